"""Conversion of a checkpoint's stored tensors to the fused weights of a layer.

    format = format_of(config.get("quantization_config"))        # None: unquantized
    scheme = fit(format, intermediate, world=tp)                 # Problem(quant=str(scheme))
    gate = {"weight": ..., "weight_scale_inv": ...}              # names as in format.stored
    w1 = merge(format, [gate, up], torch.bfloat16, scheme=scheme)
    w2 = merge(format, [down], torch.bfloat16, scheme=scheme)
    ExpertWeights(w1.w, w2.w, w1_scale=w1.scale, w2_scale=w2.scale, ...)

Packed weights stay packed. All functions except `sort_rows` are pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from modular_kernel.checkpoints.bitsandbytes import dequantize_matrix, int8_scale
from modular_kernel.checkpoints.compressed_tensors import from_compressed_tensors
from modular_kernel.checkpoints.formats import Format
from modular_kernel.checkpoints.fp8_mxfp4 import (
    channel_scale,
    from_gpt_oss,
    one_scale,
    usable_inputs,
)
from modular_kernel.checkpoints.gptq_awq import (
    GroupWeights,
    check_group_index,
    column_order,
    convert_awq,
    convert_gptq,
    sort_columns,
    without_zero_points,
)
from modular_kernel.checkpoints.matrix_layout import BlockedScale, Range, StoredTensor, refine
from modular_kernel.checkpoints.torchao import check_zero_points, dequantize_int4
from modular_kernel.errors import ConfigurationError, ShapeError, WeightsError
from modular_kernel.quant.scale_tiles import from_e8m0, pack_pairs, unpack_pairs
from modular_kernel.spec.problem import parse_dtype
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.utils.argument_checks import expect, expect_each
from modular_kernel.utils.tensor_checks import check_tensor

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Matrix:
    """Concatenated projections of one expert, or of a stack of experts (...), in kernel layout.

    w, scale, zero_point: as `ExpertWeights` has them for w1 or w2. a_scale: (...) float32, the
    largest of the projections' static activation scales; a layer uses the largest of its experts,
    except for nvfp4, where each expert has its own. global_scale: (..., projections) float32, the
    factor of each matrix of nvfp4. order: for act-order, (..., K) int32, the original index of each
    sorted column.
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

    projections: [gate, up], [down], or [gate_up] with rows in the layer's order. Each maps the
        names in `format.stored` to the tensors of one matrix, with any leading dimensions
        (experts).
    dtype: of the layer, used for unquantized weights. In a 16-bit layer, float16 and bfloat16
        scales of 4- and 8-bit integers keep their dtype; otherwise scales are float32.
    scheme: from `fit`, with tiles that divide those of `format`. None is the format's own scheme,
        whose tiles must not extend over the border between two projections.

    Raises ShapeError, DtypeError or WeightsError for tensors that do not match the format.
    """
    expect("format", format, Format)
    expect("scheme", scheme, QuantScheme | None)
    dtype = parse_dtype(dtype)
    fine = format if scheme is None else format.with_scheme(scheme)
    parts = []
    for tensors in expect_each("projections", projections, Mapping):
        if format.method == "gguf":
            need = "a format with one tensor for each kind; `load_experts` reads GGUF files"
            raise ConfigurationError("format", got=str(format), need=need)
        if format.dequantized and format.torchao is None:
            parts.append({"weight": dequantize_matrix(format.dequantized, tensors)})
            continue
        (rows, depth), checked = check_tensors(format, tensors)
        if format.dequantized and format.torchao is not None:
            values = dequantize_int4(checked, format.torchao.group, (0, depth))
            parts.append({"weight": values})
            continue
        parts.append(convert_share(format, fine, checked, (0, rows), (0, depth)))
    if not parts:
        raise ConfigurationError("projections", got="none", need="one or more")
    _check_batch_dims(fine, parts)
    return fuse(fine, parts, dtype)


def _check_batch_dims(format: Format, parts: Sequence[Tensors]) -> None:
    """Raise ShapeError if projections have different leading dimensions."""
    stored = next(stored for stored in format.stored if stored.role == "w")
    name, dims = ("weight", 2) if format.dequantized else (stored.name, len(stored.dims))
    batches = [tuple(part[name].shape[:-dims]) for part in parts]
    for batch in batches[1:]:
        if batch != batches[0]:
            need = f"{batches[0]}, like the first projection"
            raise ShapeError(f"{name}: leading dimensions", got=batch, need=need)


def convert_share(
    coarse: Format, fine: Format, tensors: Tensors, rows: Range, columns: Range
) -> dict[str, torch.Tensor]:
    """Return the tensors of a share of a matrix in the tiles of `fine`.

    tensors: what `matrix_layout.cut` returns for rows [a, b) and columns [c, d). GPTQ's g_idx is
    checked here, where the first column is known, and dropped, unless the format has act-order.
    """
    remaining = dict(tensors)
    for stored in coarse.stored:
        if stored.role == "order" and stored.name in remaining and not coarse.scheme.act_order:
            order = remaining.pop(stored.name)
            check_group_index(order, columns, coarse.scheme.group[0], "g_idx")
    for stored in coarse.stored:
        if stored.role == "scale" and stored.name in remaining:
            remaining[stored.name] = _decoded_e8m0(stored, remaining[stored.name])
        if stored.role == "w" and stored.dtypes[0] is torch.uint8 and stored.name in remaining:
            remaining[stored.name] = remaining[stored.name].view(torch.uint8)  # or int8
    return refine(coarse.stored, fine.stored, remaining, rows, columns)


def _decoded_e8m0(stored: StoredTensor, scale: torch.Tensor) -> torch.Tensor:
    """Return E8M0 scales, of either dtype, as the bytes or the floats that the scheme has."""
    if scale.dtype is torch.float8_e8m0fnu and stored.dtypes[0] is torch.uint8:
        return scale.view(torch.uint8)
    if scale.dtype is torch.uint8 and stored.dtypes[0] is not torch.uint8:
        return from_e8m0(scale)
    return scale


def fuse(
    format: Format,
    parts: Sequence[Tensors],
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> Matrix:
    """Fuse projections that are in the format's own tiles, as `convert_share` returns them.

    out: a contiguous tensor of the shape, dtype and device of the result's w. A format whose values
    have to be rearranged may write w there; then w is `out`.
    """
    reader = _READERS[format.method]
    if out is not None and len(parts) == 1 and format.method in _WRITERS:
        reader = partial(_WRITERS[format.method], out=out)
    matrices = [reader(format, tensors, dtype) for tensors in parts]
    if format.scheme.granularity == "tensor":
        return _fuse_scales(matrices)
    block_rows = format.scheme.group[0] if format.scheme.granularity == "block" else 1
    if any(matrix.w.shape[-2] % block_rows for matrix in matrices[:-1]):
        got = f"{matrices[0].w.shape[-2]} rows of blocks of {block_rows}"
        raise ShapeError("projection", got=got, need="a multiple of the block size (see `fit`)")
    scale_dim = -1 if format.scheme.granularity == "channel" else -2
    w = _concatenate([matrix.w for matrix in matrices], -2)
    assert w is not None
    return Matrix(
        w,
        _concatenate([matrix.scale for matrix in matrices], scale_dim),
        _concatenate([matrix.zero_point for matrix in matrices], -2),
        _max_input_scale(matrices),
        _concatenate([matrix.global_scale for matrix in matrices], -1),
        same_order(matrices),
    )


def check_tensors(
    format: Format, tensors: Tensors
) -> tuple[tuple[int, int], dict[str, torch.Tensor]]:
    """Return (N, K) of a matrix, and its tensors without trailing dimensions of 1.

    Raises WeightsError for a missing or superfluous tensor, ShapeError or DtypeError for a wrong
    one.
    """
    known = {spec.name: spec for spec in format.stored}
    extra = sorted(map(str, set(tensors) - set(known)))
    missing = [n for n, spec in known.items() if n not in tensors and not spec.optional]
    if extra or missing:
        got = f"unexpected {', '.join(extra)}" if extra else f"no {', '.join(missing)}"
        raise WeightsError(f"{format} tensors", got=got, need=", ".join(known))
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    weight_spec = next(spec for spec in format.stored if spec.role == "w")
    w = tensors[weight_spec.name]
    if w.dim() < len(weight_spec.dims):
        raise ShapeError(
            weight_spec.name, got=tuple(w.shape), need=f"{len(weight_spec.dims)} dimensions"
        )
    lead = tuple(w.shape[: w.dim() - len(weight_spec.dims)])
    sizes = {"N": 1, "K": 1}
    for dim, size in zip(weight_spec.dims, w.shape[len(lead) :], strict=True):
        if dim.axis:
            sizes[dim.axis] *= size * dim.step
    rows, depth = sizes["N"], sizes["K"]
    checked = {}
    for name, tensor in tensors.items():
        shape = (*lead, *known[name].shape(rows, depth))
        spec = known[name]
        spec.check(name, tuple(tensor.shape), tensor.dtype, shape)
        checked[name] = tensor.reshape(shape)
        if isinstance(spec, BlockedScale):
            checked[name] = spec.unblocked(checked[name], (0, rows), (0, depth))
    return (rows, depth), checked


# ---------------------------------------------------------------------- readers by format


def _read_plain(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    return Matrix(tensors["weight"].to(dtype))


def _read_scaled(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    by_role = {spec.role: tensors.get(spec.name) for spec in format.stored}
    w, scale, a_scale = by_role["w"], by_role["scale"], by_role.get("a_scale")
    assert w is not None
    assert scale is not None
    lead = tuple(w.shape[:-2])
    if a_scale is not None:
        a_scale = usable_inputs(a_scale, "activation scales").reshape(lead)
    if format.scheme.granularity == "tensor":
        return Matrix(w, scale.reshape(lead), None, a_scale)
    if format.scheme.granularity == "channel":
        flat = scale.reshape(-1, w.shape[-2])
        return Matrix(w, channel_scale(flat).reshape(*lead, -1), None, a_scale)
    scale = scale.float()
    _check_scale(scale, ~(scale.isfinite() & (scale >= 0)), "finite numbers from 0 on")
    return Matrix(w, scale, None, a_scale)


def _read_fp8(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    if format.scheme.weight == "float4_e2m1":
        scale = next(stored.name for stored in format.stored if stored.role == "scale")
        return _mxfp4(tensors["weight"], tensors[scale])
    return _read_scaled(format, tensors, dtype)


def _check_scale(scale: torch.Tensor, bad: torch.Tensor, need: str) -> None:
    if bool(bad.any()):
        raise WeightsError("scale", got=float(scale[bad][0]), need=need)


def _read_compressed(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    scheme = format.scheme
    if scheme.matrix_scales:
        return _nvfp4(format, tensors)
    if scheme.weight == "float4_e2m1":
        return _mxfp4(tensors["weight_packed"], tensors["weight_scale"])
    if scheme.quantizes_activations or scheme.weight == "float8_e4m3fn":
        return _read_scaled(format, tensors, dtype)
    packed, scale = tensors["weight_packed"], tensors["weight_scale"]
    if scheme.granularity == "channel":  # stored plus 128: the sign bit is inverted
        w = (packed.contiguous().view(torch.uint8) ^ 0x80).view(torch.int8)
        flat = channel_scale(scale.reshape(-1, w.shape[-2]))
        return Matrix(w, flat.reshape(*w.shape[:-1]))
    weights = from_compressed_tensors(
        packed,
        scale,
        tensors.get("weight_zero_point"),
        group=scheme.group[0],
        bits=4 if scheme.packed else 8,
    )
    return _group_matrix(format, weights, dtype, tensors.get("weight_g_idx"))


def _nvfp4(format: Format, tensors: Tensors) -> Matrix:
    """Read nvfp4. The matrix scale of compressed-tensors divides, that of modelopt multiplies.

    The same holds for the scales of its inputs, if the scheme has them. Without a matrix scale, as
    torchao may store it, the scale is 1.
    """
    by_role = {spec.role: tensors.get(spec.name) for spec in format.stored}
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
    valid = global_scale.isfinite() & factor.isfinite() & (factor >= 0)
    _check_scale(global_scale, ~valid, "a scale of a matrix from 0 on")
    a_scale = by_role.get("a_scale")
    if a_scale is not None:
        a_scale = usable_inputs(a_scale, "activation scales").reshape(w.shape[:-2])
        a_scale = 1 / a_scale if format.method == "compressed-tensors" else a_scale
    return Matrix(w, scale, None, a_scale, factor.reshape(*w.shape[:-2], -1))


def _read_modelopt(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    if format.scheme.matrix_scales:
        return _nvfp4(format, tensors)
    return _read_scaled(format, tensors, dtype)


def _read_bitsandbytes(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    if format.dequantized:
        return _read_plain(format, tensors, dtype)
    return Matrix(tensors["weight"], int8_scale(tensors["SCB"], tensors.get("weight_format")))


def _read_torchao(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    if format.dequantized:
        return _read_plain(format, tensors, dtype)
    check_zero_points(tensors.get("_weight_zero_point"))
    if format.scheme.matrix_scales:
        return _nvfp4(format, tensors)
    if format.scheme.weight == "float4_e2m1":
        return _mxfp4(tensors["_weight_qdata"], tensors["_weight_scale"])
    if format.scheme.granularity != "group":
        return _read_scaled(format, tensors, dtype)
    w = tensors["_weight_qdata"].view(torch.uint8) ^ 0x80  # plus 128
    group = format.scheme.group[0]
    weights = GroupWeights(w, tensors["_weight_scale"], None, group, bits=8)
    return _group_matrix(format, weights, dtype)


def _read_gguf(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    if format.dequantized:
        return _read_plain(format, tensors, dtype)
    w, scale = tensors["weight"], tensors["scale"]
    if format.scheme.weight == "float4_e2m1":
        return _mxfp4(w, scale)
    bits = 4 if format.scheme.packed else 8
    return _group_matrix(format, GroupWeights(w, scale, None, format.scheme.group[0], bits), dtype)


def _read_awq(
    format: Format, tensors: Tensors, dtype: torch.dtype, out: torch.Tensor | None = None
) -> Matrix:
    values = (tensors["qweight"], tensors["scales"], tensors.get("qzeros"))
    return _group_matrix(format, convert_awq(*values, format.scheme.group[0], out), dtype)


def _read_gptq(
    format: Format, tensors: Tensors, dtype: torch.dtype, out: torch.Tensor | None = None
) -> Matrix:
    bits, qweight = 4 if format.scheme.packed else 8, tensors["qweight"]
    group, order = format.scheme.group[0], None
    if format.scheme.act_order:
        order = column_order(tensors["g_idx"], 32 // bits * qweight.shape[-2], group, "g_idx")
    values = (qweight, tensors["scales"], tensors.get("qzeros"), group)
    weights = convert_gptq(*values, minus_one=format.minus_one, bits=bits, order=order, out=out)
    return replace(_sorted_group_matrix(format, weights, dtype), order=order)


def _read_mxfp4(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    blocks, scales = tensors["blocks"], tensors["scales"]
    lead = tuple(blocks.shape[:-3])
    w, scale = from_gpt_oss(
        blocks.reshape(-1, *blocks.shape[-3:]), scales.reshape(-1, *scales.shape[-2:])
    )
    return _mxfp4(w.reshape(*lead, *w.shape[1:]), scale.reshape(*lead, *scale.shape[1:]))


def _mxfp4(w: torch.Tensor, scale: torch.Tensor) -> Matrix:
    _check_scale(scale, scale == 255, "E8M0 below 255, which is NaN")
    return Matrix(w, scale)


def _group_matrix(
    format: Format, weights: GroupWeights, dtype: torch.dtype, g_idx: torch.Tensor | None = None
) -> Matrix:
    order = None
    if format.scheme.act_order:
        assert g_idx is not None
        order = column_order(g_idx, weights.depth, format.scheme.group[0], "g_idx")
        weights = sort_columns(weights, order)
    return replace(_sorted_group_matrix(format, weights, dtype), order=order)


def _sorted_group_matrix(format: Format, weights: GroupWeights, dtype: torch.dtype) -> Matrix:
    """Return weights whose columns are in group order."""
    if not format.scheme.zero_points:
        weights = without_zero_points(weights)
    smallest, largest = weights.scale.aminmax()  # one pass, which NaN outlasts
    if not (smallest.isfinite() and largest.isfinite()):
        _check_scale(weights.scale, ~weights.scale.isfinite(), "finite numbers")
    keeps_dtype = weights.scale.dtype.itemsize == dtype.itemsize == 2
    scale = weights.scale if keeps_dtype else weights.scale.float()
    return Matrix(weights.w, scale, weights.zero_point)


def _fuse_scales(parts: Sequence[Matrix]) -> Matrix:
    """Fuse projections with one scale each: keep the largest scale, round the others again."""
    if len({matrix.w.shape for matrix in parts}) > 1:
        raise ShapeError(
            "projections", got=[tuple(matrix.w.shape) for matrix in parts], need="equal shapes"
        )
    w = torch.cat([matrix.w for matrix in parts], -2)
    lead = tuple(w.shape[:-2])
    scales = torch.stack(
        [matrix.scale.reshape(-1) for matrix in parts if matrix.scale is not None], 1
    )
    merged, scale = one_scale(w.reshape(-1, *w.shape[-2:]), scales)
    w = merged.reshape(*lead, *merged.shape[1:])
    return Matrix(w, scale.reshape(lead), None, _max_input_scale(parts))


def same_order(parts: Sequence[Matrix]) -> torch.Tensor | None:
    """Return the column order, which projections of the same input must share."""
    first = parts[0].order
    for matrix in parts[1:]:
        if first is not None and matrix.order is not None and not torch.equal(first, matrix.order):
            got = "different column orders of gate and up"
            raise WeightsError("g_idx", got=got, need="one order: both multiply the same inputs")
    return first


def projection_rows(order: torch.Tensor, rows_per_column: int) -> torch.Tensor:
    """Return the source of each row of a projection of w1, for the column order of w2.

    order: (I,). rows_per_column: rows of the projection for each column of w2, which are
    consecutive. Returns (I * rows_per_column,) int64.
    """
    index = torch.arange(rows_per_column, device=order.device)
    return (order.long()[:, None] * rows_per_column + index).flatten()


def sort_rows(
    weights: dict[str, torch.Tensor], slot: int, order: torch.Tensor, *, interleaved: bool
) -> None:
    """Permute the bias and zero points of an expert's w1 like the columns of its w2, in place.

    The rows of w1 and its scales are sorted while they are copied. weights: by field of
    ExpertWeights. order: (I,), the source row of gate, and of up, for each row.
    """
    projections = weights["w1"].shape[1] // len(order)
    if interleaved:
        index = projection_rows(order, projections)
    else:
        first_rows = torch.arange(projections, device=order.device)[:, None] * len(order)
        index = (order.long() + first_rows).flatten()
    if "b1" in weights:
        rows = weights["b1"][slot]
        rows.copy_(rows.index_select(0, index.to(rows.device)))
    zero = weights.get("w1_zero_point")
    if zero is not None:
        packed = zero.shape[1] != len(index)
        points = unpack_pairs(zero[slot], 0) if packed else zero[slot]
        points = points.index_select(0, index.to(zero.device))
        zero[slot] = pack_pairs(points, 0) if packed else points


def _max_input_scale(parts: Sequence[Matrix]) -> torch.Tensor | None:
    scales = [matrix.a_scale for matrix in parts if matrix.a_scale is not None]
    return torch.stack(scales).amax(0) if scales else None


def _concatenate(parts: Sequence[torch.Tensor | None], dim: int) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    return None if not present else present[0] if len(present) == 1 else torch.cat(present, dim)


_READERS: dict[str, Callable[[Format, Tensors, torch.dtype], Matrix]] = {
    "none": _read_plain,
    "fp8": _read_fp8,
    "mxfp8": _read_scaled,
    "fbgemm_fp8": _read_scaled,
    "bitsandbytes": _read_bitsandbytes,
    "torchao": _read_torchao,
    "gguf": _read_gguf,
    "modelopt": _read_modelopt,
    "quark": _read_fp8,
    "compressed-tensors": _read_compressed,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "mxfp4": _read_mxfp4,
}
# Readers that can write w to its place.
_WRITERS: dict[str, Callable[..., Matrix]] = {"awq": _read_awq, "gptq": _read_gptq}
