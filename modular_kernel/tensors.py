"""What travels between the parts, and THE shape legend.

    T tokens of this rank     H hidden size         I intermediate size per rank
    E experts of the model    e experts here        K top-k
    N rows of w1 (2I gated, I ungated)              R routed rows
    C capacity: rows reserved per expert in the batched format
    P routed pairs, P = T * K; pair p = t * K + k

A name ends in its shape: `x_TH` is (T, H), `w1_eNH` is (e, N, H). -1 is the only id that means
"skip this pair"; adapters translate any other sentinel.
"""

from dataclasses import dataclass, replace

import torch
from torch.compiler import is_compiling

from modular_kernel.errors import DtypeError, LayoutError
from modular_kernel.types import IdSpace


@dataclass(frozen=True)
class Routing:
    """The caller's routing of its own tokens.

    topk_weights_TK: (T, K) float32.  topk_ids_TK: (T, K) int32 or int64, global expert ids, -1 to
    skip. An expert may appear twice in a row: both pairs count. The weight of a pair that is
    skipped here (-1, no expert's id, or an expert that is elsewhere) is not read: it may be NaN.
    """

    topk_weights_TK: torch.Tensor
    topk_ids_TK: torch.Tensor


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of the e experts on this rank, with their scales and biases.

    w1: (e, N, H), gate rows first (alternating if the activation is interleaved).
    w2: (e, H, I). Both may be strided views, such as a transposed checkpoint tensor.
    b1: (e, N), b2: (e, H), float32 or the problem's dtype.
    expert_map: (E,) int32, global id -> row of w1 and w2, or -1 where the expert is elsewhere; any
        other value skips too, and is a WeightsError in checked mode.
    *_scale, *_zero_point: as `modular_kernel.quant.weight_specs` says; None if unquantised.
    w1_order: (e, H) int32, of act-order: the column of x that each column of w1 multiplies; any
        other value reads 0. Each column once: `load_experts` makes it so.
    *_global_scale: of nvfp4, one of each matrix: (e, 2) of gate and up, (e, 1) of any other.
    """

    w1: torch.Tensor
    w2: torch.Tensor
    b1: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    expert_map: torch.Tensor | None = None
    w1_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    w1_zero_point: torch.Tensor | None = None
    w2_zero_point: torch.Tensor | None = None
    a1_scale: torch.Tensor | None = None
    a2_scale: torch.Tensor | None = None
    w1_global_scale: torch.Tensor | None = None
    w2_global_scale: torch.Tensor | None = None
    w1_order: torch.Tensor | None = None


@dataclass(frozen=True)
class DispatchedRouting:
    """Routing of the rows that arrived at this rank; not the caller's routing.

    topk_weights_TK float32, or None where weights were already applied or travel elsewhere.
    topk_ids_TK int32 or int64 in `space`; expert_map turns global ids into local ones.
    num_experts: ids are valid in [0, num_experts).
    invalid_ids: int32 (1,), incremented by the number of ids outside [-1, num_experts).
    """

    topk_weights_TK: torch.Tensor | None
    topk_ids_TK: torch.Tensor
    space: IdSpace
    num_experts: int
    expert_map: torch.Tensor | None
    invalid_ids: torch.Tensor


@dataclass(frozen=True)
class ContiguousTokens:
    """STANDARD format. x_TH: (T, H), every row a real token, contiguous if quantised.

    scale: None if unquantised, else float32: (1,) for one of all tokens, (T, 1) for one of each
    token, (T, ceil(H / g)) for one of each g values of a token; a value is x * scale.
    """

    x_TH: torch.Tensor
    routing: DispatchedRouting
    scale: torch.Tensor | None = None

    def rows(self, start: int, stop: int) -> "ContiguousTokens":
        """Return tokens [start, stop)."""
        weights_TK = self.routing.topk_weights_TK
        part = replace(
            self.routing,
            topk_weights_TK=None if weights_TK is None else weights_TK[start:stop],
            topk_ids_TK=self.routing.topk_ids_TK[start:stop],
        )
        scale = self.scale
        if scale is not None and scale.dim() == 2:  # else one scale for all tokens
            scale = scale[start:stop]
        return ContiguousTokens(self.x_TH[start:stop], part, scale)


@dataclass(frozen=True)
class BatchedTokens:
    """BATCHED_EXPERTS format. x_eCH: (e, C, H); counts_e: (e,) int32.

    Rows c < counts_e[i] of expert i are tokens; the other rows are undefined and never read, and
    so are their scales. scale: None if unquantised, else float32 of any strides: (1,) for one of
    all tokens, (e, C, 1) for one of each row, (e, C, ceil(H / g)) for one of each g values of it.
    """

    x_eCH: torch.Tensor
    counts_e: torch.Tensor
    scale: torch.Tensor | None = None


Dispatched = ContiguousTokens | BatchedTokens


@dataclass(frozen=True)
class ContiguousShape:
    """Worst case of a dispatch in the STANDARD format: rows T and K ids per row."""

    tokens: int
    top_k: int


@dataclass(frozen=True)
class BatchedShape:
    """Worst case of a dispatch in the BATCHED_EXPERTS format: e experts of C rows."""

    experts: int
    capacity: int


DispatchShape = ContiguousShape | BatchedShape


@dataclass(frozen=True)
class ExpertRows:
    """What a TopKWeightAndReduce works on.

    rows: (T, H), (T, K, H) or (e, C, H), as the experts left them.
    row_of_pair_TK: (T, K) int32, row of each pair in the flattened (e * C, H) rows, -1 for a
        skipped pair; None where pair p's row is row p.
    topk_weights_TK: the caller's (T, K) float32, or None if weights were applied on the input.
    scale: the routed scaling factor still to be applied.
    routing: whose pairs the rows are, counted already, where pair p's row is row p: of the
        num_local experts here. Weights of pairs that it skips are not read; None where they are 0.
    """

    rows: torch.Tensor
    row_of_pair_TK: torch.Tensor | None
    topk_weights_TK: torch.Tensor | None
    scale: float
    routing: DispatchedRouting | None = None
    num_local: int = 0


@dataclass(frozen=True)
class Handle:
    """What one prepare leaves for its own finalize; each PrepareAndFinalize has a subclass."""


def dense(what: str, value: object) -> None:
    """Before anything is asked of it: a tensor whose values lie in memory, each as it is."""
    if not isinstance(value, torch.Tensor):
        raise DtypeError(what, got=type(value).__name__, need="a tensor")
    if value.layout is not torch.strided:
        raise LayoutError(what, got=str(value.layout), need="a dense tensor (torch.strided)")
    if not is_compiling() and value.is_neg():  # torch.compile does not know the question
        raise LayoutError(what, got="a lazily negated view", need="its resolve_neg()")
