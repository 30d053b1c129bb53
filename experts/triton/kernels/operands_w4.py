"""Device functions that convert int32 words of eight 4-bit weights to MMA operands.

Word c of a row has the weights k = 8c to 8c + 7. `unpack_int4` unpacks two of them at a time into
the halves of one 32-bit register: weights j and j + 4, or 2j and 2j + 1 if words are repacked. To
avoid moving weights between registers, each step multiplies along K in a permuted order, called
word order. The activation rows are permuted to match (`to_word_order`).
"""

import triton
import triton.language as tl

from experts.triton.kernels.unpack_w4 import (
    USE_INLINE_ASM,
    hide_from_optimizer,
    is_e2m1,
    prescale_factor,
    unpack_int4,
    unpacks_without_offset,
)


@triton.jit
def weight_row_indices(
    first, count, inner, outer, STEP: tl.constexpr, UP_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """Return the weight row indices of columns [first, first + BLOCK_N), split into two summands.

    If EVEN_N, the second summand depends only on `outer`, so it is known at compile time if `outer`
    is. Otherwise, columns >= count are clamped to count - 1.

    inner, outer: inner + outer is the row within the block. Rows from BLOCK_N on are up rows, which
        are UP_ROW after the gate rows. `outer` contains the start of each equal-sized part of the
        block.
    count: the number of columns.
    STEP: weight rows per column.
    EVEN_N: whether BLOCK_N divides count.
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
    """Multiply both summands of `weight_row_indices` by a stride."""
    return rows[0] * stride, rows[1] * stride


# Whether a lane has two adjacent registers (four values) along K in an MMA operand that is unpacked
# from bytes, as before triton 3.9, or one (two values), as from 3.9 on. Matching this order avoids
# exchanging values between lanes.
_TWO_REGISTERS: tl.constexpr = tl.constexpr(
    tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9)
)


@triton.jit
def to_word_order(
    values, FORMAT: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr
):
    """Permute (STEPS, ROWS, DEPTH) from the order of k to the word order of `unpack_words`.

    Each of the four lanes along K holds whole words. The reshape splits k into its bits. In word
    order, the index of the register within the lane's words comes first. The lane and the half of
    the register come last.
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
    """Return the offsets along k for `activations_to_word_order`, (1, DEPTH / 32, 1, 32).

    Eight adjacent values belong to one word. The words of four lanes, which are DEPTH / 4 apart,
    become adjacent, so that reading a tile from shared memory has no bank conflicts.
    """
    word = tl.arange(0, DEPTH // 32)[None, :, None, None] * 8
    k = tl.arange(0, 32)[None, None, None, :]
    return word + (k // 8) * (DEPTH // 4) + k % 8


@triton.jit
def word_start_offsets(DEPTH: tl.constexpr):
    """Like `word_order_offsets`, but all values of a word get the offset of its first value."""
    word = tl.arange(0, DEPTH // 32)[None, :, None, None] * 8
    k = tl.arange(0, 32)[None, None, None, :]
    return word + (k // 8) * (DEPTH // 4)


@triton.jit
def activations_to_word_order(
    a, FORMAT: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr
):
    """Permute (STEPS, DEPTH / 32, ROWS, 32), loaded at `word_order_offsets`, to word order.

    Return (STEPS, DEPTH, ROWS).
    """
    lanes = tl.reshape(a, (STEPS, DEPTH // 32, ROWS, 4, 8))
    rows = tl.reshape(tl.permute(lanes, (0, 2, 3, 1, 4)), (STEPS, ROWS, DEPTH))
    return tl.permute(to_word_order(rows, FORMAT, STEPS, ROWS, DEPTH), (0, 2, 1))


@triton.jit
def prescale(x, FORMAT: tl.constexpr, DEPTH: tl.constexpr):
    """Multiply x (STEPS, DEPTH, ROWS), which is in word order, by `prescale_factor` if x is bf16.

    The result is exact for |x| below 2^63. For integers, values at odd k are multiplied by a factor
    16 times smaller, because their weights are unpacked 16 times too large (see `unpack_w4`).
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
    return to_word_order(unpack_int4(words, FORMAT, dtype), FORMAT, STEPS, ROWS, DEPTH)


@triton.jit
def unpack_scaled_words(
    words, scale, FORMAT: tl.constexpr, dtype: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Like `unpack_words`, but multiply each NVFP4 weight by the scale of its group, exactly.

    scale: e4m3 (STEPS, ROWS, DEPTH / 16), one scale per two words.
    """
    UNIT: tl.constexpr = 2.0**126 if dtype == tl.bfloat16 else 2.0**14
    scale_per_word = tl.broadcast_to(scale.to(dtype)[:, :, :, None], (STEPS, ROWS, DEPTH // 16, 2))
    factors = tl.reshape(scale_per_word, (STEPS, ROWS, DEPTH // 8, 1, 1, 1))
    values = unpack_int4(words, FORMAT, dtype) * tl.full((1, 1, 1, 1, 1, 1), UNIT, dtype)
    return to_word_order(values * factors, FORMAT, STEPS, ROWS, DEPTH)


@triton.jit
def load_scale(ptrs, in_bounds, FORMAT: tl.constexpr, MISSING_LOG2: tl.constexpr):
    """Load scales; return scale * 2^MISSING_LOG2 in float32.

    Scales of e2m1 are E8M0 exponents: 255 gives NaN, and for bf16, scales of 2^50 or more give
    infinity.

    in_bounds: the result is 0 where this is False. None if all scales are in bounds.
    """
    scale = tl.load(ptrs)
    if is_e2m1(FORMAT):
        # A masked load, or bytes packed two to a register, would be slower.
        result = scale_values(
            hide_from_optimizer(scale.to(tl.int32)), FORMAT, MISSING_LOG2, in_bounds
        )
    else:
        result = scale_values(_to_float32(scale), FORMAT, MISSING_LOG2)
        if in_bounds is not None:
            result = tl.where(in_bounds, result, 0.0)
    return result


@triton.jit
def _to_float32(scale):
    """Convert bf16 scales to float32 in assembly. Return other scales unchanged.

    Without the assembly, the loop would carry the 16-bit values, packed two to a register.
    """
    if USE_INLINE_ASM and scale.dtype == tl.bfloat16:
        scale = tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.u32.u16 t, $1; shl.b32 $0, t, 16; }",
            "=r,h", [scale], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return scale


@triton.jit
def scale_values(scale, FORMAT: tl.constexpr, MISSING_LOG2: tl.constexpr, in_bounds=None):
    """Convert loaded scales like `load_scale`. `in_bounds` is used only for exponents."""
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
    """Load zero points as float32.

    Subtract 8 unless WITHOUT_OFFSET, to match the offset of the unpacked weights. Without HAS_ZERO,
    the result is the same as for a zero point of 8.
    """
    if HAS_ZERO:
        zero = (hide_from_optimizer(tl.load(ptrs).to(tl.int32)) >> shift) & 15
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
    x: (STEPS, DEPTH, M) in word order, the output of `prescale`.
    zero: the result of `load_zero`, (STEPS, ROWS, 1).
    """
    acc = tl.zeros((STEPS, ROWS, M), tl.float32)
    if HAS_ZERO or unpacks_without_offset(FORMAT, x.dtype):
        # An MMA with all-ones weights sums x along K. Every row of the result is the same.
        one_code: tl.constexpr = 1 if unpacks_without_offset(FORMAT, x.dtype) else 9
        ones = tl.full(
            (STEPS, 16, DEPTH // 8), 0x11111111 * one_code - (1 << 32) * (one_code // 8), tl.int32
        )
        sums = tl.dot(unpack_words(ones, FORMAT, x.dtype, STEPS, 16, DEPTH), x)
        # Use a reshape: `[:, None]` would move the values through shared memory.
        sums = tl.reshape(sums, (STEPS, 1, 16, M))
        if HAS_ZERO:
            zeros = tl.reshape(zero, (STEPS, ROWS // 16, 16, 1)) * -sums
        else:
            zeros = tl.broadcast_to(sums * -8.0, (STEPS, ROWS // 16, 16, M))
        acc = tl.reshape(zeros, (STEPS, ROWS, M))
    return tl.dot(unpack_words(words, FORMAT, x.dtype, STEPS, ROWS, DEPTH), x, acc)
