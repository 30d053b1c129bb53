"""Device functions that turn int32 words of eight 4-bit weights into MMA operands.

Word c of a row has the weights k = 8c to 8c + 7. They are unpacked in pairs, the two halves of a
register (`unpack_int4`): j and j + 4, or 2j and 2j + 1 for repacked words. So that no weight has to
move to another register, the weights of a step are multiplied in a permuted order of k, the word
order, and the rows are permuted in the same way (`in_word_order`).
"""

import triton
import triton.language as tl

from experts.triton.kernels.unpack_w4 import (
    USE_INLINE_ASM,
    is_e2m1,
    opaque,
    prescale_factor,
    unpack_int4,
    unpacks_without_offset,
)


@triton.jit
def rows_of(
    first, count, inner, outer, STEP: tl.constexpr, UP_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """Return the weight rows of columns first to first + BLOCK_N as the sum of two terms.

    inner + outer is the row within the block; rows from BLOCK_N on are up rows, UP_ROW after the
    gate rows. `outer` has the starts of equal parts of BLOCK_N. If EVEN_N, the second term depends
    on `outer` only, so it is known at compile time if `outer` is. Otherwise the columns past the
    last of `count` repeat it.
    """
    up = outer // BLOCK_N * UP_ROW
    if EVEN_N:
        rows = ((first + inner) * STEP, outer % BLOCK_N * STEP + up)
    else:
        column = tl.minimum(first + inner + outer % BLOCK_N, count - 1)  # NaN-free: integers
        rows = (inner * 0, column * STEP + up)
    return rows


@triton.jit
def row_offsets(rows, stride):
    """Multiply both terms of `rows_of` by a stride."""
    return rows[0] * stride, rows[1] * stride


# The number of adjacent registers that one lane has along K of an MMA operand unpacked from bytes:
# two (four values) before triton 3.9, one (two values) since. With the matching order, lanes need
# not exchange values.
_TWO_REGISTERS: tl.constexpr = tl.constexpr(
    tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9)
)


