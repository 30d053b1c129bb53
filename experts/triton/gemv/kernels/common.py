"""Device functions of the gemv path, which computes matrix-vector products without tensor cores.

A program loads a tile (S, N, K) of weights, which has N rows and K columns for each of S pairs. A
thread loads VEC adjacent weights along K, multiplies them by the values of the vector, and adds
the VEC products to one sum, so that the sums are (S, N, K / VEC). Loading weights limits the speed
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
    codes, x, x_scale, scale_ptrs, zero_ptrs, mask,
    ZERO_POINT: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP_K: tl.constexpr,
    S: tl.constexpr, N: tl.constexpr, K: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of stored weights by the vectors, and return the sums (S, N, K / VEC).

    codes: (S, N, K), stored weights.
    x: (S, K).
    x_scale: (S, K / VEC). If GROUP_K > 0, the sums are multiplied by weight scales and x_scale.
    scale_ptrs, zero_ptrs: (S, N or 1, K / VEC).
    mask: has the shape of scale_ptrs, and is False for rows and K out of bounds.
    """
    values = tl.reshape(weights_to_float32(codes, ZERO_POINT), (S, N, K // VEC, VEC))
    if HAS_ZERO:
        zero = tl.load(zero_ptrs, mask=mask, other=0)
        values -= tl.expand_dims(zero.to(tl.float32), 3)
    sums = tl.sum(values * tl.reshape(x, (S, 1, K // VEC, VEC)), axis=3)
    if GROUP_K > 0:
        scale = tl.load(scale_ptrs, mask=mask, other=0.0).to(tl.float32)
        sums *= scale * x_scale[:, None, :]
    return sums


@triton.jit
def n_major_sums(
    x_ptrs, x_mask, w_ptrs, w_mask, stride_xk, stride_bk, depth,
    S: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STEP_ROWS: tl.constexpr,
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
    k = tl.arange(0, K)
    w_ptrs += (k * stride_bk)[None, :, None]
    sums = tl.zeros((S, STEP_ROWS, N), tl.float32)
    for start in tl.range(0, depth, K, num_stages=STAGES):
        in_bounds = start + k < depth
        w = tl.load(w_ptrs, mask=w_mask & in_bounds[None, :, None], other=0.0)
        x = tl.load(
            x_ptrs + ((start + k) * stride_xk)[None, :], mask=x_mask & in_bounds[None, :], other=0.0
        )
        products = w.to(tl.float32) * x.to(tl.float32)[:, :, None]
        sums += tl.sum(tl.reshape(products, (S, K // STEP_ROWS, STEP_ROWS, N)), axis=1)
        w_ptrs += K * stride_bk
    return tl.sum(sums, axis=1)


@triton.jit
def quantize_groups(
    x, QMAX: tl.constexpr, ROUND: tl.constexpr, MIN_SCALE: tl.constexpr, TYPE: tl.constexpr,
    GROUP: tl.constexpr, S: tl.constexpr, K: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Quantize x (S, K) with one scale per GROUP columns.

    Return the quantized values as float32 (S, K), and the scales (S, K / VEC).
    """
    groups = tl.reshape(x, (S, K // GROUP, GROUP))
    scale = scale_of(max_nan(tl.abs(groups), 2), QMAX, MIN_SCALE)
    q = quantize_to_float32(groups, scale[:, :, None], QMAX, ROUND, TYPE)
    scales = tl.broadcast_to(scale[:, :, None], (S, K // GROUP, GROUP // VEC))
    return tl.reshape(q, (S, K)), tl.reshape(scales, (S, K // VEC))


@triton.jit
def adapter_sums(
    u_ptrs, u_mask, b_ptrs, b_mask, rank, R: tl.constexpr
):  # fmt: skip
    """Return B u, float32 (S, N).

    u_ptrs: (S, 1), pointing at element 0 of u.
    b_ptrs: (S, N, 1), pointing at column 0 of the rows of B.
    R: a power of two >= rank.
    """
    r = tl.arange(0, R)
    in_bounds = r < rank
    u = tl.load(u_ptrs + r[None, :], mask=u_mask & in_bounds[None, :], other=0.0).to(tl.float32)
    b = tl.load(b_ptrs + r[None, None, :], mask=b_mask & in_bounds[None, None, :], other=0.0)
    return tl.sum(b.to(tl.float32) * u[:, None, :], axis=2)


@triton.jit
def quantize_to_float32(x, scale, QMAX: tl.constexpr, ROUND: tl.constexpr, TYPE: tl.constexpr):
    """Quantize float32 x with this scale as `quantize_rows` does, and return it as float32."""
    q = quantized_values(x, tl.div_rn(1.0, scale), QMAX, ROUND)
    return q.to(TYPE).to(tl.float32)
