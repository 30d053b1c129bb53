"""Packers of floating-point codes: compressed-tensors, torchao, modelopt and transformers.

Each packer packs random weights with its own scales. The reference is the float64 value of its
codes.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

from hf_suites.pack_integers import make_compressed_config, make_scheme
from hf_suites.packed import Packed, Packer, import_packer

FP8 = torch.float8_e4m3fn
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
DTYPES = (torch.float32, torch.bfloat16)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Decode e2m1, two codes per byte with the even column in the low nibble, to float64."""
    codes = torch.stack([packed.view(torch.uint8) & 15, packed.view(torch.uint8) >> 4], -1).flatten(
        -2
    )
    sign = 1 - 2 * (codes >> 3).double()
    return sign * _E2M1[(codes & 7).long()]


def decode_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """Decode e8m0 bytes to float64 powers of two."""
    return torch.pow(2.0, scale.view(torch.uint8).double() - 127)


def expand_tiles(
    tiles: torch.Tensor, rows: int, depth: int, tile_rows: int, tile_columns: int
) -> torch.Tensor:
    """Expand one scale per tile of (tile_rows, tile_columns) to (rows, depth)."""
    return tiles.repeat_interleave(tile_rows, 0)[:rows].repeat_interleave(tile_columns, 1)[
        :, :depth
    ]


# ------------------------------------------------------------------ compressed-tensors


def _pack_compressed_8bit(
    scheme: Any, dtype: torch.dtype, static: bool, weight: torch.Tensor, g: torch.Generator
) -> Packed:
    """Pack in 8 bits, with compressed-tensors' scales per tensor, channel or block."""
    weight_args, (rows, depth) = scheme.weights, weight.shape
    tile = {"tensor": (rows, depth), "channel": (1, depth)}.get(weight_args.strategy)
    tile_rows, tile_columns = tile or tuple(weight_args.block_structure)
    num_tile_rows, num_tile_columns = -(-rows // tile_rows), -(-depth // tile_columns)
    padded = torch.zeros(num_tile_rows * tile_rows, num_tile_columns * tile_columns)
    padded[:rows, :depth] = weight
    tiles = padded.reshape(num_tile_rows, tile_rows, num_tile_columns, tile_columns)
    helpers = import_packer("compressed_tensors.quantization.utils")
    scale, _ = helpers.calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), weight_args)
    scale = scale.to(dtype).reshape(()) if weight_args.strategy == "tensor" else scale.to(dtype)
    name = (
        "IntQuantizationCompressor" if weight_args.type == "int" else "FloatQuantizationCompressor"
    )
    compressor = getattr(import_packer("compressed_tensors.compressors"), name)
    tensors = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    library_values = compressor.decompress(tensors, scheme)["weight"]
    scales = expand_tiles(
        scale.double().reshape(num_tile_rows, num_tile_columns),
        rows,
        depth,
        tile_rows,
        tile_columns,
    )
    tensors = {n: t for n, t in tensors.items() if n != "weight_zero_point"}
    if static:
        tensors["input_scale"] = torch.rand(1, generator=g) / 20 + 0.2  # large enough not to clip
    return Packed(tensors, tensors["weight"].double() * scales, library_values, weight)


def _list_8bit_packers() -> Iterator[Packer]:
    kinds: dict[str, dict[str, Any]] = {
        "tensor": {"strategy": "tensor"},
        "channel": {"strategy": "channel"},
        "block": {"strategy": "block", "block_structure": [128, 128]},
        "small block": {"strategy": "block", "block_structure": [64, 64]},
    }
    token = {"strategy": "token", "dynamic": True}
    input_args: dict[str, dict[str, Any]] = {
        "tensor": {"strategy": "tensor", "dynamic": False},
        "channel": token,
        "block": {"strategy": "group", "group_size": 128, "dynamic": True},
        "small block": {"strategy": "group", "group_size": 64, "dynamic": True},
    }
    for kind, dtype, activations in product(kinds, DTYPES, (False, True)):
        inputs = {"num_bits": 8, "type": "float", **input_args[kind]} if activations else None
        scheme = make_scheme({"num_bits": 8, "type": "float", **kinds[kind]}, inputs)
        name = f"fp8 by {kind}, {dtype}, {'inputs too' if activations else 'weights alone'}"
        config = make_compressed_config(scheme, "float-quantized")
        make = partial(_pack_compressed_8bit, scheme, dtype, activations and kind == "tensor")
        yield Packer("compressed-tensors, floats", name, config, make)
    for dtype in DTYPES:
        inputs = {"num_bits": 8, "type": "int", **token}
        scheme = make_scheme({"num_bits": 8, "type": "int", "strategy": "channel"}, inputs)
        config = make_compressed_config(scheme, "int-quantized")
        make = partial(_pack_compressed_8bit, scheme, dtype, False)
        yield Packer("compressed-tensors, integers", f"w8a8 by channel, {dtype}", config, make)


