"""Packers of integers: AutoGPTQ, GPTQModel, AutoRound, AutoAWQ and compressed-tensors.

Each packs weights that are integer multiples of their groups' scales, so the exact values are
known.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hf_suites.packed import Packed, Packer, grid, import_packer, library


@dataclass(frozen=True)
class IntegerMatrix:
    """A random integer matrix.

    codes: (N, K), unsigned. scales: (N, G) in the packer's dtype. zeros: (N, G), unsigned. order:
    (K,) group of each column.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    order: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        """The exact weights, (N, K) float64."""
        spread = (self.codes - self.zeros[:, self.order]).double()
        return spread * self.scales.double()[:, self.order]


def draw(  # noqa: PLR0913 (each is one option)
    weight: torch.Tensor,
    g: torch.Generator,
    *,
    bits: int,
    group: int,
    sym: bool,
    dtype: torch.dtype,
    act_order: bool = False,
    least: int = 0,
) -> IntegerMatrix:
    """Draw an integer matrix of the shape of `weight`, with zero points of at least `least`."""
    rows, depth = weight.shape
    group = depth if group == -1 else group
    groups, top = -(-depth // group), 1 << bits
    codes = torch.randint(0, top, (rows, depth), generator=g)
    scales = ((torch.rand(rows, groups, generator=g) + 0.5) / (4 * top)).to(dtype)
    zeros = torch.full((rows, groups), top // 2)
    if not sym:
        zeros = torch.randint(least, top, (rows, groups), generator=g)
    order = torch.arange(depth) // group
    if act_order:
        order = order[torch.randperm(depth, generator=torch.Generator().manual_seed(depth))]
    return IntegerMatrix(codes, scales, zeros, order)


def _linear(drawn: IntegerMatrix, dtype: torch.dtype) -> torch.nn.Linear:
    rows, depth = drawn.codes.shape
    linear = torch.nn.Linear(depth, rows, bias=False, dtype=dtype)
    linear.weight.data = drawn.values.to(dtype)
    return linear.requires_grad_(False)


# ------------------------------------------------------------------ GPTQ


def _gptq_config(options: Any, **more: Any) -> dict[str, Any]:
    known = {"bits": options["bits"], "group_size": options["group"], "sym": options["sym"]}
    return {"quant_method": "gptq", "desc_act": options.get("act_order", False), **known, **more}


def _auto_gptq(which: str, options: Any, weight: torch.Tensor, g: torch.Generator) -> Packed:
    """Pack with AutoGPTQ in float16; its forward on the identity matrix is its dequantizer."""
    drawn = draw(weight, g, dtype=torch.float16, **options)
    rows, depth = weight.shape
    cls = import_packer(f"auto_gptq.nn_modules.qlinear.{which}").QuantLinear
    layer = cls(options["bits"], options["group"], depth, rows, bias=False)
    zeros = drawn.zeros.float()
    layer.pack(_linear(drawn, torch.float16), drawn.scales.clone(), zeros, drawn.order.int())
    tensors = {name: getattr(layer, name) for name in ("qweight", "scales", "qzeros", "g_idx")}
    reader_cls = import_packer("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
    reader = reader_cls(options["bits"], options["group"], depth, rows, bias=False)
    for name, tensor in tensors.items():
        setattr(reader, name, tensor)
    reader.autogptq_cuda_available = False
    theirs = reader(torch.eye(depth, dtype=torch.float16)).T
    return Packed(tensors, drawn.values, theirs, drawn.values)


def _gptqmodel(version: int, options: Any, weight: torch.Tensor, g: torch.Generator) -> Packed:
    """Pack with GPTQModel's layer in plain torch."""
    drawn = draw(weight, g, dtype=torch.float16, **options)
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
    linear, zeros = _linear(drawn, torch.float32), drawn.zeros.float()
    layer.pack_block(linear, drawn.scales.float(), zeros, drawn.order.int(), workers=1)
    tensors = {n: getattr(layer, n).clone() for n in ("qweight", "scales", "qzeros", "g_idx")}
    layer.enable_wf_unsqueeze = True  # as post_init does, which would also compile
    theirs = layer.dequantize_weight().T
    if version == 1:  # version 1 files store zero points minus one
        ones = sum(1 << shift for shift in range(0, 32, options["bits"]))
        tensors["qzeros"] = (tensors["qzeros"].long() - ones).to(torch.int32)
    return Packed(tensors, drawn.values, theirs, drawn.values)


def _auto_round(which: str, options: Any, weight: torch.Tensor, g: torch.Generator) -> Packed:
    """Pack with AutoRound; its forward on the identity matrix is its dequantizer."""
    drawn = draw(weight, g, dtype=torch.float16, **options)
    rows, depth = weight.shape
    cls = import_packer(f"auto_round_extension.torch.{which}").QuantLinear
    layer = cls(options["bits"], options["group"], depth, rows, bias=False)
    linear, zeros = _linear(drawn, torch.float32), drawn.zeros.float()
    layer.device = "cpu"  # as set by its exporter
    layer.pack(linear, drawn.scales.float(), zeros, drawn.order.int(), device="cpu")
    names = ("qweight", "scales", "qzeros")
    tensors = {n: getattr(layer, n).clone() for n in names} | {"g_idx": drawn.order.int()}
    theirs = layer(torch.eye(depth, dtype=torch.float16)).T
    return Packed(tensors, drawn.values, theirs, drawn.values)


def _gptq_packers() -> Iterator[Packer]:
    """Yield the GPTQ packers.

    Zero points are at least 1 for version 1 of the format, which stores them minus one.
    """
    plain = {"bits": (4, 8), "group": (32, 64, 128, -1), "sym": (True, False)}
    for options in grid(**plain, least=(1, 0)):
        if options["sym"] and options["least"] == 0:
            continue
        make = partial(_auto_gptq, "qlinear_cuda_old", options)
        yield Packer("AutoGPTQ", f"cuda_old {_text(options)}", _gptq_config(options), make)
    for options in grid(**plain, act_order=(False, True), least=(1,)):
        make = partial(_auto_gptq, "qlinear_cuda", options)
        yield Packer("AutoGPTQ", f"cuda {_text(options)}", _gptq_config(options), make)
    for version in (1, 2):
        for options in grid(**plain, act_order=(False, True), least=(2 - version,)):
            more = {"checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
            make = partial(_gptqmodel, version, options)
            name = f"version {version} {_text(options)}"
            yield Packer("GPTQModel", name, _gptq_config(options, **more), make)
    for which, least in (("qlinear_torch_zp", 1), ("qlinear_torch", 0)):
        more = {"checkpoint_format": "gptq" if least else "gptq_v2"}
        for options in grid(**plain, least=(least,)):
            make = partial(_auto_round, which, options)
            yield Packer(
                "AutoRound", f"{which} {_text(options)}", _gptq_config(options, **more), make
            )


# ------------------------------------------------------------------ AWQ, compressed-tensors


def _auto_awq(options: Any, weight: torch.Tensor, g: torch.Generator) -> Packed:
    drawn = draw(weight, g, dtype=torch.float16, **options)
    group = weight.shape[1] if options["group"] == -1 else options["group"]
    cls = import_packer("awq.modules.linear.gemm").WQLinear_GEMM
    scales, zeros = drawn.scales.T.contiguous(), drawn.zeros.T.contiguous().float()
    linear = _linear(drawn, torch.float32)
    layer = cls.from_linear(linear, options["bits"], group, scales=scales.float(), zeros=zeros)
    tensors = {name: getattr(layer, name) for name in ("qweight", "scales", "qzeros")}
    unpack = import_packer("awq.utils.packing_utils").dequantize_gemm
    theirs = unpack(layer.qweight, layer.qzeros, layer.scales, options["bits"], group).T
    return Packed(tensors, drawn.values, theirs, drawn.values)


def _compressed(scheme: Any, options: Any, weight: torch.Tensor, g: torch.Generator) -> Packed:
    drawn = draw(weight, g, **options)
    half = 1 << (options["bits"] - 1)
    inputs = {"weight": drawn.values.float(), "weight_scale": drawn.scales}
    inputs["weight_zero_point"] = (drawn.zeros - half).to(torch.int8)
    compressor = import_packer("compressed_tensors.compressors").PackedQuantizationCompressor
    tensors = compressor.compress(inputs, scheme)
    theirs = compressor.decompress(tensors, scheme)["weight"]
    return Packed(tensors, drawn.values, theirs, drawn.values)


def compressed_config(scheme: Any, packing: str) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors for a scheme."""
    cls = import_packer("compressed_tensors.quantization").QuantizationConfig
    status = import_packer("compressed_tensors.quantization").QuantizationStatus.COMPRESSED
    config = cls(config_groups={"group_0": scheme}, format=packing, quantization_status=status)
    serialized: dict[str, Any] = json.loads(
        json.dumps(config.to_dict(), default=str)
    )  # as in files
    return serialized


def scheme_of(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> Any:
    """Build a QuantizationScheme of compressed-tensors."""
    module = import_packer("compressed_tensors.quantization")
    args = [
        None if options is None else module.QuantizationArgs(**options)
        for options in (weights, inputs)
    ]
    return module.QuantizationScheme(targets=["Linear"], weights=args[0], input_activations=args[1])


def _other_packers() -> Iterator[Packer]:
    for options in grid(bits=(4,), group=(32, 64, 128, -1), sym=(True, False)):
        config = {"quant_method": "awq", "version": "gemm", "bits": options["bits"]}
        config |= {"group_size": options["group"], "zero_point": not options["sym"]}
        make = partial(_auto_awq, options)
        yield Packer("AutoAWQ", _text(options), config, make)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for options in grid(bits=(4, 8), group=(32, 64, 128, -1), sym=(True, False), dtype=dtypes):
        group = options["group"]
        kind = (
            {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
        )
        weights = {"num_bits": options["bits"], "symmetric": options["sym"], **kind}
        scheme = scheme_of(weights)
        config = compressed_config(scheme, "pack-quantized")
        make = partial(_compressed, scheme, options)
        yield Packer("compressed-tensors, integers", _text(options), config, make)


def _text(options: Any) -> str:
    return " ".join(
        f"{name}={str(value).removeprefix('torch.')}" for name, value in options.items()
    )


def packers(sources: Path) -> Iterator[Packer]:
    """Yield every packer of integers. sources: folder with AutoAWQ's unpacked source archive."""
    (awq,) = sources.glob("autoawq-*/awq")
    for name in ("", ".modules", ".modules.linear", ".utils"):
        library(f"awq{name}", awq / name.strip(".").replace(".", "/"))
    spec = find_spec("auto_gptq")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    for name in ("", ".nn_modules", ".nn_modules.qlinear"):
        library(f"auto_gptq{name}", folder / name.strip(".").replace(".", "/"))
    yield from _gptq_packers()
    yield from _other_packers()
