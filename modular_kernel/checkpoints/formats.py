"""Storage formats of checkpoints, derived from the quantization_config.

`format_of` returns a format, which consists of the scheme that weights are loaded as and of the
tensors that the files have for each matrix. `fit_scheme` adapts the tile sizes of the scheme to the
share of a tensor-parallel rank. `modular_kernel.checkpoints.fusing` converts the tensors.

The functions have no side effects, read no files and import no quantization library.
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
    canonicalize_config,
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

_MIN_TILE = 32  # minimum number of columns of a divided block or group
MX_BLOCK = (1, 32)  # rows and columns per scale in mxfp8
_N, _K = Dim("N"), Dim("K")
_FP8, _INT32 = torch.float8_e4m3fn, torch.int32
_E8M0 = (torch.uint8, torch.float8_e8m0fnu)
_SCALES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Format:
    """The storage format of the experts' matrices in a checkpoint.

    method: the quant_method of the quantization_config, or "none".
    scheme: the scheme that matrices are loaded as.
    minus_one: whether GPTQ zero points are stored minus one.
    quantizes_inputs: whether the model was quantized with activations of 4 or 8 bits, which the
        scheme leaves in 16 bits. `with_inputs` changes this for nvfp4.
    dequantized: name of the stored codes, such as "nf4", if matrices are dequantized on loading
        because no scheme can represent the codes; otherwise "".
    torchao: the storage format of torchao; None for other methods.
    """

    method: str
    scheme: QuantScheme
    minus_one: bool = True
    quantizes_inputs: bool = False
    dequantized: str = ""
    torchao: TorchaoFormat | None = None

    @property
    def expands_on_load(self) -> bool:
        """Whether converting a matrix takes several times the memory of its stored tensors.

        This is the case for codes that are dequantized on loading, and for GGUF blocks.
        """
        return bool(self.dequantized) or self.method == "gguf"

    @cached_property
    def stored_tensors(self) -> tuple[StoredTensor, ...]:
        """The tensors that the files have for one matrix."""
        if self.dequantized and self.method == "bitsandbytes":
            return bitsandbytes.list_stored_tensors_4bit(self.dequantized)
        if self.torchao is not None:
            return torchao.list_stored_tensors(self.torchao, self.scheme)
        return _STORED_TENSORS[self.method](self.scheme)

    def with_scheme(self, scheme: QuantScheme) -> "Format":
        """Return this format with another scheme, which may have smaller tiles."""
        return replace(self, scheme=scheme)

    def with_inputs(self) -> "Format":
        """Return this format with activations in nvfp4, as the model was quantized.

        Raises ConfigurationError for another format, and for a model with activations in 16 bits.
        """
        if not (self.quantizes_inputs and self.scheme.matrix_scales):
            need = "nvfp4 files of a model that was quantized with activations in nvfp4, too"
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
    """Return the storage format that a quantization_config describes.

    config: the quantization_config; None for an unquantized checkpoint.
    path: path of the config.json, for messages.
    depth: max(H, I) of the layer. Required if one group spans all columns of a matrix, that is, for
        a group_size of -1 and for 4-bit weights with per-channel scales.

    Raises ConfigurationError for a format that is unknown or cannot be converted, such as AWQ with
    other than 4 bits.
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
    config = canonicalize_config(path, dict(config))
    method = str(config["quant_method"])
    if method == "awq" and scheme.weight != "uint4":
        need = "AWQ of 4 bits"
        raise ConfigurationError(f"model {path}: quantization_config", got=str(scheme), need=need)
    if method == "bitsandbytes" and not scheme.quantized:
        return Format(method, scheme, dequantized=bitsandbytes_kind(path, config))
    if method == TORCHAO:
        torchao_format = torchao_format_of(path, config)
        dequantized = "" if scheme.quantized else torchao.INT4_CODES
        return Format(method, scheme, dequantized=dequantized, torchao=torchao_format)
    if method == "gguf":
        types = " and ".join(sorted(set(config["types"])))
        return Format(method, scheme, dequantized="" if scheme.quantized else types)
    minus_one = method != "gptq" or gptq_version(path, config) == 1
    is_weight_only = scheme.quantized and not scheme.quantizes_activations
    leaves_inputs_unquantized = is_weight_only and quantizes_inputs(config)
    return Format(method.removesuffix("_fp4"), scheme, minus_one, leaves_inputs_unquantized)


