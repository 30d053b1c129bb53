"""Conversion of GPTQ and AWQ weights to int4_w4a16_group and int8_w8a16_group.

w1 = from_gptq(qweight, scales, qzeros, group=128)  # any leading dimensions, such as (e, ...)
w2 = shard_columns(from_gptq(...), rank, world)     # groups are halved until they divide it
w1 = regroup(w1, w2.group)                          # a layer has one group size
Problem(..., quant=w2.quant), ExpertWeights(w1.w, w2.w, w1_scale=w1.scale, ...)
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

_WORD_BITS = 32  # bits of a packed integer
# Nibble i of a word of AWQ holds column _AWQ_ORDER[i] of eight; column n is in nibble
# [0, 4, 1, 5, 2, 6, 3, 7][n].
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_MIN_GROUP = 32
_NAMES = {4: "int4_w4a16_group", 8: "int8_w8a16_group"}


@dataclass(frozen=True)
class GroupWeights:
    """One matrix, or a stack of them, in the layout of the group schemes.

    w: uint8, (..., N, K / 2) with even k in the low nibble, or (..., N, K) for 8 bits. scale: (...,
    N, ceil(K / group)). zero_point: uint8, (..., N / 2, ceil(K / group)) with even n in the low
    nibble, or (..., N, ceil(K / group)) for 8 bits; None means 8, or 128 for 8 bits.
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
        """K."""
        return self.w.shape[-1] * self.per_byte

    @property
    def quant(self) -> str:
        """The scheme's name, as for `Problem.quant`."""
        zeros = "" if self.zero_point is None else ",zero_points=true"
        return f"{_NAMES[self.bits]}:group={self.group}{zeros}"


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
    """Convert GPTQ's qweight (..., K / p, N), scales (..., G, N) and qzeros (..., G, N / p).

    qweight, qzeros: int32. bits: 4 or 8; an int32 holds p = 8 or 4 values. group: columns per
    group, or -1 for one group of all K. g_idx: must be k // group, that is, without act-order.
    minus_one: qzeros hold the zero point minus one, as in the first version of the format; the
    second version stores it unchanged.

    Raises WeightsError for act-order, or for a stored zero point that overflows;
    ConfigurationError, ShapeError or DtypeError for arguments that do not match.
    """
    expect("bits", bits, Annotated[int, OneOf((4, 8))])
    expect("minus_one", minus_one, bool)
    check_packed(qweight, "qweight")
    depth = qweight.shape[-2] * (_WORD_BITS // bits)
    group = checked_group(group, depth)
    check_order(g_idx, depth, group, "g_idx")
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
    """Do what `from_gptq` does, for a checked qweight and group.

    order: (..., K), as `column_order` returns it; the columns are sorted. out: uint8 (..., N, bytes
    of K), contiguous; unless there is an order, w is written there.
    """
    if order is not None:
        w = packed_words.permute_rows(qweight, order, bits)
    else:
        # A word of a column has its values in the order of the bytes of a row.
        words = None if out is None else out.view(torch.int32)
        words = packed_words.transpose_words(qweight, words)
        w = words.view(torch.uint8) if out is None else out
    zeros = None
    if qzeros is not None:
        check_packed(qzeros, "qzeros")
        zeros = qzeros.contiguous().view(torch.uint8)
        if minus_one:
            zeros = _add_one(zeros, bits)
    return _group_weights(w, scales, zeros, group, bits)


def _add_one(zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Add 1 to each packed zero point; raise WeightsError if one would overflow."""
    max_code = (1 << bits) - 1
    for mask in (max_code << shift for shift in range(0, 8, bits)):
        if bool((zeros & mask == mask).any()):
            # top + 1 overflows, and packers disagree about the wrapped value.
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
    """Convert 4-bit AWQ's qweight (..., K, N / 8), scales (..., G, N) and qzeros (..., G, N / 8).

    qweight, qzeros: int32 of eight columns in the order 0, 2, 4, 6, 1, 3, 5, 7. group: as for GPTQ.
    """
    check_packed(qweight, "qweight")
    depth = qweight.shape[-2]
    group = checked_group(group, depth)
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
    """Do what `from_awq` does, for a checked qweight and group.

    out: uint8 (..., N, K / 2), contiguous: where to write w.
    """
    w = packed_words.pack_columns(qweight, _AWQ_ORDER, out)
    zeros = None
    if qzeros is not None:
        check_packed(qzeros, "qzeros")
        zeros = packed_words.interleave_nibbles(qzeros).view(torch.uint8)
    return _group_weights(w, scales, zeros, group, 4)


def symmetric(weights: GroupWeights) -> GroupWeights:
    """Return the weights without zero points; raise WeightsError unless all are 8, or 128."""
    _check_group_weights(weights)
    return without_zero_points(weights)


def without_zero_points(weights: GroupWeights) -> GroupWeights:
    """Return what `symmetric` does, for weights that the importers made."""
    if weights.zero_point is None:
        return weights
    zeros, middle = weights.zero_point, 1 << (weights.bits - 1)
    bad = zeros != (middle if weights.bits == 8 else middle * 0x11)  # both nibbles of a byte
    if bool(bad.any()):
        codes = zeros[bad][:1]
        points = torch.cat([codes & 15, codes >> 4]) if weights.bits == 4 else codes
        got = f"a zero point of {int(points[points != middle][0])}"
        raise WeightsError(
            "zero_point", got=got, need=f"{middle}, the zero point of symmetric weights"
        )
    return replace(weights, zero_point=None)


def regroup(weights: GroupWeights, group: int) -> GroupWeights:
    """Return the same values in groups of `group` columns, with scales and zero points repeated.

    group must divide the current group size, or, if one group spans all columns, be even.
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
    """Halve `group` until it divides `columns`; raise ConfigurationError below 32."""
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
    """Return a rank's shard of K (for w2): K / world columns, with groups halved to divide it."""
    _check_group_weights(weights)
    shard_size = _shard_size("columns", weights.depth, rank, world)
    if weights.scale.shape[-1] > 1:
        weights = regroup(weights, fit_group(weights.group, shard_size))
    else:
        weights = regroup(
            weights, shard_size
        )  # one group per row stays one group per row of a shard
    groups = shard_size // weights.group
    scales = slice(rank * groups, (rank + 1) * groups)
    columns = slice(
        rank * shard_size // weights.per_byte, (rank + 1) * shard_size // weights.per_byte
    )
    zeros = weights.zero_point
    return replace(
        weights,
        w=weights.w[..., columns].contiguous(),
        scale=weights.scale[..., scales].contiguous(),
        zero_point=None if zeros is None else zeros[..., scales].contiguous(),
    )


def shard_rows(weights: GroupWeights, rank: int, world: int) -> GroupWeights:
    """Return a rank's shard of N: N / world rows of w1's gate, or of its up projection."""
    _check_group_weights(weights)
    shard_size = _shard_size("rows", weights.w.shape[-2], rank, world)
    rows = slice(rank * shard_size, (rank + 1) * shard_size)
    packed = slice(
        rank * shard_size // weights.per_byte, (rank + 1) * shard_size // weights.per_byte
    )
    zeros = weights.zero_point
    return replace(
        weights,
        w=weights.w[..., rows, :].contiguous(),
        scale=weights.scale[..., rows, :].contiguous(),
        zero_point=None if zeros is None else zeros[..., packed, :].contiguous(),
    )


def _shard_size(what: str, size: int, rank: int, world: int) -> int:
    expect("rank", rank, int)
    expect("world", world, Count)
    if not 0 <= rank < world:
        raise ConfigurationError("rank", got=rank, need=f"0 to {world - 1}")
    if size % (2 * world):
        raise ConfigurationError(what, got=size, need=f"an even number for each of {world} ranks")
    return size // world


def checked_group(group: int, depth: int) -> int:
    """Return the columns per group, where -1 means all `depth`."""
    expect("group", group, Annotated[int, Between(-1, MAX_INT32)])
    if group == -1:
        return depth
    if group < 2 or group % 2:
        raise ConfigurationError("group", got=group, need="-1 or an even number of columns")
    return group


def check_packed(packed: torch.Tensor, what: str) -> None:
    """Raise unless `packed` is a nonempty int32 tensor with two or more dimensions."""
    check_tensor(what, packed)
    if packed.dtype is not torch.int32:
        raise DtypeError(what, got=dtype_name(packed.dtype), need="int32 of packed values")
    if packed.dim() < 2 or not packed.numel():
        need = "two dimensions or more, none of size 0"
        raise ShapeError(what, got=tuple(packed.shape), need=need)


def column_order(g_idx: torch.Tensor, depth: int, group: int, what: str) -> torch.Tensor:
    """Return the permutation that sorts columns by group, stable, (..., depth) int32.

    g_idx: (..., depth) int32 or int64, the group of each column. Raises WeightsError unless each
    group has `group` columns (the last may have fewer).
    """
    _check_indices(g_idx, what)
    expected = _group_index(0, depth, group).to(g_idx.device)
    order = g_idx.argsort(dim=-1, stable=True)
    complete = tuple(g_idx.shape[-1:]) == (depth,)
    if not complete or bool((g_idx.gather(-1, order) != expected).any()):
        need = f"{group} of {depth} columns in each, fewer only in the last"
        raise WeightsError(what, got="groups of other sizes", need=need)
    return order.int()


def sort_columns(weights: GroupWeights, order: torch.Tensor) -> GroupWeights:
    """Permute the columns into group order; scales and zero points already have it.

    order: (..., K), as `column_order` returns it.
    """
    return replace(weights, w=packed_words.permute_columns(weights.w, order, weights.bits))


def check_order(g_idx: torch.Tensor | None, depth: int, group: int, what: str) -> None:
    """Raise WeightsError unless the columns are in group order, DtypeError for no integers."""
    if g_idx is None:
        return
    _check_indices(g_idx, what)
    check_group_index(g_idx, (0, depth), group, what)


def _check_indices(g_idx: torch.Tensor, what: str) -> None:
    check_tensor(what, g_idx)
    if g_idx.dtype not in (torch.int32, torch.int64):
        raise DtypeError(what, got=dtype_name(g_idx.dtype), need="int32 or int64")


def check_group_index(g_idx: torch.Tensor, columns: tuple[int, int], group: int, what: str) -> None:
    """Raise WeightsError unless g_idx (..., K) has the groups of columns [a, b) in order."""
    expected = _group_index(*columns, group).to(g_idx.device)
    if g_idx.shape[-1:] != expected.shape or bool((g_idx != expected).any()):
        got = "columns out of order (act-order)"
        need = f"k // {group} for each of {len(expected)} columns"
        raise WeightsError(what, got=got, need=need)


@lru_cache(maxsize=16)
def _group_index(start: int, stop: int, group: int) -> torch.Tensor:
    """Return k // group of columns [start, stop), int32; cached for the matrices of a layer."""
    return torch.arange(start, stop, dtype=torch.int32, device="cpu") // group


def unpack_words(packed: torch.Tensor, dim: int, order: range | tuple[int, ...]) -> torch.Tensor:
    """Unpack int32 to uint8 values of 32 / len(order) bits along `dim`, a negative number.

    order[i]: the index, within the word, of the value in bits [bits * i, bits * (i + 1)).
    """
    bits = _WORD_BITS // len(order)
    values: list[torch.Tensor] = [packed] * len(order)
    for index, position in enumerate(order):
        values[position] = (packed >> (bits * index) & ((1 << bits) - 1)).to(torch.uint8)
    dim = packed.dim() + dim
    return torch.stack(values, dim + 1).flatten(dim, dim + 1)


def _group_weights(
    w: torch.Tensor,
    scales_GN: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    bits: int,
) -> GroupWeights:
    """Check and transpose scales (..., G, N) and packed zero points (..., G, bytes of N).

    w: (..., N, bytes of K).
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
    """Return uint8 values.

    4-bit values are packed in pairs along the last dimension, the even one low.
    """
    if bits == 4:
        values = values[..., 0::2] | (values[..., 1::2] << 4)
    return values.to(torch.uint8)
