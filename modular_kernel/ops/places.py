"""place_pairs: where each pair's row goes, for libraries that send exactly K rows for a token."""

from dataclasses import dataclass
from math import ceil

import torch

from modular_kernel.ops.count import next_power_of_2
from modular_kernel.ops.launch import launch
from modular_kernel.ops.runtime import HAS_TRITON, use_triton
from modular_kernel.placement import PlacementTables, pairs_to_slots
from modular_kernel.types import Problem

if HAS_TRITON:
    from modular_kernel.ops.kernels.places import place_pairs_kernel

_BLOCK_PAIRS = 64  # of one program


@dataclass(frozen=True)
class SlotLayout:
    """Places of all ranks, numbered through: `each` a rank, `real` for experts, then sinks.

    A sink takes the row of a pair that is skipped, or whose expert the token names twice; what
    comes back from it has to be zero, and counts for nothing.
    """

    world_size: int
    real: int
    each: int

    @classmethod
    def of(cls, problem: Problem) -> "SlotLayout":
        """As many sinks as let all K pairs of a token be skipped: a place gets no token twice."""
        world_size = problem.parallel.world_size
        real = max(map(len, problem.placement.slots))
        return cls(world_size, real, real + ceil(problem.top_k / world_size))


def place_pairs(
    topk_ids_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    tables: PlacementTables,
    layout: SlotLayout,
    *,
    rank: int,
    factor: float,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """K different places for every token of `rank`, and the weight of each.

    topk_ids_TK int32 or int64, topk_weights_TK float32, both (T, K) and contiguous. out: places
    (T, K) int32 and weights (T, K) float32, contiguous, and a counter, int32 (1,), to which the
    ids outside [-1, E) are added. The first pair of an expert carries the weights of all of them,
    times factor; the others, skipped and invalid ones go to sinks with weight 0, on this rank
    first. Ranks take turns with the copies of an expert.
    """
    tokens, top_k = topk_ids_TK.shape
    if not use_triton(topk_ids_TK):
        place_pairs_ref(
            topk_ids_TK, topk_weights_TK, tables, layout, rank=rank, factor=factor, out=out
        )
        return
    if tokens == 0:
        return
    block_k = next_power_of_2(top_k)
    block_t = max(1, _BLOCK_PAIRS // block_k)
    launch(
        place_pairs_kernel,
        (-(-tokens // block_t),),
        ids_ptr=topk_ids_TK,
        router_ptr=topk_weights_TK,
        homes_ptr=tables.homes_ER2,
        copies_ptr=tables.copies_E,
        places_ptr=out[0],
        weights_ptr=out[1],
        invalid_ptr=out[2],
        tokens=tokens,
        experts=tables.copies_E.numel(),
        most_copies=tables.homes_ER2.shape[1],
        world_size=layout.world_size,
        real=layout.real,
        each=layout.each,
        rank=rank,
        factor=factor,
        TOP_K=top_k,
        BLOCK_T=block_t,
        BLOCK_K=block_k,
    )


def place_pairs_ref(
    topk_ids_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    tables: PlacementTables,
    layout: SlotLayout,
    *,
    rank: int,
    factor: float,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Torch twin of `place_pairs`."""
    rank_TK, slot_TK, invalid = pairs_to_slots(topk_ids_TK, tables, first_token=rank)
    valid_TK = rank_TK >= 0
    place_TK = torch.where(valid_TK, rank_TK * layout.each + slot_TK, -1)
    same_TKK = (place_TK[:, :, None] == place_TK[:, None, :]) & valid_TK[:, :, None]
    live_TK = valid_TK & ~same_TKK.tril(-1).any(2)
    weights_TKK = (topk_weights_TK * factor)[:, None, :]
    sink_TK = (~live_TK).cumsum(1) - 1
    sink_rank, sink_slot = (sink_TK + rank) % layout.world_size, sink_TK // layout.world_size
    sink_TK = sink_rank * layout.each + layout.real + sink_slot
    places_TK, weights_TK, counter = out
    places_TK.copy_(torch.where(live_TK, place_TK, sink_TK))
    summed_TK = torch.where(same_TKK, weights_TKK, 0).sum(2)
    weights_TK.copy_(torch.where(live_TK, summed_TK, 0))
    counter.add_(invalid)
