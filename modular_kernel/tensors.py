"""The tensors that are passed to parts and between parts, and the letters for their dimensions.

    T  tokens of this rank
    H  hidden size
    I  intermediate size per rank
    E  experts of the model
    e  experts on this rank
    K  top-k: experts per token
    N  rows of w1: 2I if the activation is gated, else I
    R  routed rows; in the shapes of lora_* tensors, the largest rank of an adapter
    L  adapter slots
    C  capacity: rows reserved per expert in the batched format
    P  routed pairs: P = T * K, and pair p = t * K + k

The suffix of a name is its shape: `x_TH` is (T, H), and `w1_eNH` is (e, N, H). An id of -1 skips a
pair. Integrations translate the sentinels of other libraries to -1.
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
    """Routing of the tokens that the caller passes.

    topk_weights_TK: (T, K) float32. The weight of a skipped pair is not read and may be NaN. A rank
        skips a pair if its id is -1 or out of range, or if its expert is on another rank.
    topk_ids_TK: (T, K) int32 or int64, global expert ids. -1 skips the pair. If a token selects an
        expert twice, both pairs are computed.
    adapters_T: (T,) int32, adapter slot of each token, or -1 for no adapter. None if and only if
        the problem has no adapters. The string "none" if the problem has adapters, but no token of
        this call uses one; the call then runs like a call of a layer without adapters.
    """

    topk_weights_TK: torch.Tensor
    topk_ids_TK: torch.Tensor
    adapters_T: torch.Tensor | Literal["none"] | None = None

    @property
    def slots_T(self) -> torch.Tensor | None:
        """The adapter slots of the tokens, or None if no token has an adapter."""
        return self.adapters_T if isinstance(self.adapters_T, torch.Tensor) else None

    def of(self, tokens: torch.Tensor | slice) -> "Routing":
        """Return the routing of selected tokens.

        tokens: a slice, (n,) indices, or a (T,) mask.
        """
        slots_T = self.slots_T
        weights_TK = check_tensor("topk_weights", self.topk_weights_TK)
        ids_TK = check_tensor("topk_ids", self.topk_ids_TK)
        if ids_TK.dim() != 2 or weights_TK.shape != ids_TK.shape:
            got = f"{tuple(weights_TK.shape)} and {tuple(ids_TK.shape)}"
            raise ShapeError("topk_weights and topk_ids", got=got, need="the same shape, (T, K)")
        if slots_T is not None and check_tensor("adapters", slots_T).shape != ids_TK.shape[:1]:
            raise ShapeError("adapters", got=tuple(slots_T.shape), need=tuple(ids_TK.shape[:1]))
        if not isinstance(tokens, slice):
            _check_indices(tokens, len(ids_TK))
        slots = self.adapters_T if slots_T is None else slots_T[tokens]
        return Routing(weights_TK[tokens], ids_TK[tokens], slots)


def _check_indices(tokens: object, num_tokens: int) -> None:
    """Check the shape and dtype of indices or a mask. Checking values would synchronize."""
    index = check_tensor("tokens", tokens)
    if index.dtype not in (torch.bool, torch.int32, torch.int64):
        raise DtypeError("tokens", got=index.dtype, need="int32 or int64 indices, or a bool mask")
    if index.dim() != 1 or (index.dtype is torch.bool and len(index) != num_tokens):
        raise ShapeError(
            "tokens", got=tuple(index.shape), need=f"(n,) indices, or a ({num_tokens},) mask"
        )


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of the e experts on this rank, with biases, scales and adapters.

    w1: (e, N, H). Gate rows come first, or gate and up rows alternate if the activation is
        interleaved. May be a strided view, such as a transposed checkpoint tensor.
    w2: (e, H, I). May be a strided view.
    b1: (e, N), float32 or the problem's dtype.
    b2: (e, H), float32 or the problem's dtype.
    expert_map: (E,) int32, the row of w1 and w2 for each global id, or -1 if the expert is on
        another rank. Other values also skip the expert, and raise WeightsError in checked mode.
    w1_order: (e, H) int32, for act-order schemes: the column of x that each column of w1
        multiplies. Each column must occur once. Values out of range read 0 instead of x, and raise
        WeightsError in checked mode. `load_experts` returns a valid order, and permutes the rows of
        w1 to match the columns of w2.
    a1_scale, a2_scale: static activation scales. A scale that is not positive, or has no finite
        inverse, raises WeightsError in checked mode.
    lora_a13: (L, e, 2R, H), with R rows for gate, then R rows for up; (L, e, R, H) if gate and up
        share one A, or if there is no gate.
    lora_b13: (L, e, N, R), with rows in the order of w1.
    lora_a2: (L, e, R, I).
    lora_b2: (L, e, H, R).

    `modular_kernel.quant.quantized_weights.weight_specs` describes the scales, zero points and
    global scales of each scheme, which are None if the scheme does not have them. nvfp4 has one
    global scale per matrix: (e, 2) for gate and up, and (e, 1) otherwise.

    The lora_* tensors hold L adapters, and have the problem's dtype for every scheme; they are None
    without adapters. In lora_a13 and lora_b2, e is 1 if the experts share them. An adapter's
    scaling is folded into its B. A and B are zero beyond the adapter's rank, and all values are
    finite. The last dimension must be contiguous; other strides are arbitrary.

    The tensors *_tiles and *_tile_scales are int32 copies of 4-bit w1 and w2 in the layout that
    some GEMMs read (`experts.triton.grouped_w4.layout`). `kernel.prepare_weights` creates these
    tensors. If they are None, each call derives them.
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
    """Weights whose tensors never change their memory or layout, because no other code holds them.

    A kernel checks such weights only once. For all other weights, it checks in every call whether
    their tensors are still the same.
    """


@dataclass(frozen=True)
class DispatchedRouting:
    """Routing of the rows that this rank has received.

    topk_weights_TK: (T, K) float32; None if the weights were already applied, or if the handle
        carries them.
    topk_ids_TK: (T, K) int32 or int64.
    space: whether topk_ids_TK are global or local ids.
    num_experts: ids in [0, num_experts) are valid.
    expert_map: maps global ids to local ids; None if ids are not mapped.
    invalid_ids: (1,) int32, which is incremented by the number of ids outside [-1, num_experts).
    adapters_T: (T,) int32, adapter slot of each row, or -1 for no adapter; None if no row has an
        adapter.
    """

    topk_weights_TK: torch.Tensor | None
    topk_ids_TK: torch.Tensor
    space: IdSpace
    num_experts: int
    expert_map: torch.Tensor | None
    invalid_ids: torch.Tensor
    adapters_T: torch.Tensor | None = None


@dataclass(frozen=True)
class StandardTokens:
    """Tokens in STANDARD format.

    x_TH: (T, H). Every row is a token. Contiguous if quantized.
    routing: routing of the tokens.
    scale: float32 scale of quantized tokens, whose values are x * scale: (1,) per tensor, (T, 1)
        per token, or (T, ceil(H / g)) per group of g values of a token. None if unquantized.
    unquantized_TH: (T, H) in the problem's dtype, if tokens are quantized and adapters need
        unquantized tokens.
    """

    x_TH: torch.Tensor
    routing: DispatchedRouting
    scale: torch.Tensor | None = None
    unquantized_TH: torch.Tensor | None = None

    def rows(self, start: int, stop: int) -> "StandardTokens":
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
        return StandardTokens(self.x_TH[start:stop], routing, scale, rows_TH)

    @property
    def plain_TH(self) -> torch.Tensor:
        """The unquantized tokens (T, H), which adapters read."""
        return self.x_TH if self.unquantized_TH is None else self.unquantized_TH


def _slice_rows(rows: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
    return None if rows is None else rows[start:stop]


@dataclass(frozen=True)
class BatchedTokens:
    """Tokens in BATCHED_EXPERTS format.

    x_eCH: (e, C, H). The first counts_e[i] rows of expert i are tokens. The other rows and their
        scales are undefined and never read.
    counts_e: (e,) int32, number of tokens of each expert.
    scale: float32 scale of quantized rows, with any strides: (1,) or (e, C, 1) per tensor,
        (e, C, 1) per row, or (e, C, ceil(H / g)) per group of g values of a row. None if
        unquantized.
    adapters_eC: (e, C) int32, adapter slot of each row, or -1 for no adapter; None if no row has an
        adapter.
    unquantized_eCH: (e, C, H) in the problem's dtype, if rows are quantized and adapters need
        unquantized rows.
    """

    x_eCH: torch.Tensor
    counts_e: torch.Tensor
    scale: torch.Tensor | None = None
    adapters_eC: torch.Tensor | None = None
    unquantized_eCH: torch.Tensor | None = None

    @property
    def plain_eCH(self) -> torch.Tensor:
        """The unquantized rows (e, C, H), which adapters read."""
        return self.x_eCH if self.unquantized_eCH is None else self.unquantized_eCH


Dispatched = StandardTokens | BatchedTokens


@dataclass(frozen=True)
class StandardShape:
    """Largest dispatch in STANDARD format: T rows with K ids each."""

    tokens: int
    top_k: int


@dataclass(frozen=True)
class BatchedShape:
    """Largest dispatch in BATCHED_EXPERTS format: e experts with C rows each."""

    experts: int
    capacity: int


DispatchShape = StandardShape | BatchedShape


@dataclass(frozen=True)
class ExpertRows:
    """Input of a TopKWeightAndReduce.

    rows: output of the experts, (T, H), (T, K, H) or (e, C, H).
    row_of_pair_TK: (T, K) int32, row of each pair in the rows flattened to (e * C, H), or -1 for a
        skipped pair. None if row p holds pair p.
    topk_weights_TK: (T, K) float32, the caller's router weights; None if the weights were applied
        to the input.
    scale: the routed scaling factor, if it must still be applied.
    routing: the routing of the rows, only used if row p holds pair p. Invalid ids have already been
        counted, and the weights of skipped pairs are not read. None means that the rows of skipped
        pairs are 0 and may be summed.
    num_local: number of experts on this rank.
    checked: True if the tensors come from a kernel and are known to be valid. If False, the reducer
        checks them.
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
    """Data that `prepare` passes to `finalize` of the same call.

    Each PrepareAndFinalize has its own subclass.
    """


