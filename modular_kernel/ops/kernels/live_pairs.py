"""Ids and weights of rows that may not have been written."""

import triton
import triton.language as tl


@triton.jit
def live_pairs_kernel(
    ids_ptr, weights_ptr, count_ptr, out_ids_ptr, out_weights_ptr, num_pairs,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ids and weights, but -1 and 0 in rows from *count on and for negative ids."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < num_pairs
    written = inside & (pair < tl.load(count_ptr).to(tl.int64) * TOP_K)
    ids = tl.load(ids_ptr + pair, mask=written, other=-1)
    live = written & (ids >= 0)
    weights = tl.load(weights_ptr + pair, mask=live, other=0.0)
    tl.store(out_ids_ptr + pair, tl.where(live, ids, -1).to(tl.int32), mask=inside)
    tl.store(out_weights_ptr + pair, weights, mask=inside)
