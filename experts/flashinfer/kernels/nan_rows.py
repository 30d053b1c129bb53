"""Kernel that sets the router weights of each token whose row of x contains a NaN to NaN."""

import triton
import triton.language as tl


@triton.jit
def nan_rows_kernel(
    x_ptr, ids_ptr, weights_ptr, hidden, stride_row, stride_column,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Set the router weights of a token to NaN if its row of x contains a NaN.

    Grid: (tokens,). The weights of skipped pairs are not changed.

    x_ptr: (T, hidden).
    ids_ptr: (T, K) int32, -1 for a skipped pair.
    weights_ptr: (T, K) float32, modified in place.
    BLOCK_H: columns of x per step.
    BLOCK_K: a power of two >= TOP_K.
    """
    token = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, BLOCK_H)
    is_nan = tl.zeros((BLOCK_H,), tl.int32)
    for start in range(0, hidden, BLOCK_H):
        column = (start + offset).to(tl.int64)
        x = tl.load(
            x_ptr + token * stride_row + column * stride_column, mask=column < hidden, other=0.0
        )
        is_nan |= (x != x).to(tl.int32)
    k = tl.arange(0, BLOCK_K)
    pair, mask = token * TOP_K + k, k < TOP_K
    is_local = tl.load(ids_ptr + pair, mask=mask, other=-1) >= 0
    nan = tl.full((BLOCK_K,), float("nan"), tl.float32)
    # NaN-free: a maximum of integers
    tl.store(weights_ptr + pair, nan, mask=mask & is_local & (tl.max(is_nan, 0) > 0))
