"""`multiply_tile_w8a8`: compute one output tile from fp8 or int8 operands with scales."""

import triton
import triton.language as tl

from experts.triton.kernels.gemm_tile import accumulate, make_zero_accumulator, untranspose


@triton.jit
def multiply_tile_w8a8(
    a_ptrs, a_mask, b_ptrs, b_mask, up_offset, stride_ak, stride_bk, size_k,
    a_scale_ptrs, stride_ask, b_scale_ptrs, up_scale_ptrs, stride_bsk, column_mask,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, GROUP_K: tl.constexpr,
    ONE_SCALE_PER_TILE: tl.constexpr,
    SWAP_AB: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply fp8 or int8 activation rows by weights of the same dtype; return scaled (gate, up).

    gate and up are float32 (BLOCK_M, BLOCK_N). If not GATED, `up` is the same as `gate`.

    If GROUP_K is 0, each activation row and each weight row has one scale, and the scales multiply
    the result after the loop. Otherwise, a scale covers GROUP_K elements along K, and the scales
    multiply the partial sum of each K step. BLOCK_K then divides GROUP_K, so that a step has one
    scale per row.

    a_ptrs: (BLOCK_M, 1), pointers to the activation rows at k = 0.
    a_mask: (BLOCK_M, 1). Rows where it is False are read as 0.
    b_ptrs: (1, BLOCK_N), pointers to the gate (or only) weights of each column at k = 0.
    b_mask: (1, BLOCK_N). Columns where it is False are read as 0.
    up_offset: offset in elements from a gate weight to the up weight of the same column.
    a_scale_ptrs: (BLOCK_M,), pointers to the first scale of each activation row.
    stride_ask: stride of the activation scales along their groups.
    b_scale_ptrs: (BLOCK_N,), pointers to the first scale of each gate (or only) weight row; a
        single pointer if ONE_SCALE_PER_TILE.
    up_scale_ptrs: like b_scale_ptrs, for the up weight rows.
    stride_bsk: stride of the weight scales along their groups.
    column_mask: (BLOCK_N,). Scales of columns where it is False are read as 0.
    ONE_SCALE_PER_TILE: whether all gate rows of a tile share one scale, and all up rows share one.
    SWAP_AB: whether the weights are the left operand of the MMA (`accumulate`).
    """
    ACC: tl.constexpr = tl.int32 if b_ptrs.dtype.element_ty == tl.int8 else tl.float32
    SUM: tl.constexpr = ACC if GROUP_K == 0 else tl.float32
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptrs + k[None, :] * stride_ak
    b_ptrs = b_ptrs + k[:, None] * stride_bk
    rows = tl.reshape(a_mask, (BLOCK_M,))
    zero = make_zero_accumulator(ACC, SWAP_AB, BLOCK_M, BLOCK_N)
    gate = make_zero_accumulator(SUM, SWAP_AB, BLOCK_M, BLOCK_N)
    up = gate
    for start in range(0, size_k, BLOCK_K):
        in_bounds = start + k < size_k
        a_mask_k = a_mask if EVEN_K else a_mask & in_bounds[None, :]
        b_mask_k = b_mask if EVEN_K else b_mask & in_bounds[:, None]
        a = tl.load(a_ptrs, mask=a_mask_k, other=0.0)
        b = tl.load(b_ptrs, mask=b_mask_k, other=0.0)
        if GROUP_K == 0:
            gate = accumulate(gate, a, b, "ieee", SWAP_AB)
            if GATED:
                up_b = tl.load(b_ptrs + up_offset, mask=b_mask_k, other=0.0)
                up = accumulate(up, a, up_b, "ieee", SWAP_AB)
        else:
            group = start // GROUP_K
            a_scale = tl.load(a_scale_ptrs + group * stride_ask, mask=rows, other=0.0)
            b_scale = load_weight_scales(
                b_scale_ptrs + group * stride_bsk, column_mask, ONE_SCALE_PER_TILE
            )
            part = accumulate(zero, a, b, "ieee", SWAP_AB).to(tl.float32)
            gate += part * multiply_scales(a_scale, b_scale, SWAP_AB)
            if GATED:
                up_b = tl.load(b_ptrs + up_offset, mask=b_mask_k, other=0.0)
                up_b_scale = load_weight_scales(
                    up_scale_ptrs + group * stride_bsk, column_mask, ONE_SCALE_PER_TILE
                )
                part = accumulate(zero, a, up_b, "ieee", SWAP_AB).to(tl.float32)
                up += part * multiply_scales(a_scale, up_b_scale, SWAP_AB)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    gate = untranspose(gate, SWAP_AB)
    up = untranspose(up, SWAP_AB)
    if GROUP_K == 0:
        a_scale = tl.load(a_scale_ptrs, mask=rows, other=0.0)
        b_scale = load_weight_scales(b_scale_ptrs, column_mask, ONE_SCALE_PER_TILE)
        gate_out = gate.to(tl.float32) * multiply_scales(a_scale, b_scale, False)
        up_out = gate_out
        if GATED:
            up_b_scale = load_weight_scales(up_scale_ptrs, column_mask, ONE_SCALE_PER_TILE)
            up_out = up.to(tl.float32) * multiply_scales(a_scale, up_b_scale, False)
    else:
        gate_out = gate
        up_out = up
    return gate_out, up_out


@triton.jit
def load_weight_scales(ptrs, column_mask, ONE_SCALE_PER_TILE: tl.constexpr):
    """Load weight scales as float32: (1,) if ONE_SCALE_PER_TILE, otherwise (BLOCK_N,).

    Masked scales are 0.
    """
    if ONE_SCALE_PER_TILE:
        result = tl.full((1,), 0.0, tl.float32) + tl.load(ptrs)
    else:
        result = tl.load(ptrs, mask=column_mask, other=0.0)
    return result


@triton.jit
def multiply_scales(a_scale, b_scale, SWAP_AB: tl.constexpr):
    """Return the products of activation and weight scales, in the shape of the accumulator.

    The shape is (BLOCK_M, BLOCK_N), or (BLOCK_N, BLOCK_M) if SWAP_AB.
    """
    if SWAP_AB:
        result = b_scale[:, None] * a_scale[None, :]
    else:
        result = a_scale[:, None] * b_scale[None, :]
    return result
