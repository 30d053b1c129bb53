"""GEMM 2 of the w4a16 gemv: a program for each token (or pair) and block of hidden values."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from experts.triton.gemv_w4.kernels.common import (
    by_slot,
    load_by_slot,
    load_pairs,
    load_words,
    loads_are_off,
    rows_of_lanes,
    scaled_sums,
    slots_of_chunk,
)
from experts.triton.kernels.operands_w4 import times
from modular_kernel.ops.kernels.ids import load_local_ids


@triton.constexpr_function
def blocks_along(depth: int, chunks: int) -> int:
    """Blocks of chunks * 128 along the depth of a pair."""
    return -(-depth // (chunks * 128))


@triton.jit
def _own_pair(
    token, num_experts, num_local, ids_ptr, map_ptr,
    TOP_K: tl.constexpr, HAS_MAP: tl.constexpr, PARTS: tl.constexpr, TEAM: tl.constexpr,
    LOOPED: tl.constexpr,
):  # fmt: skip
    """Of part p, one of TEAM that share a pair: the pair, its local expert, and whether it is not
    skipped, (4, 8, PARTS, 1); nothing where TEAM is 0."""
    if TEAM > 0:
        slot = tl.arange(0, PARTS)[None, None, :, None] // TEAM
        if LOOPED:
            # All lanes of a warp load the same id, and none has to be told it. Where steps are laid
            # out one by one the compiler sees to that, and would lay these out otherwise.
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
def _own_biases(
    ptr, stride, first_column, hidden, token, num_experts, num_local, ids_ptr, map_ptr,
    TOP_K: tl.constexpr, HAS_MAP: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, TEAM: tl.constexpr,
):  # fmt: skip
    """float32 (PARTS, ROWS, 8): the biases of each pair, once: in the first slot of the first of
    its parts, which begins to add up there. Its router weight comes with that of the products."""
    part = tl.arange(0, PARTS)[:, None, None]
    row = tl.arange(0, ROWS)[None, :, None]
    slot = tl.arange(0, 8)[None, None, :]
    # Looked up once more than in _own_pair, which has its lanes otherwise.
    pair = token * TOP_K + part // TEAM + tl.zeros((1, 1, 8), tl.int32)
    local, _ = load_local_ids(
        ids_ptr, pair, slot == 0, map_ptr, num_experts, num_local, HAS_MAP
    )  # fmt: skip
    column = first_column + row
    once = (local >= 0) & (part % TEAM == 0) & (row < BLOCK_N) & (column < hidden)
    ptrs = ptr + tl.maximum(local, 0).to(tl.int64) * stride + column  # NaN-free: integers
    return tl.load(ptrs, mask=once, other=0.0).to(tl.float32)


@triton.jit
def _block(
    token, own, step, num_experts, num_local, ids_ptr, map_ptr, DEPTH: tl.constexpr,
    TOP_K: tl.constexpr, HAS_MAP: tl.constexpr, CHUNKS: tl.constexpr, HALVES: tl.constexpr,
    PARTS: tl.constexpr, TEAM: tl.constexpr,
):  # fmt: skip
    """Return what part p multiplies in `step`: a block's pair, local expert, whether to read it,
    and its first chunk, (4, 8, PARTS, 1). Of its own pair if there are TEAM parts for each, else
    block step * PARTS + p of all the token's pairs, one behind the other."""
    BLOCKS: tl.constexpr = blocks_along(DEPTH, CHUNKS * HALVES)
    part = tl.arange(0, PARTS)[None, None, :, None]
    if TEAM > 0:
        pair, local, live = own
        block = step * TEAM + part % TEAM
        if BLOCKS % TEAM != 0:
            live = live & (block < BLOCKS)
    else:
        index = step * PARTS + part
        if TOP_K * BLOCKS > PARTS:
            # As in _own_pair.
            index += tl.zeros((4, 8, 1, 1), tl.int32)
        pair = token * TOP_K + index // BLOCKS
        local, _ = load_local_ids(
            ids_ptr, pair, index < TOP_K * BLOCKS, map_ptr, num_experts, num_local, HAS_MAP
        )
        block = index % BLOCKS
        live = local >= 0
        local = tl.maximum(local, 0)  # NaN-free: integers
    return pair, local, live, block * (CHUNKS * HALVES)


