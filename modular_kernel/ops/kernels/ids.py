"""Device functions that map the expert ids of the router to the experts on this rank.

A pair is a token together with one of its top_k experts: pair p belongs to token p // top_k. Ids
are global, in [0, num_experts). Local ids, in [0, num_local_experts), are indices into the weights
on this rank. A pair is skipped if its id is -1, if its expert is on another rank, or if its id is
invalid, that is, outside [-1, num_experts).
"""

import triton
import triton.language as tl


@triton.jit
def load_local_ids(
    topk_ids_ptr,
    offsets,
    mask,
    expert_map_ptr,
    num_experts,
    num_local_experts,
    HAS_EXPERT_MAP: tl.constexpr,
):
    """Load expert ids, and return (local ids, mask of invalid ids).

    Local ids are int32. Skipped pairs and masked lanes get -1.

    topk_ids_ptr: int32 or int64, the id of each pair.
    offsets: the pairs to load.
    mask: False for lanes that must not be loaded.
    expert_map_ptr: (num_experts,) int32, the local id of each global id, or -1. Used if
        HAS_EXPERT_MAP; otherwise ids are local ids.
    """
    # Ids are converted to int32 only at the end: earlier, an invalid int64 id could become valid.
    ids = tl.load(topk_ids_ptr + offsets, mask=mask, other=-1)
    in_range = (ids >= 0) & (ids < num_experts)
    invalid = mask & ((ids < -1) | (ids >= num_experts))
    local_expert = tl.where(in_range, ids, -1)
    if HAS_EXPERT_MAP:
        local_expert = tl.load(expert_map_ptr + local_expert, mask=in_range, other=-1)
    local_expert = tl.where(
        (local_expert >= 0) & (local_expert < num_local_experts), local_expert, -1
    )
    return local_expert.to(tl.int32), invalid


@triton.jit
def count_invalid_ids(
    topk_ids_ptr, expert_map_ptr, invalid_count_ptr, num_pairs, num_experts, num_local_experts,
    HAS_EXPERT_MAP: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Add the number of invalid ids to the counter at invalid_count_ptr, in one program."""
    for first in range(0, num_pairs, BLOCK_PAIRS):
        pairs = first + tl.arange(0, BLOCK_PAIRS)
        _, invalid = load_local_ids(
            topk_ids_ptr,
            pairs,
            pairs < num_pairs,
            expert_map_ptr,
            num_experts,
            num_local_experts,
            HAS_EXPERT_MAP,
        )
        num_invalid = tl.sum(invalid.to(tl.int32), axis=0)
        if num_invalid > 0:
            tl.atomic_add(invalid_count_ptr, num_invalid)
