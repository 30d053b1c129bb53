"""Device functions that map the router's top-k ids to this rank's experts."""

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
    """Return int32 local ids, -1 for a skipped pair or a masked lane, and a mask of invalid ids.

    An id is invalid outside [-1, num_experts). If HAS_EXPERT_MAP, the table at expert_map_ptr maps
    ids to local
    ids or -1. Ids are compared in their own width, so that a 64-bit id is not truncated into the
    range.
    """
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
    """Add the number of invalid ids to the counter at invalid_count_ptr, in steps of BLOCK_PAIRS
    pairs."""
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
