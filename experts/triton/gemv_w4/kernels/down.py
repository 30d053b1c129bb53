"""`gemv_w4_down_kernel`: GEMM 2 of the gemv_w4 path (h W2^T), with the sum over each token's pairs.

A pair is a token together with one of its top_k experts: pair p belongs to token p // top_k. A
program computes BLOCK_N hidden columns of one token. Each of its warps sums over some of the blocks
along K and over some of the token's pairs. `gemv_w4.kernels.common` defines block, chunk and scale
slot.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from experts.triton.gemv_w4.kernels.common import (
    compute_scaled_sums,
    issue_loads,
    lane_row_indices,
    load_by_scale_slot,
    load_pairs,
    load_words,
    scale_slots_per_chunk,
    to_scale_slot_layout,
)
from experts.triton.kernels.operands_w4 import row_offsets
from modular_kernel.ops.kernels.ids import load_local_ids


@triton.constexpr_function
def count_blocks(size_k: int, chunks: int) -> int:
    """Return the number of blocks of `chunks` chunks along K."""
    return -(-size_k // (chunks * 128))


@triton.constexpr_function
def stays_in_bounds(blocks: int, warps_per_pair: int, stages: int, load_after_mma: bool) -> bool:
    """Return whether no step loads a block after the last one of its pair.

    A step loads the block of a later step in advance. The last steps would therefore load blocks
    that do not exist, unless there is only one step or all steps are loaded before the loop.

    blocks: blocks of a weight row.
    warps_per_pair: warps that share the blocks of a pair.
    stages: blocks that a warp loads before the loop.
    """
    num_steps = -(-blocks // warps_per_pair)
    return (
        blocks % warps_per_pair == 0
        and num_steps == stages
        and (num_steps == 1 or not load_after_mma)
    )


@triton.jit
def _locate_pairs(
    token, num_experts, num_local_experts, topk_ids_ptr, expert_map_ptr,
    TOP_K: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr, NUM_WARPS: tl.constexpr,
    WARPS_PER_PAIR: tl.constexpr,
    HAS_LOOP: tl.constexpr,
):  # fmt: skip
    """Return the pair of each warp, its local expert, and whether the pair is not skipped.

    The results are (4, 8, NUM_WARPS, 1). WARPS_PER_PAIR warps share a pair. If WARPS_PER_PAIR is 0,
    a warp processes several pairs, and the results are not used.

    HAS_LOOP: whether the steps run in a loop that is not unrolled.
    """
    if WARPS_PER_PAIR > 0:
        pair_slot = tl.arange(0, NUM_WARPS)[None, None, :, None] // WARPS_PER_PAIR
        if HAS_LOOP:
            # Make all lanes of a warp load the id, which avoids a broadcast. If steps are unrolled,
            # the compiler does so itself, and this addition would change the layout.
            pair_slot += tl.zeros((4, 8, 1, 1), tl.int32)
        pair = token * TOP_K + pair_slot
        local_expert, _ = load_local_ids(
            topk_ids_ptr,
            pair,
            pair_slot < TOP_K,
            expert_map_ptr,
            num_experts,
            num_local_experts,
            HAS_EXPERT_MAP,
        )
        # NaN-free: integer operands
        result = (pair, tl.maximum(local_expert, 0), local_expert >= 0)
    else:
        result = (token, token, token)
    return result


@triton.jit
def _load_initial_biases(
    ptr, stride, first_column, hidden_size, token, num_experts, num_local_experts, topk_ids_ptr,
    expert_map_ptr,
    TOP_K: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    NUM_WARPS: tl.constexpr, WARPS_PER_PAIR: tl.constexpr,
):  # fmt: skip
    """Return the biases as initial sums, float32 (NUM_WARPS, ROWS, 8).

    The bias of a pair is in the first scale slot of the pair's first warp. All other values are
    zero.
    """
    warp = tl.arange(0, NUM_WARPS)[:, None, None]
    row = tl.arange(0, ROWS)[None, :, None]
    scale_slot = tl.arange(0, 8)[None, None, :]
    # Load ids again, because the results of _locate_pairs have a different layout.
    pair = token * TOP_K + warp // WARPS_PER_PAIR + tl.zeros((1, 1, 8), tl.int32)
    local_expert, _ = load_local_ids(
        topk_ids_ptr, pair, scale_slot == 0, expert_map_ptr, num_experts, num_local_experts,
        HAS_EXPERT_MAP
    )  # fmt: skip
    column = first_column + row
    has_bias = (
        (local_expert >= 0)
        & (warp % WARPS_PER_PAIR == 0)
        & (row < BLOCK_N)
        & (column < hidden_size)
    )
    # NaN-free: integer operands
    ptrs = ptr + tl.maximum(local_expert, 0).to(tl.int64) * stride + column
    return tl.load(ptrs, mask=has_bias, other=0.0).to(tl.float32)


@triton.jit
def _locate_blocks(
    token, warp_pair, step, num_experts, num_local_experts, topk_ids_ptr, expert_map_ptr,
    SIZE_K: tl.constexpr,
    TOP_K: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr, CHUNKS: tl.constexpr, HALVES: tl.constexpr,
    NUM_WARPS: tl.constexpr, WARPS_PER_PAIR: tl.constexpr, STAGES: tl.constexpr,
    LOAD_AFTER_MMA: tl.constexpr,
):  # fmt: skip
    """Return (pair, local expert, whether to read it, first chunk) of each warp's block in a step.

    The results are (4, 8, NUM_WARPS, 1). If WARPS_PER_PAIR > 0, the block belongs to the warp's own
    pair. Otherwise, the blocks of a token's pairs are numbered consecutively, and warp w takes
    block step * NUM_WARPS + w.
    """
    BLOCKS: tl.constexpr = count_blocks(SIZE_K, CHUNKS * HALVES)
    warp = tl.arange(0, NUM_WARPS)[None, None, :, None]
    if WARPS_PER_PAIR > 0:
        pair, local_expert, valid = warp_pair
        block = step * WARPS_PER_PAIR + warp % WARPS_PER_PAIR
        if not stays_in_bounds(BLOCKS, WARPS_PER_PAIR, STAGES, LOAD_AFTER_MMA):
            valid = valid & (block < BLOCKS)
    else:
        index = step * NUM_WARPS + warp
        if TOP_K * BLOCKS > NUM_WARPS:
            # Make all lanes of a warp load the id; see _locate_pairs.
            index += tl.zeros((4, 8, 1, 1), tl.int32)
        pair = token * TOP_K + index // BLOCKS
        local_expert, _ = load_local_ids(
            topk_ids_ptr,
            pair,
            index < TOP_K * BLOCKS,
            expert_map_ptr,
            num_experts,
            num_local_experts,
            HAS_EXPERT_MAP,
        )
        block = index % BLOCKS
        valid = local_expert >= 0
        local_expert = tl.maximum(local_expert, 0)  # NaN-free: integer operands
    return pair, local_expert, valid, block * (CHUNKS * HALVES)


@triton.jit
def _load_block(
    token, warp_pair, step, num_experts, num_local_experts, topk_ids_ptr, expert_map_ptr,
    words_ptr, scale_ptr, zero_point_ptr, router_weights_ptr, words_offset, scale_offset,
    zero_offset,
    stride_be, stride_bse, stride_bze,
    SIZE_K: tl.constexpr, TOP_K: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr,
    HAS_ROUTER_WEIGHTS: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, EVEN_K: tl.constexpr,
    PAIRED_SCALES: tl.constexpr, GROUP_K: tl.constexpr, CHUNKS: tl.constexpr, HALVES: tl.constexpr,
    NUM_WARPS: tl.constexpr, WARPS_PER_PAIR: tl.constexpr, STAGES: tl.constexpr,
    LOAD_AFTER_MMA: tl.constexpr,
):  # fmt: skip
    """Load the block of each warp in a step.

    Return (words, scales, zero points, router weights, pair, whether the block is read, first
    chunk).
    """
    SCALE_SLOTS: tl.constexpr = scale_slots_per_chunk(GROUP_K)
    pair, local_expert, valid, chunk = _locate_blocks(
        token, warp_pair, step, num_experts, num_local_experts, topk_ids_ptr, expert_map_ptr,
        SIZE_K, TOP_K, HAS_EXPERT_MAP, CHUNKS, HALVES, NUM_WARPS, WARPS_PER_PAIR, STAGES,
        LOAD_AFTER_MMA,
    )  # fmt: skip
    expert = local_expert.to(tl.int64)
    words_ptr += expert * (stride_be // 4)
    words = load_words(words_ptr, words_offset, chunk, valid, SIZE_K, CHUNKS, HALVES, EVEN_K)
    scale_ptr += expert * stride_bse
    scale = load_by_scale_slot(
        scale_ptr,
        scale_offset,
        chunk,
        valid,
        SIZE_K,
        CHUNKS,
        HALVES,
        SCALE_SLOTS,
        GROUP_K,
        EVEN_K,
        PAIRED_SCALES,
    )
    zero_points = scale
    if HAS_ZERO_POINTS:
        zero_point_ptr += expert * stride_bze
        zero_points = load_by_scale_slot(
            zero_point_ptr,
            zero_offset,
            chunk,
            valid,
            SIZE_K,
            CHUNKS,
            HALVES,
            SCALE_SLOTS,
            GROUP_K,
            EVEN_K,
            PAIRED_SCALES,
        )
    router_weight = valid
    if HAS_ROUTER_WEIGHTS and WARPS_PER_PAIR == 0:
        # The router weight of a skipped pair may have any value, including NaN.
        router_weight = tl.load(router_weights_ptr + pair, mask=valid, other=0.0)
    return words, scale, zero_points, router_weight, pair, valid, chunk


@triton.jit
def _broadcast_to_sums(weight, GROUPS: tl.constexpr):
    """Broadcast one value per warp, (4, 8, warps, 1), to (warps, 8 * GROUPS, 8)."""
    warps: tl.constexpr = weight.shape[2]
    return to_scale_slot_layout(tl.broadcast_to(weight[:, :, :, :, None], (4, 8, warps, GROUPS, 2)))


@triton.jit
def _multiply_step(
    total, h, ring, step, token, warp_pair, num_experts, num_local_experts, topk_ids_ptr,
    expert_map_ptr, pairs_ptr,
    words_ptr, scale_ptr, zero_point_ptr, router_weights_ptr, words_offset, scale_offset,
    zero_offset,
    shift, stride_be, stride_bse, stride_bze,
    SIZE_K: tl.constexpr, NUM_STEPS: tl.constexpr, TOP_K: tl.constexpr,
    HAS_EXPERT_MAP: tl.constexpr,
    ACTIVATION_DTYPE: tl.constexpr, HAS_ROUTER_WEIGHTS: tl.constexpr, WEIGHT_FORMAT: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    EVEN_K: tl.constexpr, PAIRED_SCALES: tl.constexpr, GROUP_K: tl.constexpr, CHUNKS: tl.constexpr,
    HALVES: tl.constexpr, NUM_WARPS: tl.constexpr, WARPS_PER_PAIR: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD_AFTER_MMA: tl.constexpr,
):  # fmt: skip
    """Add the product of the block ring[0] and h to total; return (total, next h, advanced ring).

    ring: a tuple of the blocks of the next STAGES steps (results of `_load_block`). The block after
        these steps is loaded before the MMAs or, if LOAD_AFTER_MMA, after them.
    """
    SCALE_SLOTS: tl.constexpr = scale_slots_per_chunk(GROUP_K)
    words, scale, zero_points, router_weight, _, _, _ = ring[0]
    pairs = h
    if NUM_STEPS > STAGES and not LOAD_AFTER_MMA:
        next_block = _load_block(
            token, warp_pair, step + STAGES, num_experts, num_local_experts, topk_ids_ptr,
            expert_map_ptr,
            words_ptr, scale_ptr, zero_point_ptr, router_weights_ptr, words_offset, scale_offset,
            zero_offset,
            stride_be, stride_bse, stride_bze, SIZE_K, TOP_K, HAS_EXPERT_MAP,
            HAS_ROUTER_WEIGHTS, HAS_ZERO_POINTS, EVEN_K, PAIRED_SCALES, GROUP_K, CHUNKS, HALVES,
            NUM_WARPS,
            WARPS_PER_PAIR,
            STAGES, LOAD_AFTER_MMA,
        )  # fmt: skip
        ring = ring[1:] + (next_block,)  # noqa: RUF005
    elif STAGES > 1:
        ring = ring[1:] + (ring[0],)  # noqa: RUF005
    if NUM_STEPS > STAGES and not LOAD_AFTER_MMA:
        _, _, _, _, pair, valid, chunk = ring[0]
        h = load_pairs(pairs_ptr, pair, valid, chunk, SIZE_K, CHUNKS * HALVES, SCALE_SLOTS)
    zero_after_loads = issue_loads(NUM_WARPS)
    sums = compute_scaled_sums(
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
        True,
    )
    if HAS_ROUTER_WEIGHTS and WARPS_PER_PAIR == 0:
        sums *= _broadcast_to_sums(router_weight, words.shape[3])
    if NUM_STEPS > 1 and LOAD_AFTER_MMA:
        next_block = _load_block(
            token, warp_pair, step + 1, num_experts, num_local_experts, topk_ids_ptr,
            expert_map_ptr,
            words_ptr, scale_ptr, zero_point_ptr, router_weights_ptr, words_offset, scale_offset,
            zero_offset,
            stride_be, stride_bse, stride_bze, SIZE_K, TOP_K, HAS_EXPERT_MAP,
            HAS_ROUTER_WEIGHTS, HAS_ZERO_POINTS, EVEN_K, PAIRED_SCALES, GROUP_K, CHUNKS, HALVES,
            NUM_WARPS,
            WARPS_PER_PAIR,
            STAGES, LOAD_AFTER_MMA,
        )  # fmt: skip
        ring = (next_block,)
        _, _, _, _, pair, valid, chunk = next_block
        h = load_pairs(pairs_ptr, pair, valid, chunk, SIZE_K, CHUNKS * HALVES, SCALE_SLOTS)
    return total + sums, h, ring


@triton.jit
def gemv_w4_down_kernel(
    h_ptr, b_ptr, b_scale_ptr, zero_point_ptr, bias_ptr, router_weights_ptr, topk_ids_ptr,
    expert_map_ptr, out_ptr,
    hidden_size, num_experts, num_local_experts, num_steps, routed_scaling_factor,
    stride_be, stride_bse, stride_bze, stride_bias,
    stride_bn: tl.constexpr, stride_bsn: tl.constexpr, stride_bzn: tl.constexpr,
    SIZE_K: tl.constexpr, NUM_STEPS: tl.constexpr, TOP_K: tl.constexpr,
    HAS_EXPERT_MAP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROUTER_WEIGHTS: tl.constexpr, WEIGHT_FORMAT: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr, GROUP_K: tl.constexpr, PAIRED_SCALES: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr, CHUNKS: tl.constexpr, HALVES: tl.constexpr,
    NUM_WARPS: tl.constexpr, WARPS_PER_PAIR: tl.constexpr, STAGES: tl.constexpr,
    LOAD_AFTER_MMA: tl.constexpr, USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """Compute GEMM 2 for each pair, and write the weighted sum over the pairs of each token to out.

    The term of pair p is routed_scaling_factor * weight[p] * (h[p] @ w[expert of p]^T + bias). If
    TOP_K = 1, every pair has its own output row, which is zero if the pair is skipped.

    Grid: (tokens, blocks of BLOCK_N columns). The NUM_WARPS warps of a program divide the pairs of
        a token and their K, in blocks of HALVES * CHUNKS * 128. The order of the sum is fixed.

    h_ptr: (tokens * TOP_K, SIZE_K), contiguous, in the order of `store_in_pair_order`.
    b_ptr: weights (num_experts, hidden_size, SIZE_K / 2) bytes, read as int32 words of eight
        weights. Weights of skipped pairs are not read.
    b_scale_ptr: weight scales (num_experts, hidden_size, SIZE_K / GROUP_K).
    zero_point_ptr: zero points, two rows per byte; used if HAS_ZERO_POINTS.
    bias_ptr: (num_experts, hidden_size), used if HAS_BIAS.
    router_weights_ptr: (tokens * TOP_K,) float32, used if HAS_ROUTER_WEIGHTS.
    topk_ids_ptr, expert_map_ptr, num_experts, num_local_experts, HAS_EXPERT_MAP: the expert ids of
        the pairs, and how they map to the experts on this rank; see `load_local_ids`. Pairs whose
        expert is not on this rank are skipped.
    out_ptr: (tokens, hidden_size), contiguous.
    NUM_STEPS, num_steps: the number of steps, as a constant for loops that are unrolled and as an
        argument for other loops.
    stride_*: strides, named as in vLLM: b (weights, in bytes), bs (weight scales), bz (zero
        points); dimensions e (expert), n.
    SIZE_K: K, the intermediate size.
    TOP_K: pairs per output row.
    WEIGHT_FORMAT: the encoding of words and scales (`experts.triton.kernels.unpack_w4`).
    HAS_ZERO_POINTS: whether weights have zero points.
    GROUP_K: weights per scale.
    PAIRED_SCALES: whether two scales can be loaded at once (`load_by_scale_slot`).
    BLOCK_TOP_K: a power of two >= TOP_K.
    EVEN_N: whether BLOCK_N divides hidden_size.
    CHUNKS, HALVES: the size of a block; see `gemv_w4.kernels.common`.
    WARPS_PER_PAIR: warps per pair, or 0 if TOP_K does not divide NUM_WARPS.
    STAGES: the number of blocks that a warp has in flight while it multiplies one.
    LOAD_AFTER_MMA: whether a block is loaded only after the previous block has been multiplied.
        This takes fewer registers.
    USE_PDL: whether the launch uses programmatic dependent launch (`pdl_wait`).
    """
    ACTIVATION_DTYPE: tl.constexpr = h_ptr.dtype.element_ty
    ROWS: tl.constexpr = BLOCK_N * HALVES
    SCALE_SLOTS: tl.constexpr = scale_slots_per_chunk(GROUP_K)
    EVEN_K: tl.constexpr = SIZE_K % (CHUNKS * HALVES * 128) == 0
    token = tl.program_id(0)
    first_column = tl.program_id(1) * BLOCK_N
    words_ptr = b_ptr.to(tl.pointer_type(tl.int32))
    rows = lane_row_indices(first_column, hidden_size, ROWS, 1, 0, BLOCK_N, EVEN_N)
    shift = ((rows[0] + rows[1]) % 2 * 4)[:, :, :, :, None]
    words_offset, scale_offset = row_offsets(rows, stride_bn // 4), row_offsets(rows, stride_bsn)
    # Either the lane offsets or the group offsets are even, so they can be halved separately.
    zero_offset = row_offsets((rows[0] // 2, rows[1] // 2), stride_bzn)
    # Load the first weights before waiting for h. The ids are valid here, because GEMM 1 waited for
    # them before this kernel could start. See `pdl_wait`.
    warp_pair = _locate_pairs(
        token, num_experts, num_local_experts, topk_ids_ptr, expert_map_ptr, TOP_K, HAS_EXPERT_MAP,
        NUM_WARPS, WARPS_PER_PAIR,
        NUM_STEPS > STAGES,
    )  # fmt: skip
    ring = ()
    for stage in tl.static_range(STAGES):
        ring += (
            _load_block(
                token, warp_pair, stage, num_experts, num_local_experts, topk_ids_ptr,
                expert_map_ptr,
                words_ptr, b_scale_ptr, zero_point_ptr, router_weights_ptr, words_offset,
                scale_offset,
                zero_offset,
                stride_be, stride_bse, stride_bze, SIZE_K, TOP_K, HAS_EXPERT_MAP,
                HAS_ROUTER_WEIGHTS, HAS_ZERO_POINTS, EVEN_K, PAIRED_SCALES, GROUP_K, CHUNKS,
                HALVES, NUM_WARPS,
                WARPS_PER_PAIR, STAGES, LOAD_AFTER_MMA,
            ),
        )  # fmt: skip
    column = first_column + tl.arange(0, BLOCK_N)
    column_mask = column < hidden_size
    total = tl.zeros((NUM_WARPS, ROWS, 8), tl.float32)
    bias = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_BIAS and WARPS_PER_PAIR > 0:
        total += _load_initial_biases(
            bias_ptr, stride_bias, first_column, hidden_size, token, num_experts,
            num_local_experts, topk_ids_ptr,
            expert_map_ptr, TOP_K, HAS_EXPERT_MAP, BLOCK_N, ROWS, NUM_WARPS, WARPS_PER_PAIR,
        )  # fmt: skip
    elif HAS_BIAS:
        pair_slot = tl.arange(0, BLOCK_TOP_K)
        pairs = token * TOP_K + pair_slot
        local_expert, _ = load_local_ids(
            topk_ids_ptr,
            pairs,
            pair_slot < TOP_K,
            expert_map_ptr,
            num_experts,
            num_local_experts,
            HAS_EXPERT_MAP,
        )
        valid = local_expert >= 0
        # NaN-free: integer operands
        ptrs = (
            bias_ptr
            + tl.maximum(local_expert, 0)[:, None].to(tl.int64) * stride_bias
            + column[None, :]
        )
        biases = tl.load(ptrs, mask=valid[:, None] & column_mask[None, :], other=0.0).to(tl.float32)
        if HAS_ROUTER_WEIGHTS:
            biases *= tl.load(router_weights_ptr + pairs, mask=valid, other=0.0)[:, None]
        bias += tl.sum(biases, 0)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    pairs_ptr = h_ptr.to(tl.pointer_type(tl.int32))
    # If all steps are unrolled, load all of h at once.
    h_blocks = ()
    for stage in tl.static_range(NUM_STEPS if NUM_STEPS <= STAGES else 1):
        _, _, _, _, pair, valid, chunk = ring[stage]
        h_blocks += (
            load_pairs(pairs_ptr, pair, valid, chunk, SIZE_K, CHUNKS * HALVES, SCALE_SLOTS),
        )
    # Unroll the steps. In a loop, the compiler would hoist the unpacking of invariant words.
    if NUM_STEPS <= STAGES:
        for stage in tl.static_range(NUM_STEPS):
            total, _, ring = _multiply_step(
                total, h_blocks[stage], ring, stage, token, warp_pair, num_experts,
                num_local_experts, topk_ids_ptr,
                expert_map_ptr,
                pairs_ptr, words_ptr, b_scale_ptr, zero_point_ptr, router_weights_ptr, words_offset,
                scale_offset,
                zero_offset, shift, stride_be, stride_bse, stride_bze,
                SIZE_K, NUM_STEPS, TOP_K, HAS_EXPERT_MAP, ACTIVATION_DTYPE, HAS_ROUTER_WEIGHTS,
                WEIGHT_FORMAT, HAS_ZERO_POINTS, EVEN_K,
                PAIRED_SCALES, GROUP_K, CHUNKS, HALVES, NUM_WARPS, WARPS_PER_PAIR, STAGES,
                LOAD_AFTER_MMA,
            )  # fmt: skip
    else:
        h = h_blocks[0]
        for first in range(0, num_steps, STAGES):
            for stage in tl.static_range(STAGES):
                total, h, ring = _multiply_step(
                    total, h, ring, first + stage, token, warp_pair, num_experts,
                    num_local_experts, topk_ids_ptr,
                    expert_map_ptr,
                    pairs_ptr, words_ptr, b_scale_ptr, zero_point_ptr, router_weights_ptr,
                    words_offset,
                    scale_offset, zero_offset, shift, stride_be, stride_bse, stride_bze,
                    SIZE_K, NUM_STEPS, TOP_K, HAS_EXPERT_MAP, ACTIVATION_DTYPE, HAS_ROUTER_WEIGHTS,
                    WEIGHT_FORMAT, HAS_ZERO_POINTS, EVEN_K,
                    PAIRED_SCALES, GROUP_K, CHUNKS, HALVES, NUM_WARPS, WARPS_PER_PAIR, STAGES,
                    LOAD_AFTER_MMA,
                )  # fmt: skip
    if HAS_ROUTER_WEIGHTS and WARPS_PER_PAIR > 0:
        pair, _, valid = warp_pair
        # The router weight of a skipped pair may have any value, including NaN.
        router_weight = tl.load(router_weights_ptr + pair, mask=valid, other=0.0)
        total *= _broadcast_to_sums(router_weight, ROWS // 8)
    if HALVES == 2:
        total = tl.sum(tl.reshape(total, (NUM_WARPS, 2, BLOCK_N, 8)), 1)
    out = tl.sum(tl.sum(total, 2), 0) + bias
    out_ptrs = out_ptr + token.to(tl.int64) * hidden_size + column
    tl.store(out_ptrs, (out * routed_scaling_factor).to(out_ptr.dtype.element_ty), mask=column_mask)
