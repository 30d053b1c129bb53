"""Stored tensors of a checkpoint's matrices -> the weights of a layer.

    format = format_of(config.get("quantization_config"))        # None: unquantized
    scheme = fit(format, intermediate, world=tp)                 # Problem(quant=str(scheme))
    gate = {"weight": ..., "weight_scale_inv": ...}              # by the names in format.stored
    w1 = merge(format, [gate, up], torch.bfloat16, scheme=scheme)
    w2 = merge(format, [down], torch.bfloat16, scheme=scheme)
    ExpertWeights(w1.w, w2.w, w1_scale=w1.scale, w2_scale=w2.scale, ...)

What is packed stays packed. Everything here is pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

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
    check_order,
    column_order,
    from_awq,
    from_gptq,
    sort_columns,
    symmetric,
)
from modular_kernel.checkpoints.matrix_layout import Range, refine
from modular_kernel.errors import ConfigurationError, ShapeError, WeightsError
from modular_kernel.quant.scale_tiles import pack_pairs, unpack_pairs
from modular_kernel.spec.problem import parse_dtype
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.utils.argument_checks import expect, expect_each
from modular_kernel.utils.tensor_checks import check_tensor

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Matrix:
    """Projections of one expert (or of a stack of them, ...) one below the other, ready to load.

    w, scale, zero_point: as `ExpertWeights` has them of w1 or w2. a_scale: (...) float32, the
    largest of the projections' static activation scales; a layer takes the largest of its experts,
    but of nvfp4 each one's own.
    global_scale: (..., projections) float32, what multiplies each matrix of nvfp4. order: of
    act-order, (..., K) int32: which column each was before they were sorted by groups.
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
    """Make w1 or w2 of the projections that it consists of, one below the other.

    projections: [gate, up], [down], or [gate_up] whose rows lie as the layer wants them; each the
    tensors of one matrix by their names in `format.stored`, with any leading dimensions (of
    experts) or none. dtype: of the layer: of unquantized weights. Scales of 4- and 8-bit integers
    stay float16 or bfloat16 in a layer of 16 bits, else they are float32. scheme: as `fit` gives
    it, with tiles that divide those of `format`; None is the format's own, whose tiles must not go
    through the border between two projections.

    Raises ShapeError, DtypeError, WeightsError for what is not as the format has it.
    """
    expect("format", format, Format)
    expect("scheme", scheme, QuantScheme | None)
    dtype = parse_dtype(dtype)
    fine = format if scheme is None else format.with_scheme(scheme)
    parts = []
    for tensors in expect_each("projections", projections, Mapping):
        (rows, depth), checked = check_tensors(format, tensors)
        parts.append(piece(format, fine, checked, (0, rows), (0, depth)))
    if not parts:
        raise ConfigurationError("projections", got="none", need="one or more")
    _check_leads(fine, parts)
    return stack(fine, parts, dtype)


def _check_leads(format: Format, parts: Sequence[Tensors]) -> None:
    """Raise the ShapeError of a projection that is of other experts than the first."""
    stored = next(each for each in format.stored if each.role == "w")
    leads = [tuple(part[stored.name].shape[: -len(stored.dims)]) for part in parts]
    for lead in leads[1:]:
        if lead != leads[0]:
            need = f"{leads[0]}, as the first projection"
            raise ShapeError(f"{stored.name}: leading dimensions", got=lead, need=need)