def check_weight_tensors(weights: ExpertWeights, *, meta: bool = False) -> None:
    """Call `check_tensor` on every tensor of expert weights. All except w1 and w2 may be None."""
    optional = vars(weights).keys() - {"w1", "w2"}
    check_tensors(vars(weights), optional=optional, meta=meta)


_UNLOADED_BYTE = 255  # NaN of E8M0 and of e4m3
_UNLOADED_INDEX = -1


def fill_with_sentinel(name: str, tensor: torch.Tensor) -> None:
    """Fill a new parameter with the values that `check_loaded` treats as not loaded.

    These values are NaN for floating-point numbers of at least 16 bits and for one-byte scales, and
    -1 for indices. Other integers and float8 values are not changed, because layers with such
    parameters also have scales.
    """
    if tensor.itemsize == 1:
        if name.endswith("_scale"):
            tensor.view(torch.uint8).fill_(_UNLOADED_BYTE)
    elif tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(_UNLOADED_INDEX)


def check_loaded(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise StateError, with names, if tensors still hold the values of `fill_with_sentinel`.

    Only the first and the last value of each expert (index of the first dimension) are read. The
    check synchronizes once. Nothing is checked during the capture of a CUDA graph, or for tensors
    without memory.
    """
    unloaded_masks = {
        name: mask for name, t in tensors.items() if (mask := _find_unloaded(name, t)) is not None
    }
    if not unloaded_masks:
        return
    masks = list(unloaded_masks.values())
    if masks[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return
    missing = torch.stack([mask.any() for mask in masks]).tolist()
    if not any(missing):
        return
    unset_names = [
        name for name, is_missing in zip(unloaded_masks, missing, strict=True) if is_missing
    ]
    rows = unloaded_masks[unset_names[0]].nonzero().flatten().tolist()
    row_list = ", ".join(map(str, rows[:4])) + (", ..." if len(rows) > 4 else "")
    got = f"nothing loaded into {', '.join(unset_names)} (rows {row_list} of {unset_names[0]})"
    need = (
        "loaded weights; call load, set_weights, load_state_dict or weight_loader, or call "
        "mark_loaded if NaN is intended"
    )
    raise StateError("weights", got=got, need=need)


def _find_unloaded(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a mask of rows that were not loaded, or None if the values cannot show that."""
    if tensor.is_meta or not tensor.dim() or not tensor.numel():
        return None
    if tensor.itemsize == 1 and not name.endswith("_scale"):
        return None
    first = last = tensor.detach()
    for _ in range(tensor.dim() - 1):
        first, last = first.select(1, 0), last.select(1, -1)
    if tensor.itemsize == 1:
        first_bytes, last_bytes = first.view(torch.uint8), last.view(torch.uint8)
        return (first_bytes == _UNLOADED_BYTE) | (last_bytes == _UNLOADED_BYTE)
    if tensor.is_floating_point():
        return first.isnan() | last.isnan()
    # -1 can occur in a loaded table, but not in all of its rows.
    is_unset = first == _UNLOADED_INDEX
    return is_unset & is_unset.all()


def check_activation_scales(what: str, scale: torch.Tensor) -> None:
    """Raise WeightsError unless all activation scales are positive and have finite inverses.

    Kernels multiply by the inverse, which is infinite for scales below 2^-128. Synchronizes.
    """
    is_valid = (scale > 0) & scale.isfinite() & (1 / scale).isfinite()
    if not bool(is_valid.all()):
        need = "finite numbers above 0 with finite inverses"
        raise WeightsError(what, got=float(scale[~is_valid][0]), need=need)


def check_leading_dims(
    what: str, tensor: torch.Tensor, leading_dims: tuple[int, ...], last_dim_name: str
) -> None:
    """Raise ShapeError if the leading dimensions of `tensor` and x differ.

    what: name of the tensor.
    tensor: (*leading_dims, n), or (T, n), whose T is not checked.
    leading_dims: leading dimensions of x, that is, all except H.
    last_dim_name: name of the last dimension of `tensor`, for the message.
    """
    if tensor.dim() > 2 and tuple(tensor.shape[:-1]) != leading_dims:
        sizes = ", ".join(map(str, leading_dims))
        need = f"({sizes}, {last_dim_name}) like x, or (T, {last_dim_name})"
        raise ShapeError(what, got=tuple(tensor.shape), need=need)
