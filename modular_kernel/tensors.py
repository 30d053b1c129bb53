"""What travels between the parts, and THE shape legend.

    T tokens of this rank     H hidden size         I intermediate size per rank
    E experts of the model    e experts here        K top-k
    N rows of w1 (2I gated, I ungated)              R routed rows
    C capacity: rows reserved per expert in the batched format
    P routed pairs, P = T * K; pair p = t * K + k

A name ends in its shape: `x_TH` is (T, H), `w1_eNH` is (e, N, H). -1 is the only id that means
"skip this pair"; adapters translate any other sentinel.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from modular_kernel.errors import DtypeError, ShapeError, StateError, WeightsError
from modular_kernel.spec.problem import IdSpace
from modular_kernel.utils.tensor_checks import check_tensor, check_tensors


@dataclass(frozen=True)
class Routing:
    """The caller's routing of its own tokens.

    topk_weights_TK: (T, K) float32.  topk_ids_TK: (T, K) int32 or int64, global expert ids, -1 to
    skip. An expert may appear twice in a row: both pairs count. The weight of a pair that is
    skipped here (-1, no expert's id, or an expert that is elsewhere) is not read: it may be NaN.
    adapters_T: (T,) int32, the slot of each token's adapter, -1 for none; "none" for a call whose
    tokens all have none, which takes the paths of the layer without adapters. None only where the
    problem has no adapters.
    """

    topk_weights_TK: torch.Tensor
    topk_ids_TK: torch.Tensor
    adapters_T: torch.Tensor | Literal["none"] | None = None

    @property
    def slots_T(self) -> torch.Tensor | None:
        """The tokens' slots of adapters; None if no token has an adapter."""
        return self.adapters_T if isinstance(self.adapters_T, torch.Tensor) else None

    def of(self, tokens: torch.Tensor | slice) -> "Routing":
        """Return the routing of some tokens: a slice, (N,) indices, or a (T,) mask."""
        slots_T = self.slots_T
        weights_TK = check_tensor("topk_weights", self.topk_weights_TK)
        ids_TK = check_tensor("topk_ids", self.topk_ids_TK)
        if ids_TK.dim() != 2 or weights_TK.shape != ids_TK.shape:
            got = f"{tuple(weights_TK.shape)} and {tuple(ids_TK.shape)}"
            raise ShapeError("topk_weights and topk_ids", got=got, need="one shape, (T, K)")
        if slots_T is not None and check_tensor("adapters", slots_T).shape != ids_TK.shape[:1]:
            raise ShapeError("adapters", got=tuple(slots_T.shape), need=tuple(ids_TK.shape[:1]))
        if not isinstance(tokens, slice):
            _check_indices(tokens, len(ids_TK))
        slots = self.adapters_T if slots_T is None else slots_T[tokens]
        return Routing(weights_TK[tokens], ids_TK[tokens], slots)


def _check_indices(tokens: object, most: int) -> None:
    """Check what selects some of `most` tokens; values are not read, which would synchronize."""
    given = check_tensor("tokens", tokens)
    if given.dtype not in (torch.bool, torch.int32, torch.int64):
        raise DtypeError("tokens", got=given.dtype, need="int32 or int64 indices, or bool")
    if given.dim() != 1 or (given.dtype is torch.bool and len(given) != most):
        raise ShapeError(
            "tokens", got=tuple(given.shape), need=f"(N,) indices, or a ({most},) mask"
        )


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of the e experts on this rank, with their scales and biases.

    w1: (e, N, H), gate rows first (alternating if the activation is interleaved).
    w2: (e, H, I). Both may be strided views, such as a transposed checkpoint tensor.
    b1: (e, N), b2: (e, H), float32 or the problem's dtype.
    expert_map: (E,) int32, global id -> row of w1 and w2, or -1 where the expert is elsewhere; any
        other value skips too, and is a WeightsError in checked mode.
    *_scale, *_zero_point: as `modular_kernel.quant.quantized_weights.weight_specs` says; None if
        unquantized. An a1_scale or a2_scale that nothing can be divided by is a WeightsError in
        checked mode.
    w1_order: (e, H) int32, of act-order: the column of x that each column of w1 multiplies; any
        other value reads 0, and is a WeightsError in checked mode. Each column once: `load_experts`
        makes it so, and puts w1's rows where w2's columns lie.
    *_global_scale: of nvfp4, one of each matrix: (e, 2) of gate and up, (e, 1) of any other.
    lora_*: of L adapters, in the problem's dtype, whatever the scheme; None if it has no adapters.
        lora_a13: (L, e, 2R, H), gate's R rows, then up's; (L, e, R, H) where both share them, or
            without a gate. lora_b13: (L, e, N, R), rows as w1's.
        lora_a2: (L, e, R, I). lora_b2: (L, e, H, R). e is 1 for lora_a13 and lora_b2 where the
            experts share them. An adapter's scaling is in its B; what lies beyond its rank is zero
            in A and B, and all values are finite. Any strides, but the last dimension contiguous.
    *_tiles, *_tile_scales: int32, w1 and w2 of 4 bits once more, in the order in which some
        products read them (experts.triton.grouped_w4.layout): what `kernel.prepare_weights` made.
        None: calls make it themselves, each anew.
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
    lora_a13: torch.Tensor | None = None
    lora_b13: torch.Tensor | None = None
    lora_a2: torch.Tensor | None = None
    lora_b2: torch.Tensor | None = None
    w1_tiles: torch.Tensor | None = None
    w1_tile_scales: torch.Tensor | None = None
    w2_tiles: torch.Tensor | None = None
    w2_tile_scales: torch.Tensor | None = None


@dataclass(frozen=True)
class DispatchedRouting:
    """Routing of the rows that arrived at this rank; not the caller's routing.

    topk_weights_TK float32, or None where weights were already applied or travel elsewhere.
    topk_ids_TK int32 or int64 in `space`; expert_map turns global ids into local ones.
    num_experts: ids are valid in [0, num_experts).
    invalid_ids: int32 (1,), incremented by the number of ids outside [-1, num_experts).
    adapters_T: int32 slot of each row's adapter, -1 for none; None if no row has one.
    """

    topk_weights_TK: torch.Tensor | None
    topk_ids_TK: torch.Tensor
    space: IdSpace
    num_experts: int
    expert_map: torch.Tensor | None
    invalid_ids: torch.Tensor
    adapters_T: torch.Tensor | None = None


@dataclass(frozen=True)
class ContiguousTokens:
    """STANDARD format. x_TH: (T, H), every row a real token, contiguous if quantized.

    scale: None if unquantized, else float32: (1,) for one of all tokens, (T, 1) for one of each
    token, (T, ceil(H / g)) for one of each g values of a token; a value is x * scale.
    unquantized_TH: (T, H) beside quantized rows where adapters read them, in the problem's dtype.
    """

    x_TH: torch.Tensor
    routing: DispatchedRouting
    scale: torch.Tensor | None = None
    unquantized_TH: torch.Tensor | None = None

    def rows(self, start: int, stop: int) -> "ContiguousTokens":
        """Return tokens [start, stop)."""
        weights_TK = self.routing.topk_weights_TK
        part = replace(
            self.routing,
            topk_weights_TK=None if weights_TK is None else weights_TK[start:stop],
            topk_ids_TK=self.routing.topk_ids_TK[start:stop],
            adapters_T=_part(self.routing.adapters_T, start, stop),
        )
        scale = self.scale
        if scale is not None and scale.dim() == 2:  # else one scale for all tokens
            scale = scale[start:stop]
        plain_TH = _part(self.unquantized_TH, start, stop)
        return ContiguousTokens(self.x_TH[start:stop], part, scale, plain_TH)

    @property
    def plain_TH(self) -> torch.Tensor:
        """(T, H) tokens as adapters read them: not quantized."""
        return self.x_TH if self.unquantized_TH is None else self.unquantized_TH


def _part(rows: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
    return None if rows is None else rows[start:stop]


@dataclass(frozen=True)
class BatchedTokens:
    """BATCHED_EXPERTS format. x_eCH: (e, C, H); counts_e: (e,) int32.

    Rows c < counts_e[i] of expert i are tokens; the other rows are undefined and never read, and
    so are their scales. scale: None if unquantized, else float32 of any strides: (1,) for one of
    all tokens, (e, C, 1) for one of each row, (e, C, ceil(H / g)) for one of each g values of it.
    adapters_eC: (e, C) int32 slot of each row's adapter, -1 for none; None if no row has one.
    unquantized_eCH: as of ContiguousTokens.
    """

    x_eCH: torch.Tensor
    counts_e: torch.Tensor
    scale: torch.Tensor | None = None
    adapters_eC: torch.Tensor | None = None
    unquantized_eCH: torch.Tensor | None = None

    @property
    def plain_eCH(self) -> torch.Tensor:
        """(e, C, H) rows as adapters read them: not quantized."""
        return self.x_eCH if self.unquantized_eCH is None else self.unquantized_eCH


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
    checked: these are a kernel's own tensors, which fit; a reducer checks those of other callers.
    """

    rows: torch.Tensor
    row_of_pair_TK: torch.Tensor | None
    topk_weights_TK: torch.Tensor | None
    scale: float
    routing: DispatchedRouting | None = None
    num_local: int = 0
    checked: bool = False


@dataclass(frozen=True)
class Handle:
    """What one prepare leaves for its own finalize; each PrepareAndFinalize has a subclass."""


def check_weight_tensors(weights: ExpertWeights, *, meta: bool = False) -> None:
    """Call `check_tensor` for each tensor of expert weights; all but w1 and w2 may be None."""
    optional = vars(weights).keys() - {"w1", "w2"}
    check_tensors(vars(weights), optional=optional, meta=meta)


_UNLOADED_BYTE = 255  # NaN of E8M0 and of e4m3
_UNLOADED_INDEX = -1


def fill_unloaded(name: str, tensor: torch.Tensor) -> None:
    """Give a new parameter the values by which `check_loaded` knows that nothing was loaded.

    NaN for floats of 16 bits or more, and for scales of one byte; -1 for indices. Other integers
    and float8 values are left as they are: layers that have some have scales beside them.
    """
    if tensor.itemsize == 1:
        if name.endswith("_scale"):
            tensor.view(torch.uint8).fill_(_UNLOADED_BYTE)
    elif tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(_UNLOADED_INDEX)


def check_loaded(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise StateError for tensors that still have the values of `fill_unloaded`, by their names.

    The first and the last value of each row of the first dimension, an expert's, are looked at: it
    counts as loaded once both have been written. Synchronizes once; nothing is checked while a CUDA
    graph is captured, nor of tensors without memory.
    """
    found = {name: mask for name, t in tensors.items() if (mask := _unloaded(name, t)) is not None}
    if not found:
        return
    masks = list(found.values())
    if masks[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return
    missing = torch.stack([mask.any() for mask in masks]).tolist()
    if not any(missing):
        return
    unset = [name for name, is_missing in zip(found, missing, strict=True) if is_missing]
    rows = found[unset[0]].nonzero().flatten().tolist()
    shown = ", ".join(map(str, rows[:4])) + (", ..." if len(rows) > 4 else "")
    got = f"nothing loaded into {', '.join(unset)} (rows {shown} of {unset[0]})"
    need = "load, set_weights, load_state_dict or weight_loader; or mark_loaded, if NaN is meant"
    raise StateError("weights", got=got, need=need)


def _unloaded(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return for each row of a tensor whether nothing was loaded; None where nothing tells."""
    if tensor.is_meta or not tensor.dim() or not tensor.numel():
        return None
    if tensor.itemsize == 1 and not name.endswith("_scale"):
        return None
    ends = [tensor.detach(), tensor.detach()]
    for _ in range(tensor.dim() - 1):
        ends = [ends[0].select(1, 0), ends[1].select(1, -1)]
    if tensor.itemsize == 1:
        first, last = (end.view(torch.uint8) == _UNLOADED_BYTE for end in ends)
        return first | last
    if tensor.is_floating_point():
        return ends[0].isnan() | ends[1].isnan()
    # -1 is also an index of a loaded table, but not of all of its rows.
    unset = ends[0] == _UNLOADED_INDEX
    return unset & unset.all()


def check_divisors(what: str, scale: torch.Tensor) -> None:
    """Raise WeightsError unless values can be divided by each of these scales of activations.

    They are multiplied by the inverse, which is infinite below 2^-128. Synchronizes.
    """
    bad = ~((scale > 0) & scale.isfinite() & (1 / scale).isfinite())
    if bool(bad.any()):
        need = "finite numbers above 0 with finite inverses"
        raise WeightsError(what, got=float(scale[bad][0]), need=need)


def check_lead(what: str, given: torch.Tensor, lead: tuple[int, ...], last: str) -> None:
    """Raise ShapeError where what is given for batches of tokens lies in other batches than x.

    given: (..., last), or (T, last). lead: dimensions of x before H.
    """
    if given.dim() > 2 and tuple(given.shape[:-1]) != lead:
        need = f"({', '.join(map(str, lead))}, {last}) as x has it, or (T, {last})"
        raise ShapeError(what, got=tuple(given.shape), need=need)
