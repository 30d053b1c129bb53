"""`batched_gemm_kernel`: the GEMMs of all experts over activations in the batched format.

In the batched format (num_experts, capacity, K), every expert has a block of `capacity` rows, of
which only the first counts[i] hold tokens. `experts.triton.batched` launches the kernel twice per
layer: for GEMM 1 with the activation function, and for GEMM 2.
"""

import triton
import triton.language as tl

from experts.triton.kernels.adapters import expand_adapters, load_slots
from experts.triton.kernels.gemm_tile import finish_tile, grouped_tile_order, store_rows
from experts.triton.kernels.gemm_tile_dispatch import gemm_tile


@triton.jit
def batched_gemm_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, zero_point_ptr, bias_ptr, out_ptr, counts_ptr,
    capacity, size_n, size_k, up_row_offset, up_offset, num_m_blocks,
    stride_ase, stride_asm, stride_ask,
    stride_be, stride_bn, stride_bk, stride_bse, stride_bsn, stride_bsk,
    stride_bze, stride_bzn, stride_bzk, stride_bias, act_order_ptr, stride_act_order_e,
    GATE_STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, ACTIVATION_ALPHA: tl.constexpr, ACTIVATION_LIMIT: tl.constexpr,
    QUANT_MODE: tl.constexpr, WEIGHT_FORMAT: tl.constexpr, GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    ONE_SCALE_PER_TILE: tl.constexpr, ZERO_POINT: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr,
    PACKED: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_ACT_ORDER: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    lora_u_ptr=None, adapter_slots_ptr=None, lora_b_ptr=None, num_adapter_slots=0, lora_rank=0,
    stride_lora_u=0, stride_lora_b_slot=0, stride_lora_b_expert=0, stride_lora_b_n=0,
    LORA_UP_OFFSET: tl.constexpr = 0, HAS_LORA: tl.constexpr = False, BLOCK_RANK: tl.constexpr = 16,
):  # fmt: skip
    """out[i, c, n] = act(a[i, c] @ b[i, rows of n]^T) for the first counts[i] rows c of expert i.

    Grid: (tiles of one expert, num_experts). A program computes BLOCK_M rows by BLOCK_N columns of
        one expert. It returns immediately if the block has no valid rows.

    a_ptr: activations (num_experts, capacity, K), contiguous.
    a_scale_ptr: scales of the activations. Used with QUANT_MODE "w8a8".
    out_ptr: (num_experts, capacity, N), contiguous. Rows from counts[i] on are neither read nor
        written.
    counts_ptr: (num_experts,) int32, the number of rows of each expert.
    num_m_blocks: number of row blocks of `capacity` rows.
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
    HAS_LORA: whether some tokens have LoRA adapters. If so, B u of the row's adapter is added to
        the sums before router weight, bias and activation (`experts.triton.kernels.adapters`). The
        arguments below are used only with HAS_LORA.
    lora_u_ptr: u = A x of each row, from a shrink kernel (`experts.triton.kernels.shrink`); rows
        are stride_lora_u apart.
    adapter_slots_ptr: int32, the adapter slot of each row (num_experts, capacity). A slot outside
        [0, num_adapter_slots) means no adapter.
    lora_b_ptr: the matrices B (slots, num_experts, rows, lora_rank), with the strides
        stride_lora_b_*.
    LORA_UP_OFFSET: the first column of u for up; 0 if gate and up use the same columns.
    BLOCK_RANK: elements of the rank per step.
    """
    expert = tl.program_id(1).to(tl.int64)
    pid_m, pid_n = grouped_tile_order(
        tl.program_id(0), num_m_blocks, tl.cdiv(size_n, BLOCK_N), GROUP_M
    )
    count = tl.load(counts_ptr + expert)
    if pid_m * BLOCK_M >= count:
        return
    row = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = row < count
    column = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < size_n
    flat_row = expert * capacity + row.to(tl.int64)
    a_scale_ptr += expert * stride_ase
    gate, up = gemm_tile(
        a_ptr + flat_row[:, None] * size_k, a_scale_ptr + row.to(tl.int64) * stride_asm, row_mask,
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
        slots = load_slots(adapter_slots_ptr, flat_row, row_mask, num_adapter_slots)
        gate, up = expand_adapters(
            gate, up, slots, flat_row, lora_u_ptr, lora_b_ptr + expert * stride_lora_b_expert,
            column * GATE_STRIDE, up_row_offset, column_mask, lora_rank, stride_lora_u,
            stride_lora_b_slot, stride_lora_b_n,
            LORA_UP_OFFSET, GATED, INPUT_PRECISION, BLOCK_RANK,
        )  # fmt: skip
    out_tile = finish_tile(
        gate, up, bias_ptr + expert * stride_bias, column * GATE_STRIDE, up_row_offset, column_mask,
        gate, HAS_BIAS, False, GATED, ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT,
    )  # fmt: skip
    store_rows(out_ptr, flat_row, row_mask, column, column_mask, size_n, out_tile)
