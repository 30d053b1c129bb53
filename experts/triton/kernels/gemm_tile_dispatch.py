"""gemm_tile: compute one output tile, for all storage formats of the operands."""

import triton
import triton.language as tl

from experts.triton.kernels.gemm_tile import multiply_tile
from experts.triton.kernels.gemm_tile_w8a8 import multiply_tile_w8a8
from experts.triton.kernels.gemm_tile_weight_only import multiply_tile_weight_only


@triton.constexpr_function
def swaps_operands(dtype, mode, block_m, block_n):
    """Return whether the weights should be the left operand (SWAP of `accumulate`).

    They should if there are few rows, because the left operand of wgmma must have 64 rows. Float32
    does not use wgmma. With 64 rows, swapping makes only plain GEMMs faster (H200, triton 3.6,
    2026-11-20).
    """
    max_rows = 64 if mode == "plain" else 32
    return block_m <= max_rows and block_n >= 64 and dtype != tl.float32


@triton.jit
def gemm_tile(
    a_ptrs, a_scale_ptrs, row_mask, b_ptr, b_scale_ptr, zero_ptr, row, up_row, up_offset,
    column_mask, depth,
    stride_ak, stride_ask, stride_bn, stride_bk, stride_bsn, stride_bsk, stride_bzn, stride_bzk,
    order_ptr,
    MODE: tl.constexpr, FORMAT: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    ZERO_POINT: tl.constexpr, HAS_ZERO: tl.constexpr, PACKED: tl.constexpr,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, HAS_ORDER: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply rows by the weights of one expert; return float32 tiles (gate, up), scales applied.

    a_ptrs: (BLOCK_M, 1), pointers to the start of each row.
    a_scale_ptrs: (BLOCK_M,), pointers to the first scale of each row.
    b_ptr, b_scale_ptr, zero_ptr: the start of the expert's weights, scales and zero points.
    row: (BLOCK_N,), the weight row of each column. The up row is row + up_row, which is up_offset
        elements further.
    MODE: "plain": there are no scales. "w8a8": both operands have 8 bits and scales. "weight_only":
        weights are dequantized.
    FORMAT: the storage format of the weights; see `operands.word_format`. With "nvfp4", zero_ptr
        points to the float32 global scale of the gate (or only) matrix, followed by that of up.
    GROUP_N: number of weight rows that share a scale.
    GROUP_K: number of K elements that share a scale; 0 for all of K.
    ONE_SCALE: whether all gate rows of a tile share one scale, and all up rows another.
    ZERO_POINT: the zero point of all integer weights, unless HAS_ZERO.
    HAS_ZERO: whether each group has its own zero point.
    PACKED: whether a byte has two weights.
    EVEN_K: whether BLOCK_K divides depth.
    HAS_ORDER: whether column k of the weights is multiplied by column order_ptr[k] of the rows.
        Only with MODE "weight_only".
    """
    SWAP: tl.constexpr = swaps_operands(b_ptr.dtype.element_ty, MODE, BLOCK_M, BLOCK_N)
    b_ptrs = b_ptr + row.to(tl.int64)[None, :] * stride_bn
    if MODE == "plain":
        gate, up = multiply_tile(
            a_ptrs, row_mask[:, None], b_ptrs, column_mask[None, :], up_offset,
            stride_ak, stride_bk, depth,
            GATED, EVEN_K, PRECISION, SWAP, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        up_rows = row + up_row
        scale_row = row
        if ONE_SCALE:
            scale_row = tl.min(row, axis=0)  # NaN-free: integers
        scale_ptrs = b_scale_ptr + (scale_row // GROUP_N) * stride_bsn
        up_scale_ptrs = b_scale_ptr + ((scale_row + up_row) // GROUP_N) * stride_bsn
        if MODE == "w8a8":
            gate, up = multiply_tile_w8a8(
                a_ptrs, row_mask[:, None], b_ptrs, column_mask[None, :], up_offset,
                stride_ak, stride_bk, depth,
                a_scale_ptrs, stride_ask, scale_ptrs, up_scale_ptrs, stride_bsk, column_mask,
                GATED, EVEN_K, GROUP_K, ONE_SCALE, SWAP, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            tl.static_assert(MODE == "weight_only")
            # Two 4-bit zero points share a byte along the rows.
            ZERO_ROWS: tl.constexpr = 2 if PACKED else 1
            gate, up = multiply_tile_weight_only(
                a_ptrs, row_mask[:, None], b_ptrs, up_offset, stride_ak, stride_bk, depth,
                scale_ptrs, up_scale_ptrs, stride_bsk,
                zero_ptr + (row // ZERO_ROWS) * stride_bzn,
                zero_ptr + (up_rows // ZERO_ROWS) * stride_bzn,
                (row % ZERO_ROWS) * 4, (up_rows % ZERO_ROWS) * 4, stride_bzk, column_mask,
                order_ptr,
                GATED, FORMAT, GROUP_K, ZERO_POINT, HAS_ZERO, PACKED, ONE_SCALE, EVEN_K, HAS_ORDER,
                PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if FORMAT == "nvfp4":
                gate *= tl.load(zero_ptr)
                if GATED:
                    up *= tl.load(zero_ptr + 1)
    return gate, up
