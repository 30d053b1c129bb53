"""Checkpoint formats: identify one (`format_of`), and choose a layer's scheme for it (`fit`).

`modular_kernel.checkpoints.fusing` converts the tensors. Everything here is pure: it reads no files
and imports no quantization library.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

import torch

from modular_kernel.checkpoints import bitsandbytes, torchao
from modular_kernel.checkpoints.gptq_awq import fit_group
from modular_kernel.checkpoints.matrix_layout import FLOATS, Dim, StoredTensor
from modular_kernel.errors import ConfigurationError
from modular_kernel.models.quantization_config import (
    bitsandbytes_kind,
    check_method,
    gptq_version,
    quantizes_inputs,
    scheme_of,
    torchao_format_of,
)
from modular_kernel.models.torchao_config import METHOD as TORCHAO
from modular_kernel.models.torchao_config import TorchaoFormat
from modular_kernel.quant.nvfp4 import GROUP
from modular_kernel.quant.scale_tiles import ceil_div
from modular_kernel.spec.intermediate_split import (
    columns_per_unit,
    make_too_few_groups_error,
)
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.utils.argument_checks import Count, expect

_MIN_TILE = 32  # minimum columns of a block after a split, as in `fit_group` for groups
MX_BLOCK = (1, 32)  # rows and columns of a scale of mxfp8
_N, _K = Dim("N"), Dim("K")
_FP8, _INT32 = torch.float8_e4m3fn, torch.int32
_E8M0 = (torch.uint8, torch.float8_e8m0fnu)
_SCALES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Format:
    """The storage format of the experts' matrices in a checkpoint.

    method: quant_method of its quantization_config, or "none". scheme: what a matrix is loaded as.
    minus_one: GPTQ's zero points are stored minus one. quantizes_inputs: the files' recipe also
    rounds activations (nvfp4); they stay in 16 bits unless `with_inputs` is used. dequantized:
    name of codes that no scheme represents, such as "nf4", which are dequantized when they are
    loaded; "" for others. torchao: how torchao stores the weights; None for other methods.
    """

    method: str
    scheme: QuantScheme
    minus_one: bool = True
    quantizes_inputs: bool = False
    dequantized: str = ""
    torchao: TorchaoFormat | None = None

    @property
    def has_blocks(self) -> bool:
        """Whether files store codes that are dequantized on loading, or blocks of GGUF.

        A block of GGUF has the codes and scales of several values. Unpacking either takes several
        times the memory of what is stored.
        """
        return bool(self.dequantized) or self.method == "gguf"

    @cached_property
    def stored(self) -> tuple[StoredTensor, ...]:
        """The tensors of one matrix."""
        if self.dequantized and self.method == "bitsandbytes":
            return bitsandbytes.tensors_4bit(self.dequantized)
        if self.torchao is not None:
            return torchao.tensors(self.torchao, self.scheme)
        return _STORED[self.method](self.scheme)

    def with_scheme(self, scheme: QuantScheme) -> "Format":
        """Return the format of the same tensors with the tile sizes of `scheme`."""
        return replace(self, scheme=scheme)

    def with_inputs(self) -> "Format":
        """Return the format of the same tensors with activations rounded as in the files' recipe.

        Raises ConfigurationError if the recipe does not round them, or the scheme already does.
        """
        if not self.quantizes_inputs:
            need = "nvfp4 files whose recipe rounds activations too"
            raise ConfigurationError("quantize_inputs", got=str(self), need=need)
        return replace(self, scheme=QuantScheme.parse("nvfp4_w4a4"), quantizes_inputs=False)

    def __str__(self) -> str:
        if self.method == "none":
            return str(self.scheme)
        if self.dequantized:
            return f"{self.dequantized} ({self.method}; dequantized)"
        inputs = "; activations stay in 16 bits" if self.quantizes_inputs else ""
        return f"{self.scheme} ({self.method}{inputs})"


def format_of(config: object, *, path: str = "config.json", depth: int | None = None) -> Format:
    """Return the format of a quantization_config; None means an unquantized checkpoint.

    path: of the file, for messages. depth: max(H, I) of the layer, required for a group_size of -1
    and for 4-bit channels, which are groups of that length. Raises ConfigurationError for an
    unknown format, or one that cannot be converted, such as AWQ with other than 4 bits.
    """
    expect("path", path, str)
    expect("depth", depth, Count | None)
    if config is None:
        return Format("none", QuantScheme.parse("none"))
    if not isinstance(config, Mapping):
        need = "an object, or null"
        raise ConfigurationError(
            f"model {path}: quantization_config", got=str(config)[:80], need=need
        )
    quant = scheme_of(path, {"quantization_config": dict(config)}, depth=depth)
    scheme = QuantScheme.parse(str(quant))
    config = check_method(path, dict(config))
    method = str(config["quant_method"])
    if method == "awq" and scheme.weight != "uint4":
        need = "AWQ of 4 bits"
        raise ConfigurationError(f"model {path}: quantization_config", got=str(scheme), need=need)
    if method == "bitsandbytes" and not scheme.quantized:
        return Format(method, scheme, dequantized=bitsandbytes_kind(path, config))
    if method == TORCHAO:
        kind = torchao_format_of(path, config)
        dequantized = "" if scheme.quantized else torchao.KIND
        return Format(method, scheme, dequantized=dequantized, torchao=kind)
    if method == "gguf":
        types = " and ".join(sorted(set(config["types"])))
        return Format(method, scheme, dequantized="" if scheme.quantized else types)
    minus_one = method != "gptq" or gptq_version(path, config) == 1
    inputs = scheme.matrix_scales and quantizes_inputs(config)
    return Format(method.removesuffix("_fp4"), scheme, minus_one, inputs)


def fit(format: Format, intermediate: int, *, world: int = 1, gated: bool = True) -> QuantScheme:
    """Return the scheme of a layer on each of `world` tensor-parallel ranks.

    intermediate: I of the whole layer. An equal share of I, or the border between gate and up rows,
    may split a block or group. Blocks and groups of 32 columns or more are then divided, and their
    scales repeated, which does not change the values. Where that is impossible, as for mxfp4 and
    nvfp4, shares are whole groups and padded: see `spec.intermediate_split`. Weight-only schemes
    with one scale each for gate and up get one scale per row, because merging the two scales would
    round one of the matrices again.

    Raises ConfigurationError if there are fewer groups than ranks, or for act-order on several
    ranks.
    """
    expect("format", format, Format)
    expect("gated", gated, bool)
    expect("intermediate", intermediate, Count)
    expect("tp: ranks", world, Count)
    scheme = format.scheme
    if scheme.act_order and world > 1:
        need = (
            "1: act-order scatters the columns of a group over all shares, so a rank would have "
            "to read the whole matrix"
        )
        raise ConfigurationError("tp: ranks", got=world, need=need)
    if scheme.granularity == "tensor" and gated and not scheme.quantizes_activations:
        scheme = QuantScheme.parse(str(scheme).replace("_tensor", "_channel"))
    if world == 1:
        return _divide_rows(scheme, intermediate) if gated else scheme
    equal = _fit_equal_shares(scheme, intermediate, world)
    candidates = [equal] if equal is not None else _fit_padded(scheme, intermediate, gated)
    units = [columns_per_unit(fitted, intermediate) for fitted in candidates]
    for fitted, unit in zip(candidates, units, strict=True):
        if ceil_div(intermediate, unit) >= world:
            return fitted
    raise make_too_few_groups_error(intermediate, world, min(units))


def _fit_equal_shares(scheme: QuantScheme, intermediate: int, world: int) -> QuantScheme | None:
    """Return the scheme with tiles that divide an equal share, or None if there is none."""
    share, remainder = divmod(intermediate, world)
    if remainder:
        return None
    if share % columns_per_unit(scheme, intermediate) == 0:
        return scheme
    fitted, sizes = scheme, tuple(gcd(size, share) for size in scheme.group)
    stored = zip(sizes, scheme.group, strict=True)
    if scheme.granularity == "block" and all(
        size >= min(_MIN_TILE, whole) for size, whole in stored
    ):
        fitted = replace(scheme, group=sizes)
    elif _has_divisible_groups(scheme, intermediate):
        with suppress(ConfigurationError):
            fitted = replace(scheme, group=(fit_group(scheme.group[0], share),))
    return fitted if share % columns_per_unit(fitted, intermediate) == 0 else None


def _fit_padded(scheme: QuantScheme, intermediate: int, gated: bool) -> list[QuantScheme]:
    """Return schemes for padded shares: with the stored tiles, then with halved ones down to 32."""
    schemes = [_divide_rows(scheme, intermediate) if gated else scheme]
    if scheme.granularity == "block" or _has_divisible_groups(scheme, intermediate):
        *rows, size = schemes[0].group
        while size % 2 == 0 and size // 2 >= _MIN_TILE:
            size //= 2
            schemes.append(replace(scheme, group=(*(gcd(each, size) for each in rows), size)))
    return schemes


def _has_divisible_groups(scheme: QuantScheme, intermediate: int) -> bool:
    """Return whether groups may be divided: integer groups that do not span all columns."""
    is_integer = scheme.granularity == "group" and scheme.weight != "float4_e2m1"
    return is_integer and scheme.group[0] < intermediate


def _divide_rows(scheme: QuantScheme, intermediate: int) -> QuantScheme:
    """Return the scheme with row blocks that do not cross the border of gate and up rows."""
    if scheme.granularity != "block":
        return scheme
    rows, columns = scheme.group
    return replace(scheme, group=(gcd(rows, intermediate), columns))


# ------------------------------------------------------------------------- stored tensors


def _plain(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    return (StoredTensor("weight", "w", (_N, _K), FLOATS),)


def _scaled(
    scheme: QuantScheme, names: tuple[str, ...], a_names: tuple[str, ...]
) -> tuple[StoredTensor, ...]:
    """Return the tensors of 8-bit weights with per-tensor, per-channel or per-block scales."""
    weight = torch.int8 if scheme.weight == "int8" else _FP8
    dims: dict[str, tuple[Dim, ...]] = {"tensor": (), "channel": (_N,)}
    if scheme.granularity == "block":
        dims["block"] = (Dim("N", scheme.group[0]), Dim("K", scheme.group[1]))
    floats = (*_SCALES, torch.float8_e8m0fnu) if scheme.granularity == "block" else _SCALES
    if scheme.group == MX_BLOCK:  # bytes of mxfp8 are E8M0
        floats = (*floats, torch.uint8)
    scale = StoredTensor(names[0], "scale", dims[scheme.granularity], floats, names[1:])
    tensors = [StoredTensor("weight", "w", (_N, _K), (weight,)), scale]
    if scheme.static:
        tensors.append(StoredTensor(a_names[0], "a_scale", (), _SCALES, a_names[1:]))
    return tuple(tensors)


def _fp8(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    if scheme.weight == "float4_e2m1":  # the experts of DeepSeek-V4
        return (
            StoredTensor(
                "weight", "w", (_N, Dim("K", 2, indivisible=True)), (torch.uint8, torch.int8)
            ),
            StoredTensor(
                "scale", "scale", (_N, Dim("K", 32)), _E8M0, ("weight_scale_inv", "weight_scale")
            ),
        )
    names: tuple[str, ...] = ("weight_scale_inv", "weight_scale", "scale")
    if scheme.granularity != "block":
        names = ("weight_scale", "weight_scale_inv", "scale", "qscale_weight")
    return _scaled(scheme, names, ("input_scale", "activation_scale", "qscale_act"))


def _fbgemm(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    bound = StoredTensor("input_scale_ub", "unused", (), _SCALES, optional=True)
    return (*_scaled(scheme, ("weight_scale",), ()), bound)


def _quark(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    if scheme.weight == "float4_e2m1":
        return (
            StoredTensor("weight", "w", (_N, Dim("K", 2, indivisible=True)), (torch.uint8,)),
            StoredTensor("weight_scale", "scale", (_N, Dim("K", 32)), _E8M0),
            StoredTensor("input_scale", "unused", (), _SCALES, optional=True),
        )
    return _scaled(scheme, ("weight_scale",), ("input_scale",))


def _modelopt(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    if scheme.matrix_scales:
        return _nvfp4(scheme, "weight", "weight_scale_2", "input_scale")
    return _scaled(scheme, ("weight_scale",), ("input_scale",))


def _nvfp4(
    scheme: QuantScheme, weight: str, global_name: str, inputs: str
) -> tuple[StoredTensor, ...]:
    """Return the tensors of nvfp4: two codes per byte, scales of 16 columns, a scale of the matrix.

    The scale of its inputs is read if the scheme has one.
    """
    float32 = (torch.float32,)
    return (
        StoredTensor(weight, "w", (_N, Dim("K", 2, indivisible=True)), (torch.uint8,)),
        StoredTensor("weight_scale", "scale", (_N, Dim("K", GROUP)), (_FP8,)),
        StoredTensor(global_name, "global_scale", (), float32),
        StoredTensor(inputs, "a_scale", (), float32)
        if scheme.static
        else StoredTensor(inputs, "unused", (), float32, optional=True),
    )


def _compressed(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    if scheme.matrix_scales:
        return _nvfp4(scheme, "weight_packed", "weight_global_scale", "input_global_scale")
    if scheme.weight == "float4_e2m1":
        return (
            StoredTensor("weight_packed", "w", (_N, Dim("K", 2, indivisible=True)), (torch.uint8,)),
            StoredTensor("weight_scale", "scale", (_N, Dim("K", 32)), _E8M0),
        )
    if scheme.quantizes_activations or scheme.weight == "float8_e4m3fn":
        return _modelopt(scheme)
    per_word = 8 if scheme.weight == "uint4" else 4
    shape = StoredTensor("weight_shape", "shape", (), (torch.int64, _INT32), optional=True)
    packed = StoredTensor(
        "weight_packed", "w", (_N, Dim("K", per_word, indivisible=True)), (_INT32,)
    )
    if scheme.granularity == "channel":
        return (packed, StoredTensor("weight_scale", "scale", (_N,), _SCALES), shape)
    groups = Dim("K", scheme.group[0])
    tensors = [packed, StoredTensor("weight_scale", "scale", (_N, groups), _SCALES), shape]
    if scheme.zero_points:
        zeros = (Dim("N", per_word, indivisible=True), groups)
        tensors.append(StoredTensor("weight_zero_point", "zero_point", zeros, (_INT32,)))
    optional = not scheme.act_order
    return (*tensors, StoredTensor("weight_g_idx", "order", (_K,), (_INT32,), optional=optional))


def _awq(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    word, groups = Dim("N", 8, indivisible=True), Dim("K", scheme.group[0])
    return (
        StoredTensor("qweight", "w", (_K, word), (_INT32,)),
        StoredTensor("scales", "scale", (groups, _N), _SCALES),
        StoredTensor(
            "qzeros", "zero_point", (groups, word), (_INT32,), optional=not scheme.zero_points
        ),
    )


def _gptq(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    per_word, groups = 8 if scheme.weight == "uint4" else 4, Dim("K", scheme.group[0])
    zeros = (groups, Dim("N", per_word, indivisible=True))
    return (
        StoredTensor("qweight", "w", (Dim("K", per_word, indivisible=True), _N), (_INT32,)),
        StoredTensor("scales", "scale", (groups, _N), _SCALES),
        StoredTensor("qzeros", "zero_point", zeros, (_INT32,), optional=not scheme.zero_points),
        StoredTensor("g_idx", "order", (_K,), (_INT32, torch.int64), optional=not scheme.act_order),
    )


def _gguf(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    return (StoredTensor("weight", "w", (_N, _K), (torch.uint8, *FLOATS)),)


def _mxfp4(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    groups = Dim("K", 32, indivisible=True)
    return (
        StoredTensor("blocks", "w", (_N, groups, Dim("", 16)), (torch.uint8,)),
        StoredTensor("scales", "scale", (_N, groups), _E8M0),
    )


_STORED: dict[str, Callable[[QuantScheme], tuple[StoredTensor, ...]]] = {
    "none": _plain,
    "fp8": _fp8,
    "mxfp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "bitsandbytes": bitsandbytes.tensors_int8,
    "gguf": _gguf,
    "modelopt": _modelopt,
    "quark": _quark,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