def _pack_nvfp4(scheme: Any, weight: torch.Tensor, g: torch.Generator) -> Packed:
    helpers = import_packer("compressed_tensors.quantization.utils")
    groups = weight.reshape(len(weight), -1, 16)
    global_scale = helpers.generate_gparam(weight.amin(), weight.amax())
    scale, _ = helpers.calculate_qparams(
        groups.amin(2), groups.amax(2), scheme.weights, global_scale
    )
    compressor = import_packer("compressed_tensors.compressors").NVFP4PackedCompressor
    inputs = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
    tensors = compressor.compress(inputs, scheme)
    library_values = compressor.decompress(tensors, scheme)["weight"]
    scales = tensors["weight_scale"].double().repeat_interleave(16, 1)
    exact_values = decode_e2m1(tensors["weight_packed"]) * scales / global_scale.double()
    if scheme.input_activations is not None:
        tensors["input_global_scale"] = torch.rand(1, generator=g) * 100 + 100
    return Packed(tensors, exact_values, library_values, weight, is_rounded=True)


def _pack_mxfp4(scheme: Any, weight: torch.Tensor, g: torch.Generator) -> Packed:
    helpers = import_packer("compressed_tensors.quantization.utils")
    groups = weight.reshape(len(weight), -1, 32)
    scale, _ = helpers.calculate_qparams(groups.amin(2), groups.amax(2), scheme.weights)
    compressor = import_packer("compressed_tensors.compressors").MXFP4PackedCompressor
    tensors = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    library_values = compressor.decompress(tensors, scheme)["weight"]
    scales = decode_e8m0(tensors["weight_scale"]).repeat_interleave(32, 1)
    return Packed(tensors, decode_e2m1(tensors["weight_packed"]) * scales, library_values, weight)


