"""Device functions of the gemv path: matrix-vector products for a few tokens, without tensor cores.

A pair is a token together with one of its top_k experts: pair p belongs to token p // top_k. A
program loads a tile (PAIRS, ROWS, BLOCK_K) of weights: ROWS weight rows by BLOCK_K elements along
K, for each of PAIRS pairs. A thread loads VECTOR_SIZE adjacent weights along K, multiplies them by
the values of the vector, and adds the products to one sum, so that the sums are (PAIRS, ROWS,
BLOCK_K / VECTOR_SIZE). Loading weights limits the speed of the kernels, so they keep many bytes in
flight.

Weights are usually contiguous along K. `compute_n_major_sums` is for weights that are contiguous
along N, the weight rows. Its threads load adjacent rows.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.extrema import max_nan
from modular_kernel.ops.kernels.quantize import quantized_values, scale_of


@triton.jit
def weights_to_float32(codes, ZERO_POINT: tl.constexpr):
    """Convert stored weights to float32, and subtract ZERO_POINT from integers.

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
def compute_step_sums(
    codes, x, x_scale, scale_ptrs, zero_point_ptrs, mask,
    ZERO_POINT: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, GROUP_K: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR_SIZE: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of weights by the vectors, and return (PAIRS, ROWS, BLOCK_K / VECTOR_SIZE).

    codes: (PAIRS, ROWS, BLOCK_K), stored weights.
    x: float32 (PAIRS, BLOCK_K), one vector per pair.
    x_scale: (PAIRS, BLOCK_K / VECTOR_SIZE), the scales of x. If GROUP_K > 0, the sums are
        multiplied by the scales of x and of the weights.
    scale_ptrs, zero_point_ptrs: (PAIRS, ROWS or 1, BLOCK_K / VECTOR_SIZE), pointers to the scale
        and the zero point of each sum.
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
def compute_n_major_sums(
    x_ptrs, x_mask, w_ptrs, w_mask, stride_xk, stride_bk, size_k,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, STEP_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply vectors (PAIRS, K) by unquantized weights (PAIRS, K, ROWS), contiguous along ROWS.

    Return float32 (PAIRS, ROWS). A thread loads adjacent rows and adds the products of its own
    elements of K. The sums of the threads of a row are added once, after the last step.

    x_ptrs: (PAIRS, 1), pointers to the vectors at k = 0.
    w_ptrs: (PAIRS, 1, ROWS), pointers to the weights at k = 0.
    size_k: K.
    BLOCK_K: elements along K per step, a multiple of STEP_ROWS.
    STEP_ROWS: elements along K that the threads of a weight row load at once, one per thread.
    STAGES: stages of the software pipeline.
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
    """Quantize x (PAIRS, BLOCK_K) with one scale per GROUP_K elements.

    Return the quantized values as float32 (PAIRS, BLOCK_K), and the scales (PAIRS, BLOCK_K /
    VECTOR_SIZE).
    """
    groups = tl.reshape(x, (PAIRS, BLOCK_K // GROUP_K, GROUP_K))
    scale = scale_of(max_nan(tl.abs(groups), 2), QMAX, MIN_SCALE)
    q = quantize_to_float32(groups, scale[:, :, None], QMAX, ROUND_TO_INT, QUANT_DTYPE)
    scales = tl.broadcast_to(scale[:, :, None], (PAIRS, BLOCK_K // GROUP_K, GROUP_K // VECTOR_SIZE))
    return tl.reshape(q, (PAIRS, BLOCK_K)), tl.reshape(scales, (PAIRS, BLOCK_K // VECTOR_SIZE))


@triton.jit
def compute_adapter_sums(
    lora_u_ptrs, lora_u_mask, lora_b_ptrs, lora_b_mask, lora_rank, BLOCK_RANK: tl.constexpr
):  # fmt: skip
    """Return the LoRA term B u, float32 (PAIRS, ROWS).

    lora_u_ptrs: (PAIRS, 1), pointers to element 0 of u.
    lora_b_ptrs: (PAIRS, ROWS, 1), pointers to column 0 of the rows of B.
    lora_rank: the number of elements of u.
    BLOCK_RANK: a power of two >= lora_rank.
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
    """Quantize float32 x like `quantize_rows`, and return the quantized values as float32."""
    q = quantized_values(x, tl.div_rn(1.0, scale), QMAX, ROUND_TO_INT)
    return q.to(QUANT_DTYPE).to(tl.float32)
