"""Tensors passed between parts, and the shape legend.

    T tokens of this rank     H hidden size         I intermediate size per rank
    E experts of the model    e experts here        K top-k
    N rows of w1: 2I if the activation is gated, else I
    R routed rows
    C capacity: rows reserved per expert in the batched format
    P routed pairs, P = T * K; pair p = t * K + k

The suffix of a name is its shape: `x_TH` is (T, H), `w1_eNH` is (e, N, H). The only id that means
"skip this pair" is -1; adapters translate other sentinels.
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
    """Routing of the caller's own tokens.

    topk_weights_TK: (T, K) float32. The weight of a pair that this rank skips (-1, an id out of
        range, or an expert of another rank) is not read and may be NaN.
    topk_ids_TK: (T, K) int32 or int64, global expert ids; -1 skips the pair. A token may select an
        expert twice; both pairs count.
    adapters_T: (T,) int32 adapter slot of each token, -1 for none. "none" if no token of the call
        has an adapter; the call then runs like a layer without adapters. None only if the problem
        has no adapters.
    """

    topk_weights_TK: torch.Tensor
    topk_ids_TK: torch.Tensor
    adapters_T: torch.Tensor | Literal["none"] | None = None

    @property
    def slots_T(self) -> torch.Tensor | None:
        """Adapter slots of the tokens; None if no token has an adapter."""
        return self.adapters_T if isinstance(self.adapters_T, torch.Tensor) else None

    def of(self, tokens: torch.Tensor | slice) -> "Routing":
        """Return the routing of selected tokens: a slice, (N,) indices, or a (T,) mask."""
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


def _check_indices(tokens: object, tokens_in_call: int) -> None:
    """Check the shape and dtype of indices or a mask. Reading values would synchronize."""
    index = check_tensor("tokens", tokens)
    if index.dtype not in (torch.bool, torch.int32, torch.int64):
        raise DtypeError("tokens", got=index.dtype, need="int32 or int64 indices, or bool")
    if index.dim() != 1 or (index.dtype is torch.bool and len(index) != tokens_in_call):
        raise ShapeError(
            "tokens", got=tuple(index.shape), need=f"(N,) indices, or a ({tokens_in_call},) mask"
        )


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of the e experts on this rank, with scales and biases.

    w1: (e, N, H), gate rows first (alternating with up if the activation is interleaved).
    w2: (e, H, I). Both may be strided views, such as a transposed checkpoint tensor.
    b1: (e, N), b2: (e, H), float32 or the problem's dtype.
    expert_map: (E,) int32, global id -> row of w1 and w2, or -1 if the expert is on another rank.
        Other values skip too, and raise WeightsError in checked mode.
    *_scale, *_zero_point: see `modular_kernel.quant.quantized_weights.weight_specs`; None if
        unquantized. An a1_scale or a2_scale that is not positive, or has no finite inverse, raises
        WeightsError in checked mode.
    w1_order: (e, H) int32, for act-order schemes: the column of x that each column of w1
        multiplies. Each column must occur once. Values out of range read 0 for x, and raise
        WeightsError in checked mode. `load_experts` returns a valid order, and permutes the rows of
        w1 to match the columns of w2.
    *_global_scale: for nvfp4, one scale per matrix: (e, 2) for gate and up, (e, 1) otherwise.
    lora_*: L adapters, in the problem's dtype for every scheme; None without adapters.
        lora_a13: (L, e, 2R, H), R rows of gate, then R rows of up; (L, e, R, H) if gate and up
            share them or there is no gate. lora_b13: (L, e, N, R), rows ordered as in w1.
        lora_a2: (L, e, R, I). lora_b2: (L, e, H, R). e is 1 in lora_a13 and lora_b2 if the experts
            share them. An adapter's scaling is folded into its B. Beyond its rank, A and B are
            zero; all values are finite. Strides are free except that the last dimension is
            contiguous.
    *_tiles, *_tile_scales: int32, copies of 4-bit w1 and w2 in the layout that some GEMMs read
        (experts.triton.grouped_w4.layout), from `kernel.prepare_weights`. None if they are derived
        in each call.
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


class FixedWeights(ExpertWeights):
    """Weights whose tensors nobody but their maker holds: memory and layout stay as they are.

    A kernel checks them once, while the tensors of other weights are compared in every call.
    """


@dataclass(frozen=True)
class DispatchedRouting:
    """Routing of the rows received by this rank; not the caller's routing.

    topk_weights_TK: float32, or None if weights were already applied or are carried elsewhere.
    topk_ids_TK: int32 or int64 in `space`; expert_map turns global ids into local ones.
    num_experts: ids are valid in [0, num_experts).
    invalid_ids: int32 (1,), incremented by the number of ids outside [-1, num_experts).
    adapters_T: int32 adapter slot of each row, -1 for none; None if no row has one.
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
    """Tokens in STANDARD format. x_TH: (T, H), every row a real token, contiguous if quantized.

    scale: None if unquantized, else float32: (1,) per tensor, (T, 1) per token, or
    (T, ceil(H / g)) per group of g values of a token. The value is x * scale.
    unquantized_TH: (T, H) in the problem's dtype, in addition to quantized rows, if adapters read
    them.
    """

    x_TH: torch.Tensor
    routing: DispatchedRouting
    scale: torch.Tensor | None = None
    unquantized_TH: torch.Tensor | None = None

    def rows(self, start: int, stop: int) -> "ContiguousTokens":
        """Return tokens [start, stop)."""
        weights_TK = self.routing.topk_weights_TK
        routing = replace(
            self.routing,
            topk_weights_TK=None if weights_TK is None else weights_TK[start:stop],
            topk_ids_TK=self.routing.topk_ids_TK[start:stop],
            adapters_T=_slice_rows(self.routing.adapters_T, start, stop),
        )
        scale = self.scale
        if scale is not None and scale.dim() == 2:  # else one scale per tensor
            scale = scale[start:stop]
        rows_TH = _slice_rows(self.unquantized_TH, start, stop)
        return ContiguousTokens(self.x_TH[start:stop], routing, scale, rows_TH)

    @property
    def plain_TH(self) -> torch.Tensor:
        """(T, H) unquantized tokens, as adapters read them."""
        return self.x_TH if self.unquantized_TH is None else self.unquantized_TH


