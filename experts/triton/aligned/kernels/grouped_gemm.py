"""Kernel of a grouped GEMM over aligned pairs (`ops.align`).

The kernel gathers the rows of the pairs, and stores the result of each pair to the pair's row.
"""

import triton
import triton.language as tl

from experts.triton.kernels.adapters import expand_loaded, load_expand_operands, load_slots
from experts.triton.kernels.gemm_tile import (
    finish_tile,
    grouped_tile_order,
    multiply_interleaved,
    store_rows,
)
from experts.triton.kernels.gemm_tile_dispatch import gemm_tile, swaps_operands
from modular_kernel.ops.kernels.pdl import pdl_wait


# These arguments change with the number of tokens; specializing on them would recompile.
@triton.jit(do_not_specialize=["num_pairs", "num_m"])
def grouped_gemm_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, zero_ptr, bias_ptr, row_weights_ptr, out_ptr,
    sorted_ptr, expert_ids_ptr, num_post_ptr,
    num_pairs, columns, depth, up_row, up_offset, num_m,
    stride_am, stride_ak, stride_asm, stride_ask,
    stride_be, stride_bn, stride_bk, stride_bse, stride_bsn, stride_bsk,
    stride_bze, stride_bzn, stride_bzk, stride_bias, order_ptr, stride_oe,
    A_TOP_K: tl.constexpr, ROW_STEP: tl.constexpr, WRITE_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROW_WEIGHTS: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    MODE: tl.constexpr, FORMAT: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr,
    ONE_SCALE: tl.constexpr, ZERO_POINT: tl.constexpr, HAS_ZERO: tl.constexpr, PACKED: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_ORDER: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    OVERLAP: tl.constexpr = False,
    u_ptr=None, slots_ptr=None, lora_b_ptr=None, num_slots=0, rank=0,
    stride_u=0, stride_lbl=0, stride_lbe=0, stride_lbn=0,
    U_UP: tl.constexpr = 0, LORA: tl.constexpr = False, LORA_TOP_K: tl.constexpr = 1,
    BLOCK_R: tl.constexpr = 16, ADJACENT_UP: tl.constexpr = False,
):  # fmt: skip
    """out[p, n] = act(a[p // A_TOP_K] @ b[expert of p, rows of n]^T) for every aligned pair p.

    A program computes BLOCK_M pairs by BLOCK_N output columns. The pairs are a block of
    `ops.align`, so they have the same expert. The grid has a program for every tile of the largest
    possible number of blocks. Programs past num_post return immediately.

    a_ptr: (num_pairs / A_TOP_K, depth). A_TOP_K is K if rows are tokens, and 1 if they are pairs.
    b_ptr: (e, rows, depth). Output column n uses row n * ROW_STEP and, if GATED, also row n *
        ROW_STEP + up_row for up, which is up_offset elements further.
    out_ptr: (num_pairs, columns), contiguous. Blocks of skipped pairs get zeros if WRITE_ZEROS, and
        are not written otherwise.
    sorted_ptr, expert_ids_ptr, num_post_ptr: the tensors of `ops.align.AlignedPairs`.
    bias_ptr: (e, rows), added if HAS_BIAS.
    row_weights_ptr: (num_pairs,) float32, the router weights. If HAS_ROW_WEIGHTS, they are
        multiplied with the accumulators before the bias is added.
    KIND, ALPHA, LIMIT: the activation (`ops.kernels.activation`).
    MODE to HAS_ORDER: scales, zero points and packing; see `gemm_tile`.
    PRECISION: the precision of float32 MMAs.
    GROUP_M: number of row blocks that are computed together, so that they share weight tiles in L2.
    OVERLAP: whether the launch uses PDL.
    ADJACENT_UP: whether stride_bn is 1, up_row is 1 and ROW_STEP is 2. Gate and up weights are then
        adjacent, and a tile loads both at once. Only with MODE "plain" and GATED.
    LORA: add B u for the adapter of the pair (`expand_adapters`). There is one slot per token,
        (num_pairs / LORA_TOP_K,), and one row of u per pair. lora_b is (slots, e, rows, rank).
    """
    pdl_wait(OVERLAP)
    pid_m, pid_n = grouped_tile_order(tl.program_id(0), num_m, tl.cdiv(columns, BLOCK_N), GROUP_M)
    if pid_m * BLOCK_M >= tl.load(num_post_ptr):
        return
    pairs = tl.load(sorted_ptr + pid_m * BLOCK_M + tl.arange(0, BLOCK_M))
    row_mask = pairs < num_pairs
    column = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < columns
    expert = tl.load(expert_ids_ptr + pid_m).to(tl.int64)
    if expert < 0:
        if WRITE_ZEROS:
            zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            store_rows(out_ptr, pairs, row_mask, column, column_mask, columns, zeros)
        return
    if LORA:  # loaded before the GEMM loop, which hides the latency
        slots = load_slots(slots_ptr, pairs // LORA_TOP_K, row_mask, num_slots)
        lora_b_ptr += expert * stride_lbe
        # NaN-free: integers
        u, b, up_u, up_b = load_expand_operands(
            tl.min(slots, axis=0), 0, slots, pairs, u_ptr, lora_b_ptr,
            column * ROW_STEP, up_row, column_mask, rank, stride_u, stride_lbl, stride_lbn,
            U_UP, GATED, BLOCK_R,
        )  # fmt: skip
    a_row = (pairs // A_TOP_K).to(tl.int64)
    if ADJACENT_UP:
        tl.static_assert(MODE == "plain" and GATED and ROW_STEP == 2)
        gate, up = multiply_interleaved(
            a_ptr + a_row[:, None] * stride_am, row_mask[:, None], b_ptr + expert * stride_be,
            pid_n * BLOCK_N, columns, stride_ak, stride_bk, depth,
            EVEN_K, PRECISION, swaps_operands(b_ptr.dtype.element_ty, MODE, BLOCK_M, 2 * BLOCK_N),
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        gate, up = gemm_tile(
            a_ptr + a_row[:, None] * stride_am, a_scale_ptr + a_row * stride_asm, row_mask,
            b_ptr + expert * stride_be, b_scale_ptr + expert * stride_bse,
            zero_ptr + expert * stride_bze, column * ROW_STEP, up_row, up_offset, column_mask,
            depth, stride_ak, stride_ask, stride_bn, stride_bk, stride_bsn, stride_bsk, stride_bzn,
            stride_bzk, order_ptr + expert * stride_oe,
            MODE, FORMAT, GROUP_N, GROUP_K, ONE_SCALE, ZERO_POINT, HAS_ZERO, PACKED, GATED, EVEN_K,
            HAS_ORDER, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if LORA:
        gate, up = expand_loaded(
            gate, up, u, b, up_u, up_b, slots, pairs, u_ptr, lora_b_ptr,
            column * ROW_STEP, up_row, column_mask, rank, stride_u, stride_lbl, stride_lbn,
            U_UP, GATED, PRECISION, BLOCK_R,
        )  # fmt: skip
    row_weights = gate
    if HAS_ROW_WEIGHTS:
        row_weights = tl.load(row_weights_ptr + pairs, mask=row_mask, other=0.0)
    result = finish_tile(
        gate, up, bias_ptr + expert * stride_bias, column * ROW_STEP, up_row, column_mask,
        row_weights, HAS_BIAS, HAS_ROW_WEIGHTS, GATED, KIND, ALPHA, LIMIT,
    )  # fmt: skip
    store_rows(out_ptr, pairs, row_mask, column, column_mask, columns, result)
