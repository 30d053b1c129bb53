"""Device functions that compute and store one output tile of a GEMM.

The Triton GEMM kernels of this package (`grouped_gemm`, `segment_gemm`, `batched_gemm` and others)
share these functions. A tile is BLOCK_M rows of activations times BLOCK_N output columns, summed
over K.

A gated GEMM computes two values per output column from two weight rows of one matrix: gate and up.
The activation function then combines them to one value, for example silu(gate) * up.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.activation import activate


@triton.jit
def grouped_tile_order(pid, num_m_blocks, num_n_blocks, GROUP_M: tl.constexpr):
    """Return (pid_m, pid_n), the row block and the column block of program `pid`.

    As in the Triton matmul tutorial, GROUP_M row blocks are computed for one column block, then for
    the next one, so that they share weight tiles in the L2 cache.
    """
    blocks_per_group = GROUP_M * num_n_blocks
    first_m = (pid // blocks_per_group) * GROUP_M
    group_m = tl.minimum(num_m_blocks - first_m, GROUP_M)  # NaN-free: integer operands
    index_in_group = pid % blocks_per_group
    return first_m + index_in_group % group_m, index_in_group // group_m


@triton.jit
def make_zero_accumulator(
    dtype: tl.constexpr, SWAP_AB: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return a zero accumulator for `accumulate`.

    Its shape is (BLOCK_N, BLOCK_M) if SWAP_AB, and (BLOCK_M, BLOCK_N) otherwise.
    """
    if SWAP_AB:
        result = tl.zeros((BLOCK_N, BLOCK_M), dtype)
    else:
        result = tl.zeros((BLOCK_M, BLOCK_N), dtype)
    return result


@triton.jit
def accumulate(total, a, b, INPUT_PRECISION: tl.constexpr, SWAP_AB: tl.constexpr):
    """Return total + a @ b. If SWAP_AB, total is transposed, and the result is total + b^T @ a^T.

    On sm_90, the left operand of the MMA instruction (wgmma) must have a multiple of 64 rows, and
    the right operand a multiple of 8 columns. With few activation rows, less work is wasted if the
    weights are the left operand.

    total: the accumulator, from `make_zero_accumulator` or an earlier call.
    a: (BLOCK_M, BLOCK_K), activations.
    b: (BLOCK_K, BLOCK_N), weights.
    INPUT_PRECISION: `input_precision` of tl.dot, used for float32 operands.
    """
    if SWAP_AB:
        result = tl.dot(
            tl.trans(b), tl.trans(a), total, input_precision=INPUT_PRECISION, out_dtype=total.dtype
        )
    else:
        result = tl.dot(a, b, total, input_precision=INPUT_PRECISION, out_dtype=total.dtype)
    return result


@triton.jit
def untranspose(total, SWAP_AB: tl.constexpr):
    """Return the accumulator of `accumulate` as (BLOCK_M, BLOCK_N)."""
    return tl.trans(total) if SWAP_AB else total


