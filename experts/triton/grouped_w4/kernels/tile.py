"""e2m1 weights and their scales to the order of `experts.triton.grouped_w4.layout`."""

import triton
import triton.language as tl

LEFT_OUT = {"tile_weights_kernel": "launched where a tuned file or an override says so alone"}
_SIGN: tl.constexpr = tl.constexpr(0x80008000)
_REST: tl.constexpr = tl.constexpr(0x01C001C0)
_FIELDS: tl.constexpr = tl.constexpr(0x81C081C0)


@triton.jit
def _pair(word, INDEX: tl.constexpr, FORMAT: tl.constexpr):
    """Pair INDEX of a word of eight codes in bf16's fields; all uint32."""
    if FORMAT == "e2m1":
        byte = word >> (8 * INDEX)
        codes = (byte & 0xF) | (byte & 0xF0) << 12
        pair = (codes & 0x00080008) << 12 | (codes & 0x00070007) << 6
    elif INDEX == 0:
        pair = word & _FIELDS
    elif INDEX == 1:
        pair = (word << 3) & _FIELDS
    elif INDEX == 2:
        pair = ((word << 6) ^ (word << 1)) & _FIELDS
    else:
        pair = ((word >> 3) ^ (word << 2)) & _FIELDS
    return pair


@triton.jit
def _repacked(w0, w1, w2, w3, INDEX: tl.constexpr, FORMAT: tl.constexpr):
    """Pair INDEX of each word, four, in one word as modular_kernel.repacked packs them."""
    p2 = _pair(w2, INDEX, FORMAT)
    p3 = _pair(w3, INDEX, FORMAT)
    w = _pair(w0, INDEX, FORMAT) | _pair(w1, INDEX, FORMAT) >> 3
    w |= ((p3 ^ w << 2) & _REST) << 3
    w |= ((p2 ^ w << 1) & _REST) >> 6
    w |= ((p2 ^ w << 6) & _SIGN) >> 1
    w |= ((p3 ^ w >> 3) & _SIGN) >> 2
    return w


@triton.jit
def tile_weights_kernel(
    w_ptr, scale_ptr, starts_ptr, words_ptr, scales_ptr, first_expert, rows, row_words, columns,
    tiles, steps, up_row, STEP: tl.constexpr, SIDES: tl.constexpr, FORMAT: tl.constexpr,
    RAISED: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Tile weights of expert first_expert + e, if it has rows, to `words` and `scales` of e.

    Program (tile, STEPS steps of 64 of the depth, e). w_ptr: int32 (experts, rows, row_words) of
    eight codes, a multiple of four words; FORMAT "e2m1" or "e2m1_repacked". scale: uint8 (experts,
    rows, row_words / 4). starts_ptr: first row of each expert, and how many there are (ops.sort).
    STEP, up_row, SIDES: as layout.rows_of_tiles has them, SIDES 2 if gated. RAISED: added to
    exponents, at most 255.
    """
    tile = tl.program_id(0)
    first_step = tl.program_id(1) * STEPS
    local = tl.program_id(2)
    expert = (first_expert + local).to(tl.int64)
    if tl.load(starts_ptr + expert) == tl.load(starts_ptr + expert + 1):
        return
    # In the order in which threads have them: block, warp, row of eight, row half.
    place = tl.arange(0, 256)
    block = place // 64
    in_block = place // 16 % 4 * 16 + place % 2 * 8 + place // 2 % 8
    column = (tile * (4 // SIDES) + block // SIDES) * 64 + in_block
    row = tl.minimum(column, columns - 1) * STEP + block % SIDES * up_row
    groups = row_words // 4
    group = first_step * 2 + tl.arange(0, 2 * STEPS)
    inside = (column < columns)[:, None] & (group < groups)[None, :]
    at = (expert * rows + row)[:, None] * groups + group[None, :]
    four = tl.arange(0, 4)[None, None, :]
    given = tl.load(w_ptr + at[:, :, None] * 4 + four, mask=inside[:, :, None], other=0)
    given = given.to(tl.uint32, bitcast=True)
    even, odd = tl.split(tl.reshape(given, (256, 2 * STEPS, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    c0 = _repacked(w0, w1, w2, w3, 0, FORMAT)
    c1 = _repacked(w0, w1, w2, w3, 1, FORMAT)
    c2 = _repacked(w0, w1, w2, w3, 2, FORMAT)
    c3 = _repacked(w0, w1, w2, w3, 3, FORMAT)
    lanes = tl.join(tl.join(c0, c2), tl.join(c1, c3))
    # (block, warp and row, row half, step, group, lane) to (step, block, ..., lane, half, group)
    split = tl.reshape(lanes, (128, 2, STEPS, 2, 4))
    made = tl.reshape(tl.permute(split, (2, 0, 4, 1, 3)), (STEPS, 2048))
    step = first_step + tl.arange(0, STEPS)
    box = (local.to(tl.int64) * tiles + tile) * steps + step
    to = words_ptr + box[:, None] * 2048 + tl.arange(0, 2048)[None, :]
    tl.store(to, made.to(tl.int32, bitcast=True), mask=(step < steps)[:, None])
    exponent = tl.load(scale_ptr + at, mask=inside, other=0).to(tl.int32) + RAISED
    exponent = tl.where(inside, tl.minimum(exponent, 255), 0)
    bytes_ = tl.reshape(exponent.to(tl.uint8), (4, 32, 2, STEPS, 2))
    made = tl.reshape(tl.permute(bytes_, (3, 1, 0, 2, 4)), (STEPS, 512))
    to = scales_ptr + box[:, None] * 512 + tl.arange(0, 512)[None, :]
    tl.store(to, made, mask=(step < steps)[:, None])
