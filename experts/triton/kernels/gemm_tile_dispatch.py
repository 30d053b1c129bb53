"""`gemm_tile`: compute one output tile of a GEMM, for every storage format of the operands.

The Triton GEMM kernels call `gemm_tile` for their tiles. Depending on the constexpr QUANT_MODE, it
calls one of three functions:

    "plain"        `multiply_tile`: activations and weights have the same 16- or 32-bit dtype.
    "w8a8"         `multiply_tile_w8a8`: both are fp8 or int8, and both have scales.
    "weight_only"  `multiply_tile_weight_only`: 8- or 4-bit weights are dequantized in the loop.
"""

import triton
import triton.language as tl

from experts.triton.kernels.gemm_tile import multiply_tile
from experts.triton.kernels.gemm_tile_w8a8 import multiply_tile_w8a8
from experts.triton.kernels.gemm_tile_weight_only import multiply_tile_weight_only


@triton.constexpr_function
def swaps_operands(dtype, mode, block_m, block_n):
    """Return whether the weights should be the left operand of the MMA (SWAP_AB of `accumulate`).

    The left operand of wgmma must have at least 64 rows. If BLOCK_M is smaller, only the weights
    have enough rows. At BLOCK_M = 64, only unquantized ("plain") GEMMs are faster with swapped
    operands (H200, triton 3.6, 2026-11-20). Float32 does not use wgmma.

    dtype: the dtype of the weights.
    mode: QUANT_MODE.
    """
    max_rows = 64 if mode == "plain" else 32
    return block_m <= max_rows and block_n >= 64 and dtype != tl.float32


@triton.jit
def gemm_tile(
    a_ptrs, a_scale_ptrs, row_mask, b_ptr, b_scale_ptr, zero_or_global_scale_ptr,
    row, up_row_offset, up_offset, column_mask, size_k,
    stride_ak, stride_ask, stride_bn, stride_bk, stride_bsn, stride_bsk, stride_bzn, stride_bzk,
    act_order_ptr,
    QUANT_MODE: tl.constexpr, WEIGHT_FORMAT: tl.constexpr, GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    ONE_SCALE_PER_TILE: tl.constexpr,
    ZERO_POINT: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, PACKED: tl.constexpr,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, HAS_ACT_ORDER: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply activation rows by the weights of one expert; return the float32 tiles (gate, up).

    Scales of activations and weights are applied. Bias and activation function are not. If not
    GATED, `up` is the same as `gate`.

    The weights of an expert are a matrix of N rows by K. Strides are named as in vLLM:
    stride_<tensor><dimension>, with the tensors a (activations), as (their scales), b (weights), bs
    (their scales) and bz (their zero points), and the dimensions m, n and k. stride_bsk and
    stride_bzk are distances between adjacent scale groups along K.

    a_ptrs: (BLOCK_M, 1), pointers to the start of each activation row.
    a_scale_ptrs: (BLOCK_M,), pointers to the first scale of each activation row.
    row_mask: (BLOCK_M,), False for rows that do not exist.
    b_ptr: pointer to the weights of the expert.
    b_scale_ptr: pointer to the weight scales of the expert.
    zero_or_global_scale_ptr: pointer to the zero points of the expert. With WEIGHT_FORMAT "nvfp4",
        pointer to the float32 global scales of the expert instead: the scale of the gate (or only)
        matrix, followed by the scale of the up matrix.
    row: (BLOCK_N,), the gate (or only) weight row of each output column.
    up_row_offset: offset in weight rows from the gate row to the up row of a column.
    up_offset: offset in elements from the gate row to the up row of a column.
    column_mask: (BLOCK_N,), False for columns that do not exist.
    act_order_ptr: pointer to (K,) integers, used if HAS_ACT_ORDER.
    QUANT_MODE: see the docstring of the module.
    WEIGHT_FORMAT: "float8", "integer", "e2m1", "e2m1_repacked" or "nvfp4"
        (`experts.triton.operands.word_format`).
    GROUP_N: number of weight rows that share a scale.
    GROUP_K: number of K elements that share a scale; 0 if one scale covers all of K.
    ONE_SCALE_PER_TILE: whether all gate rows of a tile share one scale, and all up rows share one.
    ZERO_POINT: the zero point of all integer weights. Used unless HAS_ZERO_POINTS.
    HAS_ZERO_POINTS: whether each scale group has its own zero point.
    PACKED: whether a byte holds two 4-bit weights that are adjacent along K.
    GATED: whether to compute up in addition to gate.
    EVEN_K: whether BLOCK_K divides K.
    HAS_ACT_ORDER: whether the columns of the weights are permuted, as in GPTQ checkpoints with act
        order: weight column k multiplies activation column act_order_ptr[k]. Only with QUANT_MODE
        "weight_only".
    INPUT_PRECISION: `input_precision` of tl.dot, used for float32 operands.
    """
    SWAP_AB: tl.constexpr = swaps_operands(b_ptr.dtype.element_ty, QUANT_MODE, BLOCK_M, BLOCK_N)
    b_ptrs = b_ptr + row.to(tl.int64)[None, :] * stride_bn
    if QUANT_MODE == "plain":
        gate, up = multiply_tile(
            a_ptrs, row_mask[:, None], b_ptrs, column_mask[None, :], up_offset,
            stride_ak, stride_bk, size_k,
            GATED, EVEN_K, INPUT_PRECISION, SWAP_AB, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        up_rows = row + up_row_offset
        scale_row = row
        if ONE_SCALE_PER_TILE:
            scale_row = tl.min(row, axis=0)  # NaN-free: rows are integers
        scale_ptrs = b_scale_ptr + (scale_row // GROUP_N) * stride_bsn
        up_scale_ptrs = b_scale_ptr + ((scale_row + up_row_offset) // GROUP_N) * stride_bsn
        if QUANT_MODE == "w8a8":
            gate, up = multiply_tile_w8a8(
                a_ptrs, row_mask[:, None], b_ptrs, column_mask[None, :], up_offset,
                stride_ak, stride_bk, size_k,
                a_scale_ptrs, stride_ask, scale_ptrs, up_scale_ptrs, stride_bsk, column_mask,
                GATED, EVEN_K, GROUP_K, ONE_SCALE_PER_TILE, SWAP_AB, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            tl.static_assert(QUANT_MODE == "weight_only")
            # A byte holds the 4-bit zero points of two adjacent weight rows.
            ZERO_ROWS: tl.constexpr = 2 if PACKED else 1
            gate, up = multiply_tile_weight_only(
                a_ptrs, row_mask[:, None], b_ptrs, up_offset, stride_ak, stride_bk, size_k,
                scale_ptrs, up_scale_ptrs, stride_bsk,
                zero_or_global_scale_ptr + (row // ZERO_ROWS) * stride_bzn,
                zero_or_global_scale_ptr + (up_rows // ZERO_ROWS) * stride_bzn,
                (row % ZERO_ROWS) * 4, (up_rows % ZERO_ROWS) * 4, stride_bzk, column_mask,
                act_order_ptr,
                GATED, WEIGHT_FORMAT, GROUP_K, ZERO_POINT, HAS_ZERO_POINTS, PACKED,
                ONE_SCALE_PER_TILE, EVEN_K, HAS_ACT_ORDER,
                INPUT_PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if WEIGHT_FORMAT == "nvfp4":
                gate *= tl.load(zero_or_global_scale_ptr)
                if GATED:
                    up *= tl.load(zero_or_global_scale_ptr + 1)
    return gate, up
