"""Device functions shared by the contiguous and the batched grouped GEMM: one output tile."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.activation import activate


@triton.jit
def grouped_tile_order(pid, num_m, num_n, GROUP_M: tl.constexpr):
    """(pid_m, pid_n) such that GROUP_M row blocks walk the columns together and share weights."""
    per_group = GROUP_M * num_n
    first_m = (pid // per_group) * GROUP_M
    group_m = tl.minimum(num_m - first_m, GROUP_M)
    within = pid % per_group
    return first_m + within % group_m, within // group_m


@triton.jit
def multiply_tile(
    a_ptrs, a_mask, b_ptrs, b_mask, up_offset, stride_ak, stride_bk, depth,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows (BLOCK_M, depth) times weights (depth, BLOCK_N), and the up weights beside if GATED.

    a_ptrs (BLOCK_M, 1) and b_ptrs (1, BLOCK_N) point at k = 0; masked rows and columns read 0.
    Returns float32 (gate, up); `up` is `gate` where not GATED.
    """
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptrs + k[None, :] * stride_ak
    b_ptrs = b_ptrs + k[:, None] * stride_bk
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = gate
    for start in range(0, depth, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=a_mask, other=0.0)
            b = tl.load(b_ptrs, mask=b_mask, other=0.0)
            if GATED:
                c = tl.load(b_ptrs + up_offset, mask=b_mask, other=0.0)
        else:
            inside = start + k < depth
            b_inside = b_mask & inside[:, None]
            a = tl.load(a_ptrs, mask=a_mask & inside[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=b_inside, other=0.0)
            if GATED:
                c = tl.load(b_ptrs + up_offset, mask=b_inside, other=0.0)
        gate = tl.dot(a, b, gate, input_precision=PRECISION)
        if GATED:
            up = tl.dot(a, c, up, input_precision=PRECISION)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    return gate, up


@triton.jit
def finish_tile(
    gate, up, bias_ptr, bias_columns, bias_up, column_mask, row_weights,
    HAS_BIAS: tl.constexpr, HAS_ROW_WEIGHTS: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Row weight, then bias, then activation (KIND "identity" for none), all in float32.

    The weight comes before the bias: weighting the input means (w * x) W + b.
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
    """Round a float32 tile and store it to rows of a contiguous output `columns` wide."""
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * columns + column[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=mask)
