"""Device functions of the gemv_w4 path, which multiply a vector by 4-bit weights.

A word is an int32 with eight 4-bit weights of a row. Weights never move between the lanes of a
warp: a lane unpacks exactly the words that are its part of an MMA operand. The first two axes of
loaded tensors are therefore the 4 x 8 lanes of a warp. The third axis is the warps of a program.

    chunk       128 weights of a row along K: 16 adjacent bytes in each of four lanes.
    block       HALVES * CHUNKS chunks of each weight row of a warp. A warp multiplies one block per
                step.
    scale slot  the part of a chunk that shares one scale, or the whole chunk.

The vector x is the right operand of the MMA, which has eight columns. Each column belongs to one
scale slot. It holds the values of x in this slot, and zeros elsewhere. The MMA therefore computes a
separate sum for each scale slot. The sums are multiplied by their scales and then added.

An MMA has 16 weight rows. If a program has only 8 weight rows, HALVES is 2: rows 0 to 7 of the MMA
hold the first half of the block, and rows 8 to 15 hold the second half of the same weight rows. In
each row, only the columns of the scale slots in its own half are used.
"""

import triton
import triton.language as tl

from experts.triton.kernels.operands_w4 import scale_values, weight_row_indices
from experts.triton.kernels.unpack_w4 import (
    USE_INLINE_ASM,
    is_e2m1,
    missing_factor_log2,
    prescale_factor,
    unpack_int4,
    unpacks_without_offset,
)


