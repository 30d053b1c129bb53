"""Kernel that masks ids and weights in rows that may not have been written."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.pdl import pdl_wait


@triton.jit
def mask_unwritten_pairs_kernel(
    ids_ptr, weights_ptr, count_ptr, out_ids_ptr, out_weights_ptr, num_pairs,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Copy ids and weights; store -1 and 0 in rows from *count on, and for negative ids.

    Grid: (blocks of BLOCK pairs,). Values of unwritten rows are loaded too and then discarded, so
    that no load depends on another.
    """
    pdl_wait(OVERLAP)
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = pair < num_pairs
    ids = tl.load(ids_ptr + pair, mask=in_bounds, other=-1)
    weights = tl.load(weights_ptr + pair, mask=in_bounds, other=0.0)
    valid = (ids >= 0) & (pair < tl.load(count_ptr).to(tl.int64) * TOP_K)
    tl.store(out_ids_ptr + pair, tl.where(valid, ids, -1).to(tl.int32), mask=in_bounds)
    tl.store(out_weights_ptr + pair, tl.where(valid, weights, 0.0), mask=in_bounds)
