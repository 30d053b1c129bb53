"""`tile_weights_kernel`: convert 4-bit weights to the tiled layout (`grouped_w4.layout`).

A word is an int32 with eight 4-bit codes, which are unsigned integers or e2m1 values (the 4-bit
floating-point type of mxfp4 and NVFP4).
"""

import triton
import triton.language as tl

# Masks of the bits of two e2m1 codes that are in the fields of two bf16.
_SIGN_MASK: tl.constexpr = tl.constexpr(0x80008000)
_MAGNITUDE_MASK: tl.constexpr = tl.constexpr(0x01C001C0)
_PAIR_MASK: tl.constexpr = tl.constexpr(0x81C081C0)


@triton.jit
def _extract_pair(word, INDEX: tl.constexpr, WEIGHT_FORMAT: tl.constexpr):
    """Return pair INDEX (0 to 3) of a word of eight e2m1 codes, in the fields of two bf16."""
    if WEIGHT_FORMAT == "e2m1":
        byte = word >> (8 * INDEX)
        codes = (byte & 0xF) | (byte & 0xF0) << 12
        pair = (codes & 0x00080008) << 12 | (codes & 0x00070007) << 6
    elif INDEX == 0:
        pair = word & _PAIR_MASK
    elif INDEX == 1:
        pair = (word << 3) & _PAIR_MASK
    elif INDEX == 2:
        pair = ((word << 6) ^ (word << 1)) & _PAIR_MASK
    else:
        pair = ((word >> 3) ^ (word << 2)) & _PAIR_MASK
    return pair


@triton.jit
def _repack_pair(w0, w1, w2, w3, INDEX: tl.constexpr, WEIGHT_FORMAT: tl.constexpr):
    """Pack pair INDEX of four words into one word, as in `modular_kernel.quant.repacking`."""
    p2 = _extract_pair(w2, INDEX, WEIGHT_FORMAT)
    p3 = _extract_pair(w3, INDEX, WEIGHT_FORMAT)
    w = _extract_pair(w0, INDEX, WEIGHT_FORMAT) | _extract_pair(w1, INDEX, WEIGHT_FORMAT) >> 3
    w |= ((p3 ^ w << 2) & _MAGNITUDE_MASK) << 3
    w |= ((p2 ^ w << 1) & _MAGNITUDE_MASK) >> 6
    w |= ((p2 ^ w << 6) & _SIGN_MASK) >> 1
    w |= ((p3 ^ w >> 3) & _SIGN_MASK) >> 2
    return w


@triton.jit
def _pack_by_halves(w0, w1, w2, w3, INDEX: tl.constexpr):
    """Pack byte INDEX of four words into one word.

    The byte of word i has two 4-bit integers. The first one is moved to bit 4 * i of the result,
    and the second one to bit 16 + 4 * i.
    """
    word = (w0 >> (8 * INDEX)) & 0xFF
    packed = (word & 0xF) | (word & 0xF0) << 12
    word = (w1 >> (8 * INDEX)) & 0xFF
    packed |= (word & 0xF) << 4 | (word & 0xF0) << 16
    word = (w2 >> (8 * INDEX)) & 0xFF
    packed |= (word & 0xF) << 8 | (word & 0xF0) << 20
    word = (w3 >> (8 * INDEX)) & 0xFF
    return packed | (word & 0xF) << 12 | (word & 0xF0) << 24


@triton.jit
def _apply_signs(w, scale):
    """Apply the sign of the e4m3 scale to a word of e2m1 codes. Return 0 if the scale is 0."""
    is_zero = (scale & 0x7F) == 0
    signed = w ^ tl.where(scale > 0x7F, 0x88888888, 0).to(tl.uint32)
    return tl.where(is_zero, 0, signed)


@triton.jit
def _make_lane_words(w0, w1, w2, w3, WEIGHT_FORMAT: tl.constexpr):
    """Convert four words that are adjacent along K to the words of four lanes, (..., 2, 2).

    The last two dimensions are the bits of the lane. In the tiled layout, the four lanes that share
    a weight row hold its columns interleaved.
    """
    if WEIGHT_FORMAT == "integer":
        c0 = _pack_by_halves(w0, w1, w2, w3, 0)
        c1 = _pack_by_halves(w0, w1, w2, w3, 1)
        c2 = _pack_by_halves(w0, w1, w2, w3, 2)
        c3 = _pack_by_halves(w0, w1, w2, w3, 3)
    else:
        c0 = _repack_pair(w0, w1, w2, w3, 0, WEIGHT_FORMAT)
        c1 = _repack_pair(w0, w1, w2, w3, 1, WEIGHT_FORMAT)
        c2 = _repack_pair(w0, w1, w2, w3, 2, WEIGHT_FORMAT)
        c3 = _repack_pair(w0, w1, w2, w3, 3, WEIGHT_FORMAT)
    return tl.join(tl.join(c0, c2), tl.join(c1, c3))


