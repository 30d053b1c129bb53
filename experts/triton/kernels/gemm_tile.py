"""Device functions that compute and store one output tile, shared by the Triton GEMM kernels."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.activation import activate


@triton.jit
def grouped_tile_order(pid, num_m, num_n, GROUP_M: tl.constexpr):
    """Return (pid_m, pid_n), the row block and the column block of a program.

    Row blocks are computed in groups of GROUP_M, one column block after another, so that the row
    blocks of a group share weight tiles in L2.
    """
    per_group = GROUP_M * num_n
    first_m = (pid // per_group) * GROUP_M
    group_m = tl.minimum(num_m - first_m, GROUP_M)  # NaN-free: integers
    index_in_group = pid % per_group
    return first_m + index_in_group % group_m, index_in_group // group_m


@triton.jit
def zero_accumulator(
    dtype: tl.constexpr, SWAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return zeros (BLOCK_M, BLOCK_N) to start `accumulate` with. They are transposed if SWAP."""
    if SWAP:
        result = tl.zeros((BLOCK_N, BLOCK_M), dtype)
    else:
        result = tl.zeros((BLOCK_M, BLOCK_N), dtype)
    return result


@triton.jit
def accumulate(total, a, b, PRECISION: tl.constexpr, SWAP: tl.constexpr):
    """Return total + a @ b. If SWAP, total is transposed, and b^T @ a^T is added.

    The left operand of wgmma must have a multiple of 64 rows, and the right operand a multiple of 8
    columns. If `a` has few rows, the weights should therefore be the left operand.
    """
    if SWAP:
        result = tl.dot(
            tl.trans(b), tl.trans(a), total, input_precision=PRECISION, out_dtype=total.dtype
        )
    else:
        result = tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)
    return result


@triton.jit
def untranspose(total, SWAP: tl.constexpr):
    """Return the accumulator of `accumulate`, transposed back to (BLOCK_M, BLOCK_N) if SWAP."""
    return tl.trans(total) if SWAP else total


@triton.jit
def multiply_tile(
    a_ptrs, a_mask, b_ptrs, b_mask, up_offset, stride_ak, stride_bk, depth,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply rows (BLOCK_M, depth) by weights (depth, BLOCK_N), and by up weights if GATED.

    Return (gate, up) in float32. If not GATED, `up` is `gate`.

    a_ptrs: (BLOCK_M, 1), pointers to the rows at k = 0. Rows masked by a_mask are read as 0.
    b_ptrs: (1, BLOCK_N), pointers to the weights at k = 0. Columns masked by b_mask are read as 0.
    up_offset: number of elements from gate weights to up weights.
    EVEN_K: whether BLOCK_K divides depth.
    SWAP: see `accumulate`.
    """
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptrs + k[None, :] * stride_ak
    b_ptrs = b_ptrs + k[:, None] * stride_bk
    gate = zero_accumulator(tl.float32, SWAP, BLOCK_M, BLOCK_N)
    up = gate
    for start in range(0, depth, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=a_mask, other=0.0)
            b = tl.load(b_ptrs, mask=b_mask, other=0.0)
            if GATED:
                c = tl.load(b_ptrs + up_offset, mask=b_mask, other=0.0)
        else:
            in_bounds = start + k < depth
            b_mask_k = b_mask & in_bounds[:, None]
            a = tl.load(a_ptrs, mask=a_mask & in_bounds[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=b_mask_k, other=0.0)
            if GATED:
                c = tl.load(b_ptrs + up_offset, mask=b_mask_k, other=0.0)
        gate = accumulate(gate, a, b, PRECISION, SWAP)
        if GATED:
            up = accumulate(up, a, c, PRECISION, SWAP)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    return untranspose(gate, SWAP), untranspose(up, SWAP)


@triton.jit
def multiply_interleaved(
    a_ptrs, a_mask, b_ptr, first_column, columns, stride_ak, stride_bk, depth,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Like `multiply_tile` with GATED, for gate and up weights that alternate and are adjacent.

    b_ptr points to `depth` rows of 2 * columns adjacent elements. Column n uses elements 2n (gate)
    and 2n + 1 (up) of each row. Gate and up are loaded and multiplied as one tile of 2 * BLOCK_N
    adjacent columns: loads of every other 16-bit element cannot be vectorized, and without vectors
    of at least 4 bytes, there are no asynchronous copies.
    """
    pair_columns = 2 * first_column + tl.arange(0, 2 * BLOCK_N)
    both, _ = multiply_tile(
        a_ptrs, a_mask, b_ptr + pair_columns.to(tl.int64)[None, :],
        (pair_columns < 2 * columns)[None, :], 0, stride_ak, stride_bk, depth,
        False, EVEN_K, PRECISION, SWAP, BLOCK_M, 2 * BLOCK_N, BLOCK_K,
    )  # fmt: skip
    return tl.split(tl.reshape(both, (BLOCK_M, BLOCK_N, 2)))


@triton.jit
def finish_tile(
    gate, up, bias_ptr, bias_columns, bias_up, column_mask, row_weights,
    HAS_BIAS: tl.constexpr, HAS_ROW_WEIGHTS: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Apply the router weights, the bias and the activation to a float32 tile; return the result.

    The router weight w is applied before the bias is added, because weights on the input give
    (w * x) W + b.

    bias_columns: (BLOCK_N,), the index of the bias of each column. For up, it is bias_columns +
        bias_up.
    row_weights: (BLOCK_M,), the router weights.
    KIND: the activation; "identity" for none.
    """
    if HAS_ROW_WEIGHTS:
        gate = gate * row_weights[:, None]
        if GATED:
            up = up * row_weights[:, None]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + bias_columns, mask=column_mask, other=0.0)
        gate = gate + bias.to(tl.float32)[None, :]
        if GATED:
            bias = tl.load(bias_ptr + bias_columns + bias_up, mask=column_mask, other=0.0)
            up = up + bias.to(tl.float32)[None, :]
    if KIND == "identity":
        result = gate
    else:
        result = activate(gate, up, KIND, ALPHA, LIMIT)
    return result


@triton.jit
def store_rows(out_ptr, rows, row_mask, column, column_mask, columns, values):
    """Round a float32 tile and store it to `rows` of a contiguous output with `columns` columns."""
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * columns + column[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=mask)
