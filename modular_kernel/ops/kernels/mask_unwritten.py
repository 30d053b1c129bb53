"""`mask_unwritten_pairs_kernel`: mask the expert ids and router weights of unwritten rows.

A buffer for tokens from other ranks may have more rows than tokens that arrived. A pair is a token
together with one of its top_k experts: pair p belongs to token p // top_k.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.pdl import pdl_wait


@triton.jit
def mask_unwritten_pairs_kernel(
    topk_ids_ptr, router_weights_ptr, num_rows_ptr, out_topk_ids_ptr, out_router_weights_ptr,
    num_pairs,
    TOP_K: tl.constexpr, BLOCK_PAIRS: tl.constexpr, USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """Copy the ids and weights of the first num_rows rows.

    Pairs of other rows and pairs with a negative id get id -1 and weight 0.

    Grid: (blocks of BLOCK_PAIRS pairs,).

    topk_ids_ptr, router_weights_ptr: (rows, TOP_K), contiguous.
    num_rows_ptr: (1,) integer, the number of rows that were written.
    out_topk_ids_ptr, out_router_weights_ptr: outputs (rows, TOP_K), int32 and float32.
    USE_PDL: whether the launch uses programmatic dependent launch (`pdl_wait`).
    """
    pdl_wait(USE_PDL)
    pair = tl.program_id(0).to(tl.int64) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    in_bounds = pair < num_pairs
    # Unwritten rows are loaded, too, so that these loads do not wait for num_rows.
    ids = tl.load(topk_ids_ptr + pair, mask=in_bounds, other=-1)
    weights = tl.load(router_weights_ptr + pair, mask=in_bounds, other=0.0)
    valid = (ids >= 0) & (pair < tl.load(num_rows_ptr).to(tl.int64) * TOP_K)
    tl.store(out_topk_ids_ptr + pair, tl.where(valid, ids, -1).to(tl.int32), mask=in_bounds)
    tl.store(out_router_weights_ptr + pair, tl.where(valid, weights, 0.0), mask=in_bounds)
