"""Grouped GEMM over rows that already lie expert by expert."""

import triton
import triton.language as tl

from experts.kernels.triton.tile import finish_tile, grouped_tile_order, multiply_tile, store_rows


@triton.jit
def batched_gemm_kernel(
    a_ptr, b_ptr, bias_ptr, out_ptr, counts_ptr,
    capacity, columns, depth, up_row, up_offset, num_m,
    stride_be, stride_bn, stride_bk, stride_bias,
    ROW_STEP: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out[i, c, n] = act(a[i, c] @ b[i, rows of n]^T) for c < counts[i].

    a is (e, capacity, depth) and out (e, capacity, columns), both contiguous; rows from the count
    on are neither read nor written. b as in grouped_gemm_kernel. Grid (tiles of one expert, e).
    """
    expert = tl.program_id(1).to(tl.int64)
    pid_m, pid_n = grouped_tile_order(tl.program_id(0), num_m, tl.cdiv(columns, BLOCK_N), GROUP_M)
    count = tl.load(counts_ptr + expert)
    if pid_m * BLOCK_M >= count:
        return
    row = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = row < count
    column = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < columns
    slot = expert * capacity + row.to(tl.int64)
    b_row = (column * ROW_STEP).to(tl.int64)
    gate, up = multiply_tile(
        a_ptr + slot[:, None] * depth,
        row_mask[:, None],
        b_ptr + expert * stride_be + b_row[None, :] * stride_bn,
        column_mask[None, :],
        up_offset,
        1, stride_bk, depth,
        GATED, EVEN_K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    result = finish_tile(
        gate, up, bias_ptr + expert * stride_bias, column * ROW_STEP, up_row, column_mask,
        gate, HAS_BIAS, False, GATED, KIND, ALPHA, LIMIT,
    )  # fmt: skip
    store_rows(out_ptr, slot, row_mask, column, column_mask, columns, result)