@triton.jit
def in_word_order(
    values, FORMAT: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr
):
    """Permute (STEPS, ROWS, DEPTH) from the order of k to the word order of `unpack_words`.

    Each of the four lanes along K has whole words. Values are indexed by the bits of k. In word
    order, the register within the lane's words comes first; the lane and the two halves of a
    register are last.
    """
    split = tl.reshape(values, (STEPS, ROWS, 4, DEPTH // 32, 2, 2, 2))
    if FORMAT == "e2m1_repacked":
        if _TWO_REGISTERS:
            ordered = tl.permute(split, (0, 1, 5, 3, 2, 4, 6))
        else:
            ordered = tl.permute(split, (0, 1, 5, 3, 4, 2, 6))
    elif _TWO_REGISTERS:
        ordered = tl.permute(split, (0, 1, 5, 3, 2, 6, 4))
    else:
        ordered = tl.permute(split, (0, 1, 5, 3, 6, 2, 4))
    return tl.reshape(ordered, (STEPS, ROWS, DEPTH))


@triton.jit
def word_order_offsets(DEPTH: tl.constexpr):
    """Return the offsets along k for `rows_in_word_order`, (1, DEPTH / 32, 1, 32).

    Eight adjacent values belong to one word. The words of four lanes, DEPTH / 4 apart, are made
    adjacent, so that reading a tile from shared memory has no bank conflicts.
    """
    word = tl.arange(0, DEPTH // 32)[None, :, None, None] * 8
    k = tl.arange(0, 32)[None, None, None, :]
    return word + (k // 8) * (DEPTH // 4) + k % 8


@triton.jit
def first_of_eight(DEPTH: tl.constexpr):
    """Return `word_order_offsets` of the first value of each word.

    It is repeated for all eight values of the word.
    """
    word = tl.arange(0, DEPTH // 32)[None, :, None, None] * 8
    k = tl.arange(0, 32)[None, None, None, :]
    return word + (k // 8) * (DEPTH // 4)


@triton.jit
def rows_in_word_order(
    a, FORMAT: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr
):
    """Permute (STEPS, DEPTH / 32, ROWS, 32), loaded at `word_order_offsets`, to word order.

    Return (STEPS, DEPTH, ROWS).
    """
    lanes = tl.reshape(a, (STEPS, DEPTH // 32, ROWS, 4, 8))
    rows = tl.reshape(tl.permute(lanes, (0, 2, 3, 1, 4)), (STEPS, ROWS, DEPTH))
    return tl.permute(in_word_order(rows, FORMAT, STEPS, ROWS, DEPTH), (0, 2, 1))


@triton.jit
def prescale(x, FORMAT: tl.constexpr, DEPTH: tl.constexpr):
    """Multiply x (STEPS, DEPTH, ROWS), in word order, by `prescale_factor` if it is bf16.

    The result is exact for |x| below 2^63. For integers, values of odd k get a 16 times smaller
    factor, because their weights are unpacked 16 times too large (see `unpack_w4`).
    """
    if x.dtype == tl.bfloat16 and FORMAT != "nvfp4":
        if is_e2m1(FORMAT):
            x = x * tl.full((1, 1, 1), prescale_factor(FORMAT, 0), tl.bfloat16)
        else:
            # Distance from an even k to the odd one after it, in word order.
            DISTANCE: tl.constexpr = 2 if _TWO_REGISTERS else 8
            even = tl.full(
                (1, DEPTH // DISTANCE // 2, 1, 1), prescale_factor(FORMAT, 0), tl.bfloat16
            )
            odd = tl.full(
                (1, DEPTH // DISTANCE // 2, 1, 1), prescale_factor(FORMAT, 1), tl.bfloat16
            )
            # Only constants are permuted, so that x can be loaded in the layout of the MMA operand.
            factor = tl.permute(tl.join(even, odd), (0, 1, 4, 2, 3))
            split = tl.reshape(x, (x.shape[0], DEPTH // DISTANCE // 2, 2, DISTANCE, x.shape[2]))
            x = tl.reshape(split * factor, x.shape)
    return x


@triton.jit
def unpack_words(
    words, FORMAT: tl.constexpr, dtype: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Unpack int32 words (STEPS, ROWS, DEPTH / 8) to weights (STEPS, ROWS, DEPTH) in word order."""
    return in_word_order(unpack_int4(words, FORMAT, dtype), FORMAT, STEPS, ROWS, DEPTH)


@triton.jit
def unpack_scaled_words(
    words, scale, FORMAT: tl.constexpr, dtype: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Unpack like `unpack_words` and multiply each NVFP4 weight by the scale of its group, exactly.

    scale: e4m3 (STEPS, ROWS, DEPTH / 16), one per two words.
    """
    UNIT: tl.constexpr = 2.0**126 if dtype == tl.bfloat16 else 2.0**14
    scale_per_word = tl.broadcast_to(scale.to(dtype)[:, :, :, None], (STEPS, ROWS, DEPTH // 16, 2))
    factors = tl.reshape(scale_per_word, (STEPS, ROWS, DEPTH // 8, 1, 1, 1))
    values = unpack_int4(words, FORMAT, dtype) * tl.full((1, 1, 1, 1, 1, 1), UNIT, dtype)
    return in_word_order(values * factors, FORMAT, STEPS, ROWS, DEPTH)


@triton.jit
def load_scale(ptrs, in_bounds, FORMAT: tl.constexpr, MISSING_LOG2: tl.constexpr):
    """Load scales; return them times 2^MISSING_LOG2 in float32, and 0 where `in_bounds` is False.

    `in_bounds` may be None. Scales of e2m1 are E8M0 exponents: 255 gives NaN, and for bf16, scales
    of 2^50 and more give infinity.
    """
    scale = tl.load(ptrs)
    if is_e2m1(FORMAT):
        # A masked load, or bytes packed two to a register, would cost more.
        result = scale_values(opaque(scale.to(tl.int32)), FORMAT, MISSING_LOG2, in_bounds)
    else:
        result = scale_values(_to_float32(scale), FORMAT, MISSING_LOG2)
        if in_bounds is not None:
            result = tl.where(in_bounds, result, 0.0)
    return result


@triton.jit
def _to_float32(scale):
    """Convert bf16 scales to float32 in assembly; return other scales unchanged.

    Otherwise the loop would carry the 16-bit values, packed two to a register.
    """
    if USE_INLINE_ASM and scale.dtype == tl.bfloat16:
        scale = tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.u32.u16 t, $1; shl.b32 $0, t, 16; }",
            "=r,h", [scale], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return scale


@triton.jit
def scale_values(scale, FORMAT: tl.constexpr, MISSING_LOG2: tl.constexpr, in_bounds=None):
    """Convert loaded scales as `load_scale` does; `in_bounds` is used for exponents only."""
    if is_e2m1(FORMAT):
        # Nine bits: the exponent and one bit of the significand. 510 is infinity, 511 is NaN.
        exponent = scale.to(tl.int32)
        max_bits = 510 + ((exponent + 1) >> 8)
        if in_bounds is not None:
            max_bits = tl.where(in_bounds, max_bits, 0)
        bits = tl.minimum(2 * (exponent + MISSING_LOG2), max_bits)  # NaN-free: integers
        result = (bits << 22).to(tl.float32, bitcast=True)
    else:
        result = scale.to(tl.float32) * 2.0**MISSING_LOG2
    return result


@triton.jit
def load_zero(ptrs, shift, HAS_ZERO: tl.constexpr, WITHOUT_OFFSET: tl.constexpr):
    """Load float32 zero points, minus 8 unless WITHOUT_OFFSET, as the unpacked weights have them.

    Without zero points, the result is that of a zero point of 8.
    """
    if HAS_ZERO:
        zero = (opaque(tl.load(ptrs).to(tl.int32)) >> shift) & 15
        result = (zero if WITHOUT_OFFSET else zero - 8).to(tl.float32)
    else:
        result = tl.full((1, 1, 1), 8.0 if WITHOUT_OFFSET else 0.0, tl.float32)
    return result


@triton.jit
def multiply_words(
    words, x, zero, FORMAT: tl.constexpr, HAS_ZERO: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Return (weights - zero points) @ x, without scales, float32 (STEPS, ROWS, M).

    words: int32 (STEPS, ROWS, DEPTH / 8).
    x: (STEPS, DEPTH, M) in word order, `prescale`.
    zero: the result of `load_zero`, (STEPS, ROWS, 1).
    """
    start = tl.zeros((STEPS, ROWS, M), tl.float32)
    if HAS_ZERO or unpacks_without_offset(FORMAT, x.dtype):
        # An MMA with weights of one sums x along K; all of its rows have the same sums.
        one: tl.constexpr = 1 if unpacks_without_offset(FORMAT, x.dtype) else 9
        ones = tl.full((STEPS, 16, DEPTH // 8), 0x11111111 * one - (1 << 32) * (one // 8), tl.int32)
        sums = tl.dot(unpack_words(ones, FORMAT, x.dtype, STEPS, 16, DEPTH), x)
        # Use a reshape: `[:, None]` would move the values through shared memory.
        sums = tl.reshape(sums, (STEPS, 1, 16, M))
        if HAS_ZERO:
            zeros = tl.reshape(zero, (STEPS, ROWS // 16, 16, 1)) * -sums
        else:
            zeros = tl.broadcast_to(sums * -8.0, (STEPS, ROWS // 16, 16, M))
        start = tl.reshape(zeros, (STEPS, ROWS, M))
    return tl.dot(unpack_words(words, FORMAT, x.dtype, STEPS, ROWS, DEPTH), x, start)
