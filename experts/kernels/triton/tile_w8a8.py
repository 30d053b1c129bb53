"""Device function: one output tile from 8-bit rows and 8-bit weights, both with scales."""

import triton
import triton.language as tl


@triton.jit
def multiply_tile_w8a8(
    a_ptrs, a_mask, b_ptrs, b_mask, up_offset, stride_ak, stride_bk, depth,
    a_scale_ptrs, stride_ask, b_scale_ptrs, up_scale_ptrs, stride_bsk, column_mask,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, GROUP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As multiply_tile, for fp8 or int8 operands; float32 (gate, up) with all scales applied.

    GROUP_K 0: one scale per row and per column, applied behind the loop. Otherwise a scale covers
    GROUP_K of the depth and BLOCK_K divides it, so each step has one scale per row and column.
    a_scale_ptrs (BLOCK_M,), b_scale_ptrs and up_scale_ptrs (BLOCK_N,) point at the first group.
    """
    ACC: tl.constexpr = tl.int32 if b_ptrs.dtype.element_ty == tl.int8 else tl.float32
    SUM: tl.constexpr = ACC if GROUP_K == 0 else tl.float32
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptrs + k[None, :] * stride_ak
    b_ptrs = b_ptrs + k[:, None] * stride_bk
    rows = tl.reshape(a_mask, (BLOCK_M,))
    gate = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    up = gate
    for start in range(0, depth, BLOCK_K):
        inside = start + k < depth
        a_inside = a_mask if EVEN_K else a_mask & inside[None, :]
        b_inside = b_mask if EVEN_K else b_mask & inside[:, None]
        a = tl.load(a_ptrs, mask=a_inside, other=0.0)
        b = tl.load(b_ptrs, mask=b_inside, other=0.0)
        if GROUP_K == 0:
            gate = tl.dot(a, b, gate, out_dtype=ACC)
            if GATED:
                c = tl.load(b_ptrs + up_offset, mask=b_inside, other=0.0)
                up = tl.dot(a, c, up, out_dtype=ACC)
        else:
            group = start // GROUP_K
            a_scale = tl.load(a_scale_ptrs + group * stride_ask, mask=rows, other=0.0)[:, None]
            b_scale = tl.load(b_scale_ptrs + group * stride_bsk, mask=column_mask, other=0.0)
            part = tl.dot(a, b, out_dtype=ACC).to(tl.float32)
            gate += part * (a_scale * b_scale[None, :])
            if GATED:
                c = tl.load(b_ptrs + up_offset, mask=b_inside, other=0.0)
                c_scale = tl.load(up_scale_ptrs + group * stride_bsk, mask=column_mask, other=0.0)
                part = tl.dot(a, c, out_dtype=ACC).to(tl.float32)
                up += part * (a_scale * c_scale[None, :])
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    if GROUP_K == 0:
        a_scale = tl.load(a_scale_ptrs, mask=rows, other=0.0)[:, None]
        b_scale = tl.load(b_scale_ptrs, mask=column_mask, other=0.0)[None, :]
        gate_out = gate.to(tl.float32) * (a_scale * b_scale)
        up_out = gate_out
        if GATED:
            c_scale = tl.load(up_scale_ptrs, mask=column_mask, other=0.0)[None, :]
            up_out = up.to(tl.float32) * (a_scale * c_scale)
    else:
        gate_out = gate
        up_out = up
    return gate_out, up_out
