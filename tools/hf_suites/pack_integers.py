"""Packers of integers: AutoGPTQ, GPTQModel, AutoRound, AutoAWQ and compressed-tensors.

Each packer packs weights that are integer multiples of their groups' scales, so the exact values
are known.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hf_suites.packed import Packed, Packer, grid, import_packer, register_package


@dataclass(frozen=True)
class IntegerMatrix:
    """A random integer matrix with scales and zero points.

    codes: (N, K), unsigned.
    scales: (N, G) in the packer's dtype.
    zeros: (N, G) zero points, unsigned.
    order: (K,) group of each column.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    order: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        """The exact weights, (N, K) float64."""
        differences = (self.codes - self.zeros[:, self.order]).double()
        return differences * self.scales.double()[:, self.order]


def draw_matrix(  # noqa: PLR0913 (each is one option)
    weight: torch.Tensor,
    g: torch.Generator,
    *,
    bits: int,
    group: int,
    sym: bool,
    dtype: torch.dtype,
    act_order: bool = False,
    min_zero_point: int = 0,
) -> IntegerMatrix:
    """Return a random integer matrix of the shape of `weight`."""
    rows, depth = weight.shape
    group = depth if group == -1 else group
    groups, num_codes = -(-depth // group), 1 << bits
    codes = torch.randint(0, num_codes, (rows, depth), generator=g)
    scales = ((torch.rand(rows, groups, generator=g) + 0.5) / (4 * num_codes)).to(dtype)
    zeros = torch.full((rows, groups), num_codes // 2)
    if not sym:
        zeros = torch.randint(min_zero_point, num_codes, (rows, groups), generator=g)
    order = torch.arange(depth) // group
    if act_order:
        order = order[torch.randperm(depth, generator=torch.Generator().manual_seed(depth))]
    return IntegerMatrix(codes, scales, zeros, order)


def _make_linear(matrix: IntegerMatrix, dtype: torch.dtype) -> torch.nn.Linear:
    rows, depth = matrix.codes.shape
    linear = torch.nn.Linear(depth, rows, bias=False, dtype=dtype)
    linear.weight.data = matrix.values.to(dtype)
    return linear.requires_grad_(False)


# ------------------------------------------------------------------ GPTQ


def _make_gptq_config(options: Any, **extra: Any) -> dict[str, Any]:
    common = {"bits": options["bits"], "group_size": options["group"], "sym": options["sym"]}
    return {"quant_method": "gptq", "desc_act": options.get("act_order", False), **common, **extra}


def _pack_auto_gptq(
    module_name: str, options: Any, weight: torch.Tensor, g: torch.Generator
) -> Packed:
    """Pack with AutoGPTQ in float16, and dequantize with its forward on the identity matrix."""
    matrix = draw_matrix(weight, g, dtype=torch.float16, **options)
    rows, depth = weight.shape
    cls = import_packer(f"auto_gptq.nn_modules.qlinear.{module_name}").QuantLinear
    layer = cls(options["bits"], options["group"], depth, rows, bias=False)
    zeros = matrix.zeros.float()
    layer.pack(
        _make_linear(matrix, torch.float16), matrix.scales.clone(), zeros, matrix.order.int()
    )
    tensors = {name: getattr(layer, name) for name in ("qweight", "scales", "qzeros", "g_idx")}
    reader_cls = import_packer("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
    reader = reader_cls(options["bits"], options["group"], depth, rows, bias=False)
    for name, tensor in tensors.items():
        setattr(reader, name, tensor)
    reader.autogptq_cuda_available = False
    their_values = reader(torch.eye(depth, dtype=torch.float16)).T
    return Packed(tensors, matrix.values, their_values, matrix.values)


def _pack_gptqmodel(version: int, options: Any, weight: torch.Tensor, g: torch.Generator) -> Packed:
    """Pack with GPTQModel's layer in plain torch."""
    matrix = draw_matrix(weight, g, dtype=torch.float16, **options)
    rows, depth = weight.shape
    cls = import_packer("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    layer = cls(
        bits=options["bits"],
        group_size=options["group"],
        sym=options["sym"],
        desc_act=options["act_order"],
        in_features=depth,
        out_features=rows,
        bias=False,
        pack_dtype=torch.int32,
        register_buffers=True,
    )
    linear, zeros = _make_linear(matrix, torch.float32), matrix.zeros.float()
    layer.pack_block(linear, matrix.scales.float(), zeros, matrix.order.int(), workers=1)
    tensors = {n: getattr(layer, n).clone() for n in ("qweight", "scales", "qzeros", "g_idx")}
    layer.enable_wf_unsqueeze = True  # set here, because post_init would also compile
    their_values = layer.dequantize_weight().T
    if version == 1:  # version 1 files store zero points minus one
        ones = sum(1 << shift for shift in range(0, 32, options["bits"]))
        tensors["qzeros"] = (tensors["qzeros"].long() - ones).to(torch.int32)
    return Packed(tensors, matrix.values, their_values, matrix.values)


def _pack_auto_round(
    module_name: str, options: Any, weight: torch.Tensor, g: torch.Generator
) -> Packed:
    """Pack with AutoRound, and dequantize with its forward on the identity matrix."""
    matrix = draw_matrix(weight, g, dtype=torch.float16, **options)
    rows, depth = weight.shape
    cls = import_packer(f"auto_round_extension.torch.{module_name}").QuantLinear
    layer = cls(options["bits"], options["group"], depth, rows, bias=False)
    linear, zeros = _make_linear(matrix, torch.float32), matrix.zeros.float()
    layer.device = "cpu"  # as set by its exporter
    layer.pack(linear, matrix.scales.float(), zeros, matrix.order.int(), device="cpu")
    names = ("qweight", "scales", "qzeros")
    tensors = {n: getattr(layer, n).clone() for n in names} | {"g_idx": matrix.order.int()}
    their_values = layer(torch.eye(depth, dtype=torch.float16)).T
    return Packed(tensors, matrix.values, their_values, matrix.values)


def _list_gptq_packers() -> Iterator[Packer]:
    """Yield the GPTQ packers.

    Version 1 of the format stores zero points minus one, so they are at least 1.
    """
    common = {"bits": (4, 8), "group": (32, 64, 128, -1), "sym": (True, False)}
    for options in grid(**common, min_zero_point=(1, 0)):
        if options["sym"] and options["min_zero_point"] == 0:
            continue
        make = partial(_pack_auto_gptq, "qlinear_cuda_old", options)
        yield Packer(
            "AutoGPTQ", f"cuda_old {_format_options(options)}", _make_gptq_config(options), make
        )
    for options in grid(**common, act_order=(False, True), min_zero_point=(1,)):
        make = partial(_pack_auto_gptq, "qlinear_cuda", options)
        yield Packer(
            "AutoGPTQ", f"cuda {_format_options(options)}", _make_gptq_config(options), make
        )
    for version in (1, 2):
        for options in grid(**common, act_order=(False, True), min_zero_point=(2 - version,)):
            extra = {"checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
            make = partial(_pack_gptqmodel, version, options)
            name = f"version {version} {_format_options(options)}"
            yield Packer("GPTQModel", name, _make_gptq_config(options, **extra), make)
    for module_name, min_zero_point in (("qlinear_torch_zp", 1), ("qlinear_torch", 0)):
        extra = {"checkpoint_format": "gptq" if min_zero_point else "gptq_v2"}
        for options in grid(**common, min_zero_point=(min_zero_point,)):
            make = partial(_pack_auto_round, module_name, options)
            yield Packer(
                "AutoRound",
                f"{module_name} {_format_options(options)}",
                _make_gptq_config(options, **extra),
                make,
            )


# ------------------------------------------------------------------ AWQ, compressed-tensors


def _pack_auto_awq(options: Any, weight: torch.Tensor, g: torch.Generator) -> Packed:
    matrix = draw_matrix(weight, g, dtype=torch.float16, **options)
    group = weight.shape[1] if options["group"] == -1 else options["group"]
    cls = import_packer("awq.modules.linear.gemm").WQLinear_GEMM
    scales, zeros = matrix.scales.T.contiguous(), matrix.zeros.T.contiguous().float()
    linear = _make_linear(matrix, torch.float32)
    layer = cls.from_linear(linear, options["bits"], group, scales=scales.float(), zeros=zeros)
    tensors = {name: getattr(layer, name) for name in ("qweight", "scales", "qzeros")}
    unpack = import_packer("awq.utils.packing_utils").dequantize_gemm
    their_values = unpack(layer.qweight, layer.qzeros, layer.scales, options["bits"], group).T
    return Packed(tensors, matrix.values, their_values, matrix.values)


def _pack_compressed(scheme: Any, options: Any, weight: torch.Tensor, g: torch.Generator) -> Packed:
    matrix = draw_matrix(weight, g, **options)
    half = 1 << (options["bits"] - 1)
    inputs = {"weight": matrix.values.float(), "weight_scale": matrix.scales}
    inputs["weight_zero_point"] = (matrix.zeros - half).to(torch.int8)
    compressor = import_packer("compressed_tensors.compressors").PackedQuantizationCompressor
    tensors = compressor.compress(inputs, scheme)
    their_values = compressor.decompress(tensors, scheme)["weight"]
    return Packed(tensors, matrix.values, their_values, matrix.values)


def make_compressed_config(scheme: Any, packing: str) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors for a scheme."""
    cls = import_packer("compressed_tensors.quantization").QuantizationConfig
    status = import_packer("compressed_tensors.quantization").QuantizationStatus.COMPRESSED
    config = cls(config_groups={"group_0": scheme}, format=packing, quantization_status=status)
    serialized: dict[str, Any] = json.loads(
        json.dumps(config.to_dict(), default=str)
    )  # as in files
    return serialized


def make_scheme(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> Any:
    """Build a QuantizationScheme of compressed-tensors."""
    module = import_packer("compressed_tensors.quantization")
    args = [
        None if options is None else module.QuantizationArgs(**options)
        for options in (weights, inputs)
    ]
    return module.QuantizationScheme(targets=["Linear"], weights=args[0], input_activations=args[1])


def _list_other_packers() -> Iterator[Packer]:
    for options in grid(bits=(4,), group=(32, 64, 128, -1), sym=(True, False)):
        config = {"quant_method": "awq", "version": "gemm", "bits": options["bits"]}
        config |= {"group_size": options["group"], "zero_point": not options["sym"]}
        make = partial(_pack_auto_awq, options)
        yield Packer("AutoAWQ", _format_options(options), config, make)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for options in grid(bits=(4, 8), group=(32, 64, 128, -1), sym=(True, False), dtype=dtypes):
        group = options["group"]
        kind = (
            {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
        )
        weights = {"num_bits": options["bits"], "symmetric": options["sym"], **kind}
        scheme = make_scheme(weights)
        config = make_compressed_config(scheme, "pack-quantized")
        make = partial(_pack_compressed, scheme, options)
        yield Packer("compressed-tensors, integers", _format_options(options), config, make)


def _format_options(options: Any) -> str:
    return " ".join(
        f"{name}={str(value).removeprefix('torch.')}" for name, value in options.items()
    )


def list_packers(sources: Path) -> Iterator[Packer]:
    """Yield every packer of integers.

    sources: folder with AutoAWQ's unpacked source archive.
    """
    (awq,) = sources.glob("autoawq-*/awq")
    for name in ("", ".modules", ".modules.linear", ".utils"):
        register_package(f"awq{name}", awq / name.strip(".").replace(".", "/"))
    spec = find_spec("auto_gptq")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    for name in ("", ".nn_modules", ".nn_modules.qlinear"):
        register_package(f"auto_gptq{name}", folder / name.strip(".").replace(".", "/"))
    yield from _list_gptq_packers()
    yield from _list_other_packers()