@triton.jit
def multiply_tile(
    a_ptrs, a_mask, b_ptrs, b_mask, up_offset, stride_ak, stride_bk, size_k,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, INPUT_PRECISION: tl.constexpr, SWAP_AB: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply activation rows (BLOCK_M, K) by weights (K, BLOCK_N) without scales.

    Return (gate, up), float32 (BLOCK_M, BLOCK_N). If not GATED, `up` is the same as `gate`.

    a_ptrs: (BLOCK_M, 1), pointers to the activation rows at k = 0.
    a_mask: (BLOCK_M, 1). Rows where it is False are read as 0.
    b_ptrs: (1, BLOCK_N), pointers to the gate (or only) weights of each column at k = 0.
    b_mask: (1, BLOCK_N). Columns where it is False are read as 0.
    up_offset: offset in elements from a gate weight to the up weight of the same column.
    stride_ak: stride of the activations along K.
    stride_bk: stride of the weights along K.
    GATED: whether to compute up in addition to gate.
    EVEN_K: whether BLOCK_K divides K, so that no masks along K are needed.
    INPUT_PRECISION: see `accumulate`.
    SWAP_AB: see `accumulate`.
    """
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptrs + k[None, :] * stride_ak
    b_ptrs = b_ptrs + k[:, None] * stride_bk
    gate = make_zero_accumulator(tl.float32, SWAP_AB, BLOCK_M, BLOCK_N)
    up = gate
    for start in range(0, size_k, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=a_mask, other=0.0)
            b = tl.load(b_ptrs, mask=b_mask, other=0.0)
            if GATED:
                up_b = tl.load(b_ptrs + up_offset, mask=b_mask, other=0.0)
        else:
            in_bounds = start + k < size_k
            b_mask_k = b_mask & in_bounds[:, None]
            a = tl.load(a_ptrs, mask=a_mask & in_bounds[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=b_mask_k, other=0.0)
            if GATED:
                up_b = tl.load(b_ptrs + up_offset, mask=b_mask_k, other=0.0)
        gate = accumulate(gate, a, b, INPUT_PRECISION, SWAP_AB)
        if GATED:
            up = accumulate(up, a, up_b, INPUT_PRECISION, SWAP_AB)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    return untranspose(gate, SWAP_AB), untranspose(up, SWAP_AB)


@triton.jit
def multiply_interleaved(
    a_ptrs, a_mask, b_ptr, first_column, size_n, stride_ak, stride_bk, size_k,
    EVEN_K: tl.constexpr, INPUT_PRECISION: tl.constexpr, SWAP_AB: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Like `multiply_tile` with GATED, for weights with interleaved gate and up columns.

    For each k, the weights of all columns are contiguous: gate of column 0, up of column 0, gate of
    column 1, and so on. Gate and up are loaded and multiplied as one tile of 2 * BLOCK_N columns.
    Separate loads would read every other 16-bit element. The compiler cannot vectorize them, and it
    uses asynchronous copies (cp.async) only for vectors of at least 4 bytes.

    b_ptr: pointer to the weights of the expert, (K, 2 * size_n).
    first_column: the first output column of the tile.
    """
    pair_columns = 2 * first_column + tl.arange(0, 2 * BLOCK_N)
    gate_up, _ = multiply_tile(
        a_ptrs, a_mask, b_ptr + pair_columns.to(tl.int64)[None, :],
        (pair_columns < 2 * size_n)[None, :], 0, stride_ak, stride_bk, size_k,
        False, EVEN_K, INPUT_PRECISION, SWAP_AB, BLOCK_M, 2 * BLOCK_N, BLOCK_K,
    )  # fmt: skip
    return tl.split(tl.reshape(gate_up, (BLOCK_M, BLOCK_N, 2)))


@triton.jit
def finish_tile(
    gate, up, bias_ptr, bias_columns, bias_up, column_mask, router_weights,
    HAS_BIAS: tl.constexpr, HAS_ROUTER_WEIGHTS: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, ACTIVATION_ALPHA: tl.constexpr, ACTIVATION_LIMIT: tl.constexpr,
):  # fmt: skip
    """Apply router weights, bias and activation function to an accumulated tile; return float32.

    If router weights apply to the input of the layer, GEMM 1 multiplies its sums by them: (w * x) W
    = w * (x W). The bias is added afterwards, because it must not be multiplied.

    gate, up: float32 (BLOCK_M, BLOCK_N), from `multiply_tile`.
    bias_ptr: pointer to the biases of the expert, one per weight row.
    bias_columns: (BLOCK_N,), the index of the gate (or only) bias of each column.
    bias_up: offset from the gate bias to the up bias of a column.
    column_mask: (BLOCK_N,), False for columns past the last one.
    router_weights: (BLOCK_M,) float32. Used if HAS_ROUTER_WEIGHTS.
    ACTIVATION: name of the activation function (`modular_kernel.ops.kernels.activation`), or
        "identity".
    ACTIVATION_ALPHA, ACTIVATION_LIMIT: parameters of the activation function.
    """
    if HAS_ROUTER_WEIGHTS:
        gate = gate * router_weights[:, None]
        if GATED:
            up = up * router_weights[:, None]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + bias_columns, mask=column_mask, other=0.0)
        gate = gate + bias.to(tl.float32)[None, :]
        if GATED:
            bias = tl.load(bias_ptr + bias_columns + bias_up, mask=column_mask, other=0.0)
            up = up + bias.to(tl.float32)[None, :]
    if ACTIVATION == "identity":
        result = gate
    else:
        result = activate(gate, up, ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT)
    return result


@triton.jit
def store_rows(out_ptr, rows, row_mask, column, column_mask, size_n, values):
    """Round a float32 tile to the output dtype and store it in a contiguous output (M, size_n).

    rows: (BLOCK_M,), the output row of each row of the tile.
    row_mask: (BLOCK_M,). Rows where it is False are not stored.
    column: (BLOCK_N,), the output column of each column of the tile.
    column_mask: (BLOCK_N,). Columns where it is False are not stored.
    values: float32 (BLOCK_M, BLOCK_N).
    """
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * size_n + column[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=mask)