@triton.jit
def _encode_scales(scale, in_bounds, WEIGHT_FORMAT: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr):
    """Convert scales to the encoding of the tiled layout. Scales out of bounds become 0.

    With HAS_ZERO_POINTS, the last four bits of integer scales are 0, for the zero point.
    """
    if WEIGHT_FORMAT == "integer":
        # Codes are interpreted as q * 2^-133, and unpacked weights are weight * 2^-50.
        scaled = scale.to(tl.float32) * 2.0 ** (133 - 50)
        encoded = scaled.to(tl.int32, bitcast=True)
        if HAS_ZERO_POINTS:
            # Without this check, rounding would turn a NaN with all bits set into zero.
            encoded = tl.where(scaled == scaled, (encoded + 8) & ~15, 0x7FC00000)
    elif WEIGHT_FORMAT == "nvfp4":  # five exponent bits and three significand bits of the value
        value = scale.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        # NaN-free: integer operands
        encoded = tl.minimum(tl.maximum((bits >> 20) - ((127 - 10) << 3), 0), 255)
    else:  # an exponent, for codes that are interpreted as value * 2^-126
        encoded = tl.minimum(scale.to(tl.int32) + (126 - 50), 255)  # NaN-free: integer operands
    return tl.where(in_bounds, encoded, 0)