@triton.constexpr_function
def scale_slots_per_chunk(group: int) -> int:
    """Return the number of scale slots per chunk, 1, 2 or 4, if `group` weights share a scale."""
    return next(slots for slots in (1, 2, 4) if group % (128 // slots) == 0)


@triton.jit
def issue_loads(WARPS: tl.constexpr):
    """Return 0, but only after all preceding loads have been issued.

    The compiler would delay loads until registers are free for their results, which is too late to
    hide their latency. A barrier prevents this: no load moves behind the barrier, and no code that
    uses the result of the barrier moves before it. The barrier joins only two warps. Barrier 0 is
    reserved for the whole program.
    """
    zero = 0
    if USE_INLINE_ASM:
        threads: tl.constexpr = 64 if WARPS > 1 else 32
        zero = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .pred p; mov.u32 t, %tid.x; setp.gt.u32 p, t, 4096; "
            "shr.b32 t, t, 6; add.u32 t, t, 1; "
            f"bar.red.popc.u32 $0, t, {threads}, p; }}",
            "=r", [], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return zero


@triton.jit
def lane_row_indices(
    first, count, ROWS: tl.constexpr, GATE_STRIDE: tl.constexpr, UP_ROW_OFFSET: tl.constexpr,
    BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """Return the weight rows of a warp as two summands; see `weight_row_indices`.

    The first summand is (1, 8, 1, 1). The second one is (1, 1, 1, ROWS / 8) if EVEN_N, with one
    value per group of eight rows, and (1, 8, 1, ROWS / 8) otherwise, with one value per row.
    """
    lane = tl.arange(0, 8)[None, :, None, None]
    row_group = tl.arange(0, ROWS // 8)[None, None, None, :] * 8
    return weight_row_indices(
        first, count, lane, row_group, GATE_STRIDE, UP_ROW_OFFSET, BLOCK_N, EVEN_N
    )


@triton.jit
def load_words(
    ptr, offset, chunk, in_bounds, size_k, CHUNKS: tl.constexpr, HALVES: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """Load a block of each weight row.

    If HALVES is 2, a weight row takes two MMA rows, each with one half of the block.

    Return int32 (4, 8, warps, ROWS / 8, CHUNKS, 4).

    ptr: pointer to the int32 words of the expert, or one pointer per lane.
    offset: offsets of the weight rows in words, as two summands of `lane_row_indices`.
    chunk: index of the first chunk of the block, (1 or 4, 1 or 8, warps, 1).
    in_bounds: whether to read the block, with the same shape as `chunk`.
    size_k: K.
    """
    lane = tl.arange(0, 4)[:, None, None, None]
    half_chunk_offset = tl.arange(0, HALVES)[None, None, None, :] * CHUNKS
    chunk_index = tl.arange(0, CHUNKS)[None, None, None, None, :, None]
    word = tl.arange(0, 4)[None, None, None, None, None, :]
    # There is one base address per lane. The offsets from it are known at compile time.
    base_ptrs = ptr + (offset[0] + (chunk * 16 + lane * 4))
    static_offset = (offset[1] + half_chunk_offset * 16)[:, :, :, :, None, None]
    ptrs = base_ptrs[:, :, :, :, None, None] + (static_offset + (chunk_index * 16 + word))
    mask = in_bounds[:, :, :, :, None, None]
    if not EVEN_K:
        first_k = (chunk + half_chunk_offset) * 128 + lane * 32
        k = first_k[:, :, :, :, None, None] + chunk_index * 128
        mask = mask & (k < size_k)
    return tl.load(ptrs, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def _make_scale_slot_mask(
    chunk, in_bounds, scale_slot, size_k, CHUNKS: tl.constexpr, HALVES: tl.constexpr,
    SCALE_SLOTS: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """Return whether a scale slot starts inside its row's half of the block and inside K."""
    half = tl.arange(0, HALVES)[None, None, None, :]
    mask = in_bounds & (scale_slot // (CHUNKS * SCALE_SLOTS) == half)
    if not EVEN_K:
        mask = mask & (chunk * 128 + scale_slot * (128 // SCALE_SLOTS) < size_k)
    return mask


@triton.jit
def _load_scale_slots(
    ptr, offset, chunk, scale_slot, mask, SCALE_SLOTS: tl.constexpr, GROUP_K: tl.constexpr
):
    """Load the scales or zero points of one or more scale slots; see `load_by_scale_slot`."""
    if GROUP_K == 128 // SCALE_SLOTS:
        group = chunk * SCALE_SLOTS + scale_slot
    else:
        group = (chunk * 128 + scale_slot * (128 // SCALE_SLOTS)) // GROUP_K
    return tl.load((ptr + (offset[0] + group)) + offset[1], mask=mask, other=0)


@triton.jit
def load_by_scale_slot(
    ptr, offset, chunk, in_bounds, size_k, CHUNKS: tl.constexpr, HALVES: tl.constexpr,
    SCALE_SLOTS: tl.constexpr, GROUP_K: tl.constexpr, EVEN_K: tl.constexpr,
    PAIRED_SCALES: tl.constexpr,
):  # fmt: skip
    """Load scales or zero points, one per weight row and scale slot, as (4, 8, warps, ROWS / 8, 2).

    The result is 0 for scale slots outside the block or half. If PAIRED_SCALES, one vector load
    reads both scales. Otherwise, two loads are used: a single load that is not vectorized would get
    another layout, and its values would have to move through shared memory.

    ptr, offset, chunk, in_bounds: as in `load_words`.
    """
    scale_slot = (tl.arange(0, 4) * 2)[:, None, None, None]
    mask = _make_scale_slot_mask(
        chunk, in_bounds, scale_slot, size_k, CHUNKS, HALVES, SCALE_SLOTS, EVEN_K
    )
    if PAIRED_SCALES:  # either both slots are inside, or neither is
        pair_index = tl.arange(0, 2)[None, None, None, None, :]
        first = ptr + (offset[0] + (chunk * SCALE_SLOTS + scale_slot))
        ptrs = first[:, :, :, :, None] + (offset[1][:, :, :, :, None] + pair_index)
        result = tl.load(ptrs, mask=mask[:, :, :, :, None], other=0)
    else:
        even = _load_scale_slots(ptr, offset, chunk, scale_slot, mask, SCALE_SLOTS, GROUP_K)
        mask = _make_scale_slot_mask(
            chunk, in_bounds, scale_slot + 1, size_k, CHUNKS, HALVES, SCALE_SLOTS, EVEN_K
        )
        odd = _load_scale_slots(ptr, offset, chunk, scale_slot + 1, mask, SCALE_SLOTS, GROUP_K)
        result = tl.join(even, odd)
    return result


@triton.jit
def to_scale_slot_layout(values):
    """Reshape (4, 8, warps, ROWS / 8, 2) to (warps, ROWS, 8), the shape of the scale slot sums."""
    warps: tl.constexpr = values.shape[2]
    row_groups: tl.constexpr = values.shape[3]
    return tl.reshape(tl.permute(values, (2, 3, 1, 0, 4)), (warps, row_groups * 8, 8))


@triton.jit
def _compute_value_offsets(
    chunk, in_bounds, size_k, CHUNKS: tl.constexpr, SCALE_SLOTS: tl.constexpr
):
    """Return an offset into a row of x and a mask for every eight values, (4, 8, warps, 1, 4, 1).

    chunk, in_bounds: as in `load_words`.
    """
    lane = tl.arange(0, 4)[:, None, None, None]
    scale_slot = tl.arange(0, 8)[None, :, None, None]
    k = (chunk + scale_slot // SCALE_SLOTS) * 128 + lane * 32
    is_lane_slot = (scale_slot % SCALE_SLOTS == lane * SCALE_SLOTS // 4) & (
        scale_slot < CHUNKS * SCALE_SLOTS
    )
    mask = in_bounds & is_lane_slot & (k < size_k)
    word = tl.arange(0, 4)[None, None, None, None, :, None]
    return k[:, :, :, :, None, None] + word * 8, mask[:, :, :, :, None, None]


@triton.jit
def load_pairs(ptr, row, in_bounds, chunk, size_k, CHUNKS: tl.constexpr, SCALE_SLOTS: tl.constexpr):
    """Load a block of rows written by `store_in_pair_order` as int32 (4, 8, warps, 1, 4, 4).

    Each int32 holds a pair of 16-bit values in the order of the MMA (`to_mma_pairs`).

    ptr: an int32 pointer to rows of size_k values.
    row: the row of each warp, with the same shape as `chunk`.
    chunk, in_bounds: as in `load_words`.
    """
    offset, mask = _compute_value_offsets(chunk, in_bounds, size_k, CHUNKS, SCALE_SLOTS)
    pair = tl.arange(0, 4)[None, None, None, None, None, :]
    ptrs = ptr + (row.to(tl.int64) * (size_k // 2))[:, :, :, :, None, None]
    return tl.load(ptrs + (offset // 2 + pair), mask=mask, other=0)


@triton.jit
def load_row(
    ptr, stride, in_bounds, chunk, size_k, CHUNKS: tl.constexpr, SCALE_SLOTS: tl.constexpr
):
    """Load a block of a row of x as int32 (4, 8, warps, 1, 4, 4).

    Each int32 holds two adjacent 16-bit values. `to_mma_pairs` converts the result to the order
    that the MMA needs.

    ptr, stride: pointer to the row, and the stride of its values.
    chunk, in_bounds: as in `load_words`.
    """
    offset, mask = _compute_value_offsets(chunk, in_bounds, size_k, CHUNKS, SCALE_SLOTS)
    k = tl.arange(0, 8)[None, None, None, None, None, :]
    x = tl.load(ptr + (offset + k) * stride, mask=mask, other=0.0)
    bits = tl.reshape(x.to(tl.int16, bitcast=True), (4, 8, x.shape[2], 1, 4, 4, 2))
    low, high = tl.split(bits)
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def to_mma_pairs(x, zero_after_loads, dtype: tl.constexpr, WEIGHT_FORMAT: tl.constexpr):
    """Permute the result of `load_row` to the order of the MMA, int32 (4, 8, warps, 1, 4, 4).

    Each int32 becomes a pair: the two values of x that are multiplied by the low and by the high
    half of a register of unpacked weights. bf16 values are multiplied by `prescale_factor`. The two
    pairs of an MMA are adjacent.

    zero_after_loads: 0, from `issue_loads`. The computation depends on it, so that it starts after
        the loads.
    """
    warps: tl.constexpr = x.shape[2]
    bits = tl.join(x.to(tl.int16), (x >> 16).to(tl.int16))
    if dtype == tl.bfloat16:
        odd = tl.arange(0, 2)[None, None, None, None, None, None, :] + zero_after_loads
        factor = tl.where(
            odd == 1, prescale_factor(WEIGHT_FORMAT, 1), prescale_factor(WEIGHT_FORMAT, 0)
        ).to(tl.bfloat16)
        bits = (bits.to(tl.bfloat16, bitcast=True) * factor).to(tl.int16, bitcast=True)
    if WEIGHT_FORMAT != "e2m1_repacked":  # pairs are k and k + 4, so reverse the bits of k
        bits = tl.reshape(bits, (4, 8, warps, 1, 4, 2, 2, 2))
        bits = tl.reshape(tl.permute(bits, (0, 1, 2, 3, 4, 7, 6, 5)), (4, 8, warps, 1, 4, 4, 2))
    low, high = tl.split(bits)
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def store_in_pair_order(row_ptr, column, mask, values, WEIGHT_FORMAT: tl.constexpr):
    """Prescale values and store them in the order in which `load_pairs` reads them.

    GEMM 1 stores h in this way, so that GEMM 2 does not have to permute and prescale it.
    """
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    values = values.to(dtype)
    if dtype == tl.bfloat16:
        odd = column & 1 == 1
        values = values * tl.where(
            odd, prescale_factor(WEIGHT_FORMAT, 1), prescale_factor(WEIGHT_FORMAT, 0)
        ).to(tl.bfloat16)
    if WEIGHT_FORMAT != "e2m1_repacked":
        k = column & 7  # `% 8` of a signed number takes more instructions
        column = (column ^ k) + ((k & 1) << 2) + (k & 2) + (k >> 2)  # see to_mma_pairs
    tl.store(row_ptr + column, values, mask=mask)


@triton.jit
def _make_weight_operand(words, WEIGHT_FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Unpack words (4, 8, WARPS, ROWS / 8, CHUNKS, 4) to weights (CHUNKS * WARPS, ROWS, 128)."""
    warps: tl.constexpr = words.shape[2]
    row_groups: tl.constexpr = words.shape[3]
    chunks: tl.constexpr = words.shape[4]
    values = unpack_int4(words, WEIGHT_FORMAT, dtype)
    if WEIGHT_FORMAT == "e2m1_repacked":
        ordered = tl.permute(values, (4, 2, 3, 1, 5, 7, 0, 6, 8))
    else:
        ordered = tl.permute(values, (4, 2, 3, 1, 5, 7, 0, 8, 6))
    return tl.reshape(ordered, (chunks * warps, row_groups * 8, 128))


@triton.jit
def _make_x_operand(pairs, dtype: tl.constexpr):
    """Convert pairs (4, 8, warps, 1, 4, 4) to the right operand of the MMA, (warps, 128, 8).

    Column s holds the values of x in scale slot s, and zeros elsewhere.
    """
    warps: tl.constexpr = pairs.shape[2]
    low = pairs.to(tl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
    values = tl.reshape(tl.join(low, high), (4, 8, warps, 4, 2, 2, 2))
    return tl.reshape(tl.permute(values, (2, 3, 5, 0, 4, 6, 1)), (warps, 128, 8))


@triton.jit
def _repeat_per_chunk(values, CHUNKS: tl.constexpr):
    """Repeat `values` (WARPS, M, N) for every chunk; return (CHUNKS * WARPS, M, N)."""
    warps: tl.constexpr = values.shape[0]
    m: tl.constexpr = values.shape[1]
    n: tl.constexpr = values.shape[2]
    repeated = tl.broadcast_to(values[None, :, :, :], (CHUNKS, warps, m, n))
    return tl.reshape(repeated, (CHUNKS * warps, m, n))


@triton.jit
def _select_chunk_of_scale_slot(sums, CHUNKS: tl.constexpr, SCALE_SLOTS: tl.constexpr):
    """Select, for each column of sums (CHUNKS * warps, ROWS, 8), the chunk of its scale slot.

    Return (warps, ROWS, 8).
    """
    warps: tl.constexpr = sums.shape[0] // CHUNKS
    rows: tl.constexpr = sums.shape[1]
    result = tl.permute(tl.reshape(sums, (CHUNKS, warps, rows, 8)), (1, 2, 3, 0))
    chunk = tl.arange(0, 8)[None, None, :, None] // SCALE_SLOTS
    for bit in tl.static_range(3):
        if CHUNKS >> bit > 1:
            halves = tl.reshape(result, (warps, rows, 8, CHUNKS >> (bit + 1), 2))
            even, odd = tl.split(halves)
            result = tl.where((chunk >> bit) % 2 == 0, even, odd)
    return tl.reshape(result, (warps, rows, 8))


@triton.jit
def _compute_zero_point_term(
    x, zero_points, zero_after_loads_f32, rows: tl.constexpr, dtype: tl.constexpr,
    WEIGHT_FORMAT: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
):  # fmt: skip
    """Return the negated zero points times the sums of x along K, float32 (WARPS, rows, 8).

    Without zero points, the sums are multiplied by -8, the negated offset of the weight codes.
    An MMA with all-ones weights computes the sums of x. Every row of its result is the same.

    zero_after_loads_f32: 0, which depends on `issue_loads` and keeps the MMA behind the loads.
    """
    warps: tl.constexpr = x.shape[0]
    ones_word: tl.constexpr = (
        0x11111111 if unpacks_without_offset(WEIGHT_FORMAT, dtype) else 0x99999999 - (1 << 32)
    )
    ones = tl.full((4, 8, warps, 2, 1, 4), ones_word, tl.int32)
    initial_sums = tl.zeros((warps, 16, 8), tl.float32) + zero_after_loads_f32
    # Use a reshape: `[:, None]` would move the values through shared memory.
    sums = tl.reshape(
        tl.dot(_make_weight_operand(ones, WEIGHT_FORMAT, dtype), x, initial_sums), (warps, 1, 16, 8)
    )
    if HAS_ZERO_POINTS:
        term = tl.reshape(zero_points, (warps, rows // 16, 16, 8)) * -sums
    else:
        term = tl.broadcast_to(sums * -8.0, (warps, rows // 16, 16, 8))
    return tl.reshape(term, (warps, rows, 8))


@triton.jit
def compute_scale_slot_sums(
    words, pairs, zero_points, zero_after_loads, dtype: tl.constexpr, WEIGHT_FORMAT: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    SCALE_SLOTS: tl.constexpr, ADD_ZERO_TERM_LAST: tl.constexpr,
):  # fmt: skip
    """Return (weights - zero points) @ x for each scale slot, without scales.

    The result is float32 (warps, ROWS, 8). Every chunk is multiplied by all columns, and the
    results for columns of other chunks are dropped. This takes fewer instructions than zeroing
    these columns.

    words: (4, 8, warps, ROWS / 8, CHUNKS, 4), from `load_words`.
    pairs: (4, 8, warps, 1, 4, 4), from `to_mma_pairs` or `load_pairs`.
    zero_points: float32 (warps, ROWS, 8).
    zero_after_loads: 0, from `issue_loads`. The MMAs depend on it, so that they are issued after
        the loads.
    ADD_ZERO_TERM_LAST: whether the zero-point term is added after the MMA. Otherwise, it is the
        initial accumulator, which takes fewer registers.
    """
    warps: tl.constexpr = words.shape[2]
    rows: tl.constexpr = words.shape[3] * 8
    chunks: tl.constexpr = words.shape[4]
    NEEDS_ZERO_POINT_TERM: tl.constexpr = HAS_ZERO_POINTS or unpacks_without_offset(
        WEIGHT_FORMAT, dtype
    )
    x = _make_x_operand(pairs, dtype)
    zero_after_loads_f32 = zero_after_loads.to(tl.float32, bitcast=True)
    initial_sums = tl.zeros((warps, rows, 8), tl.float32) + zero_after_loads_f32
    if NEEDS_ZERO_POINT_TERM and not ADD_ZERO_TERM_LAST:
        initial_sums = _compute_zero_point_term(
            x, zero_points, zero_after_loads_f32, rows, dtype, WEIGHT_FORMAT, HAS_ZERO_POINTS
        )
    chunk_sums = tl.dot(
        _make_weight_operand(words, WEIGHT_FORMAT, dtype),
        _repeat_per_chunk(x, chunks),
        _repeat_per_chunk(initial_sums, chunks),
    )
    sums = _select_chunk_of_scale_slot(chunk_sums, chunks, SCALE_SLOTS)
    if NEEDS_ZERO_POINT_TERM and ADD_ZERO_TERM_LAST:
        sums += _compute_zero_point_term(
            x, zero_points, zero_after_loads_f32, rows, dtype, WEIGHT_FORMAT, HAS_ZERO_POINTS
        )
    return sums


@triton.jit
def decode_zero_points(
    codes, shift, HAS_ZERO_POINTS: tl.constexpr, UNPACKED_WITHOUT_OFFSET: tl.constexpr
):
    """Return the zero points as float32, minus 8 if unpacking subtracts 8 from the weights.

    codes: bytes (4, 8, WARPS, ROWS / 8, 2).
    shift: the position of a row's zero point in its byte, bit 0 or 4, (1, 8, 1, ROWS / 8, 1).
    """
    zero = ((codes.to(tl.int32) >> shift) & 15).to(tl.float32)
    return zero if UNPACKED_WITHOUT_OFFSET else zero - 8.0


@triton.jit
def compute_scaled_sums(
    words, pairs, scale, zero_point_codes, shift, zero_after_loads, dtype: tl.constexpr,
    WEIGHT_FORMAT: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr, SCALE_SLOTS: tl.constexpr, ADD_ZERO_TERM_LAST: tl.constexpr,
):  # fmt: skip
    """Return the scaled sums of a block for each scale slot, float32 (warps, ROWS, 8).

    scale, zero_point_codes: results of `load_by_scale_slot`.
    shift: the position of a row's zero point in its byte, bit 0 or 4, (1, 8, 1, ROWS / 8, 1).
    words, pairs, zero_after_loads, ADD_ZERO_TERM_LAST: as in `compute_scale_slot_sums`.
    """
    if is_e2m1(WEIGHT_FORMAT):
        # Widen the bytes, which would otherwise be packed two to a register and unpacked again.
        scale = scale.to(tl.int32) + zero_after_loads
    scales = to_scale_slot_layout(
        scale_values(scale, WEIGHT_FORMAT, missing_factor_log2(WEIGHT_FORMAT, dtype))
    )
    zero_points = scales
    if HAS_ZERO_POINTS:
        zero_points = to_scale_slot_layout(
            decode_zero_points(
                zero_point_codes,
                shift,
                HAS_ZERO_POINTS,
                unpacks_without_offset(WEIGHT_FORMAT, dtype),
            )
        )
    return (
        compute_scale_slot_sums(
            words,
            pairs,
            zero_points,
            zero_after_loads,
            dtype,
            WEIGHT_FORMAT,
            HAS_ZERO_POINTS,
            SCALE_SLOTS,
            ADD_ZERO_TERM_LAST,
        )
        * scales
    )
