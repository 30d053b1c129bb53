"""Device functions of the w4a16 gemv: one row of x times 4-bit weights, from registers alone.

A warp multiplies a block of each of its rows at once: CHUNKS * 128 weights. A chunk of a row is
four lanes' 16 bytes side by side, and a lane's words go from memory to the product without leaving
it: whatever is loaded for it has axes of four and of eight first, the warp's lanes, then PARTS, the
warps. Right of the product stand eight columns of one row of x, each with the values of one slot
and zeros besides: a slot is what of a block shares a scale, a chunk of it at most. So the sums of
all slots are scaled at once, and added up last.

A product has 16 rows. Where that is too many, HALVES = 2: they are 8 rows twice, first with one
half of a block, then with the other, and a row's columns are the slots of its half.
"""

import triton
import triton.language as tl

from experts.triton.kernels.operands_w4 import rows_of, scale_values
from experts.triton.kernels.unpack_w4 import (
    ASSEMBLE,
    boost_of,
    counts_from_zero,
    is_e2m1,
    lacking,
    unpack_int4,
)


@triton.constexpr_function
def slots_of_chunk(group: int) -> int:
    """Slots of a chunk where `group` weights share a scale: 1, 2 or 4 of 128, 64 or 32 weights."""
    return next(slots for slots in (1, 2, 4) if group % (128 // slots) == 0)


@triton.jit
def loads_are_off(WARPS: tl.constexpr):
    """0, but only once the loads before this have set off.

    Left alone the compiler waits with loads until there are registers for their values, which is
    when they should have arrived. What it may not move a load past is a barrier, here of two warps;
    what it may not move before one is what needs a value from behind it. Barrier 0 is for the whole
    program.
    """
    zero = 0
    if ASSEMBLE:
        threads: tl.constexpr = 64 if WARPS > 1 else 32
        zero = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .pred p; mov.u32 t, %tid.x; setp.gt.u32 p, t, 4096; "
            "shr.b32 t, t, 6; add.u32 t, t, 1; "
            f"bar.red.popc.u32 $0, t, {threads}, p; }}",
            "=r", [], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return zero


@triton.jit
def rows_of_lanes(
    first, count, ROWS: tl.constexpr, STEP: tl.constexpr, UP_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """`rows_of` eight lanes, (1, 8, 1, 1), and groups of eight rows, (1, 1 or 8, 1, ROWS / 8)."""
    lane = tl.arange(0, 8)[None, :, None, None]
    group = tl.arange(0, ROWS // 8)[None, None, None, :] * 8
    return rows_of(first, count, lane, group, STEP, UP_ROW, BLOCK_N, EVEN_N)


@triton.jit
def load_words(
    ptr, offset, chunk, inside, depth, CHUNKS: tl.constexpr, HALVES: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """int32 (4, 8, PARTS, ROWS / 8, CHUNKS, 4): a block of each row, or the half that is its own.

    ptr: to int32, or as many of them as lanes; offset, in words: of `rows_of_lanes`; chunk: the
    first of a block, and inside: whether it is to be read, (1 or 4, 1 or 8, PARTS, 1).
    """
    lane = tl.arange(0, 4)[:, None, None, None]
    half = tl.arange(0, HALVES)[None, None, None, :] * CHUNKS
    here = tl.arange(0, CHUNKS)[None, None, None, None, :, None]
    word = tl.arange(0, 4)[None, None, None, None, None, :]
    # One address, and from there as far as the compiler knows.
    first = ptr + (offset[0] + (chunk * 16 + lane * 4))
    known = (offset[1] + half * 16)[:, :, :, :, None, None]
    ptrs = first[:, :, :, :, None, None] + (known + (here * 16 + word))
    mask = inside[:, :, :, :, None, None]
    if not EVEN_K:
        k = ((chunk + half) * 128 + lane * 32)[:, :, :, :, None, None] + here * 128
        mask = mask & (k < depth)
    return tl.load(ptrs, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def _is_inside(
    chunk, inside, slot, depth, CHUNKS: tl.constexpr, HALVES: tl.constexpr, SLOTS: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """Whether a slot begins within a row's half of its block, and within the depth."""
    half = tl.arange(0, HALVES)[None, None, None, :]
    mask = inside & (slot // (CHUNKS * SLOTS) == half)
    if not EVEN_K:
        mask = mask & (chunk * 128 + slot * (128 // SLOTS) < depth)
    return mask


@triton.jit
def _load_slots(ptr, offset, chunk, slot, mask, SLOTS: tl.constexpr, GROUP_K: tl.constexpr):
    """As load_by_slot, of one slot or several."""
    if GROUP_K == 128 // SLOTS:
        group = chunk * SLOTS + slot
    else:
        group = (chunk * 128 + slot * (128 // SLOTS)) // GROUP_K
    return tl.load((ptr + (offset[0] + group)) + offset[1], mask=mask, other=0)


@triton.jit
def load_by_slot(
    ptr, offset, chunk, inside, depth, CHUNKS: tl.constexpr, HALVES: tl.constexpr,
    SLOTS: tl.constexpr, GROUP_K: tl.constexpr, EVEN_K: tl.constexpr, IN_TWOS: tl.constexpr,
):  # fmt: skip
    """(4, 8, PARTS, ROWS / 8, 2): scales, or what lies like them, of each row and slot.

    ptr, offset, chunk, inside: as in load_words. Slots past a block or half are 0. IN_TWOS: two can
    be loaded at once. Where they cannot, a load of both would be laid out otherwise, and its values
    would go through shared memory.
    """
    slot = (tl.arange(0, 4) * 2)[:, None, None, None]
    mask = _is_inside(chunk, inside, slot, depth, CHUNKS, HALVES, SLOTS, EVEN_K)
    if IN_TWOS:  # the second slot is inside as the first is
        two = tl.arange(0, 2)[None, None, None, None, :]
        first = ptr + (offset[0] + (chunk * SLOTS + slot))
        ptrs = first[:, :, :, :, None] + (offset[1][:, :, :, :, None] + two)
        result = tl.load(ptrs, mask=mask[:, :, :, :, None], other=0)
    else:
        even = _load_slots(ptr, offset, chunk, slot, mask, SLOTS, GROUP_K)
        mask = _is_inside(chunk, inside, slot + 1, depth, CHUNKS, HALVES, SLOTS, EVEN_K)
        odd = _load_slots(ptr, offset, chunk, slot + 1, mask, SLOTS, GROUP_K)
        result = tl.join(even, odd)
    return result


@triton.jit
def by_slot(values):
    """(4, 8, PARTS, ROWS / 8, 2) to (PARTS, ROWS, 8), as sums are."""
    parts: tl.constexpr = values.shape[2]
    groups: tl.constexpr = values.shape[3]
    return tl.reshape(tl.permute(values, (2, 3, 1, 0, 4)), (parts, groups * 8, 8))


@triton.jit
def _value_offsets(chunk, inside, depth, CHUNKS: tl.constexpr, SLOTS: tl.constexpr):
    """Where lanes find a block of a row of x, eight values each, and whether they are to read
    them: (4, 8, PARTS, 1, 4, 1). chunk, inside: as in load_words."""
    lane = tl.arange(0, 4)[:, None, None, None]
    slot = tl.arange(0, 8)[None, :, None, None]
    k = (chunk + slot // SLOTS) * 128 + lane * 32
    own = (slot % SLOTS == lane * SLOTS // 4) & (slot < CHUNKS * SLOTS)
    mask = inside & own & (k < depth)
    word = tl.arange(0, 4)[None, None, None, None, :, None]
    return k[:, :, :, :, None, None] + word * 8, mask[:, :, :, :, None, None]


@triton.jit
def load_pairs(ptr, row, inside, chunk, depth, CHUNKS: tl.constexpr, SLOTS: tl.constexpr):
    """int32 (4, 8, PARTS, 1, 4, 4) of rows `depth` wide that `store_paired` has written, seen as
    int32. row: as chunk."""
    offset, mask = _value_offsets(chunk, inside, depth, CHUNKS, SLOTS)
    pair = tl.arange(0, 4)[None, None, None, None, None, :]
    ptrs = ptr + (row.to(tl.int64) * (depth // 2))[:, :, :, :, None, None]
    return tl.load(ptrs + (offset // 2 + pair), mask=mask, other=0)


@triton.jit
def load_row(ptr, stride, inside, chunk, depth, CHUNKS: tl.constexpr, SLOTS: tl.constexpr):
    """int32 (4, 8, PARTS, 1, 4, 4) of a row of x: two values side by side each, for `pairs_of`."""
    offset, mask = _value_offsets(chunk, inside, depth, CHUNKS, SLOTS)
    k = tl.arange(0, 8)[None, None, None, None, None, :]
    x = tl.load(ptr + (offset + k) * stride, mask=mask, other=0.0)
    bits = tl.reshape(x.to(tl.int16, bitcast=True), (4, 8, x.shape[2], 1, 4, 4, 2))
    low, high = tl.split(bits)
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def pairs_of(x, after, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """int32 (4, 8, PARTS, 1, 4, 4) of what load_row gave of values of dtype: those that meet the
    halves of a register of weights are one pair, `boosted`; the two pairs of a product are side by
    side. after: as in slot_sums."""
    parts: tl.constexpr = x.shape[2]
    bits = tl.join(x.to(tl.int16), (x >> 16).to(tl.int16))
    if dtype == tl.bfloat16:
        odd = tl.arange(0, 2)[None, None, None, None, None, None, :] + after
        boost = tl.where(odd == 1, boost_of(FORMAT, 1), boost_of(FORMAT, 0)).to(tl.bfloat16)
        bits = (bits.to(tl.bfloat16, bitcast=True) * boost).to(tl.int16, bitcast=True)
    if FORMAT != "e2m1_repacked":  # values k and k + 4: their bits in reverse
        bits = tl.reshape(bits, (4, 8, parts, 1, 4, 2, 2, 2))
        bits = tl.reshape(tl.permute(bits, (0, 1, 2, 3, 4, 7, 6, 5)), (4, 8, parts, 1, 4, 4, 2))
    low, high = tl.split(bits)
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def store_paired(row_ptr, column, mask, values, FORMAT: tl.constexpr):
    """Store values, rounded to what row_ptr points at, as `load_pairs` reads them."""
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    values = values.to(dtype)
    if dtype == tl.bfloat16:
        odd = column & 1 == 1
        values = values * tl.where(odd, boost_of(FORMAT, 1), boost_of(FORMAT, 0)).to(tl.bfloat16)
    if FORMAT != "e2m1_repacked":
        k = column & 7  # bits: of a number that may be negative a remainder takes more
        column = (column ^ k) + ((k & 1) << 2) + (k & 2) + (k >> 2)  # see pairs_of
    tl.store(row_ptr + column, values, mask=mask)


@triton.jit
def _left(words, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Words (4, 8, PARTS, ROWS / 8, CHUNKS, 4) to weights (CHUNKS * PARTS, ROWS, 128)."""
    parts: tl.constexpr = words.shape[2]
    groups: tl.constexpr = words.shape[3]
    chunks: tl.constexpr = words.shape[4]
    values = unpack_int4(words, FORMAT, dtype)
    if FORMAT == "e2m1_repacked":
        ordered = tl.permute(values, (4, 2, 3, 1, 5, 7, 0, 6, 8))
    else:
        ordered = tl.permute(values, (4, 2, 3, 1, 5, 7, 0, 8, 6))
    return tl.reshape(ordered, (chunks * parts, groups * 8, 128))


@triton.jit
def _right(pairs, dtype: tl.constexpr):
    """Pairs (4, 8, PARTS, 1, 4, 4) to x (PARTS, 128, 8): in each slot's column its own chunk."""
    parts: tl.constexpr = pairs.shape[2]
    low = pairs.to(tl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
    values = tl.reshape(tl.join(low, high), (4, 8, parts, 4, 2, 2, 2))
    return tl.reshape(tl.permute(values, (2, 3, 5, 0, 4, 6, 1)), (parts, 128, 8))


@triton.jit
def _for_each(values, CHUNKS: tl.constexpr):
    """(PARTS, M, N) to (CHUNKS * PARTS, M, N), the same for every chunk."""
    parts: tl.constexpr = values.shape[0]
    m: tl.constexpr = values.shape[1]
    n: tl.constexpr = values.shape[2]
    same = tl.broadcast_to(values[None, :, :, :], (CHUNKS, parts, m, n))
    return tl.reshape(same, (CHUNKS * parts, m, n))


@triton.jit
def _of_own_chunk(sums, CHUNKS: tl.constexpr, SLOTS: tl.constexpr):
    """(CHUNKS * PARTS, ROWS, 8) to (PARTS, ROWS, 8): of each column what its slot's chunk gave."""
    parts: tl.constexpr = sums.shape[0] // CHUNKS
    rows: tl.constexpr = sums.shape[1]
    result = tl.permute(tl.reshape(sums, (CHUNKS, parts, rows, 8)), (1, 2, 3, 0))
    chunk = tl.arange(0, 8)[None, None, :, None] // SLOTS
    for bit in tl.static_range(3):
        if CHUNKS >> bit > 1:
            halves = tl.reshape(result, (parts, rows, 8, CHUNKS >> (bit + 1), 2))
            even, odd = tl.split(halves)
            result = tl.where((chunk >> bit) % 2 == 0, even, odd)
    return tl.reshape(result, (parts, rows, 8))


@triton.jit
def _share_of_zeros(
    x, zero, zero_yet, rows: tl.constexpr, dtype: tl.constexpr, FORMAT: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):  # fmt: skip
    """float32 (PARTS, rows, 8): minus the zero points times the sums of x along the depth, which a
    product with ones gives, the same in each of its rows."""
    parts: tl.constexpr = x.shape[0]
    one: tl.constexpr = 0x11111111 if counts_from_zero(FORMAT, dtype) else 0x99999999 - (1 << 32)
    ones = tl.full((4, 8, parts, 2, 1, 4), one, tl.int32)
    nothing = tl.zeros((parts, 16, 8), tl.float32) + zero_yet
    # By reshape: `[:, None]` would send them through shared memory.
    sums = tl.reshape(tl.dot(_left(ones, FORMAT, dtype), x, nothing), (parts, 1, 16, 8))
    if HAS_ZERO:
        less = tl.reshape(zero, (parts, rows // 16, 16, 8)) * -sums
    else:
        less = tl.broadcast_to(sums * -8.0, (parts, rows // 16, 16, 8))
    return tl.reshape(less, (parts, rows, 8))


@triton.jit
def slot_sums(
    words, pairs, zero, after, dtype: tl.constexpr, FORMAT: tl.constexpr, HAS_ZERO: tl.constexpr,
    SLOTS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """float32 (PARTS, ROWS, 8): weights less their zero points times x, without scales.

    words (4, 8, PARTS, ROWS / 8, CHUNKS, 4), pairs (4, 8, PARTS, 1, 4, 4), zero float32
    (PARTS, ROWS, 8); after: 0, and nothing is multiplied before it is known. Every chunk is
    multiplied with all columns, and those of other chunks are let go: fewer instructions than to
    put zeros into them. APART: the product does not wait for the zero points' share, which is added
    behind it; otherwise it starts from there, which takes fewer registers.
    """
    parts: tl.constexpr = words.shape[2]
    rows: tl.constexpr = words.shape[3] * 8
    chunks: tl.constexpr = words.shape[4]
    SHIFTED: tl.constexpr = HAS_ZERO or counts_from_zero(FORMAT, dtype)
    x = _right(pairs, dtype)
    zero_yet = after.to(tl.float32, bitcast=True)
    start = tl.zeros((parts, rows, 8), tl.float32) + zero_yet
    if SHIFTED and not APART:
        start = _share_of_zeros(x, zero, zero_yet, rows, dtype, FORMAT, HAS_ZERO)
    part = tl.dot(_left(words, FORMAT, dtype), _for_each(x, chunks), _for_each(start, chunks))
    sums = _of_own_chunk(part, chunks, SLOTS)
    if SHIFTED and APART:
        sums += _share_of_zeros(x, zero, zero_yet, rows, dtype, FORMAT, HAS_ZERO)
    return sums


@triton.jit
def zero_values(codes, shift, HAS_ZERO: tl.constexpr, FROM_ZERO: tl.constexpr):
    """float32 zero points, less the 8 that unpacked weights are without if not FROM_ZERO.

    codes (4, 8, PARTS, ROWS / 8, 2), bytes; shift (1, 8, 1, ROWS / 8, 1).
    """
    zero = ((codes.to(tl.int32) >> shift) & 15).to(tl.float32)
    return zero if FROM_ZERO else zero - 8.0


@triton.jit
def scaled_sums(
    words, pairs, scale, zero, shift, after, dtype: tl.constexpr, FORMAT: tl.constexpr,
    HAS_ZERO: tl.constexpr, SLOTS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """float32 (PARTS, ROWS, 8): what a block adds to each slot's column.

    scale, zero: as load_by_slot gives them; shift: 0 or 4 by rows, (1, 8, 1, ROWS / 8, 1); APART:
    as in slot_sums.
    """
    if is_e2m1(FORMAT):
        # More than bytes, so that they are not computed two to a register and parted again.
        scale = scale.to(tl.int32) + after
    values = by_slot(scale_values(scale, FORMAT, lacking(FORMAT, dtype)))
    zeros = values
    if HAS_ZERO:
        zeros = by_slot(zero_values(zero, shift, HAS_ZERO, counts_from_zero(FORMAT, dtype)))
    return slot_sums(words, pairs, zeros, after, dtype, FORMAT, HAS_ZERO, SLOTS, APART) * values