def _list_4bit_packers() -> Iterator[Packer]:
    float4 = {"num_bits": 4, "type": "float", "symmetric": True}
    group16 = float4 | {"strategy": "tensor_group", "group_size": 16, "scale_dtype": FP8}
    for inputs in (None, group16 | {"dynamic": "local"}):
        scheme = make_scheme(group16, inputs)
        config = make_compressed_config(scheme, "nvfp4-pack-quantized")
        name = f"nvfp4, {'weights alone' if inputs is None else 'inputs too'}"
        yield Packer("compressed-tensors, floats", name, config, partial(_pack_nvfp4, scheme))
    group32 = float4 | {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    scheme = make_scheme(group32)
    config = make_compressed_config(scheme, "mxfp4-pack-quantized")
    yield Packer("compressed-tensors, floats", "mxfp4", config, partial(_pack_mxfp4, scheme))


# ------------------------------------------------------------------ torchao, modelopt, transformers

MXFP4 = {"quant_method": "mxfp4"}


def _pack_torchao_mx(
    dtype: torch.dtype, mode: str, weight: torch.Tensor, g: torch.Generator
) -> Packed:
    """Pack with torchao. Dequantize with torchao and with transformers' gpt-oss functions."""
    module = import_packer("torchao.prototype.mx_formats.mx_tensor")
    weight_cast = weight.to(dtype)
    packed = module.MXTensor.to_mx(
        weight_cast,
        torch.float4_e2m1fn_x2,
        32,
        scaling_mode=getattr(module.ScaleCalculationMode, mode),
    )
    rows, depth = weight.shape
    codes, scale = packed.qdata.view(torch.uint8), packed.scale.view(torch.uint8).reshape(rows, -1)
    exact_values = decode_e2m1(codes) * decode_e8m0(scale).repeat_interleave(32, 1)
    library_values = packed.dequantize(torch.float32)
    blocks = codes.reshape(rows, depth // 32, 16)
    convert = import_packer("transformers.integrations.mxfp4").convert_moe_packed_tensors
    read_back = convert(blocks[None].clone(), scale[None].clone(), dtype=torch.bfloat16)[0].T
    if not torch.equal(read_back.double(), exact_values):
        library_values = read_back
    return Packed({"blocks": blocks, "scales": scale}, exact_values, library_values, weight_cast)


def _pack_torchao_nv(dtype: torch.dtype, weight: torch.Tensor, g: torch.Generator) -> Packed:
    module = import_packer("torchao.prototype.mx_formats.nvfp4_tensor")
    weight_cast = weight.to(dtype)
    global_scale = module.per_tensor_amax_to_scale(weight_cast.abs().amax())
    packed = module.NVFP4Tensor.to_nvfp4(weight_cast, per_tensor_scale=global_scale)
    codes, scale = packed.qdata.view(torch.uint8), packed.scale.reshape(weight.shape[0], -1)
    exact_values = (
        decode_e2m1(codes) * scale.double().repeat_interleave(16, 1) * global_scale.double()
    )
    tensors = {
        "weight": codes,
        "weight_scale": scale.view(FP8),
        "weight_scale_2": global_scale.float(),
    }
    return Packed(
        tensors, exact_values, packed.dequantize(torch.float32), weight_cast, is_rounded=True
    )


def _pack_modelopt_nv(dtype: torch.dtype, weight: torch.Tensor, g: torch.Generator) -> Packed:
    cls = import_packer("modelopt.torch.quantization.qtensor").NVFP4QTensor
    weight_cast = weight.to(dtype)
    packed, scale, global_scale = cls.quantize(weight_cast, 16)
    codes = packed._quantized_data
    exact_values = (
        decode_e2m1(codes) * scale.double().repeat_interleave(16, 1) * global_scale.double()
    )
    library_values = packed.dequantize(
        dtype=torch.float32, scale=scale, double_scale=global_scale, block_sizes={-1: 16}
    )
    tensors = {
        "weight": codes,
        "weight_scale": scale,
        "weight_scale_2": global_scale.float().reshape(()),
    }
    return Packed(tensors, exact_values, library_values, weight_cast, is_rounded=True)


def _pack_modelopt_mx(dtype: torch.dtype, weight: torch.Tensor, g: torch.Generator) -> Packed:
    cls = import_packer("modelopt.torch.quantization.qtensor").MXFP4QTensor
    weight_cast, (rows, depth) = weight.to(dtype), weight.shape
    packed, scale = cls.quantize(weight_cast, 32)
    codes, scale = packed._quantized_data.reshape(rows, -1), scale.reshape(rows, -1)
    exact_values = decode_e2m1(codes) * decode_e8m0(scale).repeat_interleave(32, 1)
    library_values = packed.dequantize(dtype=torch.float32, scale=scale, block_sizes={-1: 32})
    tensors = {"blocks": codes.reshape(rows, depth // 32, 16), "scales": scale}
    return Packed(tensors, exact_values, library_values.reshape(rows, depth), weight_cast)


def _pack_modelopt_fp8(dtype: torch.dtype, weight: torch.Tensor, g: torch.Generator) -> Packed:
    cls = import_packer("modelopt.torch.quantization.qtensor").FP8QTensor
    weight_cast = weight.to(dtype)
    packed, scale = cls.quantize(weight_cast)
    library_values = packed.dequantize(dtype=torch.float32, scale=scale)
    codes = packed._quantized_data
    tensors = {"weight": codes, "weight_scale": scale.float().reshape(())}
    tensors["input_scale"] = torch.rand((), generator=g) / 20 + 0.2  # large enough not to clip
    return Packed(
        tensors, codes.double() * tensors["weight_scale"].double(), library_values, weight_cast
    )


def _pack_transformers_fp8(
    block: tuple[int, int], ue8m0: bool, weight: torch.Tensor, g: torch.Generator
) -> Packed:
    module = import_packer("transformers.integrations.finegrained_fp8")
    config = SimpleNamespace(weight_block_size=block, scale_fmt="ue8m0" if ue8m0 else "float")
    packer = module.Fp8Quantize(SimpleNamespace(quantization_config=config))
    tensors = packer.convert({"weight": weight})
    (scale,) = (tensor for name, tensor in tensors.items() if "scale" in name)
    packed = {"weight": tensors["weight"], "weight_scale_inv": scale}
    (library_values,) = packer.reverse_op.convert(dict(packed)).values()
    scales = expand_tiles(scale.double(), *weight.shape, *block)  # type: ignore[call-arg]
    return Packed(packed, packed["weight"].double() * scales, library_values, weight)


def list_packers() -> Iterator[Packer]:
    """Yield every packer of floating-point codes."""
    yield from _list_8bit_packers()
    yield from _list_4bit_packers()
    for dtype in DTYPES:
        for mode in ("FLOOR", "RCEIL", "CEIL", "EVEN"):
            make = partial(_pack_torchao_mx, dtype, mode)
            yield Packer("torchao", f"mxfp4, {mode}, {dtype}", MXFP4, make, layer=False)
        nvfp4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
        fp8 = {"quant_method": "modelopt", "quant_algo": "FP8"}
        yield Packer("torchao", f"nvfp4, {dtype}", nvfp4, partial(_pack_torchao_nv, dtype))
        yield Packer("modelopt", f"nvfp4, {dtype}", nvfp4, partial(_pack_modelopt_nv, dtype))
        yield Packer(
            "modelopt", f"mxfp4, {dtype}", MXFP4, partial(_pack_modelopt_mx, dtype), layer=False
        )
        yield Packer("modelopt", f"fp8, {dtype}", fp8, partial(_pack_modelopt_fp8, dtype))
    for block, ue8m0 in product(((64, 64), (32, 64), (64, 32)), (False, True)):
        config: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
        }
        config = config | {"weight_block_size": list(block)}
        config |= {"scale_fmt": "ue8m0"} if ue8m0 else {}
        name = f"fp8 by {block[0]}x{block[1]}, {'UE8M0' if ue8m0 else 'float32'} scales"
        yield Packer(
            "transformers, fp8", name, config, partial(_pack_transformers_fp8, block, ue8m0)
        )
