"""Router weights of tokens that hold a NaN."""

import triton
import triton.language as tl


@triton.jit
def nan_rows_kernel(
    x_ptr, ids_ptr, weights_ptr, hidden, stride_row, stride_column,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Make the weights of a token's pairs NaN where its row of x has one; skipped pairs stay 0.

    One program for each token. ids (T, K) int32, -1 for a skipped pair; weights (T, K) float32.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_H)
    found = tl.zeros((BLOCK_H,), tl.int32)
    for start in range(0, hidden, BLOCK_H):
        at = (start + column).to(tl.int64)
        x = tl.load(x_ptr + token * stride_row + at * stride_column, mask=at < hidden, other=0.0)
        found |= (x != x).to(tl.int32)
    k = tl.arange(0, BLOCK_K)
    pair, here = token * TOP_K + k, k < TOP_K
    live = tl.load(ids_ptr + pair, mask=here, other=-1) >= 0
    nan = tl.full((BLOCK_K,), float("nan"), tl.float32)
    # NaN-free: integers
    tl.store(weights_ptr + pair, nan, mask=here & live & (tl.max(found, 0) > 0))
