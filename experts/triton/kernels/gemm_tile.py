"""Device functions for one output tile, shared by the Triton GEMM kernels."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.activation import activate


@triton.jit
def grouped_tile_order(pid, num_m, num_n, GROUP_M: tl.constexpr):
    """Return (pid_m, pid_n) of a program.

    Programs are ordered so that GROUP_M row blocks share weight tiles in L2.
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
    """Return the initial accumulator of `accumulate`: (BLOCK_M, BLOCK_N), or transposed if SWAP."""
    if SWAP:
        result = tl.zeros((BLOCK_N, BLOCK_M), dtype)
    else:
        result = tl.zeros((BLOCK_M, BLOCK_N), dtype)
    return result


@triton.jit
def accumulate(total, a, b, PRECISION: tl.constexpr, SWAP: tl.constexpr):
    """Return total + a @ b. If SWAP, total is transposed, and b^T @ a^T is added.

    The left operand of wgmma has a multiple of 64 rows, and its right operand a multiple of 8
    columns. With few rows in `a`, the weights should therefore be on the left.
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
    """Return the accumulator of `accumulate` as (BLOCK_M, BLOCK_N)."""
    return tl.trans(total) if SWAP else total


@triton.jit
def multiply_tile(
    a_ptrs, a_mask, b_ptrs, b_mask, up_offset, stride_ak, stride_bk, depth,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply rows (BLOCK_M, depth) by weights (depth, BLOCK_N), and by up weights if GATED.

    Return float32 (gate, up); `up` is `gate` if not GATED.

    a_ptrs, b_ptrs: (BLOCK_M, 1) and (1, BLOCK_N), pointing at k = 0. Masked rows and columns read
        0.
    up_offset: elements from gate weights to up weights.
    EVEN_K: BLOCK_K divides depth.
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

    Column n uses elements 2n (gate) and 2n + 1 (up) of each of the `depth` weight rows at b_ptr,
    which have 2 * columns adjacent elements. Both are loaded and multiplied as one tile of 2 *
    BLOCK_N adjacent columns, because loads of every other 16-bit element cannot be vectorized, and
    without vectors of at least 4 bytes there are no asynchronous copies.
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
    """Apply router weight, bias and activation to a float32 tile; KIND "identity": no activation.

    The weight multiplies before the bias is added: weighting the input w * x gives (w * x) W + b.

    bias_columns: (BLOCK_N,), the index of each column's bias; that of up is bias_up further.
    row_weights: (BLOCK_M,).
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
    """Round a float32 tile and store it to `rows` of a contiguous output that is `columns` wide."""
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * columns + column[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=mask)
