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
@triton.jit(do_not_specialize=["num_pairs", "num_m_blocks"])
def grouped_gemm_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, zero_point_ptr, bias_ptr, router_weights_ptr, out_ptr,
    sorted_token_ids_ptr, expert_ids_ptr, num_tokens_post_padded_ptr,
    num_pairs, size_n, size_k, up_row_offset, up_offset, num_m_blocks,
    stride_am, stride_ak, stride_asm, stride_ask,
    stride_be, stride_bn, stride_bk, stride_bse, stride_bsn, stride_bsk,
    stride_bze, stride_bzn, stride_bzk, stride_bias, act_order_ptr, stride_act_order_e,
    PAIRS_PER_A_ROW: tl.constexpr, GATE_STRIDE: tl.constexpr, WRITE_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROUTER_WEIGHTS: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, ACTIVATION_ALPHA: tl.constexpr, ACTIVATION_LIMIT: tl.constexpr,
    QUANT_MODE: tl.constexpr, WEIGHT_FORMAT: tl.constexpr, GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    ONE_SCALE_PER_TILE: tl.constexpr, ZERO_POINT: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr,
    PACKED: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_ACT_ORDER: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    USE_PDL: tl.constexpr = False,
    lora_u_ptr=None, adapter_slots_ptr=None, lora_b_ptr=None, num_adapter_slots=0, lora_rank=0,
    stride_lora_u=0, stride_lora_b_slot=0, stride_lora_b_expert=0, stride_lora_b_n=0,
    LORA_UP_OFFSET: tl.constexpr = 0, HAS_LORA: tl.constexpr = False,
    PAIRS_PER_TOKEN: tl.constexpr = 1,
    BLOCK_RANK: tl.constexpr = 16, ADJACENT_GATE_UP: tl.constexpr = False,
):  # fmt: skip
    """out[p, n] = act(a[p // PAIRS_PER_A_ROW] @ b[expert of p, rows of n]^T) for every aligned
    pair p.

    A program computes BLOCK_M pairs by BLOCK_N output columns. The pairs are a block of
    `ops.align`, so they have the same expert. The grid has a program for every tile of the largest
    possible number of blocks. Programs past num_post return immediately.

    a_ptr: (num_pairs / PAIRS_PER_A_ROW, depth). PAIRS_PER_A_ROW is K if rows are tokens, and 1 if
        they are pairs.
    b_ptr: (e, rows, depth). Output column n uses row n * GATE_STRIDE and, if GATED, also row n *
        GATE_STRIDE + up_row_offset for up, which is up_offset elements further.
    out_ptr: (num_pairs, columns), contiguous. Blocks of skipped pairs get zeros if WRITE_ZEROS, and
        are not written otherwise.
    sorted_token_ids_ptr, expert_ids_ptr, num_tokens_post_padded_ptr: the tensors of
        `ops.align.AlignedPairs`.
    bias_ptr: (e, rows), added if HAS_BIAS.
    router_weights_ptr: (num_pairs,) float32, the router weights. If HAS_ROUTER_WEIGHTS, they are
        multiplied with the accumulators before the bias is added.
    ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT: the activation (`ops.kernels.activation`).
    QUANT_MODE to HAS_ACT_ORDER: scales, zero points and packing; see `gemm_tile`.
    INPUT_PRECISION: the precision of float32 MMAs.
    GROUP_M: number of row blocks that are computed together, so that they share weight tiles in L2.
    USE_PDL: whether the launch uses PDL.
    ADJACENT_GATE_UP: whether stride_bn is 1, up_row_offset is 1 and GATE_STRIDE is 2. Gate and up
        weights are then
        adjacent, and a tile loads both at once. Only with QUANT_MODE "plain" and GATED.
    LORA: add B u for the adapter of the pair (`expand_adapters`). There is one slot per token,
        (num_pairs / PAIRS_PER_TOKEN,), and one row of u per pair. lora_b is (slots, e, rows, rank).
    """
    pdl_wait(USE_PDL)
    pid_m, pid_n = grouped_tile_order(
        tl.program_id(0), num_m_blocks, tl.cdiv(size_n, BLOCK_N), GROUP_M
    )
    if pid_m * BLOCK_M >= tl.load(num_tokens_post_padded_ptr):
        return
    pairs = tl.load(sorted_token_ids_ptr + pid_m * BLOCK_M + tl.arange(0, BLOCK_M))
    row_mask = pairs < num_pairs
    column = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < size_n
    expert = tl.load(expert_ids_ptr + pid_m).to(tl.int64)
    if expert < 0:
        if WRITE_ZEROS:
            zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            store_rows(out_ptr, pairs, row_mask, column, column_mask, size_n, zeros)
        return
    if HAS_LORA:  # loaded before the GEMM loop, which hides the latency
        slots = load_slots(adapter_slots_ptr, pairs // PAIRS_PER_TOKEN, row_mask, num_adapter_slots)
        lora_b_ptr += expert * stride_lora_b_expert
        # NaN-free: integers
        u, b, up_u, up_b = load_expand_operands(
            tl.min(slots, axis=0), 0, slots, pairs, lora_u_ptr, lora_b_ptr,
            column * GATE_STRIDE, up_row_offset, column_mask, lora_rank, stride_lora_u,
            stride_lora_b_slot, stride_lora_b_n,
            LORA_UP_OFFSET, GATED, BLOCK_RANK,
        )  # fmt: skip
    a_row = (pairs // PAIRS_PER_A_ROW).to(tl.int64)
    if ADJACENT_GATE_UP:
        tl.static_assert(QUANT_MODE == "plain" and GATED and GATE_STRIDE == 2)
        gate, up = multiply_interleaved(
            a_ptr + a_row[:, None] * stride_am, row_mask[:, None], b_ptr + expert * stride_be,
            pid_n * BLOCK_N, size_n, stride_ak, stride_bk, size_k,
            EVEN_K, INPUT_PRECISION,
            swaps_operands(b_ptr.dtype.element_ty, QUANT_MODE, BLOCK_M, 2 * BLOCK_N),
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        gate, up = gemm_tile(
            a_ptr + a_row[:, None] * stride_am, a_scale_ptr + a_row * stride_asm, row_mask,
            b_ptr + expert * stride_be, b_scale_ptr + expert * stride_bse,
            zero_point_ptr + expert * stride_bze, column * GATE_STRIDE, up_row_offset, up_offset,
            column_mask,
            size_k, stride_ak, stride_ask, stride_bn, stride_bk, stride_bsn, stride_bsk, stride_bzn,
            stride_bzk, act_order_ptr + expert * stride_act_order_e,
            QUANT_MODE, WEIGHT_FORMAT, GROUP_N, GROUP_K, ONE_SCALE_PER_TILE, ZERO_POINT,
            HAS_ZERO_POINTS, PACKED, GATED, EVEN_K,
            HAS_ACT_ORDER, INPUT_PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if HAS_LORA:
        gate, up = expand_loaded(
            gate, up, u, b, up_u, up_b, slots, pairs, lora_u_ptr, lora_b_ptr,
            column * GATE_STRIDE, up_row_offset, column_mask, lora_rank, stride_lora_u,
            stride_lora_b_slot, stride_lora_b_n,
            LORA_UP_OFFSET, GATED, INPUT_PRECISION, BLOCK_RANK,
        )  # fmt: skip
    router_weights = gate
    if HAS_ROUTER_WEIGHTS:
        router_weights = tl.load(router_weights_ptr + pairs, mask=row_mask, other=0.0)
    result = finish_tile(
        gate, up, bias_ptr + expert * stride_bias, column * GATE_STRIDE, up_row_offset, column_mask,
        router_weights, HAS_BIAS, HAS_ROUTER_WEIGHTS, GATED, ACTIVATION, ACTIVATION_ALPHA,
        ACTIVATION_LIMIT,
    )  # fmt: skip
    store_rows(out_ptr, pairs, row_mask, column, column_mask, size_n, result)