def fit_scheme(
    format: Format, intermediate: int, *, world: int = 1, gated: bool = True
) -> QuantScheme:
    """Return the scheme of a layer on each of `world` tensor-parallel ranks.

    The result is the scheme of `format`, possibly with smaller tiles. An equal share of I, or the
    border between gate and up rows, may split a block or group. The tile size is then divided, down
    to 32 columns, and scales are repeated, which does not change any value. If that is impossible,
    as for mxfp4 and nvfp4, shares consist of whole groups and are padded
    (`spec.intermediate_split`).

    If gate and up have one scale each, and activations are not quantized, the result has one scale
    per row, because a common scale would require rounding one of the matrices again.

    intermediate: I of the whole layer.
    gated: whether w1 has gate and up rows.

    Raises ConfigurationError if there are fewer groups than ranks, and for act-order on several
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
    equal_share_scheme = _fit_equal_shares(scheme, intermediate, world)
    candidates = (
        [equal_share_scheme]
        if equal_share_scheme is not None
        else _list_padded_schemes(scheme, intermediate, gated)
    )
    units = [columns_per_unit(candidate, intermediate) for candidate in candidates]
    for candidate, unit in zip(candidates, units, strict=True):
        if ceil_div(intermediate, unit) >= world:
            return candidate
    raise make_too_few_groups_error(intermediate, world, min(units))


def _fit_equal_shares(scheme: QuantScheme, intermediate: int, world: int) -> QuantScheme | None:
    """Return the scheme with tiles that divide an equal share, or None if no tiles do."""
    share, remainder = divmod(intermediate, world)
    if remainder:
        return None
    if share % columns_per_unit(scheme, intermediate) == 0:
        return scheme
    fitted, sizes = scheme, tuple(gcd(size, share) for size in scheme.group)
    is_large_enough = all(
        size >= min(_MIN_TILE, stored_size)
        for size, stored_size in zip(sizes, scheme.group, strict=True)
    )
    if scheme.granularity == "block" and is_large_enough:
        fitted = replace(scheme, group=sizes)
    elif _has_divisible_groups(scheme, intermediate):
        with suppress(ConfigurationError):
            fitted = replace(scheme, group=(fit_group(scheme.group[0], share),))
    return fitted if share % columns_per_unit(fitted, intermediate) == 0 else None


def _list_padded_schemes(scheme: QuantScheme, intermediate: int, gated: bool) -> list[QuantScheme]:
    """Return candidates for padded shares, in order of preference.

    The first candidate has the tile sizes of the files. Each further candidate halves them, down to
    32.
    """
    schemes = [_divide_rows(scheme, intermediate) if gated else scheme]
    if scheme.granularity == "block" or _has_divisible_groups(scheme, intermediate):
        *rows, size = schemes[0].group
        while size % 2 == 0 and size // 2 >= _MIN_TILE:
            size //= 2
            tile_rows = (gcd(num_rows, size) for num_rows in rows)
            schemes.append(replace(scheme, group=(*tile_rows, size)))
    return schemes


def _has_divisible_groups(scheme: QuantScheme, intermediate: int) -> bool:
    """Return whether groups can be divided: integer codes with several groups per row."""
    is_integer = scheme.granularity == "group" and scheme.weight != "float4_e2m1"
    return is_integer and scheme.group[0] < intermediate


def _divide_rows(scheme: QuantScheme, intermediate: int) -> QuantScheme:
    """Return the scheme with blocks that do not cross the border between gate and up rows."""
    if scheme.granularity != "block":
        return scheme
    rows, columns = scheme.group
    return replace(scheme, group=(gcd(rows, intermediate), columns))


# --- The stored tensors of one matrix, by quant_method ---


def _describe_unquantized(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    return (StoredTensor("weight", "w", (_N, _K), FLOATS),)


def _describe_scaled(
    scheme: QuantScheme, scale_names: tuple[str, ...], input_scale_names: tuple[str, ...]
) -> tuple[StoredTensor, ...]:
    """Return the tensors of 8-bit weights with per-tensor, per-channel or per-block scales.

    scale_names, input_scale_names: the usual name of the tensor, followed by alternatives.
    """
    weight = torch.int8 if scheme.weight == "int8" else _FP8
    dims: dict[str, tuple[Dim, ...]] = {"tensor": (), "channel": (_N,)}
    if scheme.granularity == "block":
        dims["block"] = (Dim("N", scheme.group[0]), Dim("K", scheme.group[1]))
    dtypes = (*_SCALES, torch.float8_e8m0fnu) if scheme.granularity == "block" else _SCALES
    if scheme.group == MX_BLOCK:  # mxfp8 may store E8M0 scales as bytes
        dtypes = (*dtypes, torch.uint8)
    name, *aliases = scale_names
    scale = StoredTensor(name, "scale", dims[scheme.granularity], dtypes, tuple(aliases))
    tensors = [StoredTensor("weight", "w", (_N, _K), (weight,)), scale]
    if scheme.static:
        name, *aliases = input_scale_names
        tensors.append(StoredTensor(name, "a_scale", (), _SCALES, tuple(aliases)))
    return tuple(tensors)


def _describe_fp8(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
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
    return _describe_scaled(scheme, names, ("input_scale", "activation_scale", "qscale_act"))


def _describe_fbgemm(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    upper_bound = StoredTensor("input_scale_ub", "unused", (), _SCALES, optional=True)
    return (*_describe_scaled(scheme, ("weight_scale",), ()), upper_bound)


def _describe_quark(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    if scheme.weight == "float4_e2m1":
        return (
            StoredTensor("weight", "w", (_N, Dim("K", 2, indivisible=True)), (torch.uint8,)),
            StoredTensor("weight_scale", "scale", (_N, Dim("K", 32)), _E8M0),
            StoredTensor("input_scale", "unused", (), _SCALES, optional=True),
        )
    return _describe_scaled(scheme, ("weight_scale",), ("input_scale",))


def _describe_modelopt(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    if scheme.matrix_scales:
        return _describe_nvfp4(scheme, "weight", "weight_scale_2", "input_scale")
    return _describe_scaled(scheme, ("weight_scale",), ("input_scale",))


def _describe_nvfp4(
    scheme: QuantScheme, weight_name: str, global_scale_name: str, input_scale_name: str
) -> tuple[StoredTensor, ...]:
    """Return the tensors of nvfp4: pairs of codes, a scale per 16 columns, and a scale per matrix.

    The activation scale is read only if the scheme has static activation scales.
    """
    float32 = (torch.float32,)
    return (
        StoredTensor(weight_name, "w", (_N, Dim("K", 2, indivisible=True)), (torch.uint8,)),
        StoredTensor("weight_scale", "scale", (_N, Dim("K", GROUP)), (_FP8,)),
        StoredTensor(global_scale_name, "global_scale", (), float32),
        StoredTensor(input_scale_name, "a_scale", (), float32)
        if scheme.static
        else StoredTensor(input_scale_name, "unused", (), float32, optional=True),
    )


def _describe_compressed_tensors(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    if scheme.matrix_scales:
        return _describe_nvfp4(scheme, "weight_packed", "weight_global_scale", "input_global_scale")
    if scheme.weight == "float4_e2m1":
        return (
            StoredTensor("weight_packed", "w", (_N, Dim("K", 2, indivisible=True)), (torch.uint8,)),
            StoredTensor("weight_scale", "scale", (_N, Dim("K", 32)), _E8M0),
        )
    if scheme.quantizes_activations or scheme.weight == "float8_e4m3fn":
        return _describe_modelopt(scheme)
    values_per_word = 8 if scheme.weight == "uint4" else 4
    shape_tensor = StoredTensor("weight_shape", "shape", (), (torch.int64, _INT32), optional=True)
    packed = StoredTensor(
        "weight_packed", "w", (_N, Dim("K", values_per_word, indivisible=True)), (_INT32,)
    )
    if scheme.granularity == "channel":
        return (packed, StoredTensor("weight_scale", "scale", (_N,), _SCALES), shape_tensor)
    groups = Dim("K", scheme.group[0])
    tensors = [packed, StoredTensor("weight_scale", "scale", (_N, groups), _SCALES), shape_tensor]
    if scheme.zero_points:
        zero_point_dims = (Dim("N", values_per_word, indivisible=True), groups)
        tensors.append(StoredTensor("weight_zero_point", "zero_point", zero_point_dims, (_INT32,)))
    optional = not scheme.act_order
    return (*tensors, StoredTensor("weight_g_idx", "order", (_K,), (_INT32,), optional=optional))


def _describe_awq(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    word, groups = Dim("N", 8, indivisible=True), Dim("K", scheme.group[0])
    return (
        StoredTensor("qweight", "w", (_K, word), (_INT32,)),
        StoredTensor("scales", "scale", (groups, _N), _SCALES),
        StoredTensor(
            "qzeros", "zero_point", (groups, word), (_INT32,), optional=not scheme.zero_points
        ),
    )


def _describe_gptq(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    values_per_word, groups = 8 if scheme.weight == "uint4" else 4, Dim("K", scheme.group[0])
    zero_point_dims = (groups, Dim("N", values_per_word, indivisible=True))
    return (
        StoredTensor("qweight", "w", (Dim("K", values_per_word, indivisible=True), _N), (_INT32,)),
        StoredTensor("scales", "scale", (groups, _N), _SCALES),
        StoredTensor(
            "qzeros", "zero_point", zero_point_dims, (_INT32,), optional=not scheme.zero_points
        ),
        StoredTensor("g_idx", "order", (_K,), (_INT32, torch.int64), optional=not scheme.act_order),
    )


def _describe_gguf(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    return (StoredTensor("weight", "w", (_N, _K), (torch.uint8, *FLOATS)),)


def _describe_mxfp4(scheme: QuantScheme) -> tuple[StoredTensor, ...]:
    groups = Dim("K", 32, indivisible=True)
    return (
        StoredTensor("blocks", "w", (_N, groups, Dim("", 16)), (torch.uint8,)),
        StoredTensor("scales", "scale", (_N, groups), _E8M0),
    )


_STORED_TENSORS: dict[str, Callable[[QuantScheme], tuple[StoredTensor, ...]]] = {
    "none": _describe_unquantized,
    "fp8": _describe_fp8,
    "mxfp8": _describe_fp8,
    "fbgemm_fp8": _describe_fbgemm,
    "bitsandbytes": bitsandbytes.list_stored_tensors_int8,
    "gguf": _describe_gguf,
    "modelopt": _describe_modelopt,
    "quark": _describe_quark,
    "compressed-tensors": _describe_compressed_tensors,
    "awq": _describe_awq,
    "gptq": _describe_gptq,
    "mxfp4": _describe_mxfp4,
}
