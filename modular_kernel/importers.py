"""4-bit checkpoints of other packers -> tensors of the scheme int4_w4a16_group.

w1 = from_gptq(qweight, scales, qzeros, group=128)      # any leading dimensions: (e, ...) too
w2 = shard_columns(from_gptq(...), rank, world)         # groups halved where they must be
w1 = regroup(w1, w2.group)                              # a layer has one group size
Problem(..., quant=w2.quant), ExpertWeights(w1.w, w2.w, w1_scale=w1.scale, ...)
"""

from dataclasses import dataclass

import torch

from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError, WeightsError
from modular_kernel.types import dtype_name

_NIBBLES = 8  # of an int32
# AWQ's nibble i holds column _AWQ_ORDER[i] of eight: column n is found in nibble [0,4,1,5,2,6,3,7].
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_LEAST_GROUP = 32
_MIDDLE = 8


@dataclass(frozen=True)
class Int4Weights:
    """One matrix, or a stack of them, as int4_w4a16_group stores it.

    w: (..., N, K / 2) uint8, the even k in the low nibble. scale: (..., N, ceil(K / group)).
    zero_point: (..., N / 2, ceil(K / group)) uint8, the even n in the low nibble; None means 8.
    """

    w: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    group: int

    @property
    def depth(self) -> int:
        """K."""
        return self.w.shape[-1] * 2

    @property
    def quant(self) -> str:
        """The scheme by name, as `Problem.quant` takes it."""
        zeros = "" if self.zero_point is None else ",zero_points=true"
        return f"int4_w4a16_group:group={self.group}{zeros}"


def from_gptq(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    qzeros: torch.Tensor | None,
    *,
    group: int,
    g_idx: torch.Tensor | None = None,
    symmetric: bool = False,
    minus_one: bool = True,
) -> Int4Weights:
    """GPTQ: qweight (..., K / 8, N) int32, scales (..., G, N), qzeros (..., G, N / 8) int32.

    group: -1 for one group of all K. g_idx: refused unless it is k // group (no act-order).
    symmetric: every zero point must be 8, and none is kept. minus_one: qzeros hold the zero point
    less one, as the format's first version does; the second stores it as it is.
    """
    _check(qweight, "qweight")
    k_NK = _unpack(qweight, -2, range(_NIBBLES)).mT
    depth = k_NK.shape[-1]
    group = _checked_group(group, depth)
    if g_idx is not None:
        expected = torch.arange(depth, device=g_idx.device) // group
        if tuple(g_idx.shape[-1:]) != (depth,) or bool((g_idx != expected).any()):
            got = "columns out of order (act-order)"
            raise WeightsError("g_idx", got=got, need=f"k // {group} for each of {depth} columns")
    zeros = None
    if qzeros is not None:
        _check(qzeros, "qzeros")
        zeros = _unpack(qzeros, -1, range(_NIBBLES))
        if minus_one and bool((zeros == 15).any()):
            # 16 fits no nibble, and packers disagree on what a zero point of 0 wraps to.
            raise WeightsError("qzeros", got="a stored 15", need="at most 14: the zero point - 1")
        zeros = zeros + int(minus_one)
    return _packed(k_NK, scales, zeros, group, symmetric=symmetric)


def from_awq(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    qzeros: torch.Tensor | None,
    *,
    group: int,
    symmetric: bool = False,
) -> Int4Weights:
    """AWQ: qweight (..., K, N / 8) int32, scales (..., G, N), qzeros (..., G, N / 8) int32.

    Eight columns share an int32 in the order 0, 2, 4, 6, 1, 3, 5, 7. group, symmetric: as GPTQ's.
    """
    _check(qweight, "qweight")
    k_NK = _unpack(qweight, -1, _AWQ_ORDER).mT
    zeros = None
    if qzeros is not None:
        _check(qzeros, "qzeros")
        zeros = _unpack(qzeros, -1, _AWQ_ORDER)
    group = _checked_group(group, k_NK.shape[-1])
    return _packed(k_NK, scales, zeros, group, symmetric=symmetric)


