"""number_pairs: renumber experts for libraries that expect equal blocks of experts per rank.

A library that sends tokens to the ranks of their experts, such as DeepEP, expects contiguous blocks
of experts on the ranks, all of the same size and in rank order. A placement is more general: a rank
may have any number of experts, and an expert may have copies on several ranks. A slot is the
position of an expert on its rank.

To map a placement to the form that the library expects, every rank gets the same count of expert
numbers, numbers_per_rank, which is enough for the rank with the most experts. The number of an
expert is rank * numbers_per_rank + slot. Numbers without an expert never receive tokens.

Some libraries send exactly K rows per token, so they cannot skip a pair (a token together with one
of its K experts). For these libraries, each rank has additional numbers after its slots, called
sinks. Dropped pairs are sent to sinks, whose result rows must be zero.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from modular_kernel.errors import ConfigurationError, ShapeError
from modular_kernel.ops.count import next_power_of_2
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.pdl import pdl_arguments
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.spec.placement import Placement, PlacementTables, pairs_to_slots
from modular_kernel.tensors import Routing

_PAIRS_PER_WARP = 32  # one per lane


def count_slots_per_rank(placement: Placement) -> int:
    """Return the number of slots per rank, which is the maximum number of experts on a rank."""
    return max(map(len, placement.slots))


@dataclass(frozen=True)
class Numbering:
    """The numbering of the experts of a placement.

    placement: the placement.
    tables: the placement as tensors, on the device of the ids.
    first_token: offset that is added to token indices. Of the R copies of an expert, copy (t +
        first_token) % R gets the pairs of token t. The first sink of every token is on rank
        first_token % world_size. Callers pass different offsets on different ranks, so that the
        ranks do not all use the same copies and sinks.
    num_sinks: number of sinks per rank.
    """

    placement: Placement
    tables: PlacementTables
    first_token: int = 0
    num_sinks: int = 0

    @classmethod
    def of(
        cls,
        placement: Placement,
        device: torch.device | str,
        first_token: int = 0,
        *,
        num_sinks: int = 0,
    ) -> "Numbering":
        """Return the numbering of a placement, for ids on `device`."""
        return cls(placement, placement.tables(device), first_token, num_sinks)

    @cached_property
    def slots(self) -> int:
        return count_slots_per_rank(self.placement)

    @property
    def numbers_per_rank(self) -> int:
        """Number of slots and sinks of each rank."""
        return self.slots + self.num_sinks

    @cached_property
    def is_linear(self) -> bool:
        """Whether ranks have contiguous blocks of experts of equal size, without copies."""
        has_equal_blocks = self.slots * self.placement.world_size == self.placement.experts
        return has_equal_blocks and self.placement.is_linear


@dataclass(frozen=True)
class Pairs:
    """The input and output of `number_pairs`.

    A pair that is skipped or has an invalid id is dropped. If there are sinks, a dropped pair gets
    the number of a sink instead of -1. The sinks of a token are all different, and on consecutive
    ranks. Sinks require `join`.

    routing: input, the routing of the tokens.
    numbering: input, the numbering of the experts.
    numbers_TK: output, (T, K) int32 or int64, contiguous, the number of the expert of each pair, or
        -1 if the pair is dropped.
    weights_TK: output, (T, K) float32, contiguous, the router weight times `factor`, or 0 if the
        pair is dropped.
    invalid_ids: output, (1,) int32, which is incremented by the number of ids outside [-1, E).
    join: whether to make the numbers of a token unique. If a token has several pairs with the same
        expert, the first pair gets the sum of their weights, and the other pairs are dropped.
    factor: factor by which the router weights are multiplied.
    """

    routing: Routing
    numbering: Numbering
    numbers_TK: torch.Tensor
    weights_TK: torch.Tensor
    invalid_ids: torch.Tensor
    join: bool
    factor: float


def number_pairs(pairs: Pairs) -> None:
    """Compute the outputs of `pairs`, in one launch on a GPU."""
    check_pairs(pairs)
    if pairs.numbers_TK.numel() == 0:
        return
    if not use_triton(pairs.numbers_TK):
        number_pairs_ref(pairs)
        return
    from modular_kernel.ops.kernels.expert_slots import number_pairs_kernel

    arguments, programs = make_pair_arguments(pairs, 1)
    launch(number_pairs_kernel, (programs,), num_warps=1, **arguments, **pdl_arguments())


def check_pairs(pairs: Pairs) -> None:
    """Raise an InputError if the pairs cannot be numbered."""
    shape = tuple(pairs.routing.topk_ids_TK.shape)
    for name, output in (("numbers", pairs.numbers_TK), ("weights", pairs.weights_TK)):
        if tuple(output.shape) != shape:
            raise ShapeError(f"{name} of pairs", got=tuple(output.shape), need=shape)
    if pairs.numbering.num_sinks and not pairs.join:
        need = "join=True, because there are sinks"
        raise ConfigurationError("join of pairs", got="join=False", need=need)


def make_pair_arguments(pairs: Pairs, warps: int) -> tuple[dict[str, object], int]:
    """Return (kernel arguments, number of programs) for programs of `warps` warps."""
    routing, numbering = pairs.routing, pairs.numbering
    tokens, top_k = routing.topk_ids_TK.shape
    homes_ER2, lanes = numbering.tables.homes_ER2, next_power_of_2(top_k)
    block_t = max(1, _PAIRS_PER_WARP * warps // lanes)
    arguments: dict[str, object] = {
        "topk_ids_ptr": routing.topk_ids_TK,
        "router_weights_ptr": routing.topk_weights_TK,
        "expert_locations_ptr": homes_ER2,
        "num_copies_ptr": numbering.tables.copies_E,
        "expert_numbers_ptr": pairs.numbers_TK,
        "out_router_weights_ptr": pairs.weights_TK,
        "invalid_count_ptr": pairs.invalid_ids,
        "num_tokens": tokens,
        "num_experts": numbering.placement.experts,
        "first_token": numbering.first_token,
        "world_size": numbering.placement.world_size,
        "slots_per_rank": numbering.slots,
        "numbers_per_rank": numbering.numbers_per_rank,
        "max_copies": homes_ER2.shape[1],
        "weight_factor": float(pairs.factor),
        "stride_ids": routing.topk_ids_TK.stride(0),
        "stride_weights": routing.topk_weights_TK.stride(0),
        "TOP_K": top_k,
        "MERGE_REPEATS": pairs.join,
        "HAS_SINKS": numbering.num_sinks > 0,
        "LINEAR_PLACEMENT": numbering.is_linear,
        "BLOCK_TOKENS": block_t,
        "BLOCK_TOP_K": lanes,
    }
    return arguments, -(-tokens // block_t)


def number_pairs_ref(pairs: Pairs) -> None:
    """Torch reference of `number_pairs`."""
    routing, numbering = pairs.routing, pairs.numbering
    rank_TK, slot_TK, invalid = pairs_to_slots(
        routing.topk_ids_TK, numbering.tables, first_token=numbering.first_token, together=True
    )
    numbers_TK = torch.where(rank_TK >= 0, rank_TK * numbering.numbers_per_rank + slot_TK, -1)
    drop_TK, weights_TK = numbers_TK < 0, routing.topk_weights_TK
    if pairs.join:
        same_TKK = numbers_TK[:, :, None] == numbers_TK[:, None, :]
        # The weight of a skipped pair is undefined, so it must not be added to other weights.
        weights_TK = torch.where(same_TKK, weights_TK[:, None, :], 0).sum(2)
        drop_TK = drop_TK | same_TKK.tril(-1).any(2)
    dropped_numbers = _assign_sinks(drop_TK, numbering) if numbering.num_sinks else -1
    pairs.numbers_TK.copy_(torch.where(drop_TK, dropped_numbers, numbers_TK))
    pairs.weights_TK.copy_((weights_TK * pairs.factor).masked_fill(drop_TK, 0))
    pairs.invalid_ids.add_(invalid)


def _assign_sinks(drop_TK: torch.Tensor, numbering: Numbering) -> torch.Tensor:
    """Return the numbers of sinks for the dropped pairs of each token, (T, K)."""
    world_size, index_TK = numbering.placement.world_size, drop_TK.cumsum(1) - 1
    rank_TK = (index_TK + numbering.first_token) % world_size
    return rank_TK * numbering.numbers_per_rank + numbering.slots + index_TK // world_size
