"""Kernel of a grouped GEMM over expert-sorted rows without padding. A tile has only one expert."""

import triton
import triton.language as tl

from experts.triton.kernels.adapters import expand_adapters, load_slots
from experts.triton.kernels.gemm_tile import finish_tile, grouped_tile_order, store_rows
from experts.triton.kernels.gemm_tile_dispatch import gemm_tile


# max_tiles changes with the number of tokens; specializing on it would recompile.
@triton.jit(do_not_specialize=["max_tiles"])
def segment_gemm_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, zero_point_ptr, bias_ptr, router_weights_ptr, out_ptr,
    tiles_ptr,
    max_tiles, size_n, size_k, up_row_offset, up_offset,
    stride_asm, stride_ask,
    stride_be, stride_bn, stride_bk, stride_bse, stride_bsn, stride_bsk,
    stride_bze, stride_bzn, stride_bzk, stride_bias, act_order_ptr, stride_act_order_e,
    GATE_STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROUTER_WEIGHTS: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, ACTIVATION_ALPHA: tl.constexpr,
    ACTIVATION_LIMIT: tl.constexpr,
    QUANT_MODE: tl.constexpr, WEIGHT_FORMAT: tl.constexpr, GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    ONE_SCALE_PER_TILE: tl.constexpr, ZERO_POINT: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr,
    PACKED: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_ACT_ORDER: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    lora_u_ptr=None, adapter_slots_ptr=None, tokens_ptr=None, lora_b_ptr=None, num_adapter_slots=0,
    lora_rank=0,
    stride_lora_u=0, stride_lora_b_slot=0, stride_lora_b_expert=0, stride_lora_b_n=0,
    LORA_UP_OFFSET: tl.constexpr = 0, HAS_LORA: tl.constexpr = False, BLOCK_RANK: tl.constexpr = 16,
):  # fmt: skip
    """out[r, n] = act(a[r] @ b[expert of r, rows of n]^T) for the rows r of every tile in use.

    A program computes one tile of at most BLOCK_M rows by BLOCK_N columns. The grid has a program
    for the largest possible number of tiles. Programs past the tiles in use return immediately.

    a_ptr: (R, depth), contiguous.
    out_ptr: (R, columns), contiguous. Rows outside all tiles are neither read nor written.
    tiles_ptr: `ops.sort.SortedPairs.tiles`.
    router_weights_ptr: (R,) float32. If HAS_ROUTER_WEIGHTS, they are multiplied with the
        accumulators
        before the bias is added.
    tokens_ptr: (R,) the token of each row; used if LORA.
    LORA: add B u for the adapter of the row's token. There is one slot per token, and one row of u
        per row of a.

    b, bias and the other constants are as in `grouped_gemm_kernel`.
    """
    num_m_blocks = tl.load(tiles_ptr + 3 * max_tiles)
    num_n_blocks = tl.cdiv(size_n, BLOCK_N)
    if tl.program_id(0) >= num_m_blocks * num_n_blocks:
        return
    pid_m, pid_n = grouped_tile_order(tl.program_id(0), num_m_blocks, num_n_blocks, GROUP_M)
    expert = tl.load(tiles_ptr + pid_m).to(tl.int64)
    row = tl.load(tiles_ptr + max_tiles + pid_m) + tl.arange(0, BLOCK_M)
    row_mask = row < tl.load(tiles_ptr + 2 * max_tiles + pid_m)
    column = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < size_n
    row_int64 = row.to(tl.int64)
    gate, up = gemm_tile(
        a_ptr + row_int64[:, None] * size_k, a_scale_ptr + row_int64 * stride_asm, row_mask,
        b_ptr + expert * stride_be, b_scale_ptr + expert * stride_bse,
        zero_point_ptr + expert * stride_bze, column * GATE_STRIDE, up_row_offset, up_offset,
        column_mask, size_k,
        1, stride_ask, stride_bn, stride_bk, stride_bsn, stride_bsk, stride_bzn, stride_bzk,
        act_order_ptr + expert * stride_act_order_e,
        QUANT_MODE, WEIGHT_FORMAT, GROUP_N, GROUP_K, ONE_SCALE_PER_TILE, ZERO_POINT,
        HAS_ZERO_POINTS, PACKED, GATED, EVEN_K,
        HAS_ACT_ORDER, INPUT_PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if HAS_LORA:
        tokens = tl.load(tokens_ptr + row, mask=row_mask, other=0)
        slots = load_slots(adapter_slots_ptr, tokens, row_mask, num_adapter_slots)
        gate, up = expand_adapters(
            gate, up, slots, row, lora_u_ptr, lora_b_ptr + expert * stride_lora_b_expert,
            column * GATE_STRIDE, up_row_offset, column_mask, lora_rank, stride_lora_u,
            stride_lora_b_slot, stride_lora_b_n,
            LORA_UP_OFFSET, GATED, INPUT_PRECISION, BLOCK_RANK,
        )  # fmt: skip
    router_weights = gate
    if HAS_ROUTER_WEIGHTS:
        router_weights = tl.load(router_weights_ptr + row, mask=row_mask, other=0.0)
    result = finish_tile(
        gate, up, bias_ptr + expert * stride_bias, column * GATE_STRIDE, up_row_offset, column_mask,
        router_weights, HAS_BIAS, HAS_ROUTER_WEIGHTS, GATED, ACTIVATION, ACTIVATION_ALPHA,
        ACTIVATION_LIMIT,
    )  # fmt: skip
    store_rows(out_ptr, row, row_mask, column, column_mask, size_n, result)
