"""Converts the stored tensors of projections to the fused weights w1 and w2 of a layer.

    format = format_of(config.get("quantization_config"))      # None: unquantized
    scheme = fit_scheme(format, intermediate, world=tp)        # Problem(quant=str(scheme))
    gate = {"weight": ..., "weight_scale_inv": ...}            # names as in format.stored_tensors
    w1 = merge(format, [gate, up], torch.bfloat16, scheme=scheme)
    w2 = merge(format, [down], torch.bfloat16, scheme=scheme)
    ExpertWeights(w1.w, w2.w, w1_scale=w1.scale, w2_scale=w2.scale, ...)

`merge` takes whole tensors. The loaders read one share of a matrix at a time, and call the two
steps of `merge`: `convert_share` divides the tiles of scales, and `fuse` converts to the layout of
kernels and concatenates gate and up. Packed weights stay packed. All functions are pure, except for
`sort_w1_rows`, and for `fuse` with `out`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from modular_kernel.checkpoints.bitsandbytes import compute_int8_scale, dequantize_matrix
from modular_kernel.checkpoints.compressed_tensors import from_compressed_tensors
from modular_kernel.checkpoints.formats import Format
from modular_kernel.checkpoints.fp8_mxfp4 import (
    channel_scale,
    convert_input_scale,
    from_gpt_oss,
    merge_scales,
)
from modular_kernel.checkpoints.gptq_awq import (
    GroupWeights,
    argsort_by_group,
    check_group_index,
    convert_awq,
    convert_gptq,
    drop_zero_points_unchecked,
    sort_columns,
)
from modular_kernel.checkpoints.matrix_layout import (
    BlockedScale,
    Range,
    StoredTensor,
    repeat_scales,
)
from modular_kernel.checkpoints.torchao import check_zero_points, dequantize_int4
from modular_kernel.errors import ConfigurationError, ShapeError, WeightsError
from modular_kernel.quant.scale_tiles import e8m0_to_float, pack_pairs, unpack_pairs
from modular_kernel.spec.problem import parse_dtype
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.utils.argument_checks import expect, expect_each
from modular_kernel.utils.tensor_checks import check_tensor

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Matrix:
    """Concatenated projections of one expert, or of a stack of experts (...), in kernel layout.

    w, scale, zero_point: in the layout of `ExpertWeights` for w1 or w2.
    a_scale: (...) float32, the maximum of the projections' static activation scales. A layer uses
        the maximum over its experts, except for nvfp4, where each expert has its own scale.
    global_scale: (..., projections) float32, the factor of each matrix of nvfp4.
    order: (..., K) int32 for act-order, the original index of each sorted column.
    """

    w: torch.Tensor
    scale: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None
    a_scale: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None
    order: torch.Tensor | None = None


def merge(
    format: Format,
    projections: Sequence[Tensors],
    dtype: torch.dtype,
    *,
    scheme: QuantScheme | None = None,
) -> Matrix:
    """Build w1 or w2 from its projections, concatenated along the rows.

    projections: [gate, up], [down], or [gate_up] with rows in the layer's order. Each projection
        maps the names in `format.stored_tensors` to the tensors of one matrix, which may have any
        leading dimensions (experts).
    dtype: dtype of the layer, and of unquantized weights. In a 16-bit layer, float16 and bfloat16
        scales of 4- and 8-bit integers keep their dtype. Other scales become float32.
    scheme: the result of `fit_scheme`. None uses the scheme of `format`, whose tiles must not cross
        the border between two projections.

    Raises ShapeError, DtypeError or WeightsError for tensors that do not match the format.
    """
    expect("format", format, Format)
    expect("scheme", scheme, QuantScheme | None)
    dtype = parse_dtype(dtype)
    target = format if scheme is None else format.with_scheme(scheme)
    parts = []
    for tensors in expect_each("projections", projections, Mapping):
        if format.method == "gguf":
            need = "codes and scales in separate tensors; `load_experts` reads GGUF files"
            raise ConfigurationError("format", got=str(format), need=need)
        if format.dequantized and format.torchao is None:
            parts.append({"weight": dequantize_matrix(format.dequantized, tensors)})
            continue
        (rows, depth), checked = check_tensors(format, tensors)
        if format.dequantized and format.torchao is not None:
            values = dequantize_int4(checked, format.torchao.group, (0, depth))
            parts.append({"weight": values})
            continue
        parts.append(convert_share(format, target, checked, (0, rows), (0, depth)))
    if not parts:
        raise ConfigurationError("projections", got="none", need="one or more")
    _check_batch_dims(target, parts)
    return fuse(target, parts, dtype)


def _check_batch_dims(format: Format, parts: Sequence[Tensors]) -> None:
    """Raise ShapeError if projections have different leading dimensions."""
    spec = next(spec for spec in format.stored_tensors if spec.role == "w")
    name, dims = ("weight", 2) if format.dequantized else (spec.name, len(spec.dims))
    batches = [tuple(part[name].shape[:-dims]) for part in parts]
    for batch in batches[1:]:
        if batch != batches[0]:
            need = f"{batches[0]}, like the first projection"
            raise ShapeError(f"{name}: leading dimensions", got=batch, need=need)


def convert_share(
    source: Format, target: Format, tensors: Tensors, rows: Range, columns: Range
) -> dict[str, torch.Tensor]:
    """Convert the stored tensors of a share of a matrix to the tile sizes of the layer.

    GPTQ's g_idx is checked and dropped, unless the format has act-order.

    source, target: the format with the tile sizes in the files, and with the tile sizes of the
        layer.
    tensors: result of `matrix_layout.slice_tensors` for rows [a, b) and columns [c, d).
    """
    converted = dict(tensors)
    for spec in source.stored_tensors:
        if spec.role == "order" and spec.name in converted and not source.scheme.act_order:
            order = converted.pop(spec.name)
            check_group_index(order, columns, source.scheme.group[0], "g_idx")
    for spec in source.stored_tensors:
        if spec.role == "scale" and spec.name in converted:
            converted[spec.name] = _convert_e8m0(spec, converted[spec.name])
        if spec.role == "w" and spec.dtypes[0] is torch.uint8 and spec.name in converted:
            converted[spec.name] = converted[spec.name].view(torch.uint8)  # may be int8
    return repeat_scales(source.stored_tensors, target.stored_tensors, converted, rows, columns)


def _convert_e8m0(spec: StoredTensor, scale: torch.Tensor) -> torch.Tensor:
    """Convert E8M0 scales to bytes or floats, depending on the first dtype of `spec`.

    Scales that are not E8M0 are returned unchanged.
    """
    if scale.dtype is torch.float8_e8m0fnu and spec.dtypes[0] is torch.uint8:
        return scale.view(torch.uint8)
    if scale.dtype is torch.uint8 and spec.dtypes[0] is not torch.uint8:
        return e8m0_to_float(scale)
    return scale


def fuse(
    format: Format,
    parts: Sequence[Tensors],
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> Matrix:
    """Convert projections to the layout of kernels, and concatenate them along the rows.

    format: the format with the tile sizes of the layer.
    parts: the tensors of each projection, as `convert_share` returns them.
    out: contiguous tensor with the shape, dtype and device of the result's w. Formats in _WRITERS
        write w there instead of allocating it.
    """
    reader = _READERS[format.method]
    if out is not None and len(parts) == 1 and format.method in _WRITERS:
        reader = partial(_WRITERS[format.method], out=out)
    matrices = [reader(format, tensors, dtype) for tensors in parts]
    if format.scheme.granularity == "tensor":
        return _fuse_with_one_scale(matrices)
    block_rows = format.scheme.group[0] if format.scheme.granularity == "block" else 1
    if any(matrix.w.shape[-2] % block_rows for matrix in matrices[:-1]):
        got = f"{matrices[0].w.shape[-2]} rows of blocks of {block_rows}"
        raise ShapeError(
            "projection", got=got, need="a multiple of the block size (see `fit_scheme`)"
        )
    scale_dim = -1 if format.scheme.granularity == "channel" else -2
    w = _concatenate([matrix.w for matrix in matrices], -2)
    assert w is not None
    return Matrix(
        w,
        _concatenate([matrix.scale for matrix in matrices], scale_dim),
        _concatenate([matrix.zero_point for matrix in matrices], -2),
        _find_max_activation_scale(matrices),
        _concatenate([matrix.global_scale for matrix in matrices], -1),
        find_common_column_order(matrices),
    )


def check_tensors(
    format: Format, tensors: Tensors
) -> tuple[tuple[int, int], dict[str, torch.Tensor]]:
    """Check the tensors of one matrix against the format.

    Returns (N, K), and the tensors without excess dimensions of size 1 and with unblocked scales.
    Raises WeightsError for a missing or unexpected tensor, and ShapeError or DtypeError for an
    invalid one.
    """
    specs = {spec.name: spec for spec in format.stored_tensors}
    unexpected = sorted(map(str, set(tensors) - set(specs)))
    missing = [n for n, spec in specs.items() if n not in tensors and not spec.optional]
    if unexpected or missing:
        got = f"unexpected {', '.join(unexpected)}" if unexpected else f"no {', '.join(missing)}"
        raise WeightsError(f"{format} tensors", got=got, need=", ".join(specs))
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    weight_spec = next(spec for spec in format.stored_tensors if spec.role == "w")
    w = tensors[weight_spec.name]
    if w.dim() < len(weight_spec.dims):
        raise ShapeError(
            weight_spec.name, got=tuple(w.shape), need=f"{len(weight_spec.dims)} dimensions"
        )
    leading_dims = tuple(w.shape[: w.dim() - len(weight_spec.dims)])
    sizes = {"N": 1, "K": 1}
    for dim, size in zip(weight_spec.dims, w.shape[len(leading_dims) :], strict=True):
        if dim.axis:
            sizes[dim.axis] *= size * dim.step
    rows, depth = sizes["N"], sizes["K"]
    checked = {}
    for name, tensor in tensors.items():
        spec = specs[name]
        shape = (*leading_dims, *spec.shape(rows, depth))
        spec.check(name, tuple(tensor.shape), tensor.dtype, shape)
        checked[name] = tensor.reshape(shape)
        if isinstance(spec, BlockedScale):
            checked[name] = spec.unblock(checked[name], (0, rows), (0, depth))
    return (rows, depth), checked


# --- Readers: convert the tensors of one projection to a Matrix, by quant_method ---


def _read_unquantized(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    return Matrix(tensors["weight"].to(dtype))


def _read_scaled(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    by_role = {spec.role: tensors.get(spec.name) for spec in format.stored_tensors}
    w, scale, a_scale = by_role["w"], by_role["scale"], by_role.get("a_scale")
    assert w is not None
    assert scale is not None
    leading_dims = tuple(w.shape[:-2])
    if a_scale is not None:
        a_scale = convert_input_scale(a_scale, "activation scales").reshape(leading_dims)
    if format.scheme.granularity == "tensor":
        return Matrix(w, scale.reshape(leading_dims), None, a_scale)
    if format.scheme.granularity == "channel":
        scale_eN = scale.reshape(-1, w.shape[-2])
        return Matrix(w, channel_scale(scale_eN).reshape(*leading_dims, -1), None, a_scale)
    scale = scale.float()
    _check_scale(scale, ~(scale.isfinite() & (scale >= 0)), "finite numbers from 0 on")
    return Matrix(w, scale, None, a_scale)


def _read_fp8(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    if format.scheme.weight == "float4_e2m1":
        scale_name = next(spec.name for spec in format.stored_tensors if spec.role == "scale")
        return _read_mxfp4_codes(tensors["weight"], tensors[scale_name])
    return _read_scaled(format, tensors, dtype)


def _check_scale(scale: torch.Tensor, is_invalid: torch.Tensor, need: str) -> None:
    if bool(is_invalid.any()):
        raise WeightsError("scale", got=float(scale[is_invalid][0]), need=need)


def _read_compressed_tensors(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    scheme = format.scheme
    if scheme.matrix_scales:
        return _read_nvfp4(format, tensors)
    if scheme.weight == "float4_e2m1":
        return _read_mxfp4_codes(tensors["weight_packed"], tensors["weight_scale"])
    if scheme.quantizes_activations or scheme.weight == "float8_e4m3fn":
        return _read_scaled(format, tensors, dtype)
    packed, scale = tensors["weight_packed"], tensors["weight_scale"]
    if scheme.granularity == "channel":  # stored with an offset of 128, so the sign bit is inverted
        w = (packed.contiguous().view(torch.uint8) ^ 0x80).view(torch.int8)
        scale_eN = channel_scale(scale.reshape(-1, w.shape[-2]))
        return Matrix(w, scale_eN.reshape(*w.shape[:-1]))
    weights = from_compressed_tensors(
        packed,
        scale,
        tensors.get("weight_zero_point"),
        group=scheme.group[0],
        bits=4 if scheme.packed else 8,
    )
    return _make_group_matrix(format, weights, dtype, tensors.get("weight_g_idx"))


def _read_nvfp4(format: Format, tensors: Tensors) -> Matrix:
    """Read nvfp4, in which a weight is e2m1 code * scale of its group * scale of its matrix.

    compressed-tensors stores the reciprocals of the matrix scales and of the activation scales.
    torchao may omit the matrix scale, which is then 1.
    """
    by_role = {spec.role: tensors.get(spec.name) for spec in format.stored_tensors}
    w, scale, global_scale = by_role["w"], by_role["scale"], by_role.get("global_scale")
    assert w is not None
    assert scale is not None
    if global_scale is None:
        global_scale = w.new_ones(w.shape[:-2], dtype=torch.float32)
    values = scale.float()
    _check_scale(values, values.isnan(), "numbers")
    if format.scheme.scales_by_expert:  # MMA instructions with 4-bit operands need unsigned scales
        _check_scale(values, values < 0, "numbers from 0 on")
    factor = 1 / global_scale if format.method == "compressed-tensors" else global_scale
    is_valid = global_scale.isfinite() & factor.isfinite() & (factor >= 0)
    _check_scale(global_scale, ~is_valid, "a finite matrix scale >= 0")
    a_scale = by_role.get("a_scale")
    if a_scale is not None:
        a_scale = convert_input_scale(a_scale, "activation scales").reshape(w.shape[:-2])
        a_scale = 1 / a_scale if format.method == "compressed-tensors" else a_scale
    return Matrix(w, scale, None, a_scale, factor.reshape(*w.shape[:-2], -1))


def _read_modelopt(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    if format.scheme.matrix_scales:
        return _read_nvfp4(format, tensors)
    return _read_scaled(format, tensors, dtype)


def _read_bitsandbytes(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    if format.dequantized:
        return _read_unquantized(format, tensors, dtype)
    return Matrix(
        tensors["weight"], compute_int8_scale(tensors["SCB"], tensors.get("weight_format"))
    )


def _read_torchao(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    if format.dequantized:
        return _read_unquantized(format, tensors, dtype)
    check_zero_points(tensors.get("_weight_zero_point"))
    if format.scheme.matrix_scales:
        return _read_nvfp4(format, tensors)
    if format.scheme.weight == "float4_e2m1":
        return _read_mxfp4_codes(tensors["_weight_qdata"], tensors["_weight_scale"])
    if format.scheme.granularity != "group":
        return _read_scaled(format, tensors, dtype)
    w = tensors["_weight_qdata"].view(torch.uint8) ^ 0x80  # adds 128
    group = format.scheme.group[0]
    weights = GroupWeights(w, tensors["_weight_scale"], None, group, bits=8)
    return _make_group_matrix(format, weights, dtype)


def _read_gguf(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    if format.dequantized:
        return _read_unquantized(format, tensors, dtype)
    w, scale = tensors["weight"], tensors["scale"]
    if format.scheme.weight == "float4_e2m1":
        return _read_mxfp4_codes(w, scale)
    bits = 4 if format.scheme.packed else 8
    return _make_group_matrix(
        format, GroupWeights(w, scale, None, format.scheme.group[0], bits), dtype
    )


def _read_awq(
    format: Format, tensors: Tensors, dtype: torch.dtype, out: torch.Tensor | None = None
) -> Matrix:
    values = (tensors["qweight"], tensors["scales"], tensors.get("qzeros"))
    return _make_group_matrix(format, convert_awq(*values, format.scheme.group[0], out), dtype)


def _read_gptq(
    format: Format, tensors: Tensors, dtype: torch.dtype, out: torch.Tensor | None = None
) -> Matrix:
    bits, qweight = 4 if format.scheme.packed else 8, tensors["qweight"]
    group, order = format.scheme.group[0], None
    if format.scheme.act_order:
        order = argsort_by_group(tensors["g_idx"], 32 // bits * qweight.shape[-2], group, "g_idx")
    values = (qweight, tensors["scales"], tensors.get("qzeros"), group)
    weights = convert_gptq(*values, minus_one=format.minus_one, bits=bits, order=order, out=out)
    return replace(_make_sorted_group_matrix(format, weights, dtype), order=order)


def _read_mxfp4(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    blocks, scales = tensors["blocks"], tensors["scales"]
    leading_dims = tuple(blocks.shape[:-3])
    w, scale = from_gpt_oss(
        blocks.reshape(-1, *blocks.shape[-3:]), scales.reshape(-1, *scales.shape[-2:])
    )
    return _read_mxfp4_codes(
        w.reshape(*leading_dims, *w.shape[1:]), scale.reshape(*leading_dims, *scale.shape[1:])
    )


def _read_mxfp4_codes(w: torch.Tensor, scale: torch.Tensor) -> Matrix:
    _check_scale(scale, scale == 255, "E8M0 below 255, which is NaN")
    return Matrix(w, scale)


def _make_group_matrix(
    format: Format, weights: GroupWeights, dtype: torch.dtype, g_idx: torch.Tensor | None = None
) -> Matrix:
    order = None
    if format.scheme.act_order:
        assert g_idx is not None
        order = argsort_by_group(g_idx, weights.depth, format.scheme.group[0], "g_idx")
        weights = sort_columns(weights, order)
    return replace(_make_sorted_group_matrix(format, weights, dtype), order=order)


def _make_sorted_group_matrix(format: Format, weights: GroupWeights, dtype: torch.dtype) -> Matrix:
    """Return a Matrix of weights whose columns are sorted by group."""
    if not format.scheme.zero_points:
        weights = drop_zero_points_unchecked(weights)
    smallest, largest = weights.scale.aminmax()  # a single pass, which propagates NaN
    if not (smallest.isfinite() and largest.isfinite()):
        _check_scale(weights.scale, ~weights.scale.isfinite(), "finite numbers")
    keeps_dtype = weights.scale.dtype.itemsize == dtype.itemsize == 2
    scale = weights.scale if keeps_dtype else weights.scale.float()
    return Matrix(weights.w, scale, weights.zero_point)


def _fuse_with_one_scale(parts: Sequence[Matrix]) -> Matrix:
    """Concatenate projections with one scale each, and use the maximum scale for all.

    The weights of projections with smaller scales are rounded again.
    """
    if len({matrix.w.shape for matrix in parts}) > 1:
        got = [tuple(matrix.w.shape) for matrix in parts]
        raise ShapeError("projections", got=got, need="equal shapes")
    w = torch.cat([matrix.w for matrix in parts], -2)
    leading_dims = tuple(w.shape[:-2])
    scales = torch.stack(
        [matrix.scale.reshape(-1) for matrix in parts if matrix.scale is not None], 1
    )
    merged, scale = merge_scales(w.reshape(-1, *w.shape[-2:]), scales)
    w = merged.reshape(*leading_dims, *merged.shape[1:])
    return Matrix(w, scale.reshape(leading_dims), None, _find_max_activation_scale(parts))


def find_common_column_order(parts: Sequence[Matrix]) -> torch.Tensor | None:
    """Return the column order of projections, or None without act-order.

    Raises WeightsError if gate and up have different orders, because they have the same input.
    """
    first = parts[0].order
    for matrix in parts[1:]:
        if first is not None and matrix.order is not None and not torch.equal(first, matrix.order):
            got = "different column orders of gate and up"
            raise WeightsError("g_idx", got=got, need="one order: both multiply the same inputs")
    return first


def expand_column_order(order: torch.Tensor, rows_per_column: int) -> torch.Tensor:
    """Return the permutation of a w1 projection's rows that matches the column order of w2.

    order: (I,), the source of each column of w2.
    rows_per_column: consecutive rows of the projection for each column of w2: 2 if gate and up rows
        alternate, and otherwise 1.

    Returns (I * rows_per_column,) int64, the source of each row.
    """
    index = torch.arange(rows_per_column, device=order.device)
    return (order.long()[:, None] * rows_per_column + index).flatten()


def sort_w1_rows(
    weights: dict[str, torch.Tensor], slot: int, order: torch.Tensor, *, interleaved: bool
) -> None:
    """Permute the bias and zero points of an expert's w1 like the columns of its w2, in place.

    The loader has already sorted the rows of w1 and its scales while copying them.

    weights: fields of ExpertWeights by name.
    slot: index of the expert in `weights`.
    order: (I,), the source of each row of gate and of up.
    interleaved: whether gate and up rows alternate.
    """
    projections = weights["w1"].shape[1] // len(order)
    if interleaved:
        index = expand_column_order(order, projections)
    else:
        first_rows = torch.arange(projections, device=order.device)[:, None] * len(order)
        index = (order.long() + first_rows).flatten()
    if "b1" in weights:
        rows = weights["b1"][slot]
        rows.copy_(rows.index_select(0, index.to(rows.device)))
    zero_point = weights.get("w1_zero_point")
    if zero_point is not None:
        packed = zero_point.shape[1] != len(index)
        unpacked = unpack_pairs(zero_point[slot], 0) if packed else zero_point[slot]
        unpacked = unpacked.index_select(0, index.to(zero_point.device))
        zero_point[slot] = pack_pairs(unpacked, 0) if packed else unpacked


def _find_max_activation_scale(parts: Sequence[Matrix]) -> torch.Tensor | None:
    scales = [matrix.a_scale for matrix in parts if matrix.a_scale is not None]
    return torch.stack(scales).amax(0) if scales else None


def _concatenate(parts: Sequence[torch.Tensor | None], dim: int) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    return None if not present else present[0] if len(present) == 1 else torch.cat(present, dim)


_READERS: dict[str, Callable[[Format, Tensors, torch.dtype], Matrix]] = {
    "none": _read_unquantized,
    "fp8": _read_fp8,
    "mxfp8": _read_scaled,
    "fbgemm_fp8": _read_scaled,
    "bitsandbytes": _read_bitsandbytes,
    "torchao": _read_torchao,
    "gguf": _read_gguf,
    "modelopt": _read_modelopt,
    "quark": _read_fp8,
    "compressed-tensors": _read_compressed_tensors,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "mxfp4": _read_mxfp4,
}
# Readers that can write w to an existing tensor.
_WRITERS: dict[str, Callable[..., Matrix]] = {"awq": _read_awq, "gptq": _read_gptq}
