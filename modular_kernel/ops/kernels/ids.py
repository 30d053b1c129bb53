"""Device functions that map the router's top-k ids to this rank's experts."""

import triton
import triton.language as tl


@triton.jit
def load_local_ids(ids_ptr, offsets, mask, map_ptr, num_experts, num_local, HAS_MAP: tl.constexpr):
    """Return int32 local ids, -1 for a skipped pair or a masked lane, and a mask of invalid ids.

    An id is invalid outside [-1, num_experts). If HAS_MAP, the table at map_ptr maps ids to local
    ids or -1. Ids are compared in their own width, so that a 64-bit id is not truncated into the
    range.
    """
    ids = tl.load(ids_ptr + offsets, mask=mask, other=-1)
    in_range = (ids >= 0) & (ids < num_experts)
    invalid = mask & ((ids < -1) | (ids >= num_experts))
    local = tl.where(in_range, ids, -1)
    if HAS_MAP:
        local = tl.load(map_ptr + local, mask=in_range, other=-1)
    local = tl.where((local >= 0) & (local < num_local), local, -1)
    return local.to(tl.int32), invalid


@triton.jit
def count_invalid_ids(
    ids_ptr, map_ptr, invalid_ptr, num_pairs, num_experts, num_local,
    HAS_MAP: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Add the number of invalid ids to the counter at invalid_ptr, in steps of BLOCK_P pairs."""
    for first in range(0, num_pairs, BLOCK_P):
        pairs = first + tl.arange(0, BLOCK_P)
        _, invalid = load_local_ids(
            ids_ptr, pairs, pairs < num_pairs, map_ptr, num_experts, num_local, HAS_MAP
        )
        num_invalid = tl.sum(invalid.to(tl.int32), axis=0)
        if num_invalid > 0:
            tl.atomic_add(invalid_ptr, num_invalid)
