"""Converts GPTQ and AWQ weights to int4_w4a16_group and int8_w8a16_group.

    w1 = from_gptq(qweight, scales, qzeros, group=128)  # any leading dimensions, such as (e, ...)
    w2 = shard_columns(from_gptq(...), rank, world)     # may need smaller groups than the file has
    w1 = regroup(w1, w2.group)                          # w1 and w2 must have the same group size
    Problem(..., quant=w2.quant), ExpertWeights(w1.w, w2.w, w1_scale=w1.scale, ...)

A weight is scale * (code - zero point), with one scale and zero point per row and group of columns.
Both quantizers pack codes into int32 words and store matrices as (K, N). GPTQ packs along K. AWQ
packs along N, and interleaves the columns of a word.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated

import torch

from modular_kernel.checkpoints import packed_words
from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError, WeightsError
from modular_kernel.spec.problem import dtype_name
from modular_kernel.utils.argument_checks import MAX_INT32, Between, Count, OneOf, expect
from modular_kernel.utils.tensor_checks import check_tensor, check_tensors

_WORD_BITS = 32
_MIN_GROUP = 32
_SCHEME_NAMES = {4: "int4_w4a16_group", 8: "int8_w8a16_group"}


@dataclass(frozen=True)
class GroupWeights:
    """One matrix, or a stack of them, in the layout of the group schemes.

    w: uint8, (..., N, K / 2) with even k in the low nibble, or (..., N, K) for 8 bits.
    scale: (..., N, ceil(K / group)) floating.
    zero_point: uint8, (..., N / 2, ceil(K / group)) with even n in the low nibble, or (..., N,
        ceil(K / group)) for 8 bits. None means 8 for 4 bits, and 128 for 8 bits.
    group: columns per scale.
    bits: 4 or 8.
    """

    w: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    group: int
    bits: int = 4

    @property
    def per_byte(self) -> int:
        """Values per byte."""
        return 8 // self.bits

    @property
    def depth(self) -> int:
        """Number of columns, K."""
        return self.w.shape[-1] * self.per_byte

    @property
    def quant(self) -> str:
        """The scheme's name, as for `Problem.quant`."""
        zeros = "" if self.zero_point is None else ",zero_points=true"
        return f"{_SCHEME_NAMES[self.bits]}:group={self.group}{zeros}"


