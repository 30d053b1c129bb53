"""`grouped_gemm_kernel`: a grouped GEMM over aligned pairs, like vLLM's fused_moe kernel.

A pair is a token together with one of its top_k experts: pair p belongs to token p // top_k.
`modular_kernel.ops.align` sorts the pairs by expert and pads each expert to whole blocks of BLOCK_M
pairs, so that all pairs of a block multiply the same weights. The kernel gathers the activation row
of each pair and stores each result in the row of its pair, so that no other launch permutes rows.
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


# These arguments change with the number of tokens, so specializing on them would recompile.
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
    """out[p, n] = act(a[p // PAIRS_PER_A_ROW] @ b[expert of p, rows of n]^T) for every pair p.

    Grid: (row blocks * column blocks,), for the largest possible number of row blocks. A program
        computes one block of BLOCK_M pairs by BLOCK_N output columns. Programs past
        num_tokens_post_padded return immediately.

    a_ptr: activations (num_pairs / PAIRS_PER_A_ROW, K). A row is a token (PAIRS_PER_A_ROW = top_k)
        in GEMM 1 and a pair (PAIRS_PER_A_ROW = 1) in GEMM 2.
    a_scale_ptr: scales of the activations. Used with QUANT_MODE "w8a8".
    router_weights_ptr: (num_pairs,) float32. If HAS_ROUTER_WEIGHTS, they multiply the sums before
        the bias is added.
    out_ptr: (num_pairs, N), contiguous. Pairs in blocks of expert -1 are skipped: their rows get
        zeros if WRITE_ZEROS, and are not written otherwise.
    sorted_token_ids_ptr, expert_ids_ptr, num_tokens_post_padded_ptr: the blocks of pairs, as in
        vLLM's moe_align_block_size (`modular_kernel.ops.align.AlignedPairs`). The ids are indices
        of pairs.
    num_m_blocks: number of row blocks in the grid.
    b_ptr: weights (num_experts, rows, K), with any strides. Output column n uses weight row n *
        GATE_STRIDE and, if GATED, also row n * GATE_STRIDE + up_row_offset for up.
    b_scale_ptr: weight scales (num_experts, row groups, K groups).
    zero_point_ptr: zero points of integer weights (num_experts, rows, K groups), used if
        HAS_ZERO_POINTS. For NVFP4, the global scales.
    bias_ptr: (num_experts, rows), used if HAS_BIAS.
    size_n: N, the number of output columns.
    size_k: K.
    up_offset: offset in stored elements from a gate weight to the up weight of the same column.
    stride_*: strides, named as in vLLM: a (activations), as (their scales), b (weights), bs (their
        scales), bz (zero points); dimensions e (expert), m, n, k.
    act_order_ptr, stride_act_order_e, HAS_ACT_ORDER: weight column k multiplies activation column
        act_order_ptr[expert, k], as in GPTQ checkpoints with act order.
    GATE_STRIDE: 2 if gate and up rows alternate in b, otherwise 1.
    GATED: whether the activation function combines a gate and an up value, as in SwiGLU.
    ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT: the activation function
        (`modular_kernel.ops.kernels.activation`); "identity" for none.
    QUANT_MODE, WEIGHT_FORMAT, GROUP_N, GROUP_K, ONE_SCALE_PER_TILE, ZERO_POINT, PACKED: how weights
        are quantized; see `gemm_tile`.
    EVEN_K: whether BLOCK_K divides K.
    INPUT_PRECISION: `input_precision` of tl.dot, used for float32 operands.
    BLOCK_M, BLOCK_N, BLOCK_K: pairs, output columns and K elements per step of a tile.
    GROUP_M: number of row blocks per group. The blocks of a group are computed for one column block
        before the next, so that they share weight tiles in the L2 cache.
    USE_PDL: whether the launch uses programmatic dependent launch (`pdl_wait`).
    ADJACENT_GATE_UP: whether the gate and up weights of a column are adjacent in memory: stride_bn
        is 1, up_row_offset is 1 and GATE_STRIDE is 2. A tile then loads both at once
        (`multiply_interleaved`). Only with QUANT_MODE "plain" and GATED.
    HAS_LORA: whether some tokens have LoRA adapters. For these tokens, the product B u of the
        adapter's matrix B and u = A x is added to the accumulators before the router weight, the
        bias and the activation are applied (`experts.triton.kernels.adapters`). The arguments below
        are used only with HAS_LORA.
    lora_u_ptr: u = A x of each row, from a shrink kernel (`experts.triton.kernels.shrink`); rows
        are stride_lora_u apart.
    adapter_slots_ptr: int32, the adapter slot of each token (num_pairs / PAIRS_PER_TOKEN,). A slot
        outside [0, num_adapter_slots) means no adapter.
    lora_b_ptr: the matrices B (slots, num_experts, rows, lora_rank), with the strides
        stride_lora_b_*.
    LORA_UP_OFFSET: the first column of u for up; 0 if gate and up use the same columns.
    BLOCK_RANK: elements of the rank per step.
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
        # NaN-free: adapter slots are integers
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
    out_tile = finish_tile(
        gate, up, bias_ptr + expert * stride_bias, column * GATE_STRIDE, up_row_offset, column_mask,
        router_weights, HAS_BIAS, HAS_ROUTER_WEIGHTS, GATED, ACTIVATION, ACTIVATION_ALPHA,
        ACTIVATION_LIMIT,
    )  # fmt: skip
    store_rows(out_ptr, pairs, row_mask, column, column_mask, size_n, out_tile)