@triton.jit
def tile_weights_kernel(
    w_ptr, scale_ptr, zero_point_ptr, starts_ptr, out_words_ptr, out_scales_ptr, first_expert,
    rows, row_words,
    scale_groups, size_n, num_tiles, num_k_steps, up_row_offset, GATE_STRIDE: tl.constexpr,
    NUM_MATRICES: tl.constexpr,
    WEIGHT_FORMAT: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, GROUP_K: tl.constexpr,
    SCALES_PER_ROW_AND_STEP: tl.constexpr,
    K_STEPS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Convert weights and scales of experts to the tiled layout. Experts without rows are skipped.

    Grid: (tiles, blocks of K_STEPS_PER_PROGRAM K steps, experts to convert). A program converts
        K_STEPS_PER_PROGRAM steps of 64 elements along K, of one tile of 256 weight rows. Index i of
        the last axis stands for expert first_expert + i.

    w_ptr: int32 (num_experts, rows, row_words), eight codes per word. row_words is a multiple of
        four.
    scale_ptr: (num_experts, rows, scale_groups), one scale per GROUP_K elements along K. GROUP_K =
        0 means that one scale covers all of K.
    zero_point_ptr: uint8 (num_experts, rows / 2, scale_groups), two rows per byte. Used if
        HAS_ZERO_POINTS.
    starts_ptr: (num_experts + 1,) int32, the first activation row of each expert, then the number
        of rows (`modular_kernel.ops.sort`).
    out_words_ptr: output, `layout.TiledWeights.words`.
    out_scales_ptr: output, `layout.TiledWeights.scales`.
    size_n: number of output columns of the GEMM. Column n uses weight row n * GATE_STRIDE and, with
        two matrices, also row n * GATE_STRIDE + up_row_offset for up.
    num_tiles, num_k_steps: number of tiles per expert, and of K steps.
    NUM_MATRICES: 2 if the GEMM computes gate and up values, otherwise 1.
    WEIGHT_FORMAT: "integer", "e2m1", "e2m1_repacked" or "nvfp4"
        (`experts.triton.operands.word_format`).
    SCALES_PER_ROW_AND_STEP: `PackedFormat.groups`, for integers.
    """
    tile = tl.program_id(0)
    first_step = tl.program_id(1) * K_STEPS_PER_PROGRAM
    chunk_index = tl.program_id(2)
    expert = (first_expert + chunk_index).to(tl.int64)
    if tl.load(starts_ptr + expert) == tl.load(starts_ptr + expert + 1):
        return
    # The rows of a tile in the order of the threads that own them: block, warp, row, row half.
    position = tl.arange(0, 256)
    block = position // 64
    row_in_block = position // 16 % 4 * 16 + position % 2 * 8 + position // 2 % 8
    column = (tile * (4 // NUM_MATRICES) + block // NUM_MATRICES) * 64 + row_in_block
    row = (
        tl.minimum(column, size_n - 1) * GATE_STRIDE + block % NUM_MATRICES * up_row_offset
    )  # NaN-free: integer operands
    column_mask = (column < size_n)[:, None]
    half_step = first_step * 2 + tl.arange(0, 2 * K_STEPS_PER_PROGRAM)
    in_bounds = column_mask & (half_step < row_words // 4)[None, :]
    offsets = (expert * rows + row)[:, None] * row_words + half_step[None, :] * 4
    word_in_half_step = tl.arange(0, 4)[None, None, :]
    loaded_words = tl.load(
        w_ptr + offsets[:, :, None] + word_in_half_step, mask=in_bounds[:, :, None], other=0
    )
    loaded_words = loaded_words.to(tl.uint32, bitcast=True)
    even, odd = tl.split(tl.reshape(loaded_words, (256, 2 * K_STEPS_PER_PROGRAM, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    scale_ptr += (expert * rows + row)[:, None] * scale_groups
    if WEIGHT_FORMAT == "nvfp4":
        first_scale = tl.load(scale_ptr + half_step[None, :] * 2, mask=in_bounds, other=0)
        second_scale = tl.load(scale_ptr + half_step[None, :] * 2 + 1, mask=in_bounds, other=0)
        w0 = _apply_signs(w0, first_scale)
        w1 = _apply_signs(w1, first_scale)
        w2 = _apply_signs(w2, second_scale)
        w3 = _apply_signs(w3, second_scale)
    elif WEIGHT_FORMAT != "integer":
        # E8M0 defines 255 as NaN. The GEMM interprets 255 as infinity, and its product with a code
        # of 0 is NaN.
        scale = tl.load(scale_ptr + half_step[None, :], mask=in_bounds, other=0)
        w0 = tl.where(scale == 255, 0, w0)
        w1 = tl.where(scale == 255, 0, w1)
        w2 = tl.where(scale == 255, 0, w2)
        w3 = tl.where(scale == 255, 0, w3)
    lanes = _make_lane_words(w0, w1, w2, w3, "e2m1" if WEIGHT_FORMAT == "nvfp4" else WEIGHT_FORMAT)
    # (block, warp, row; row half; step; half of the step; lane) to
    # (step; block, warp, row; lane; row half; half of the step)
    split = tl.reshape(lanes, (128, 2, K_STEPS_PER_PROGRAM, 2, 4))
    values = tl.reshape(tl.permute(split, (2, 0, 4, 1, 3)), (K_STEPS_PER_PROGRAM, 2048))
    step = first_step + tl.arange(0, K_STEPS_PER_PROGRAM)
    box = (chunk_index.to(tl.int64) * num_tiles + tile) * num_k_steps + step
    out_ptrs = out_words_ptr + box[:, None] * 2048 + tl.arange(0, 2048)[None, :]
    tl.store(out_ptrs, values.to(tl.int32, bitcast=True), mask=(step < num_k_steps)[:, None])
    # Scales per row and step.
    SCALES_PER_STEP: tl.constexpr = (
        4
        if WEIGHT_FORMAT == "nvfp4"
        else (SCALES_PER_ROW_AND_STEP if WEIGHT_FORMAT == "integer" else 2)
    )
    k = first_step * 64 + tl.arange(0, SCALES_PER_STEP * K_STEPS_PER_PROGRAM) * (
        64 // SCALES_PER_STEP
    )
    group = (k // GROUP_K if GROUP_K > 0 else k * 0)[None, :]
    in_bounds = column_mask & (k < row_words * 8)[None, :]
    scale = tl.load(scale_ptr + group, mask=in_bounds, other=0.0)
    encoded = _encode_scales(scale, in_bounds, WEIGHT_FORMAT, HAS_ZERO_POINTS)
    if HAS_ZERO_POINTS:
        pair = expert * (rows // 2) + row // 2
        zero_points = tl.load(
            zero_point_ptr + pair[:, None] * scale_groups + group, mask=in_bounds, other=0
        )
        encoded |= (zero_points.to(tl.int32) >> (row % 2 * 4)[:, None]) & 15
    if WEIGHT_FORMAT != "integer":
        encoded = encoded.to(tl.uint8)
    # (warpgroup, block, quad, row half, step, scale of the step) to the order of `layout`
    split = tl.reshape(encoded, (2, 2, 32, 2, K_STEPS_PER_PROGRAM, SCALES_PER_STEP))
    if WEIGHT_FORMAT == "integer" and SCALES_PER_STEP == 2:
        ordered = tl.permute(split, (4, 0, 1, 2, 3, 5))
    elif WEIGHT_FORMAT == "integer" or WEIGHT_FORMAT == "nvfp4":
        ordered = tl.permute(split, (4, 0, 2, 1, 3, 5))
    else:
        ordered = tl.permute(split, (4, 2, 0, 1, 3, 5))
    values = tl.reshape(ordered, (K_STEPS_PER_PROGRAM, 256 * SCALES_PER_STEP))
    out_ptrs = (
        out_scales_ptr
        + box[:, None] * (256 * SCALES_PER_STEP)
        + tl.arange(0, 256 * SCALES_PER_STEP)[None, :]
    )
    tl.store(out_ptrs, values, mask=(step < num_k_steps)[:, None])
