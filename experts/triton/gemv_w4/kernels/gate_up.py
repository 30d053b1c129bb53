"""`gemv_w4_gate_up_kernel`: GEMM 1 of the gemv_w4 path, h = act(x W1^T).

A pair is a token together with one of its top_k experts: pair p belongs to token p // top_k. A
program computes BLOCK_N intermediate columns of one pair. Each of its warps sums over some of the
blocks along K. `gemv_w4.kernels.common` defines block, chunk and scale slot.
"""

import triton
import triton.language as tl

from experts.triton.gemv_w4.kernels.common import (
    compute_scaled_sums,
    issue_loads,
    lane_row_indices,
    load_by_scale_slot,
    load_row,
    load_words,
    scale_slots_per_chunk,
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

    Warp w takes block step * NUM_WARPS + w along K.
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
    zero_points = scale
    if HAS_ZERO_POINTS:
        zero_points = load_by_scale_slot(
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
    return words, scale, zero_points


@triton.jit
def _load_x(
    x_ptr, stride, step, size_k,
    GROUP_K: tl.constexpr, CHUNKS: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """Load the values of x that are multiplied by the words from `_load_block` of the same step."""
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
    """Add the product of the block ring[0] and x to total; return (total, next x, advanced ring).

    ring: a tuple of the blocks of the next STAGES steps (results of `_load_block`). The block after
        these steps is loaded before the MMAs or, if LOAD_AFTER_MMA, after them.
    """
    SCALE_SLOTS: tl.constexpr = scale_slots_per_chunk(GROUP_K)
    words, scale, zero_points = ring[0]
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
    zero_after_loads = issue_loads(NUM_WARPS)
    pairs = to_mma_pairs(row, zero_after_loads, ACTIVATION_DTYPE, WEIGHT_FORMAT)
    # ADD_ZERO_TERM_LAST = False saves registers for weights.
    total += compute_scaled_sums(
        words,
        pairs,
        scale,
        zero_points,
        shift,
        zero_after_loads,
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
    """h[p, n] = act(r[p] * (x[p // TOP_K] @ w[expert of p, rows of n]^T) + bias) for local pairs p.

    r[p] is the router weight if HAS_ROUTER_WEIGHTS, and 1 otherwise. A pair is local if its expert
    is on this rank.

    Grid: (num_pairs, blocks of BLOCK_N columns + 1). The NUM_WARPS warps of a program split K in
        blocks of CHUNKS * 128. In the extra block, the program of pair 0 counts the ids that are
        not valid, BLOCK_PAIRS at a time.

    x_ptr: (num_pairs / TOP_K, SIZE_K).
    b_ptr: weights (num_experts, rows, SIZE_K / 2) bytes, read as int32 words of eight weights.
        Column n uses weight row n * GATE_STRIDE and, if GATED, also row n * GATE_STRIDE +
        UP_ROW_OFFSET for up.
    b_scale_ptr: weight scales (num_experts, rows, SIZE_K / GROUP_K).
    zero_point_ptr: zero points, two rows per byte; used if HAS_ZERO_POINTS.
    bias_ptr: (num_experts, rows), used if HAS_BIAS.
    router_weights_ptr: (num_pairs,) float32, used if HAS_ROUTER_WEIGHTS.
    topk_ids_ptr, expert_map_ptr, num_experts, num_local_experts, HAS_EXPERT_MAP: the expert ids of
        the pairs, and how they map to the experts on this rank; see `load_local_ids`. Pairs whose
        expert is not on this rank are skipped.
    invalid_count_ptr: int32, incremented by the number of ids outside [-1, num_experts).
    h_ptr: output (num_pairs, intermediate_size), contiguous, in the order of `store_in_pair_order`.
        Rows of skipped pairs are not written.
    NUM_STEPS, num_steps: the number of steps, as a constant for loops that are unrolled and as an
        argument for other loops.
    stride_*: strides, named as in vLLM: x, b (weights, in bytes), bs (weight scales), bz (zero
        points); dimensions e (expert), m, n, k.
    SIZE_K: K, the hidden size.
    GATE_STRIDE: 2 if gate and up rows alternate in b, otherwise 1.
    GATED: whether the activation function combines gate and up.
    ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT: the activation function
        (`modular_kernel.ops.kernels.activation`).
    WEIGHT_FORMAT: the encoding of words and scales (`experts.triton.kernels.unpack_w4`).
    HAS_ZERO_POINTS: whether weights have zero points.
    GROUP_K: weights per scale.
    PAIRED_SCALES: whether two scales can be loaded at once (`load_by_scale_slot`).
    EVEN_N: whether BLOCK_N divides intermediate_size.
    CHUNKS: chunks per block.
    STAGES: the number of blocks that a warp has in flight while it multiplies one.
    LOAD_AFTER_MMA: whether a block is loaded only after the previous block has been multiplied.
        This takes fewer registers.
    USE_PDL: whether the launch uses programmatic dependent launch (`pdl_wait`).
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
    # Unroll the steps. In a loop, the compiler would hoist the unpacking of invariant words.
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
    # Compute these values after the loop to save registers in the loop.
    tile_row = tl.arange(0, ROWS)
    column = block * BLOCK_N + tile_row % BLOCK_N
    bias = tl.zeros((ROWS,), tl.float32)
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * stride_bias + column * GATE_STRIDE
        bias_ptrs += (tile_row // BLOCK_N) * UP_ROW_OFFSET
        bias += tl.load(bias_ptrs, mask=column < intermediate_size, other=0.0).to(tl.float32)
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