def piece(
    coarse: Format, fine: Format, tensors: Tensors, rows: Range, columns: Range
) -> dict[str, torch.Tensor]:
    """Return the tensors of a share of a matrix in the tiles of `fine`.

    tensors: what `stored.cut` gives for rows [a, b) and columns [c, d) of the matrix. GPTQ's g_idx
    is checked here, where the first column is known, and left out, but for act-order.
    """
    kept = dict(tensors)
    for stored in coarse.stored:
        if stored.role == "order" and stored.name in kept and not coarse.scheme.act_order:
            order, group = kept.pop(stored.name), coarse.scheme.group[0]
            whole = torch.arange(columns[1], device=order.device) // group
            need = whole[columns[0] :].to(order.dtype)
            check_order(order - need + torch.arange(len(need)) // group, len(need), group, "g_idx")
    return refine(coarse.stored, fine.stored, kept, rows, columns)


def stack(format: Format, parts: Sequence[Tensors], dtype: torch.dtype) -> Matrix:
    """Merge projections whose tiles are the format's own, as `piece` gives them."""
    made = [_READ[format.method](format, tensors, dtype) for tensors in parts]
    if format.scheme.granularity == "tensor":
        return _one_scale(made)
    border = format.scheme.group[0] if format.scheme.granularity == "block" else 1
    if any(each.w.shape[-2] % border for each in made[:-1]):
        got = f"{made[0].w.shape[-2]} rows of blocks of {border}"
        raise ShapeError("projection", got=got, need="whole blocks (see `fit`)")
    along = -1 if format.scheme.granularity == "channel" else -2
    whole = _joined([each.w for each in made], -2)
    assert whole is not None
    return Matrix(
        whole,
        _joined([each.scale for each in made], along),
        _joined([each.zero_point for each in made], -2),
        _largest(made),
        _joined([each.global_scale for each in made], -1),
        same_order(made),
    )


def check_tensors(
    format: Format, tensors: Tensors
) -> tuple[tuple[int, int], dict[str, torch.Tensor]]:
    """Return (N, K) of a matrix, and its tensors without trailing dimensions of 1.

    Raises the error of a tensor that is missing, too many, misshapen or of another dtype.
    """
    known = {each.name: each for each in format.stored}
    extra = sorted(map(str, set(tensors) - set(known)))
    missing = [n for n, each in known.items() if n not in tensors and not each.optional]
    if extra or missing:
        got = f"{', '.join(extra)} too many" if extra else f"no {', '.join(missing)}"
        raise WeightsError(f"{format} tensors", got=got, need=", ".join(known))
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    first = next(each for each in format.stored if each.role == "w")
    w = tensors[first.name]
    if w.dim() < len(first.dims):
        raise ShapeError(first.name, got=tuple(w.shape), need=f"{len(first.dims)} dimensions")
    lead = tuple(w.shape[: w.dim() - len(first.dims)])
    sizes = {"N": 1, "K": 1}
    for dim, size in zip(first.dims, w.shape[len(lead) :], strict=True):
        if dim.axis:
            sizes[dim.axis] *= size * dim.step
    rows, depth = sizes["N"], sizes["K"]
    found = {}
    for name, tensor in tensors.items():
        shape = (*lead, *known[name].shape(rows, depth))
        known[name].check(name, tuple(tensor.shape), tensor.dtype, shape)
        found[name] = tensor.reshape(shape)
    return (rows, depth), found


# --------------------------------------------------------------------- what is made of it


def _read_plain(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    return Matrix(tensors["weight"].to(dtype))


def _read_scaled(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    by_role = {each.role: tensors.get(each.name) for each in format.stored}
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
    if scheme.granularity == "channel":  # stored plus 128: the sign bit the other way round
        w = (packed.contiguous().view(torch.uint8) ^ 0x80).view(torch.int8)
        flat = channel_scale(scale.reshape(-1, w.shape[-2]))
        return Matrix(w, flat.reshape(*w.shape[:-1]))
    made = from_compressed_tensors(
        packed,
        scale,
        tensors.get("weight_zero_point"),
        group=scheme.group[0],
        bits=4 if scheme.packed else 8,
    )
    return _of_groups(format, made, dtype, tensors.get("weight_g_idx"))


def _nvfp4(format: Format, tensors: Tensors) -> Matrix:
    """Read nvfp4: compressed-tensors' scale of a matrix divides, modelopt's multiplies.

    So do those of its inputs, where the scheme has them.
    """
    by_role = {each.role: tensors.get(each.name) for each in format.stored}
    w, scale, whole = by_role["w"], by_role["scale"], by_role["global_scale"]
    assert w is not None
    assert scale is not None
    assert whole is not None
    values = scale.float()
    _check_scale(values, values.isnan(), "numbers")
    if format.scheme.scales_by_expert:  # instructions of 4-bit operands take no sign
        _check_scale(values, values < 0, "numbers from 0 on")
    factor = 1 / whole if format.method == "compressed-tensors" else whole
    usable = whole.isfinite() & factor.isfinite() & (factor >= 0)
    _check_scale(whole, ~usable, "a scale of a matrix from 0 on")
    a_scale = by_role.get("a_scale")
    if a_scale is not None:
        a_scale = usable_inputs(a_scale, "activation scales").reshape(w.shape[:-2])
        a_scale = 1 / a_scale if format.method == "compressed-tensors" else a_scale
    return Matrix(w, scale, None, a_scale, factor.reshape(*w.shape[:-2], -1))


def _read_modelopt(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    if format.scheme.matrix_scales:
        return _nvfp4(format, tensors)
    return _read_scaled(format, tensors, dtype)


def _read_awq(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    group = format.scheme.group[0]
    made = from_awq(tensors["qweight"], tensors["scales"], tensors.get("qzeros"), group=group)
    return _of_groups(format, made, dtype)


def _read_gptq(format: Format, tensors: Tensors, dtype: torch.dtype) -> Matrix:
    made = from_gptq(
        tensors["qweight"],
        tensors["scales"],
        tensors.get("qzeros"),
        group=format.scheme.group[0],
        minus_one=format.minus_one,
        bits=4 if format.scheme.packed else 8,
    )
    return _of_groups(format, made, dtype, tensors.get("g_idx"))


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


def _of_groups(
    format: Format, made: GroupWeights, dtype: torch.dtype, g_idx: torch.Tensor | None = None
) -> Matrix:
    order = None
    if format.scheme.act_order:
        assert g_idx is not None
        order = column_order(g_idx, made.depth, format.scheme.group[0], "g_idx")
        made = sort_columns(made, order)
    if not format.scheme.zero_points:
        made = symmetric(made)
    _check_scale(made.scale, ~made.scale.isfinite(), "finite numbers")
    kept = made.scale.dtype.itemsize == dtype.itemsize == 2
    scale = made.scale if kept else made.scale.float()
    return Matrix(made.w, scale, made.zero_point, order=order)


def _one_scale(parts: Sequence[Matrix]) -> Matrix:
    """Merge projections with a scale each: the largest stays, the others are rounded again."""
    if len({each.w.shape for each in parts}) > 1:
        raise ShapeError("projections", got=[tuple(e.w.shape) for e in parts], need="equal shapes")
    w = torch.cat([each.w for each in parts], -2)
    lead = tuple(w.shape[:-2])
    scales = torch.stack([each.scale.reshape(-1) for each in parts if each.scale is not None], 1)
    merged, scale = one_scale(w.reshape(-1, *w.shape[-2:]), scales)
    w = merged.reshape(*lead, *merged.shape[1:])
    return Matrix(w, scale.reshape(lead), None, _largest(parts))


def same_order(parts: Sequence[Matrix]) -> torch.Tensor | None:
    """Return the order of columns, which all projections of an input must have."""
    first = parts[0].order
    for each in parts[1:]:
        if first is not None and each.order is not None and not torch.equal(first, each.order):
            got = "orders of columns of gate and up that differ"
            raise WeightsError("g_idx", got=got, need="one: they have the same inputs")
    return first


def sort_rows(
    weights: dict[str, torch.Tensor], slot: int, order: torch.Tensor, *, interleaved: bool
) -> None:
    """Put the rows of an expert's w1 where w2's sorted columns have theirs, in place.

    weights: by fields of ExpertWeights. order: (I,), which row of gate, and of up, comes to each.
    """
    sides = weights["w1"].shape[1] // len(order)
    own, rows = order.long(), torch.arange(sides, device=order.device)
    if interleaved:
        index = (own[:, None] * sides + rows).flatten()
    else:
        index = (own + rows[:, None] * len(own)).flatten()
    for name in ("w1", "w1_scale", "b1"):
        if name in weights:
            weights[name][slot] = weights[name][slot][index.to(weights[name].device)]
    zero = weights.get("w1_zero_point")
    if zero is not None:
        packed = zero.shape[1] != len(index)
        points = unpack_pairs(zero[slot], 0) if packed else zero[slot]
        points = points[index.to(zero.device)]
        zero[slot] = pack_pairs(points, 0) if packed else points


def _largest(parts: Sequence[Matrix]) -> torch.Tensor | None:
    given = [each.a_scale for each in parts if each.a_scale is not None]
    return torch.stack(given).amax(0) if given else None


def _joined(parts: Sequence[torch.Tensor | None], dim: int) -> torch.Tensor | None:
    given = [part for part in parts if part is not None]
    return None if not given else given[0] if len(given) == 1 else torch.cat(given, dim)


_READ: dict[str, Callable[[Format, Tensors, torch.dtype], Matrix]] = {
    "none": _read_plain,
    "fp8": _read_scaled,
    "modelopt": _read_modelopt,
    "compressed-tensors": _read_compressed,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "mxfp4": _read_mxfp4,
}