def _slice_rows(rows: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
    return None if rows is None else rows[start:stop]


@dataclass(frozen=True)
class BatchedTokens:
    """Tokens in BATCHED_EXPERTS format. x_eCH: (e, C, H); counts_e: (e,) int32.

    Rows 0 to counts_e[i] - 1 of expert i are tokens. The other rows and their scales are undefined
    and never read. scale: None if unquantized, else float32 of any strides: (1,) per tensor, (e, C,
    1) per row, or (e, C, ceil(H / g)) per group of g values of a row.
    adapters_eC: (e, C) int32 adapter slot of each row, -1 for none; None if no row has one.
    unquantized_eCH: as in ContiguousTokens.
    """

    x_eCH: torch.Tensor
    counts_e: torch.Tensor
    scale: torch.Tensor | None = None
    adapters_eC: torch.Tensor | None = None
    unquantized_eCH: torch.Tensor | None = None

    @property
    def plain_eCH(self) -> torch.Tensor:
        """(e, C, H) unquantized rows, as adapters read them."""
        return self.x_eCH if self.unquantized_eCH is None else self.unquantized_eCH


Dispatched = ContiguousTokens | BatchedTokens


@dataclass(frozen=True)
class ContiguousShape:
    """Worst case of a dispatch in STANDARD format: T rows with K ids each."""

    tokens: int
    top_k: int


@dataclass(frozen=True)
class BatchedShape:
    """Worst case of a dispatch in BATCHED_EXPERTS format: e experts with C rows each."""

    experts: int
    capacity: int


DispatchShape = ContiguousShape | BatchedShape


@dataclass(frozen=True)
class ExpertRows:
    """Input of a TopKWeightAndReduce.

    rows: (T, H), (T, K, H) or (e, C, H), as the experts wrote them.
    row_of_pair_TK: (T, K) int32, row of each pair in the flattened (e * C, H) rows, -1 for a
        skipped pair; None if pair p is row p.
    topk_weights_TK: the caller's (T, K) float32; None if weights were applied on the input.
    scale: the routed scaling factor still to be applied.
    routing: the routing of the rows, with invalid ids already counted, if pair p is row p.
        Weights of pairs that it skips are not read. None if such rows are 0.
    num_local: number of experts on this rank.
    checked: True if the tensors come from a kernel and are valid; otherwise the reducer checks
        them.
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
    """Data passed from one prepare to its own finalize; each PrepareAndFinalize has a subclass."""


def check_weight_tensors(weights: ExpertWeights, *, meta: bool = False) -> None:
    """Call `check_tensor` on every tensor of expert weights; all except w1 and w2 may be None."""
    optional = vars(weights).keys() - {"w1", "w2"}
    check_tensors(vars(weights), optional=optional, meta=meta)


_UNLOADED_BYTE = 255  # NaN of E8M0 and of e4m3
_UNLOADED_INDEX = -1


def fill_with_sentinel(name: str, tensor: torch.Tensor) -> None:
    """Fill a new parameter with the values that `check_loaded` treats as not loaded.

    NaN for floats of 16 bits or more and for one-byte scales; -1 for indices. Other integers and
    float8 values are left unchanged, because layers that have them also have scales.
    """
    if tensor.itemsize == 1:
        if name.endswith("_scale"):
            tensor.view(torch.uint8).fill_(_UNLOADED_BYTE)
    elif tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(_UNLOADED_INDEX)


def check_loaded(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise StateError, with names, for tensors that still hold the values of `fill_with_sentinel`.

    Reads the first and last value of each row of the first dimension (an expert); the row counts as
    loaded once both were written. Synchronizes once. Nothing is checked while a CUDA graph is
    captured, nor for tensors without memory.
    """
    unloaded = {
        name: mask for name, t in tensors.items() if (mask := _unloaded(name, t)) is not None
    }
    if not unloaded:
        return
    masks = list(unloaded.values())
    if masks[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return
    missing = torch.stack([mask.any() for mask in masks]).tolist()
    if not any(missing):
        return
    unset_names = [name for name, is_missing in zip(unloaded, missing, strict=True) if is_missing]
    rows = unloaded[unset_names[0]].nonzero().flatten().tolist()
    row_list = ", ".join(map(str, rows[:4])) + (", ..." if len(rows) > 4 else "")
    got = f"nothing loaded into {', '.join(unset_names)} (rows {row_list} of {unset_names[0]})"
    need = "load, set_weights, load_state_dict or weight_loader; or mark_loaded if NaN is intended"
    raise StateError("weights", got=got, need=need)


def _unloaded(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a mask of rows that were not loaded; None if the values cannot show it."""
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
    # -1 can occur in a loaded table, but not in all of its rows.
    unset = ends[0] == _UNLOADED_INDEX
    return unset & unset.all()


def check_divisors(what: str, scale: torch.Tensor) -> None:
    """Raise WeightsError unless values can be divided by each of these activation scales.

    Kernels multiply by the inverse, which is infinite below 2^-128. Synchronizes.
    """
    bad = ~((scale > 0) & scale.isfinite() & (1 / scale).isfinite())
    if bool(bad.any()):
        need = "finite numbers above 0 with finite inverses"
        raise WeightsError(what, got=float(scale[bad][0]), need=need)


def check_lead(what: str, tensor: torch.Tensor, lead: tuple[int, ...], last: str) -> None:
    """Raise ShapeError if the leading dimensions of `tensor` differ from those of x.

    tensor: (..., last), or (T, last). lead: leading dimensions of x, before H. last: name of the
    last dimension.
    """
    if tensor.dim() > 2 and tuple(tensor.shape[:-1]) != lead:
        need = f"({', '.join(map(str, lead))}, {last}) like x, or (T, {last})"
        raise ShapeError(what, got=tuple(tensor.shape), need=need)