def regroup(weights: Int4Weights, group: int) -> Int4Weights:
    """The same values in groups of `group` columns, scales and zero points repeated.

    group must divide the weights' own, or be anything even where one group spans all columns.
    """
    depth, groups = weights.depth, weights.scale.shape[-1]
    if group < 2 or group % 2 or (groups > 1 and weights.group % group):
        raise ConfigurationError("group", got=group, need=f"an even divisor of {weights.group}")
    index = torch.arange(-(-depth // group), device=weights.w.device) * group // weights.group
    zeros = weights.zero_point
    return Int4Weights(
        weights.w,
        weights.scale[..., index].contiguous(),
        None if zeros is None else zeros[..., index].contiguous(),
        group,
    )


def fit_group(group: int, columns: int) -> int:
    """`group`, halved until it divides `columns`; ConfigurationError below 32."""
    fitting = group
    while columns % fitting:
        fitting //= 2
        if fitting < _LEAST_GROUP:
            need = f"a group that halves to a divisor of {columns}, not below {_LEAST_GROUP}"
            raise ConfigurationError("group", got=group, need=need)
    return fitting


def shard_columns(weights: Int4Weights, rank: int, world: int) -> Int4Weights:
    """Rank's share of K (w2's): K / world columns, in groups halved until they divide it."""
    share = _share("columns", weights.depth, rank, world)
    if weights.scale.shape[-1] > 1:
        weights = regroup(weights, fit_group(weights.group, share))
    else:
        weights = regroup(weights, share)  # one group a row: one group of each share too
    groups = share // weights.group
    scales = slice(rank * groups, (rank + 1) * groups)
    zeros = weights.zero_point
    return Int4Weights(
        weights.w[..., rank * share // 2 : (rank + 1) * share // 2].contiguous(),
        weights.scale[..., scales].contiguous(),
        None if zeros is None else zeros[..., scales].contiguous(),
        weights.group,
    )


def shard_rows(weights: Int4Weights, rank: int, world: int) -> Int4Weights:
    """Rank's share of N (of w1's gate rows, and alike of its up rows): N / world rows."""
    share = _share("rows", weights.w.shape[-2], rank, world)
    rows = slice(rank * share, (rank + 1) * share)
    pairs = slice(rank * share // 2, (rank + 1) * share // 2)
    zeros = weights.zero_point
    return Int4Weights(
        weights.w[..., rows, :].contiguous(),
        weights.scale[..., rows, :].contiguous(),
        None if zeros is None else zeros[..., pairs, :].contiguous(),
        weights.group,
    )


def _share(what: str, size: int, rank: int, world: int) -> int:
    if not 0 <= rank < world:
        raise ConfigurationError("rank", got=rank, need=f"0 to {world - 1}")
    if size % (2 * world):
        raise ConfigurationError(what, got=size, need=f"an even number for each of {world} ranks")
    return size // world


def _checked_group(group: int, depth: int) -> int:
    if group == -1:
        return depth
    if group < 2 or group % 2:
        raise ConfigurationError("group", got=group, need="-1 or an even number of columns")
    return group


def _check(packed: torch.Tensor, what: str) -> None:
    if packed.dtype is not torch.int32:
        raise DtypeError(what, got=dtype_name(packed.dtype), need="int32 of eight nibbles")
    if packed.dim() < 2:
        raise ShapeError(what, got=tuple(packed.shape), need="two dimensions or more")


def _unpack(packed: torch.Tensor, dim: int, order: range | tuple[int, ...]) -> torch.Tensor:
    """int32 -> int32 values 0 to 15, eight along `dim`; order[i]: which of eight nibble i is."""
    nibbles: list[torch.Tensor] = [packed] * _NIBBLES
    for nibble, place in enumerate(order):
        nibbles[place] = (packed >> (4 * nibble)) & 15
    dim = packed.dim() + dim
    return torch.stack(nibbles, dim + 1).flatten(dim, dim + 1)


def _packed(
    values_NK: torch.Tensor,
    scales_GN: torch.Tensor,
    zeros_GN: torch.Tensor | None,
    group: int,
    *,
    symmetric: bool,
) -> Int4Weights:
    """Values and zero points 0 to 15 -> bytes; (..., G, N) -> (..., N, G)."""
    *lead, rows, depth = values_NK.shape
    need = (*lead, -(-depth // group), rows)
    for what, tensor in (("scales", scales_GN), ("qzeros", zeros_GN)):
        if tensor is not None and tuple(tensor.shape) != need:
            raise ShapeError(what, got=tuple(tensor.shape), need=f"(..., G, N) = {need} unpacked")
    if not scales_GN.dtype.is_floating_point:
        raise DtypeError("scales", got=dtype_name(scales_GN.dtype), need="a floating dtype")
    if symmetric and zeros_GN is not None:
        if bool((zeros_GN != _MIDDLE).any()):
            got = f"a zero point of {int(zeros_GN[zeros_GN != _MIDDLE][0])}"
            raise WeightsError("qzeros", got=got, need=f"{_MIDDLE}, as symmetric=True says")
        zeros_GN = None
    w = values_NK[..., 0::2] | (values_NK[..., 1::2] << 4)
    zeros = None
    if zeros_GN is not None:
        zeros = (zeros_GN[..., 0::2] | (zeros_GN[..., 1::2] << 4)).mT
        zeros = zeros.contiguous().to(torch.uint8)
    return Int4Weights(w.contiguous().to(torch.uint8), scales_GN.mT.contiguous(), zeros, group)
