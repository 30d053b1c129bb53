"""Device functions of the gemv path, which computes matrix-vector products without tensor cores.

A program loads a tile (S, N, K) of weights, which has N rows and K columns for each of S pairs. A
thread loads VECTOR_SIZE adjacent weights along K, multiplies them by the values of the vector, and
adds
the VECTOR_SIZE products to one sum, so that the sums are (S, N, K / VECTOR_SIZE). Loading weights
limits the speed
of the kernels, so they keep many bytes in flight. `n_major_sums` loads weights whose N is
contiguous along N.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.extrema import max_nan
from modular_kernel.ops.kernels.quantize import quantized_values, scale_of


@triton.jit
def weights_to_float32(codes, ZERO_POINT: tl.constexpr):
    """Convert stored weights to float32, subtracting ZERO_POINT from integers.

    Direct conversion of bytes is slow on a GPU. The bits of the float 1.5 * 2^23 + n are 0x4B400000
    + n, so an integer addition and a float subtraction convert n.
    """
    if codes.dtype == tl.int8 or codes.dtype == tl.uint8:
        bits = codes.to(tl.int32) + 0x4B400000
        values = bits.to(tl.float32, bitcast=True) - (12582912.0 + ZERO_POINT)
    else:
        values = codes.to(tl.float32)
    return values


@triton.jit
def step_sums(
    codes, x, x_scale, scale_ptrs, zero_point_ptrs, mask,
    ZERO_POINT: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, GROUP_K: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR_SIZE: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of stored weights by the vectors, and return the sums (S, N, K /
    VECTOR_SIZE).

    codes: (S, N, K), stored weights.
    x: (S, K).
    x_scale: (S, K / VECTOR_SIZE). If GROUP_K > 0, the sums are multiplied by weight scales and
        x_scale.
    scale_ptrs, zero_point_ptrs: (S, N or 1, K / VECTOR_SIZE).
    mask: has the shape of scale_ptrs, and is False for rows and K out of bounds.
    """
    values = tl.reshape(
        weights_to_float32(codes, ZERO_POINT), (PAIRS, ROWS, BLOCK_K // VECTOR_SIZE, VECTOR_SIZE)
    )
    if HAS_ZERO_POINTS:
        zero = tl.load(zero_point_ptrs, mask=mask, other=0)
        values -= tl.expand_dims(zero.to(tl.float32), 3)
    sums = tl.sum(values * tl.reshape(x, (PAIRS, 1, BLOCK_K // VECTOR_SIZE, VECTOR_SIZE)), axis=3)
    if GROUP_K > 0:
        scale = tl.load(scale_ptrs, mask=mask, other=0.0).to(tl.float32)
        sums *= scale * x_scale[:, None, :]
    return sums


@triton.jit
def n_major_sums(
    x_ptrs, x_mask, w_ptrs, w_mask, stride_xk, stride_bk, size_k,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, STEP_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply vectors (S, depth) by unquantized weights (S, depth, N) whose N is contiguous.

    Return float32 (S, N). A thread loads adjacent columns and adds the products of its own elements
    of K. The sums of the threads of a column are added once, after the last step.

    x_ptrs: (S, 1), pointing at k = 0.
    w_ptrs: (S, 1, N), pointing at k = 0.
    K: elements of K per step, a multiple of STEP_ROWS.
    STEP_ROWS: elements of K that the threads of a column load at once, each thread one.
    """
    k = tl.arange(0, BLOCK_K)
    w_ptrs += (k * stride_bk)[None, :, None]
    sums = tl.zeros((PAIRS, STEP_ROWS, ROWS), tl.float32)
    for start in tl.range(0, size_k, BLOCK_K, num_stages=STAGES):
        in_bounds = start + k < size_k
        w = tl.load(w_ptrs, mask=w_mask & in_bounds[None, :, None], other=0.0)
        x = tl.load(
            x_ptrs + ((start + k) * stride_xk)[None, :], mask=x_mask & in_bounds[None, :], other=0.0
        )
        products = w.to(tl.float32) * x.to(tl.float32)[:, :, None]
        sums += tl.sum(tl.reshape(products, (PAIRS, BLOCK_K // STEP_ROWS, STEP_ROWS, ROWS)), axis=1)
        w_ptrs += BLOCK_K * stride_bk
    return tl.sum(sums, axis=1)


@triton.jit
def quantize_groups(
    x, QMAX: tl.constexpr, ROUND_TO_INT: tl.constexpr, MIN_SCALE: tl.constexpr,
    QUANT_DTYPE: tl.constexpr,
    GROUP_K: tl.constexpr, PAIRS: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR_SIZE: tl.constexpr,
):  # fmt: skip
    """Quantize x (S, K) with one scale per GROUP_K columns.

    Return the quantized values as float32 (S, K), and the scales (S, K / VECTOR_SIZE).
    """
    groups = tl.reshape(x, (PAIRS, BLOCK_K // GROUP_K, GROUP_K))
    scale = scale_of(max_nan(tl.abs(groups), 2), QMAX, MIN_SCALE)
    q = quantize_to_float32(groups, scale[:, :, None], QMAX, ROUND_TO_INT, QUANT_DTYPE)
    scales = tl.broadcast_to(scale[:, :, None], (PAIRS, BLOCK_K // GROUP_K, GROUP_K // VECTOR_SIZE))
    return tl.reshape(q, (PAIRS, BLOCK_K)), tl.reshape(scales, (PAIRS, BLOCK_K // VECTOR_SIZE))


@triton.jit
def adapter_sums(
    lora_u_ptrs, lora_u_mask, lora_b_ptrs, lora_b_mask, lora_rank, BLOCK_RANK: tl.constexpr
):  # fmt: skip
    """Return B u, float32 (S, N).

    lora_u_ptrs: (S, 1), pointing at element 0 of u.
    lora_b_ptrs: (S, N, 1), pointing at column 0 of the rows of B.
    R: a power of two >= rank.
    """
    rank_index = tl.arange(0, BLOCK_RANK)
    in_bounds = rank_index < lora_rank
    lora_u = tl.load(
        lora_u_ptrs + rank_index[None, :], mask=lora_u_mask & in_bounds[None, :], other=0.0
    ).to(tl.float32)
    lora_b = tl.load(
        lora_b_ptrs + rank_index[None, None, :],
        mask=lora_b_mask & in_bounds[None, None, :],
        other=0.0,
    )
    return tl.sum(lora_b.to(tl.float32) * lora_u[:, None, :], axis=2)


@triton.jit
def quantize_to_float32(
    x, scale, QMAX: tl.constexpr, ROUND_TO_INT: tl.constexpr, QUANT_DTYPE: tl.constexpr
):
    """Quantize float32 x with this scale as `quantize_rows` does, and return it as float32."""
    q = quantized_values(x, tl.div_rn(1.0, scale), QMAX, ROUND_TO_INT)
    return q.to(QUANT_DTYPE).to(tl.float32)
