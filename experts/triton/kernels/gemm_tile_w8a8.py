"""Device functions that compute one output tile from 8-bit rows and 8-bit weights with scales."""

import triton
import triton.language as tl

from experts.triton.kernels.gemm_tile import accumulate, untranspose, zero_accumulator


@triton.jit
def multiply_tile_w8a8(
    a_ptrs, a_mask, b_ptrs, b_mask, up_offset, stride_ak, stride_bk, depth,
    a_scale_ptrs, stride_ask, b_scale_ptrs, up_scale_ptrs, stride_bsk, column_mask,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, GROUP_K: tl.constexpr, ONE_SCALE: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Like `multiply_tile`, for fp8 or int8 operands. Return scaled (gate, up) in float32.

    If GROUP_K is 0, each row and each column has one scale, which is applied after the loop.
    Otherwise, a scale covers GROUP_K elements along K. BLOCK_K divides GROUP_K, so that each row
    and each column has one scale per K step.

    a_scale_ptrs: (BLOCK_M,), pointers to the first scale of each row.
    b_scale_ptrs: (BLOCK_N,), pointers to the first scale of each column; a single pointer if
        ONE_SCALE.
    up_scale_ptrs: the same for up.
    """
    ACC: tl.constexpr = tl.int32 if b_ptrs.dtype.element_ty == tl.int8 else tl.float32
    SUM: tl.constexpr = ACC if GROUP_K == 0 else tl.float32
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptrs + k[None, :] * stride_ak
    b_ptrs = b_ptrs + k[:, None] * stride_bk
    rows = tl.reshape(a_mask, (BLOCK_M,))
    zero = zero_accumulator(ACC, SWAP, BLOCK_M, BLOCK_N)
    gate = zero_accumulator(SUM, SWAP, BLOCK_M, BLOCK_N)
    up = gate
    for start in range(0, depth, BLOCK_K):
        in_bounds = start + k < depth
        a_mask_k = a_mask if EVEN_K else a_mask & in_bounds[None, :]
        b_mask_k = b_mask if EVEN_K else b_mask & in_bounds[:, None]
        a = tl.load(a_ptrs, mask=a_mask_k, other=0.0)
        b = tl.load(b_ptrs, mask=b_mask_k, other=0.0)
        if GROUP_K == 0:
            gate = accumulate(gate, a, b, "ieee", SWAP)
            if GATED:
                c = tl.load(b_ptrs + up_offset, mask=b_mask_k, other=0.0)
                up = accumulate(up, a, c, "ieee", SWAP)
        else:
            group = start // GROUP_K
            a_scale = tl.load(a_scale_ptrs + group * stride_ask, mask=rows, other=0.0)
            b_scale = weight_scale(b_scale_ptrs + group * stride_bsk, column_mask, ONE_SCALE)
            part = accumulate(zero, a, b, "ieee", SWAP).to(tl.float32)
            gate += part * scale_products(a_scale, b_scale, SWAP)
            if GATED:
                c = tl.load(b_ptrs + up_offset, mask=b_mask_k, other=0.0)
                c_scale = weight_scale(up_scale_ptrs + group * stride_bsk, column_mask, ONE_SCALE)
                part = accumulate(zero, a, c, "ieee", SWAP).to(tl.float32)
                up += part * scale_products(a_scale, c_scale, SWAP)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    gate = untranspose(gate, SWAP)
    up = untranspose(up, SWAP)
    if GROUP_K == 0:
        a_scale = tl.load(a_scale_ptrs, mask=rows, other=0.0)
        b_scale = weight_scale(b_scale_ptrs, column_mask, ONE_SCALE)
        gate_out = gate.to(tl.float32) * scale_products(a_scale, b_scale, False)
        up_out = gate_out
        if GATED:
            c_scale = weight_scale(up_scale_ptrs, column_mask, ONE_SCALE)
            up_out = up.to(tl.float32) * scale_products(a_scale, c_scale, False)
    else:
        gate_out = gate
        up_out = up
    return gate_out, up_out


@triton.jit
def weight_scale(ptrs, column_mask, ONE_SCALE: tl.constexpr):
    """Load weight scales, (1,) if ONE_SCALE, else (BLOCK_N,). Masked scales are 0."""
    if ONE_SCALE:
        result = tl.full((1,), 0.0, tl.float32) + tl.load(ptrs)
    else:
        result = tl.load(ptrs, mask=column_mask, other=0.0)
    return result


@triton.jit
def scale_products(a_scale, b_scale, SWAP: tl.constexpr):
    """Return the products of row and column scales, (BLOCK_M, BLOCK_N), transposed if SWAP."""
    if SWAP:
        result = b_scale[:, None] * a_scale[None, :]
    else:
        result = a_scale[:, None] * b_scale[None, :]
    return result
