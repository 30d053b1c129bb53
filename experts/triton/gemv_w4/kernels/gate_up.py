"""Kernel of GEMM 1 of the gemv_w4 path.

A program computes a block of intermediate columns of a routed pair. Each of its WARPS warps sums
over some of the blocks along K. `common` defines blocks, chunks and slots.
"""

import triton
import triton.language as tl

from experts.triton.gemv_w4.kernels.common import (
    issue_loads,
    lane_row_indices,
    load_by_scale_slot,
    load_row,
    load_words,
    scale_slots_per_chunk,
    scaled_sums,
    store_in_pair_order,
    to_mma_pairs,
)
from experts.triton.kernels.operands_w4 import row_offsets
from modular_kernel.ops.kernels.activation import activate
from modular_kernel.ops.kernels.ids import count_invalid_ids, load_local_ids
from modular_kernel.ops.kernels.pdl import pdl_wait


@triton.jit
def _load_block(
    words_ptr, scale_ptr, zero_point_ptr, words_offset, scale_offset, zero_offset, step, size_k,
    HAS_ZERO_POINTS: tl.constexpr, EVEN_K: tl.constexpr, PAIRED_SCALES: tl.constexpr,
    GROUP_K: tl.constexpr,
    CHUNKS: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """Load the words, scales and zero points of one block for each warp.

    Warp w gets block step * WARPS + w along K.
    """
    SCALE_SLOTS: tl.constexpr = scale_slots_per_chunk(GROUP_K)
    warp = tl.arange(0, NUM_WARPS)[None, None, :, None]
    chunk = (step * NUM_WARPS + warp) * CHUNKS
    in_bounds = chunk * 128 < size_k
    words = load_words(words_ptr, words_offset, chunk, in_bounds, size_k, CHUNKS, 1, EVEN_K)
    scale = load_by_scale_slot(
        scale_ptr,
        scale_offset,
        chunk,
        in_bounds,
        size_k,
        CHUNKS,
        1,
        SCALE_SLOTS,
        GROUP_K,
        EVEN_K,
        PAIRED_SCALES,
    )
    zero = scale
    if HAS_ZERO_POINTS:
        zero = load_by_scale_slot(
            zero_point_ptr,
            zero_offset,
            chunk,
            in_bounds,
            size_k,
            CHUNKS,
            1,
            SCALE_SLOTS,
            GROUP_K,
            EVEN_K,
            PAIRED_SCALES,
        )
    return words, scale, zero


@triton.jit
def _load_x(
    x_ptr, stride, step, size_k,
    GROUP_K: tl.constexpr, CHUNKS: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """Load the values of x that are multiplied by the words from `_load_block`."""
    warp = tl.arange(0, NUM_WARPS)[None, None, :, None]
    chunk = (step * NUM_WARPS + warp) * CHUNKS
    in_bounds, scale_slots = chunk * 128 < size_k, scale_slots_per_chunk(GROUP_K)
    return load_row(x_ptr, stride, in_bounds, chunk, size_k, CHUNKS, scale_slots)


@triton.jit
def _multiply_step(
    total, x, ring, step, x_ptr, stride_xk,
    words_ptr, scale_ptr, zero_point_ptr, words_offset, scale_offset, zero_offset, shift,
    SIZE_K: tl.constexpr, NUM_STEPS: tl.constexpr, ACTIVATION_DTYPE: tl.constexpr,
    WEIGHT_FORMAT: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr, EVEN_K: tl.constexpr, PAIRED_SCALES: tl.constexpr,
    GROUP_K: tl.constexpr,
    CHUNKS: tl.constexpr, NUM_WARPS: tl.constexpr, STAGES: tl.constexpr,
    LOAD_AFTER_MMA: tl.constexpr,
):  # fmt: skip
    """Add the product of ring[0] and x to total. Return total, the next x and the advanced ring.

    The ring holds the blocks of the next STAGES steps. The block after these steps is loaded before
    the MMAs, or, if LOAD_AFTER_MMA, after the MMAs.
    """
    SCALE_SLOTS: tl.constexpr = scale_slots_per_chunk(GROUP_K)
    words, scale, zero = ring[0]
    row = x
    if NUM_STEPS > STAGES and not LOAD_AFTER_MMA:
        next_block = _load_block(
            words_ptr, scale_ptr, zero_point_ptr, words_offset, scale_offset, zero_offset,
            step + STAGES, SIZE_K,
            HAS_ZERO_POINTS, EVEN_K, PAIRED_SCALES, GROUP_K, CHUNKS, NUM_WARPS,
        )  # fmt: skip
        ring = ring[1:] + (next_block,)  # noqa: RUF005
    elif STAGES > 1:
        ring = ring[1:] + (ring[0],)  # noqa: RUF005
    if NUM_STEPS > 1 and not LOAD_AFTER_MMA:
        x = _load_x(x_ptr, stride_xk, step + 1, SIZE_K, GROUP_K, CHUNKS, NUM_WARPS)
    barrier = issue_loads(NUM_WARPS)
    pairs = to_mma_pairs(row, barrier, ACTIVATION_DTYPE, WEIGHT_FORMAT)
    # ADD_ZERO_TERM_LAST = False saves registers for weights.
    total += scaled_sums(
        words,
        pairs,
        scale,
        zero,
        shift,
        barrier,
        ACTIVATION_DTYPE,
        WEIGHT_FORMAT,
        HAS_ZERO_POINTS,
        SCALE_SLOTS,
        False,
    )
    if NUM_STEPS > 1 and LOAD_AFTER_MMA:
        next_block = _load_block(
            words_ptr, scale_ptr, zero_point_ptr, words_offset, scale_offset, zero_offset, step + 1,
            SIZE_K,
            HAS_ZERO_POINTS, EVEN_K, PAIRED_SCALES, GROUP_K, CHUNKS, NUM_WARPS,
        )  # fmt: skip
        ring = (next_block,)
        x = _load_x(x_ptr, stride_xk, step + 1, SIZE_K, GROUP_K, CHUNKS, NUM_WARPS)
    return total, x, ring


@triton.jit(do_not_specialize=["num_pairs"])
def gemv_w4_gate_up_kernel(
    x_ptr, b_ptr, b_scale_ptr, zero_point_ptr, bias_ptr, router_weights_ptr,
    topk_ids_ptr, expert_map_ptr, invalid_count_ptr, h_ptr,
    num_pairs, intermediate_size, num_experts, num_local_experts, num_steps,
    stride_xm, stride_xk, stride_be, stride_bse, stride_bze, stride_bias,
    stride_bn: tl.constexpr, stride_bsn: tl.constexpr, stride_bzn: tl.constexpr,
    UP_ROW_OFFSET: tl.constexpr, SIZE_K: tl.constexpr, NUM_STEPS: tl.constexpr, TOP_K: tl.constexpr,
    GATE_STRIDE: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_ROUTER_WEIGHTS: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, ACTIVATION_ALPHA: tl.constexpr, ACTIVATION_LIMIT: tl.constexpr,
    WEIGHT_FORMAT: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, GROUP_K: tl.constexpr,
    PAIRED_SCALES: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr, CHUNKS: tl.constexpr,
    NUM_WARPS: tl.constexpr, STAGES: tl.constexpr, LOAD_AFTER_MMA: tl.constexpr,
    USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """h[p, n] = act(r[p] * (x[p // TOP_K] @ w[expert of p, rows of n]^T) + bias)

    for pairs p of local experts, where r[p] is the router weight if HAS_ROUTER_WEIGHTS, else 1.

    Grid: (num_pairs, blocks of BLOCK_N columns + 1). The WARPS warps of a program split K in blocks
    of CHUNKS * 128. In the extra block, the program of pair 0 counts invalid ids, BLOCK_PAIRS at a
    time.

    x_ptr: (num_pairs / TOP_K, SIZE_K).
    b_ptr: w, (e, rows, SIZE_K / 2) bytes. The kernel reads int32 words of eight weights. Column n
        uses row n * GATE_STRIDE and, if GATED, also row n * GATE_STRIDE + UP_ROW_OFFSET for up.
    bias_ptr: if HAS_BIAS, the bias of the rows of w, (e, rows).
    h_ptr: (num_pairs, intermediate), contiguous, in the order of `store_in_pair_order`. Rows of
        skipped pairs are not written.
    ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT: see `ops.kernels.activation`.
    WEIGHT_FORMAT, HAS_ZERO_POINTS, GROUP_K, PAIRED_SCALES, EVEN_N, CHUNKS, STEPS, STAGES,
        LOAD_AFTER_MMA: see
        `gemv_w4_down_kernel`.
    """
    pdl_wait(USE_PDL)
    pair = tl.program_id(0)
    block = tl.program_id(1)
    if block * BLOCK_N >= intermediate_size:
        if pair == 0:
            count_invalid_ids(
                topk_ids_ptr,
                expert_map_ptr,
                invalid_count_ptr,
                num_pairs,
                num_experts,
                num_local_experts,
                HAS_EXPERT_MAP,
                BLOCK_PAIRS,
            )
        return
    local_expert, _ = load_local_ids(
        topk_ids_ptr,
        pair,
        pair >= 0,
        expert_map_ptr,
        num_experts,
        num_local_experts,
        HAS_EXPERT_MAP,
    )
    if local_expert < 0:
        return
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    ACTIVATION_DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    EVEN_K: tl.constexpr = SIZE_K % (CHUNKS * 128) == 0
    expert = local_expert.to(tl.int64)
    x_ptr += (pair // TOP_K).to(tl.int64) * stride_xm
    words_ptr = b_ptr.to(tl.pointer_type(tl.int32)) + expert * (stride_be // 4)
    b_scale_ptr += expert * stride_bse
    zero_point_ptr += expert * stride_bze
    rows = lane_row_indices(
        block * BLOCK_N, intermediate_size, ROWS, GATE_STRIDE, UP_ROW_OFFSET, BLOCK_N, EVEN_N
    )
    shift = ((rows[0] + rows[1]) % 2 * 4)[:, :, :, :, None]
    words_offset, scale_offset = row_offsets(rows, stride_bn // 4), row_offsets(rows, stride_bsn)
    # Either the lane offsets or the group offsets are even, so they can be halved separately.
    zero_offset = row_offsets((rows[0] // 2, rows[1] // 2), stride_bzn)
    ring = ()
    for stage in tl.static_range(STAGES):
        ring += (
            _load_block(
                words_ptr, b_scale_ptr, zero_point_ptr, words_offset, scale_offset, zero_offset,
                stage, SIZE_K,
                HAS_ZERO_POINTS, EVEN_K, PAIRED_SCALES, GROUP_K, CHUNKS, NUM_WARPS,
            ),
        )  # fmt: skip
    x = _load_x(x_ptr, stride_xk, 0, SIZE_K, GROUP_K, CHUNKS, NUM_WARPS)
    total = tl.zeros((NUM_WARPS, ROWS, 8), tl.float32)
    # Unroll the steps. In a loop the compiler would hoist the unpacking of invariant words.
    if NUM_STEPS <= STAGES:
        for stage in tl.static_range(NUM_STEPS):
            total, x, ring = _multiply_step(
                total, x, ring, stage, x_ptr, stride_xk,
                words_ptr, b_scale_ptr, zero_point_ptr, words_offset, scale_offset, zero_offset,
                shift,
                SIZE_K, NUM_STEPS, ACTIVATION_DTYPE, WEIGHT_FORMAT, HAS_ZERO_POINTS, EVEN_K,
                PAIRED_SCALES, GROUP_K, CHUNKS, NUM_WARPS,
                STAGES, LOAD_AFTER_MMA,
            )  # fmt: skip
    else:
        for first in range(0, num_steps, STAGES):
            for stage in tl.static_range(STAGES):
                total, x, ring = _multiply_step(
                    total, x, ring, first + stage, x_ptr, stride_xk,
                    words_ptr, b_scale_ptr, zero_point_ptr, words_offset, scale_offset, zero_offset,
                    shift,
                    SIZE_K, NUM_STEPS, ACTIVATION_DTYPE, WEIGHT_FORMAT, HAS_ZERO_POINTS, EVEN_K,
                    PAIRED_SCALES, GROUP_K, CHUNKS,
                    NUM_WARPS,
                    STAGES, LOAD_AFTER_MMA,
                )  # fmt: skip
    # Compute these after the loop, which saves registers in it.
    end = tl.arange(0, ROWS)
    end_column = block * BLOCK_N + end % BLOCK_N
    bias = tl.zeros((ROWS,), tl.float32)
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * stride_bias + end_column * GATE_STRIDE
        bias_ptrs += (end // BLOCK_N) * UP_ROW_OFFSET
        bias += tl.load(bias_ptrs, mask=end_column < intermediate_size, other=0.0).to(tl.float32)
    row_weight = 1.0
    if HAS_ROUTER_WEIGHTS:
        row_weight = tl.load(router_weights_ptr + pair)
    sums = tl.sum(tl.sum(total, 2), 0)
    if HAS_ROUTER_WEIGHTS:
        sums *= row_weight
    sums += bias
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, BLOCK_N)), (1, 0)))
    else:
        gate = sums
        up = gate
    out_column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    h = activate(gate, up, ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT)
    h_ptr += pair.to(tl.int64) * intermediate_size
    store_in_pair_order(h_ptr, out_column, out_column < intermediate_size, h, WEIGHT_FORMAT)