def _check_group_weights(weights: object) -> None:
    expect("weights", weights, GroupWeights)
    assert isinstance(weights, GroupWeights)
    tensors = {name: getattr(weights, name) for name in ("w", "scale", "zero_point")}
    check_tensors(tensors, optional=("zero_point",))
    expect("weights: bits", weights.bits, Annotated[int, OneOf((4, 8))])
    expect("weights: group", weights.group, Count)
    w, scale, zeros = weights.w, weights.scale, weights.zero_point
    if w.dim() < 2 or w.dtype is not torch.uint8:
        got = f"{tuple(w.shape)} {dtype_name(w.dtype)}"
        raise ShapeError("weights: w", got=got, need="(..., N, K) uint8, packed")
    *batch, rows = w.shape[:-1]
    groups = -(-weights.depth // weights.group)
    if tuple(scale.shape) != (*batch, rows, groups):
        raise ShapeError("weights: scale", got=tuple(scale.shape), need=(*batch, rows, groups))
    if not scale.is_floating_point():
        raise DtypeError("weights: scale", got=dtype_name(scale.dtype), need="a floating dtype")
    if zeros is None:
        return
    if tuple(zeros.shape) != (*batch, rows // weights.per_byte, groups):
        need = (*batch, rows // weights.per_byte, groups)
        raise ShapeError("weights: zero_point", got=tuple(zeros.shape), need=need)
    if zeros.dtype is not torch.uint8:
        raise DtypeError("weights: zero_point", got=dtype_name(zeros.dtype), need="uint8")


def from_gptq(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    qzeros: torch.Tensor | None,
    *,
    group: int,
    g_idx: torch.Tensor | None = None,
    minus_one: bool = True,
    bits: int = 4,
) -> GroupWeights:
    """Convert GPTQ weights.

    qweight: (..., K / p, N) int32 with p = 32 / bits values per word.
    scales: (..., G, N) floating.
    qzeros: (..., G, N / p) int32, the zero points.
    group: columns per group, or -1 for one group of all K.
    g_idx: (..., K) integers, the group of each column. Must be k // group, because columns that are
        ordered by activation (act-order) are not supported.
    minus_one: whether qzeros are zero points minus one, as in the first version of GPTQ's format.
        The second version stores zero points unchanged.
    bits: 4 or 8.

    Raises WeightsError for act-order, or if a zero point minus one overflows when 1 is added.
    Raises ConfigurationError, ShapeError or DtypeError for arguments that do not match.
    """
    expect("bits", bits, Annotated[int, OneOf((4, 8))])
    expect("minus_one", minus_one, bool)
    check_packed(qweight, "qweight")
    depth = qweight.shape[-2] * (_WORD_BITS // bits)
    group = resolve_group(group, depth)
    check_group_order(g_idx, depth, group, "g_idx")
    return convert_gptq(qweight, scales, qzeros, group, minus_one=minus_one, bits=bits)


def convert_gptq(  # noqa: PLR0913 (as from_gptq)
    qweight: torch.Tensor,
    scales: torch.Tensor,
    qzeros: torch.Tensor | None,
    group: int,
    *,
    minus_one: bool,
    bits: int,
    order: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> GroupWeights:
    """Convert GPTQ weights like `from_gptq`, without checks of `qweight` and `group`.

    order: (..., K), the column order from `argsort_by_group`. None keeps the order.
    out: contiguous uint8 (..., N, K bits / 8), the tensor to write w to.
    """
    if order is not None:
        w = packed_words.permute_rows(qweight, order, bits, out)
    else:
        # The bytes of a word are already in the order of K, so words can be transposed whole.
        words = None if out is None else out.view(torch.int32)
        words = packed_words.transpose_words(qweight, words)
        w = words.view(torch.uint8) if out is None else out
    zeros = None
    if qzeros is not None:
        check_packed(qzeros, "qzeros")
        zeros = qzeros.contiguous().view(torch.uint8)
        if minus_one:
            zeros = _add_one(zeros, bits)
    return _make_group_weights(w, scales, zeros, group, bits)


def _add_one(zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Add 1 to each packed zero point. Raises WeightsError if one would overflow."""
    max_code = (1 << bits) - 1
    for mask in (max_code << shift for shift in range(0, 8, bits)):
        if bool((zeros & mask == mask).any()):
            # Quantizers disagree about the meaning of a zero point whose sum overflows.
            need = f"at most {max_code - 1} (zero point minus 1)"
            raise WeightsError("qzeros", got=f"a stored {max_code}", need=need)
    return zeros + (0x11 if bits == 4 else 1)


def from_awq(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    qzeros: torch.Tensor | None,
    *,
    group: int,
) -> GroupWeights:
    """Convert 4-bit AWQ weights.

    qweight: (..., K, N / 8) int32, eight columns per word in the order 0, 2, 4, 6, 1, 3, 5, 7.
    scales: (..., G, N) floating.
    qzeros: (..., G, N / 8) int32, the zero points, packed like qweight.
    group: columns per group, or -1 for one group of all K.
    """
    check_packed(qweight, "qweight")
    depth = qweight.shape[-2]
    group = resolve_group(group, depth)
    if depth % 2:
        raise ShapeError("qweight", got=tuple(qweight.shape), need="(..., K, N / 8), K even")
    return convert_awq(qweight, scales, qzeros, group)


def convert_awq(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    qzeros: torch.Tensor | None,
    group: int,
    out: torch.Tensor | None = None,
) -> GroupWeights:
    """Convert AWQ weights like `from_awq`, without checks of `qweight` and `group`.

    out: contiguous uint8 (..., N, K / 2), the tensor to write w to.
    """
    w = packed_words.pack_columns(qweight, out)
    zeros = None
    if qzeros is not None:
        check_packed(qzeros, "qzeros")
        zeros = packed_words.interleave_nibbles(qzeros).view(torch.uint8)
    return _make_group_weights(w, scales, zeros, group, 4)


def drop_zero_points(weights: GroupWeights) -> GroupWeights:
    """Return symmetric weights without their zero points.

    Raises WeightsError unless all zero points are 8 (4 bits) or 128 (8 bits).
    """
    _check_group_weights(weights)
    return drop_zero_points_unchecked(weights)


def drop_zero_points_unchecked(weights: GroupWeights) -> GroupWeights:
    """Drop zero points like `drop_zero_points`, without checks of shapes and dtypes."""
    if weights.zero_point is None:
        return weights
    zeros, symmetric_point = weights.zero_point, 1 << (weights.bits - 1)
    symmetric_byte = symmetric_point * (0x11 if weights.bits == 4 else 1)  # 0x11: both nibbles
    is_asymmetric = zeros != symmetric_byte
    if bool(is_asymmetric.any()):
        codes = zeros[is_asymmetric][:1]
        zero_points = torch.cat([codes & 15, codes >> 4]) if weights.bits == 4 else codes
        got = f"a zero point of {int(zero_points[zero_points != symmetric_point][0])}"
        raise WeightsError(
            "zero_point", got=got, need=f"{symmetric_point}, the zero point of symmetric weights"
        )
    return replace(weights, zero_point=None)


def regroup(weights: GroupWeights, group: int) -> GroupWeights:
    """Return the same weights in smaller groups, with repeated scales and zero points.

    group: columns per group, an even divisor of the current size. If one group spans all columns,
        any even number is allowed.
    """
    _check_group_weights(weights)
    expect("group", group, int)
    depth, groups = weights.depth, weights.scale.shape[-1]
    if group < 2 or group % 2 or (groups > 1 and weights.group % group):
        raise ConfigurationError("group", got=group, need=f"an even divisor of {weights.group}")
    index = torch.arange(-(-depth // group), device=weights.w.device) * group // weights.group
    zeros = weights.zero_point
    return replace(
        weights,
        scale=weights.scale[..., index].contiguous(),
        zero_point=None if zeros is None else zeros[..., index].contiguous(),
        group=group,
    )


def fit_group(group: int, columns: int) -> int:
    """Halve `group` until it divides `columns`. Raises ConfigurationError if it falls below 32."""
    expect("group", group, Count)
    expect("columns", columns, Count)
    size = group
    while columns % size:
        size //= 2
        if size < _MIN_GROUP:
            need = f"a group that can be halved to a divisor of {columns}, at least {_MIN_GROUP}"
            raise ConfigurationError("group", got=group, need=need)
    return size


def shard_columns(weights: GroupWeights, rank: int, world: int) -> GroupWeights:
    """Return the columns of w2 for one tensor-parallel rank.

    The shard has K / world columns. Groups are halved until they divide this number.
    """
    _check_group_weights(weights)
    shard_size = _compute_shard_size("columns", weights.depth, rank, world)
    has_one_group = weights.scale.shape[-1] == 1
    group = shard_size if has_one_group else fit_group(weights.group, shard_size)
    weights = regroup(weights, group)
    num_groups = shard_size // weights.group
    groups = slice(rank * num_groups, (rank + 1) * num_groups)
    columns = slice(
        rank * shard_size // weights.per_byte, (rank + 1) * shard_size // weights.per_byte
    )
    zeros = weights.zero_point
    return replace(
        weights,
        w=weights.w[..., columns].contiguous(),
        scale=weights.scale[..., groups].contiguous(),
        zero_point=None if zeros is None else zeros[..., groups].contiguous(),
    )


def shard_rows(weights: GroupWeights, rank: int, world: int) -> GroupWeights:
    """Return the N / world rows of a gate or up projection for one tensor-parallel rank."""
    _check_group_weights(weights)
    shard_size = _compute_shard_size("rows", weights.w.shape[-2], rank, world)
    rows = slice(rank * shard_size, (rank + 1) * shard_size)
    packed_rows = slice(
        rank * shard_size // weights.per_byte, (rank + 1) * shard_size // weights.per_byte
    )
    zeros = weights.zero_point
    return replace(
        weights,
        w=weights.w[..., rows, :].contiguous(),
        scale=weights.scale[..., rows, :].contiguous(),
        zero_point=None if zeros is None else zeros[..., packed_rows, :].contiguous(),
    )


def _compute_shard_size(what: str, size: int, rank: int, world: int) -> int:
    expect("rank", rank, int)
    expect("world", world, Count)
    if not 0 <= rank < world:
        raise ConfigurationError("rank", got=rank, need=f"0 to {world - 1}")
    if size % (2 * world):
        raise ConfigurationError(what, got=size, need=f"an even number for each of {world} ranks")
    return size // world


def resolve_group(group: int, depth: int) -> int:
    """Return the columns per group. A `group` of -1 means one group of all `depth` columns."""
    expect("group", group, Annotated[int, Between(-1, MAX_INT32)])
    if group == -1:
        return depth
    if group < 2 or group % 2:
        raise ConfigurationError("group", got=group, need="-1 or an even number of columns")
    return group


def check_packed(packed: torch.Tensor, what: str) -> None:
    """Raise DtypeError or ShapeError unless `packed` is nonempty int32 with two or more dims."""
    check_tensor(what, packed)
    if packed.dtype is not torch.int32:
        raise DtypeError(what, got=dtype_name(packed.dtype), need="int32 of packed values")
    if packed.dim() < 2 or not packed.numel():
        need = "two dimensions or more, none of size 0"
        raise ShapeError(what, got=tuple(packed.shape), need=need)


def argsort_by_group(g_idx: torch.Tensor, depth: int, group: int, what: str) -> torch.Tensor:
    """Return the stable permutation that sorts columns by group, (..., depth) int32.

    With act-order (GPTQ's desc_act), a group consists of columns of similar activations, which are
    not adjacent. Kernels need adjacent groups, and permute their input in the same way.

    g_idx: (..., depth) int32 or int64, the group of each column.
    group: columns per group.
    what: name of g_idx, for messages.

    Raises WeightsError unless each group has `group` columns. The last group may have fewer.
    """
    _check_indices(g_idx, what)
    expected = _make_group_index(0, depth, group).to(g_idx.device)
    order = g_idx.argsort(dim=-1, stable=True)
    has_all_columns = tuple(g_idx.shape[-1:]) == (depth,)
    if not has_all_columns or bool((g_idx.gather(-1, order) != expected).any()):
        need = f"{group} columns in each group ({depth} in total), fewer only in the last group"
        raise WeightsError(what, got="groups of different sizes", need=need)
    return order.int()


def sort_columns(weights: GroupWeights, order: torch.Tensor) -> GroupWeights:
    """Sort the columns of w by group. Scales and zero points are already stored by group.

    order: (..., K), the result of `argsort_by_group`.
    """
    return replace(weights, w=packed_words.permute_columns(weights.w, order, weights.bits))


def check_group_order(g_idx: torch.Tensor | None, depth: int, group: int, what: str) -> None:
    """Raise WeightsError unless columns are in the order of groups (no act-order).

    g_idx: (..., depth) integers, the group of each column. None means that columns are in order.

    Raises DtypeError if g_idx does not have integers.
    """
    if g_idx is None:
        return
    _check_indices(g_idx, what)
    check_group_index(g_idx, (0, depth), group, what)


def _check_indices(g_idx: torch.Tensor, what: str) -> None:
    check_tensor(what, g_idx)
    if g_idx.dtype not in (torch.int32, torch.int64):
        raise DtypeError(what, got=dtype_name(g_idx.dtype), need="int32 or int64")


def check_group_index(g_idx: torch.Tensor, columns: tuple[int, int], group: int, what: str) -> None:
    """Raise WeightsError unless g_idx is k // group for columns [a, b)."""
    expected = _make_group_index(*columns, group).to(g_idx.device)
    if g_idx.shape[-1:] != expected.shape or bool((g_idx != expected).any()):
        got = "columns out of order (act-order)"
        need = f"k // {group} for each of {len(expected)} columns"
        raise WeightsError(what, got=got, need=need)


@lru_cache(maxsize=16)
def _make_group_index(start: int, stop: int, group: int) -> torch.Tensor:
    """Return k // group for k in [start, stop), int32. All experts share the cached result."""
    return torch.arange(start, stop, dtype=torch.int32, device="cpu") // group


def unpack_words(packed: torch.Tensor, dim: int, order: range | tuple[int, ...]) -> torch.Tensor:
    """Unpack int32 words along a dimension to uint8 values.

    dim: a negative number.
    order: order[i] is the position, among the values of a word, of the value in bits [bits * i,
        bits * (i + 1)), where bits = 32 / len(order).
    """
    bits = _WORD_BITS // len(order)
    values: list[torch.Tensor] = [packed] * len(order)
    for index, position in enumerate(order):
        values[position] = (packed >> (bits * index) & ((1 << bits) - 1)).to(torch.uint8)
    dim = packed.dim() + dim
    return torch.stack(values, dim + 1).flatten(dim, dim + 1)


def _make_group_weights(
    w: torch.Tensor,
    scales_GN: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    bits: int,
) -> GroupWeights:
    """Check the shapes, and transpose scales and zero points.

    w: (..., N, K bits / 8).
    scales_GN: (..., G, N).
    zeros: (..., G, N bits / 8) uint8.
    """
    per_byte = 8 // bits
    *batch, rows, row_bytes = w.shape
    groups = -(-row_bytes * per_byte // group)
    check_tensor("scales", scales_GN)
    shapes = {"scales": tuple(scales_GN.shape)}
    if zeros is not None:
        shapes["qzeros"] = (*zeros.shape[:-1], zeros.shape[-1] * per_byte)
    need = (*batch, groups, rows)
    for what, shape in shapes.items():
        if shape != need:
            raise ShapeError(what, got=shape, need=f"(..., G, N) = {need} unpacked")
    if not scales_GN.dtype.is_floating_point:
        raise DtypeError("scales", got=dtype_name(scales_GN.dtype), need="a floating dtype")
    zeros = None if zeros is None else zeros.mT.contiguous()
    return GroupWeights(w, scales_GN.mT.contiguous(), zeros, group, bits)


def pack_values(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack 4-bit values in pairs along the last dimension, the even one in the low nibble.

    8-bit values are not packed. Returns uint8.
    """
    if bits == 4:
        values = values[..., 0::2] | (values[..., 1::2] << 4)
    return values.to(torch.uint8)
