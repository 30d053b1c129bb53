"""Kernel of a grouped GEMM over expert-sorted rows without padding. A tile has only one expert."""

import triton
import triton.language as tl

from experts.triton.kernels.adapters import expand_adapters, load_slots
from experts.triton.kernels.gemm_tile import finish_tile, grouped_tile_order, store_rows
from experts.triton.kernels.gemm_tile_dispatch import gemm_tile


# max_tiles changes with the number of tokens; specializing on it would recompile.
@triton.jit(do_not_specialize=["max_tiles"])
def segment_gemm_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, zero_ptr, bias_ptr, row_weights_ptr, out_ptr,
    tiles_ptr,
    max_tiles, columns, depth, up_row, up_offset,
    stride_asm, stride_ask,
    stride_be, stride_bn, stride_bk, stride_bse, stride_bsn, stride_bsk,
    stride_bze, stride_bzn, stride_bzk, stride_bias, order_ptr, stride_oe,
    ROW_STEP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROW_WEIGHTS: tl.constexpr,
    GATED: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    MODE: tl.constexpr, FORMAT: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr,
    ONE_SCALE: tl.constexpr, ZERO_POINT: tl.constexpr, HAS_ZERO: tl.constexpr, PACKED: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_ORDER: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    u_ptr=None, slots_ptr=None, tokens_ptr=None, lora_b_ptr=None, num_slots=0, rank=0,
    stride_u=0, stride_lbl=0, stride_lbe=0, stride_lbn=0,
    U_UP: tl.constexpr = 0, LORA: tl.constexpr = False, BLOCK_R: tl.constexpr = 16,
):  # fmt: skip
    """out[r, n] = act(a[r] @ b[expert of r, rows of n]^T) for the rows r of every tile in use.

    A program computes one tile of at most BLOCK_M rows by BLOCK_N columns. The grid has a program
    for the largest possible number of tiles. Programs past the tiles in use return immediately.

    a_ptr: (R, depth), contiguous.
    out_ptr: (R, columns), contiguous. Rows outside all tiles are neither read nor written.
    tiles_ptr: `ops.sort.SortedPairs.tiles`.
    row_weights_ptr: (R,) float32. If HAS_ROW_WEIGHTS, they are multiplied with the accumulators
        before the bias is added.
    tokens_ptr: (R,) the token of each row; used if LORA.
    LORA: add B u for the adapter of the row's token. There is one slot per token, and one row of u
        per row of a.

    b, bias and the other constants are as in `grouped_gemm_kernel`.
    """
    num_m = tl.load(tiles_ptr + 3 * max_tiles)
    num_n = tl.cdiv(columns, BLOCK_N)
    if tl.program_id(0) >= num_m * num_n:
        return
    pid_m, pid_n = grouped_tile_order(tl.program_id(0), num_m, num_n, GROUP_M)
    expert = tl.load(tiles_ptr + pid_m).to(tl.int64)
    row = tl.load(tiles_ptr + max_tiles + pid_m) + tl.arange(0, BLOCK_M)
    row_mask = row < tl.load(tiles_ptr + 2 * max_tiles + pid_m)
    column = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < columns
    row_int64 = row.to(tl.int64)
    gate, up = gemm_tile(
        a_ptr + row_int64[:, None] * depth, a_scale_ptr + row_int64 * stride_asm, row_mask,
        b_ptr + expert * stride_be, b_scale_ptr + expert * stride_bse,
        zero_ptr + expert * stride_bze, column * ROW_STEP, up_row, up_offset, column_mask, depth,
        1, stride_ask, stride_bn, stride_bk, stride_bsn, stride_bsk, stride_bzn, stride_bzk,
        order_ptr + expert * stride_oe,
        MODE, FORMAT, GROUP_N, GROUP_K, ONE_SCALE, ZERO_POINT, HAS_ZERO, PACKED, GATED, EVEN_K,
        HAS_ORDER, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if LORA:
        tokens = tl.load(tokens_ptr + row, mask=row_mask, other=0)
        slots = load_slots(slots_ptr, tokens, row_mask, num_slots)
        gate, up = expand_adapters(
            gate, up, slots, row, u_ptr, lora_b_ptr + expert * stride_lbe,
            column * ROW_STEP, up_row, column_mask, rank, stride_u, stride_lbl, stride_lbn,
            U_UP, GATED, PRECISION, BLOCK_R,
        )  # fmt: skip
    row_weights = gate
    if HAS_ROW_WEIGHTS:
        row_weights = tl.load(row_weights_ptr + row, mask=row_mask, other=0.0)
    result = finish_tile(
        gate, up, bias_ptr + expert * stride_bias, column * ROW_STEP, up_row, column_mask,
        row_weights, HAS_BIAS, HAS_ROW_WEIGHTS, GATED, KIND, ALPHA, LIMIT,
    )  # fmt: skip
    store_rows(out_ptr, row, row_mask, column, column_mask, columns, result)