@triton.jit
def _load_block(
    token, own, step, num_experts, num_local, ids_ptr, map_ptr,
    words_ptr, scale_ptr, zero_ptr, row_weights_ptr, words_at, scale_at, zero_at,
    stride_be, stride_bse, stride_bze,
    DEPTH: tl.constexpr, TOP_K: tl.constexpr, HAS_MAP: tl.constexpr,
    HAS_ROW_WEIGHTS: tl.constexpr, HAS_ZERO: tl.constexpr, EVEN_K: tl.constexpr,
    IN_TWOS: tl.constexpr, GROUP_K: tl.constexpr, CHUNKS: tl.constexpr, HALVES: tl.constexpr,
    PARTS: tl.constexpr, TEAM: tl.constexpr,
):  # fmt: skip
    """Words, scales, zero points and router weights of a block of each part; its pair, whether it
    is to be read, and its first chunk."""
    SLOTS: tl.constexpr = slots_of_chunk(GROUP_K)
    pair, local, live, chunk = _block(
        token, own, step, num_experts, num_local, ids_ptr, map_ptr,
        DEPTH, TOP_K, HAS_MAP, CHUNKS, HALVES, PARTS, TEAM,
    )  # fmt: skip
    expert = local.to(tl.int64)
    words_ptr += expert * (stride_be // 4)
    words = load_words(words_ptr, words_at, chunk, live, DEPTH, CHUNKS, HALVES, EVEN_K)
    scale_ptr += expert * stride_bse
    scale = load_by_slot(
        scale_ptr, scale_at, chunk, live, DEPTH, CHUNKS, HALVES, SLOTS, GROUP_K, EVEN_K, IN_TWOS
    )
    zero = scale
    if HAS_ZERO:
        zero_ptr += expert * stride_bze
        zero = load_by_slot(
            zero_ptr, zero_at, chunk, live, DEPTH, CHUNKS, HALVES, SLOTS, GROUP_K, EVEN_K, IN_TWOS
        )
    weight = live
    if HAS_ROW_WEIGHTS and TEAM == 0:
        # A skipped pair's weight may be anything, NaN too.
        weight = tl.load(row_weights_ptr + pair, mask=live, other=0.0)
    return words, scale, zero, weight, pair, live, chunk


@triton.jit
def _for_sums(weight, GROUPS: tl.constexpr):
    """(4, 8, PARTS, 1), of each part one, to (PARTS, 8 * GROUPS, 8), as sums are."""
    parts: tl.constexpr = weight.shape[2]
    return by_slot(tl.broadcast_to(weight[:, :, :, :, None], (4, 8, parts, GROUPS, 2)))


@triton.jit
def _step(
    total, h, ring, step, token, own, num_experts, num_local, ids_ptr, map_ptr, pairs_ptr,
    words_ptr, scale_ptr, zero_ptr, row_weights_ptr, words_at, scale_at, zero_at,
    shift, stride_be, stride_bse, stride_bze,
    DEPTH: tl.constexpr, STEPS: tl.constexpr, TOP_K: tl.constexpr, HAS_MAP: tl.constexpr,
    TYPE: tl.constexpr, HAS_ROW_WEIGHTS: tl.constexpr, FORMAT: tl.constexpr, HAS_ZERO: tl.constexpr,
    EVEN_K: tl.constexpr, IN_TWOS: tl.constexpr, GROUP_K: tl.constexpr, CHUNKS: tl.constexpr,
    HALVES: tl.constexpr, PARTS: tl.constexpr, TEAM: tl.constexpr, STAGES: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """total with the products of ring[0] and h added, the next h, and the ring moved on: what
    comes next sets off before, or with LATE behind."""
    SLOTS: tl.constexpr = slots_of_chunk(GROUP_K)
    words, scale, zero, weight, _, _, _ = ring[0]
    pairs = h
    if STEPS > STAGES and not LATE:
        new = _load_block(
            token, own, step + STAGES, num_experts, num_local, ids_ptr, map_ptr,
            words_ptr, scale_ptr, zero_ptr, row_weights_ptr, words_at, scale_at, zero_at,
            stride_be, stride_bse, stride_bze, DEPTH, TOP_K, HAS_MAP,
            HAS_ROW_WEIGHTS, HAS_ZERO, EVEN_K, IN_TWOS, GROUP_K, CHUNKS, HALVES, PARTS, TEAM,
        )  # fmt: skip
        ring = ring[1:] + (new,)  # noqa: RUF005
    elif STAGES > 1:
        ring = ring[1:] + (ring[0],)  # noqa: RUF005
    if STEPS > STAGES and not LATE:
        _, _, _, _, pair, live, chunk = ring[0]
        h = load_pairs(pairs_ptr, pair, live, chunk, DEPTH, CHUNKS * HALVES, SLOTS)
    after = loads_are_off(PARTS)
    sums = scaled_sums(words, pairs, scale, zero, shift, after, TYPE, FORMAT, HAS_ZERO, SLOTS, True)
    if HAS_ROW_WEIGHTS and TEAM == 0:
        sums *= _for_sums(weight, words.shape[3])
    if STEPS > 1 and LATE:
        new = _load_block(
            token, own, step + 1, num_experts, num_local, ids_ptr, map_ptr,
            words_ptr, scale_ptr, zero_ptr, row_weights_ptr, words_at, scale_at, zero_at,
            stride_be, stride_bse, stride_bze, DEPTH, TOP_K, HAS_MAP,
            HAS_ROW_WEIGHTS, HAS_ZERO, EVEN_K, IN_TWOS, GROUP_K, CHUNKS, HALVES, PARTS, TEAM,
        )  # fmt: skip
        ring = (new,)
        _, _, _, _, pair, live, chunk = new
        h = load_pairs(pairs_ptr, pair, live, chunk, DEPTH, CHUNKS * HALVES, SLOTS)
    return total + sums, h, ring


@triton.jit
def gemv_w4_down_kernel(
    h_ptr, b_ptr, b_scale_ptr, zero_ptr, bias_ptr, row_weights_ptr, ids_ptr, map_ptr, out_ptr,
    hidden, num_experts, num_local, steps, factor,
    stride_be, stride_bse, stride_bze, stride_bias,
    stride_bn: tl.constexpr, stride_bsn: tl.constexpr, stride_bzn: tl.constexpr,
    DEPTH: tl.constexpr, STEPS: tl.constexpr, TOP_K: tl.constexpr, HAS_MAP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROW_WEIGHTS: tl.constexpr, FORMAT: tl.constexpr,
    HAS_ZERO: tl.constexpr, GROUP_K: tl.constexpr, IN_TWOS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr, CHUNKS: tl.constexpr, HALVES: tl.constexpr,
    PARTS: tl.constexpr, TEAM: tl.constexpr, STAGES: tl.constexpr, LATE: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """out[t, n] = factor * sum over the pairs p of t of weight[p] * (h[p] @ w[expert, n] + bias).

    h is (tokens * TOP_K, DEPTH), as `store_paired` writes it, out (tokens, hidden), both
    contiguous; skipped pairs are not read. With TOP_K = 1 every pair keeps a row, zero if skipped.
    PARTS warps share a token's pairs and their depth in blocks of HALVES * CHUNKS * 128; STAGES
    blocks of each are on their way while one is multiplied, or with LATE one, once the last is
    multiplied.
    Sums are added in a fixed order. BLOCK_K: a power of two from TOP_K on. Grid
    (tokens, blocks of BLOCK_N columns).
    """
    TYPE: tl.constexpr = h_ptr.dtype.element_ty
    ROWS: tl.constexpr = BLOCK_N * HALVES
    SLOTS: tl.constexpr = slots_of_chunk(GROUP_K)
    EVEN_K: tl.constexpr = DEPTH % (CHUNKS * HALVES * 128) == 0
    token = tl.program_id(0)
    first_column = tl.program_id(1) * BLOCK_N
    words_ptr = b_ptr.to(tl.pointer_type(tl.int32))
    rows = rows_of_lanes(first_column, hidden, ROWS, 1, 0, BLOCK_N, EVEN_N)
    shift = ((rows[0] + rows[1]) % 2 * 4)[:, :, :, :, None]
    words_at, scale_at = times(rows, stride_bn // 4), times(rows, stride_bsn)
    # The rows of lanes or those of groups are even.
    zero_at = times((rows[0] // 2, rows[1] // 2), stride_bzn)
    # The first weights are on their way before anything waits for h: GEMM 1 has waited for the ids
    # when this kernel may begin. See after_predecessor.
    own = _own_pair(
        token, num_experts, num_local, ids_ptr, map_ptr, TOP_K, HAS_MAP, PARTS, TEAM,
        STEPS > STAGES,
    )  # fmt: skip
    ring = ()
    for s in tl.static_range(STAGES):
        ring += (
            _load_block(
                token, own, s, num_experts, num_local, ids_ptr, map_ptr,
                words_ptr, b_scale_ptr, zero_ptr, row_weights_ptr, words_at, scale_at, zero_at,
                stride_be, stride_bse, stride_bze, DEPTH, TOP_K, HAS_MAP,
                HAS_ROW_WEIGHTS, HAS_ZERO, EVEN_K, IN_TWOS, GROUP_K, CHUNKS, HALVES, PARTS, TEAM,
            ),
        )  # fmt: skip
    column = first_column + tl.arange(0, BLOCK_N)
    column_mask = column < hidden
    total = tl.zeros((PARTS, ROWS, 8), tl.float32)
    bias = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_BIAS and TEAM > 0:
        total += _own_biases(
            bias_ptr, stride_bias, first_column, hidden, token, num_experts, num_local, ids_ptr,
            map_ptr, TOP_K, HAS_MAP, BLOCK_N, ROWS, PARTS, TEAM,
        )  # fmt: skip
    elif HAS_BIAS:
        slot = tl.arange(0, BLOCK_K)
        pairs = token * TOP_K + slot
        local, _ = load_local_ids(
            ids_ptr, pairs, slot < TOP_K, map_ptr, num_experts, num_local, HAS_MAP
        )
        live = local >= 0
        # NaN-free: integers
        ptrs = bias_ptr + tl.maximum(local, 0)[:, None].to(tl.int64) * stride_bias + column[None, :]
        biases = tl.load(ptrs, mask=live[:, None] & column_mask[None, :], other=0.0).to(tl.float32)
        if HAS_ROW_WEIGHTS:
            biases *= tl.load(row_weights_ptr + pairs, mask=live, other=0.0)[:, None]
        bias += tl.sum(biases, 0)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    pairs_ptr = h_ptr.to(tl.pointer_type(tl.int32))
    # All of h at once where all steps are laid out one by one.
    ahead = ()
    for s in tl.static_range(STEPS if STEPS <= STAGES else 1):
        _, _, _, _, pair, live, chunk = ring[s]
        ahead += (load_pairs(pairs_ptr, pair, live, chunk, DEPTH, CHUNKS * HALVES, SLOTS),)
    # In a loop what does not change would be unpacked before it.
    if STEPS <= STAGES:
        for s in tl.static_range(STEPS):
            total, _, ring = _step(
                total, ahead[s], ring, s, token, own, num_experts, num_local, ids_ptr, map_ptr,
                pairs_ptr, words_ptr, b_scale_ptr, zero_ptr, row_weights_ptr, words_at, scale_at,
                zero_at, shift, stride_be, stride_bse, stride_bze,
                DEPTH, STEPS, TOP_K, HAS_MAP, TYPE, HAS_ROW_WEIGHTS, FORMAT, HAS_ZERO, EVEN_K,
                IN_TWOS, GROUP_K, CHUNKS, HALVES, PARTS, TEAM, STAGES, LATE,
            )  # fmt: skip
    else:
        h = ahead[0]
        for first in range(0, steps, STAGES):
            for s in tl.static_range(STAGES):
                total, h, ring = _step(
                    total, h, ring, first + s, token, own, num_experts, num_local, ids_ptr, map_ptr,
                    pairs_ptr, words_ptr, b_scale_ptr, zero_ptr, row_weights_ptr, words_at,
                    scale_at, zero_at, shift, stride_be, stride_bse, stride_bze,
                    DEPTH, STEPS, TOP_K, HAS_MAP, TYPE, HAS_ROW_WEIGHTS, FORMAT, HAS_ZERO, EVEN_K,
                    IN_TWOS, GROUP_K, CHUNKS, HALVES, PARTS, TEAM, STAGES, LATE,
                )  # fmt: skip
    if HAS_ROW_WEIGHTS and TEAM > 0:
        pair, _, live = own
        # A skipped pair's weight may be anything, NaN too.
        weight = tl.load(row_weights_ptr + pair, mask=live, other=0.0)
        total *= _for_sums(weight, ROWS // 8)
    if HALVES == 2:
        total = tl.sum(tl.reshape(total, (PARTS, 2, BLOCK_N, 8)), 1)
    out = tl.sum(tl.sum(total, 2), 0) + bias
    out_ptrs = out_ptr + token.to(tl.int64) * hidden + column
    tl.store(out_ptrs, (out * factor).to(out_ptr.dtype.element_ty), mask=column_mask)
