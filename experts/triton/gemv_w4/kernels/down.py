"""Kernel of GEMM 2 of the gemv_w4 path.

A program computes a block of hidden columns of one token. Each of its WARPS warps sums over some of
the blocks along K and over some of the token's pairs. `common` defines blocks, chunks and slots.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from experts.triton.gemv_w4.kernels.common import (
    issue_loads,
    lane_row_indices,
    load_by_slot,
    load_pairs,
    load_words,
    scaled_sums,
    slots_of_chunk,
    to_slot_layout,
)
from experts.triton.kernels.operands_w4 import row_offsets
from modular_kernel.ops.kernels.ids import load_local_ids


@triton.constexpr_function
def blocks_along(depth: int, chunks: int) -> int:
    """Return the number of blocks of `chunks` chunks along K."""
    return -(-depth // (chunks * 128))


@triton.constexpr_function
def stays_in_bounds(blocks: int, warps_per_pair: int, stages: int, load_after_mma: bool) -> bool:
    """Return whether no step loads a block after the last one of its pair.

    A step loads the block of a later step, so that the last of several steps load blocks of steps
    that do not exist.
    """
    steps = -(-blocks // warps_per_pair)
    return blocks % warps_per_pair == 0 and steps == stages and (steps == 1 or not load_after_mma)


@triton.jit
def _pair_of_warp(
    token, num_experts, num_local, ids_ptr, map_ptr,
    TOP_K: tl.constexpr, HAS_MAP: tl.constexpr, WARPS: tl.constexpr, WARPS_PER_PAIR: tl.constexpr,
    HAS_LOOP: tl.constexpr,
):  # fmt: skip
    """Return the pair of each warp, its local expert, and whether the pair is not skipped.

    The results are (4, 8, WARPS, 1). WARPS_PER_PAIR warps share a pair. If WARPS_PER_PAIR is 0, a
    warp processes several pairs, and the results are not used.
    """
    if WARPS_PER_PAIR > 0:
        slot = tl.arange(0, WARPS)[None, None, :, None] // WARPS_PER_PAIR
        if HAS_LOOP:
            # Make all lanes of a warp load the id, which avoids a broadcast. If steps are unrolled,
            # the compiler does so itself, and this addition would change the layout.
            slot += tl.zeros((4, 8, 1, 1), tl.int32)
        pair = token * TOP_K + slot
        local, _ = load_local_ids(
            ids_ptr, pair, slot < TOP_K, map_ptr, num_experts, num_local, HAS_MAP
        )
        result = (pair, tl.maximum(local, 0), local >= 0)  # NaN-free: integers
    else:
        result = (token, token, token)
    return result


@triton.jit
def _initial_biases(
    ptr, stride, first_column, hidden, token, num_experts, num_local, ids_ptr, map_ptr,
    TOP_K: tl.constexpr, HAS_MAP: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    WARPS: tl.constexpr, WARPS_PER_PAIR: tl.constexpr,
):  # fmt: skip
    """Return the biases as initial sums, float32 (WARPS, ROWS, 8).

    The first slot of a pair's first warp has the pair's bias. The other slots are zero. The sums
    are multiplied by the router weight later.
    """
    warp = tl.arange(0, WARPS)[:, None, None]
    row = tl.arange(0, ROWS)[None, :, None]
    slot = tl.arange(0, 8)[None, None, :]
    # Load ids again, because the results of _pair_of_warp have a different layout.
    pair = token * TOP_K + warp // WARPS_PER_PAIR + tl.zeros((1, 1, 8), tl.int32)
    local, _ = load_local_ids(
        ids_ptr, pair, slot == 0, map_ptr, num_experts, num_local, HAS_MAP
    )  # fmt: skip
    column = first_column + row
    is_first = (local >= 0) & (warp % WARPS_PER_PAIR == 0) & (row < BLOCK_N) & (column < hidden)
    ptrs = ptr + tl.maximum(local, 0).to(tl.int64) * stride + column  # NaN-free: integers
    return tl.load(ptrs, mask=is_first, other=0.0).to(tl.float32)


@triton.jit
def _block_of_warp(
    token, warp_pair, step, num_experts, num_local, ids_ptr, map_ptr, DEPTH: tl.constexpr,
    TOP_K: tl.constexpr, HAS_MAP: tl.constexpr, CHUNKS: tl.constexpr, HALVES: tl.constexpr,
    WARPS: tl.constexpr, WARPS_PER_PAIR: tl.constexpr, STAGES: tl.constexpr,
    LOAD_AFTER_MMA: tl.constexpr,
):  # fmt: skip
    """Return pair, local expert, whether to read it, and first chunk of each warp's block in step.

    The results are (4, 8, WARPS, 1). If WARPS_PER_PAIR > 0, the block belongs to the warp's own
    pair. Otherwise the blocks of a token's pairs are numbered consecutively, and warp w has block
    step * WARPS + w.
    """
    BLOCKS: tl.constexpr = blocks_along(DEPTH, CHUNKS * HALVES)
    warp = tl.arange(0, WARPS)[None, None, :, None]
    if WARPS_PER_PAIR > 0:
        pair, local, valid = warp_pair
        block = step * WARPS_PER_PAIR + warp % WARPS_PER_PAIR
        if not stays_in_bounds(BLOCKS, WARPS_PER_PAIR, STAGES, LOAD_AFTER_MMA):
            valid = valid & (block < BLOCKS)
    else:
        index = step * WARPS + warp
        if TOP_K * BLOCKS > WARPS:
            # Make all lanes of a warp load the id; see _pair_of_warp.
            index += tl.zeros((4, 8, 1, 1), tl.int32)
        pair = token * TOP_K + index // BLOCKS
        local, _ = load_local_ids(
            ids_ptr, pair, index < TOP_K * BLOCKS, map_ptr, num_experts, num_local, HAS_MAP
        )
        block = index % BLOCKS
        valid = local >= 0
        local = tl.maximum(local, 0)  # NaN-free: integers
    return pair, local, valid, block * (CHUNKS * HALVES)


@triton.jit
def _load_block(
    token, warp_pair, step, num_experts, num_local, ids_ptr, map_ptr,
    words_ptr, scale_ptr, zero_ptr, row_weights_ptr, words_offset, scale_offset, zero_offset,
    stride_be, stride_bse, stride_bze,
    DEPTH: tl.constexpr, TOP_K: tl.constexpr, HAS_MAP: tl.constexpr,
    HAS_ROW_WEIGHTS: tl.constexpr, HAS_ZERO: tl.constexpr, EVEN_K: tl.constexpr,
    PAIRED_SCALES: tl.constexpr, GROUP_K: tl.constexpr, CHUNKS: tl.constexpr, HALVES: tl.constexpr,
    WARPS: tl.constexpr, WARPS_PER_PAIR: tl.constexpr, STAGES: tl.constexpr,
    LOAD_AFTER_MMA: tl.constexpr,
):  # fmt: skip
    """Load words, scales, zero points and router weights of the block of each warp.

    Return these, and the block's pair, whether the block is read, and its first chunk.
    """
    SLOTS: tl.constexpr = slots_of_chunk(GROUP_K)
    pair, local, valid, chunk = _block_of_warp(
        token, warp_pair, step, num_experts, num_local, ids_ptr, map_ptr,
        DEPTH, TOP_K, HAS_MAP, CHUNKS, HALVES, WARPS, WARPS_PER_PAIR, STAGES, LOAD_AFTER_MMA,
    )  # fmt: skip
    expert = local.to(tl.int64)
    words_ptr += expert * (stride_be // 4)
    words = load_words(words_ptr, words_offset, chunk, valid, DEPTH, CHUNKS, HALVES, EVEN_K)
    scale_ptr += expert * stride_bse
    scale = load_by_slot(
        scale_ptr,
        scale_offset,
        chunk,
        valid,
        DEPTH,
        CHUNKS,
        HALVES,
        SLOTS,
        GROUP_K,
        EVEN_K,
        PAIRED_SCALES,
    )
    zero = scale
    if HAS_ZERO:
        zero_ptr += expert * stride_bze
        zero = load_by_slot(
            zero_ptr,
            zero_offset,
            chunk,
            valid,
            DEPTH,
            CHUNKS,
            HALVES,
            SLOTS,
            GROUP_K,
            EVEN_K,
            PAIRED_SCALES,
        )
    weight = valid
    if HAS_ROW_WEIGHTS and WARPS_PER_PAIR == 0:
        # The router weight of a skipped pair may be anything, including NaN.
        weight = tl.load(row_weights_ptr + pair, mask=valid, other=0.0)
    return words, scale, zero, weight, pair, valid, chunk


@triton.jit
def _broadcast_to_sums(weight, GROUPS: tl.constexpr):
    """Broadcast a value per warp, (4, 8, WARPS, 1), to the shape of sums (WARPS, 8 * GROUPS, 8)."""
    warps: tl.constexpr = weight.shape[2]
    return to_slot_layout(tl.broadcast_to(weight[:, :, :, :, None], (4, 8, warps, GROUPS, 2)))


@triton.jit
def _step(
    total, h, ring, step, token, warp_pair, num_experts, num_local, ids_ptr, map_ptr, pairs_ptr,
    words_ptr, scale_ptr, zero_ptr, row_weights_ptr, words_offset, scale_offset, zero_offset,
    shift, stride_be, stride_bse, stride_bze,
    DEPTH: tl.constexpr, STEPS: tl.constexpr, TOP_K: tl.constexpr, HAS_MAP: tl.constexpr,
    TYPE: tl.constexpr, HAS_ROW_WEIGHTS: tl.constexpr, FORMAT: tl.constexpr, HAS_ZERO: tl.constexpr,
    EVEN_K: tl.constexpr, PAIRED_SCALES: tl.constexpr, GROUP_K: tl.constexpr, CHUNKS: tl.constexpr,
    HALVES: tl.constexpr, WARPS: tl.constexpr, WARPS_PER_PAIR: tl.constexpr, STAGES: tl.constexpr,
    LOAD_AFTER_MMA: tl.constexpr,
):  # fmt: skip
    """Add the product of ring[0] and h to total. Return total, the next h and the advanced ring.

    The ring holds the blocks of the next STAGES steps. The block after these steps is loaded before
    the MMAs, or, if LOAD_AFTER_MMA, after the MMAs.
    """
    SLOTS: tl.constexpr = slots_of_chunk(GROUP_K)
    words, scale, zero, weight, _, _, _ = ring[0]
    pairs = h
    if STEPS > STAGES and not LOAD_AFTER_MMA:
        next_block = _load_block(
            token, warp_pair, step + STAGES, num_experts, num_local, ids_ptr, map_ptr,
            words_ptr, scale_ptr, zero_ptr, row_weights_ptr, words_offset, scale_offset,
            zero_offset,
            stride_be, stride_bse, stride_bze, DEPTH, TOP_K, HAS_MAP,
            HAS_ROW_WEIGHTS, HAS_ZERO, EVEN_K, PAIRED_SCALES, GROUP_K, CHUNKS, HALVES, WARPS,
            WARPS_PER_PAIR,
            STAGES, LOAD_AFTER_MMA,
        )  # fmt: skip
        ring = ring[1:] + (next_block,)  # noqa: RUF005
    elif STAGES > 1:
        ring = ring[1:] + (ring[0],)  # noqa: RUF005
    if STEPS > STAGES and not LOAD_AFTER_MMA:
        _, _, _, _, pair, valid, chunk = ring[0]
        h = load_pairs(pairs_ptr, pair, valid, chunk, DEPTH, CHUNKS * HALVES, SLOTS)
    barrier = issue_loads(WARPS)
    sums = scaled_sums(
        words, pairs, scale, zero, shift, barrier, TYPE, FORMAT, HAS_ZERO, SLOTS, True
    )
    if HAS_ROW_WEIGHTS and WARPS_PER_PAIR == 0:
        sums *= _broadcast_to_sums(weight, words.shape[3])
    if STEPS > 1 and LOAD_AFTER_MMA:
        next_block = _load_block(
            token, warp_pair, step + 1, num_experts, num_local, ids_ptr, map_ptr,
            words_ptr, scale_ptr, zero_ptr, row_weights_ptr, words_offset, scale_offset,
            zero_offset,
            stride_be, stride_bse, stride_bze, DEPTH, TOP_K, HAS_MAP,
            HAS_ROW_WEIGHTS, HAS_ZERO, EVEN_K, PAIRED_SCALES, GROUP_K, CHUNKS, HALVES, WARPS,
            WARPS_PER_PAIR,
            STAGES, LOAD_AFTER_MMA,
        )  # fmt: skip
        ring = (next_block,)
        _, _, _, _, pair, valid, chunk = next_block
        h = load_pairs(pairs_ptr, pair, valid, chunk, DEPTH, CHUNKS * HALVES, SLOTS)
    return total + sums, h, ring


@triton.jit
def gemv_w4_down_kernel(
    h_ptr, b_ptr, b_scale_ptr, zero_ptr, bias_ptr, row_weights_ptr, ids_ptr, map_ptr, out_ptr,
    hidden, num_experts, num_local, steps, factor,
    stride_be, stride_bse, stride_bze, stride_bias,
    stride_bn: tl.constexpr, stride_bsn: tl.constexpr, stride_bzn: tl.constexpr,
    DEPTH: tl.constexpr, STEPS: tl.constexpr, TOP_K: tl.constexpr, HAS_MAP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROW_WEIGHTS: tl.constexpr, FORMAT: tl.constexpr,
    HAS_ZERO: tl.constexpr, GROUP_K: tl.constexpr, PAIRED_SCALES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr, CHUNKS: tl.constexpr, HALVES: tl.constexpr,
    WARPS: tl.constexpr, WARPS_PER_PAIR: tl.constexpr, STAGES: tl.constexpr,
    LOAD_AFTER_MMA: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """out[t, n] = factor * sum over pairs p of t of weight[p] * (h[p] @ w[expert of p, n] + bias).

    Grid: (tokens, blocks of BLOCK_N columns). The WARPS warps of a program split the pairs of a
    token and their K, in blocks of HALVES * CHUNKS * 128. The order of the sum is fixed. If TOP_K =
    1, every pair has an output row, which is zero if the pair is skipped.

    h_ptr: (tokens * TOP_K, DEPTH), contiguous, in the order of `store_in_pair_order`.
    b_ptr: w, (e, hidden, DEPTH / 2) bytes. The kernel reads int32 words of eight weights, and does
        not read the weights of skipped pairs.
    out_ptr: (tokens, hidden), contiguous.
    FORMAT: the encoding of words and scales; see `unpack_w4`.
    HAS_ZERO: whether weights have zero points.
    GROUP_K: weights per scale.
    PAIRED_SCALES: see `load_by_slot`.
    BLOCK_K: a power of two >= TOP_K.
    EVEN_N: whether BLOCK_N divides hidden.
    CHUNKS, HALVES: see `common`.
    WARPS_PER_PAIR: warps per pair, or 0 if TOP_K does not divide WARPS.
    STEPS, steps: the number of steps. STEPS is a constant, which short loops need for unrolling.
        Other loops use steps.
    STAGES: the number of blocks that a warp has in flight while it multiplies one.
    LOAD_AFTER_MMA: whether a block is loaded only after the previous block has been multiplied.
        This takes fewer registers.
    """
    TYPE: tl.constexpr = h_ptr.dtype.element_ty
    ROWS: tl.constexpr = BLOCK_N * HALVES
    SLOTS: tl.constexpr = slots_of_chunk(GROUP_K)
    EVEN_K: tl.constexpr = DEPTH % (CHUNKS * HALVES * 128) == 0
    token = tl.program_id(0)
    first_column = tl.program_id(1) * BLOCK_N
    words_ptr = b_ptr.to(tl.pointer_type(tl.int32))
    rows = lane_row_indices(first_column, hidden, ROWS, 1, 0, BLOCK_N, EVEN_N)
    shift = ((rows[0] + rows[1]) % 2 * 4)[:, :, :, :, None]
    words_offset, scale_offset = row_offsets(rows, stride_bn // 4), row_offsets(rows, stride_bsn)
    # Either the lane offsets or the group offsets are even, so they can be halved separately.
    zero_offset = row_offsets((rows[0] // 2, rows[1] // 2), stride_bzn)
    # Load the first weights before waiting for h. The ids are valid here, because GEMM 1 waited for
    # them before this kernel could start. See `pdl_wait`.
    warp_pair = _pair_of_warp(
        token, num_experts, num_local, ids_ptr, map_ptr, TOP_K, HAS_MAP, WARPS, WARPS_PER_PAIR,
        STEPS > STAGES,
    )  # fmt: skip
    ring = ()
    for s in tl.static_range(STAGES):
        ring += (
            _load_block(
                token, warp_pair, s, num_experts, num_local, ids_ptr, map_ptr,
                words_ptr, b_scale_ptr, zero_ptr, row_weights_ptr, words_offset, scale_offset,
                zero_offset,
                stride_be, stride_bse, stride_bze, DEPTH, TOP_K, HAS_MAP,
                HAS_ROW_WEIGHTS, HAS_ZERO, EVEN_K, PAIRED_SCALES, GROUP_K, CHUNKS, HALVES, WARPS,
                WARPS_PER_PAIR, STAGES, LOAD_AFTER_MMA,
            ),
        )  # fmt: skip
    column = first_column + tl.arange(0, BLOCK_N)
    column_mask = column < hidden
    total = tl.zeros((WARPS, ROWS, 8), tl.float32)
    bias = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_BIAS and WARPS_PER_PAIR > 0:
        total += _initial_biases(
            bias_ptr, stride_bias, first_column, hidden, token, num_experts, num_local, ids_ptr,
            map_ptr, TOP_K, HAS_MAP, BLOCK_N, ROWS, WARPS, WARPS_PER_PAIR,
        )  # fmt: skip
    elif HAS_BIAS:
        slot = tl.arange(0, BLOCK_K)
        pairs = token * TOP_K + slot
        local, _ = load_local_ids(
            ids_ptr, pairs, slot < TOP_K, map_ptr, num_experts, num_local, HAS_MAP
        )
        valid = local >= 0
        # NaN-free: integers
        ptrs = bias_ptr + tl.maximum(local, 0)[:, None].to(tl.int64) * stride_bias + column[None, :]
        biases = tl.load(ptrs, mask=valid[:, None] & column_mask[None, :], other=0.0).to(tl.float32)
        if HAS_ROW_WEIGHTS:
            biases *= tl.load(row_weights_ptr + pairs, mask=valid, other=0.0)[:, None]
        bias += tl.sum(biases, 0)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    pairs_ptr = h_ptr.to(tl.pointer_type(tl.int32))
    # If all steps are unrolled, load all of h at once.
    h_blocks = ()
    for s in tl.static_range(STEPS if STEPS <= STAGES else 1):
        _, _, _, _, pair, valid, chunk = ring[s]
        h_blocks += (load_pairs(pairs_ptr, pair, valid, chunk, DEPTH, CHUNKS * HALVES, SLOTS),)
    # Unroll the steps. In a loop the compiler would hoist the unpacking of invariant words.
    if STEPS <= STAGES:
        for s in tl.static_range(STEPS):
            total, _, ring = _step(
                total, h_blocks[s], ring, s, token, warp_pair, num_experts, num_local, ids_ptr,
                map_ptr,
                pairs_ptr, words_ptr, b_scale_ptr, zero_ptr, row_weights_ptr, words_offset,
                scale_offset,
                zero_offset, shift, stride_be, stride_bse, stride_bze,
                DEPTH, STEPS, TOP_K, HAS_MAP, TYPE, HAS_ROW_WEIGHTS, FORMAT, HAS_ZERO, EVEN_K,
                PAIRED_SCALES, GROUP_K, CHUNKS, HALVES, WARPS, WARPS_PER_PAIR, STAGES,
                LOAD_AFTER_MMA,
            )  # fmt: skip
    else:
        h = h_blocks[0]
        for first in range(0, steps, STAGES):
            for s in tl.static_range(STAGES):
                total, h, ring = _step(
                    total, h, ring, first + s, token, warp_pair, num_experts, num_local, ids_ptr,
                    map_ptr,
                    pairs_ptr, words_ptr, b_scale_ptr, zero_ptr, row_weights_ptr, words_offset,
                    scale_offset, zero_offset, shift, stride_be, stride_bse, stride_bze,
                    DEPTH, STEPS, TOP_K, HAS_MAP, TYPE, HAS_ROW_WEIGHTS, FORMAT, HAS_ZERO, EVEN_K,
                    PAIRED_SCALES, GROUP_K, CHUNKS, HALVES, WARPS, WARPS_PER_PAIR, STAGES,
                    LOAD_AFTER_MMA,
                )  # fmt: skip
    if HAS_ROW_WEIGHTS and WARPS_PER_PAIR > 0:
        pair, _, valid = warp_pair
        # The router weight of a skipped pair may be anything, including NaN.
        weight = tl.load(row_weights_ptr + pair, mask=valid, other=0.0)
        total *= _broadcast_to_sums(weight, ROWS // 8)
    if HALVES == 2:
        total = tl.sum(tl.reshape(total, (WARPS, 2, BLOCK_N, 8)), 1)
    out = tl.sum(tl.sum(total, 2), 0) + bias
    out_ptrs = out_ptr + token.to(tl.int64) * hidden + column
    tl.store(out_ptrs, (out * factor).to(out_ptr.dtype.element_ty), mask=column_mask)
