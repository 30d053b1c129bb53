"""`segment_gemm_kernel`: a grouped GEMM over rows that are sorted by expert, without padding.

A pair is a token together with one of its top_k experts: pair p belongs to token p // top_k.
`modular_kernel.ops.sort` gives each pair a row, with the rows of an expert adjacent (a segment),
and splits each segment into tiles of at most BLOCK_M rows.
"""

import triton
import triton.language as tl

from experts.triton.kernels.adapters import expand_adapters, load_slots
from experts.triton.kernels.gemm_tile import finish_tile, grouped_tile_order, store_rows
from experts.triton.kernels.gemm_tile_dispatch import gemm_tile


# max_tiles changes with the number of tokens, so specializing on it would recompile.
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
    """out[r, n] = act(a[r] @ b[expert of r, rows of n]^T) for the rows r of every tile.

    Grid: (max_tiles * column blocks,). A program computes one tile of at most BLOCK_M rows by
        BLOCK_N output columns. Programs past the number of tiles return immediately.

    a_ptr: activations (rows, K), contiguous, in sorted order.
    a_scale_ptr: scales of the activations. Used with QUANT_MODE "w8a8".
    router_weights_ptr: (rows,) float32. If HAS_ROUTER_WEIGHTS, they multiply the sums before the
        bias is added.
    out_ptr: (rows, N), contiguous. Rows outside all tiles are neither read nor written.
    tiles_ptr: `modular_kernel.ops.sort.SortedPairs.tiles`. Three int32 arrays of max_tiles values
        have, for each tile, the expert, the first row, and the end of the expert's rows. The number
        of tiles follows.
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
    BLOCK_M, BLOCK_N, BLOCK_K: rows, output columns and K elements per step of a tile.
    GROUP_M: number of row blocks per group. The blocks of a group are computed for one column block
        before the next, so that they share weight tiles in the L2 cache.
    tokens_ptr: (rows,) int32, the token of each row. Used if HAS_LORA.
    HAS_LORA: whether some tokens have LoRA adapters. If so, B u of the row's adapter is added to
        the sums before router weight, bias and activation (`experts.triton.kernels.adapters`). The
        arguments below are used only with HAS_LORA.
    lora_u_ptr: u = A x of each row, from a shrink kernel (`experts.triton.kernels.shrink`); rows
        are stride_lora_u apart.
    adapter_slots_ptr: int32, the adapter slot of each token. A slot outside [0, num_adapter_slots)
        means no adapter.
    lora_b_ptr: the matrices B (slots, num_experts, rows, lora_rank), with the strides
        stride_lora_b_*.
    LORA_UP_OFFSET: the first column of u for up; 0 if gate and up use the same columns.
    BLOCK_RANK: elements of the rank per step.
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
    out_tile = finish_tile(
        gate, up, bias_ptr + expert * stride_bias, column * GATE_STRIDE, up_row_offset, column_mask,
        router_weights, HAS_BIAS, HAS_ROUTER_WEIGHTS, GATED, ACTIVATION, ACTIVATION_ALPHA,
        ACTIVATION_LIMIT,
    )  # fmt: skip
    store_rows(out_ptr, row, row_mask, column, column_mask, size_n, out_tile)
