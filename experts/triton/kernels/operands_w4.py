"""Device functions that convert int32 words of 4-bit weights, and activations, to MMA operands.

The kernels of the aligned_w4 and gemv_w4 paths use them. Word c of a weight row holds the weights k
= 8c to 8c + 7.

`unpack_int4` writes two weights of a word to the two halves of one 32-bit register: weights j and j
+ 4 of the word, or 2j and 2j + 1 if words are repacked. An MMA expects other weights in a register.
Instead of moving weights between registers and lanes, the kernels multiply along K in a permuted
order, called word order, and permute the activations in the same way (`to_word_order`).

A step of a kernel's loop has STEPS MMAs of ROWS weight rows by MMA_K elements along K. bf16
activations are multiplied by a power of two (`prescale`), because unpacked weights are very small.
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
    first, count, inner, outer, GATE_STRIDE: tl.constexpr, UP_ROW_OFFSET: tl.constexpr,
    BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """Return the weight row of each row of a block, as two summands.

    A block covers the output columns [first, first + BLOCK_N). Its first BLOCK_N rows are gate (or
    only) weight rows. Rows from BLOCK_N on are the up rows of the same columns, which are
    UP_ROW_OFFSET rows after the gate rows.

    The row is split into two summands so that addresses are cheap: if EVEN_N, the second summand
    depends only on `outer`, and is a compile-time constant if `outer` is. Otherwise, columns >=
    count are clamped to count - 1.

    first: the first output column.
    count: the number of output columns.
    inner, outer: inner + outer is the row within the block.
    GATE_STRIDE: weight rows per output column: 2 if gate and up rows alternate, otherwise 1.
    EVEN_N: whether BLOCK_N divides count.
    """
    up = outer // BLOCK_N * UP_ROW_OFFSET
    if EVEN_N:
        rows = ((first + inner) * GATE_STRIDE, outer % BLOCK_N * GATE_STRIDE + up)
    else:
        # NaN-free: integer operands
        column = tl.minimum(first + inner + outer % BLOCK_N, count - 1)
        rows = (inner * 0, column * GATE_STRIDE + up)
    return rows


@triton.jit
def row_offsets(rows, stride):
    """Multiply both summands of `weight_row_indices` by the stride of a weight row."""
    return rows[0] * stride, rows[1] * stride


# Whether a lane has two adjacent registers (four values) along K in an MMA operand that is unpacked
# from bytes. From triton 3.9 on, it has only one. Word order matches the order of the operand, so
# that lanes do not exchange values.
_TWO_REGISTERS: tl.constexpr = tl.constexpr(
    tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9)
)


@triton.jit
def to_word_order(
    values,
    WEIGHT_FORMAT: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    MMA_K: tl.constexpr,
):
    """Permute the last axis of (STEPS, ROWS, MMA_K) from the order of k to word order.

    In an MMA operand, four lanes share a row along K. Each of them holds whole words. The reshape
    splits k into its bits, and the permutation puts them in the order in which `unpack_words`
    returns weights: first the register within a word, then the word, then the lane, and last the
    half of the register. Before triton 3.9, a lane has two adjacent registers (`_TWO_REGISTERS`).
    """
    split = tl.reshape(values, (STEPS, ROWS, 4, MMA_K // 32, 2, 2, 2))
    if WEIGHT_FORMAT == "e2m1_repacked":
        if _TWO_REGISTERS:
            ordered = tl.permute(split, (0, 1, 5, 3, 2, 4, 6))
        else:
            ordered = tl.permute(split, (0, 1, 5, 3, 4, 2, 6))
    elif _TWO_REGISTERS:
        ordered = tl.permute(split, (0, 1, 5, 3, 2, 6, 4))
    else:
        ordered = tl.permute(split, (0, 1, 5, 3, 6, 2, 4))
    return tl.reshape(ordered, (STEPS, ROWS, MMA_K))


@triton.jit
def word_order_offsets(MMA_K: tl.constexpr):
    """Return the k offsets at which to load activations for `activations_to_word_order`.

    The result is (1, MMA_K / 32, 1, 32). Eight adjacent values belong to one word. The words of
    four lanes, which are MMA_K / 4 apart, become adjacent, so that reading the tile from shared
    memory has no bank conflicts.
    """
    word = tl.arange(0, MMA_K // 32)[None, :, None, None] * 8
    k = tl.arange(0, 32)[None, None, None, :]
    return word + (k // 8) * (MMA_K // 4) + k % 8


@triton.jit
def word_start_offsets(MMA_K: tl.constexpr):
    """Like `word_order_offsets`, but every value gets the offset of the first value of its word.

    Masks use these offsets, because a word is in bounds or out of bounds as a whole.
    """
    word = tl.arange(0, MMA_K // 32)[None, :, None, None] * 8
    k = tl.arange(0, 32)[None, None, None, :]
    return word + (k // 8) * (MMA_K // 4)


@triton.jit
def activations_to_word_order(
    a, WEIGHT_FORMAT: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, MMA_K: tl.constexpr
):
    """Permute activations that were loaded at `word_order_offsets` to word order.

    a: (STEPS, MMA_K / 32, ROWS, 32), where ROWS counts activation rows.

    Return (STEPS, MMA_K, ROWS), the right operand of the MMA.
    """
    lanes = tl.reshape(a, (STEPS, MMA_K // 32, ROWS, 4, 8))
    rows = tl.reshape(tl.permute(lanes, (0, 2, 3, 1, 4)), (STEPS, ROWS, MMA_K))
    return tl.permute(to_word_order(rows, WEIGHT_FORMAT, STEPS, ROWS, MMA_K), (0, 2, 1))


@triton.jit
def prescale(x, WEIGHT_FORMAT: tl.constexpr, MMA_K: tl.constexpr):
    """Multiply bf16 activations in word order by `prescale_factor`; return other dtypes unchanged.

    Without the factor, products with unpacked weights would underflow in float32. The result is
    exact for |x| below 2^63. For integers, the factor is 16 times smaller at odd k, because the
    weights at odd k are unpacked 16 times too large (see `unpack_w4`).

    x: (STEPS, MMA_K, ROWS).
    """
    if x.dtype == tl.bfloat16 and WEIGHT_FORMAT != "nvfp4":
        if is_e2m1(WEIGHT_FORMAT):
            x = x * tl.full((1, 1, 1), prescale_factor(WEIGHT_FORMAT, 0), tl.bfloat16)
        else:
            # Distance in word order between an even k and k + 1.
            DISTANCE: tl.constexpr = 2 if _TWO_REGISTERS else 8
            even = tl.full(
                (1, MMA_K // DISTANCE // 2, 1, 1), prescale_factor(WEIGHT_FORMAT, 0), tl.bfloat16
            )
            odd = tl.full(
                (1, MMA_K // DISTANCE // 2, 1, 1), prescale_factor(WEIGHT_FORMAT, 1), tl.bfloat16
            )
            # Only constants are permuted, so that x can be loaded in the layout of the MMA operand.
            factor = tl.permute(tl.join(even, odd), (0, 1, 4, 2, 3))
            split = tl.reshape(x, (x.shape[0], MMA_K // DISTANCE // 2, 2, DISTANCE, x.shape[2]))
            x = tl.reshape(split * factor, x.shape)
    return x


@triton.jit
def unpack_words(
    words, WEIGHT_FORMAT: tl.constexpr, dtype: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, MMA_K: tl.constexpr,
):  # fmt: skip
    """Unpack int32 words (STEPS, ROWS, MMA_K / 8) to weights (STEPS, ROWS, MMA_K) in word order."""
    return to_word_order(
        unpack_int4(words, WEIGHT_FORMAT, dtype), WEIGHT_FORMAT, STEPS, ROWS, MMA_K
    )


@triton.jit
def unpack_scaled_words(
    words, scale, WEIGHT_FORMAT: tl.constexpr, dtype: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, MMA_K: tl.constexpr,
):  # fmt: skip
    """Like `unpack_words`, but multiply each NVFP4 weight by the scale of its group, exactly.

    scale: e4m3 (STEPS, ROWS, MMA_K / 16), one scale per two words.
    """
    UNIT: tl.constexpr = 2.0**126 if dtype == tl.bfloat16 else 2.0**14
    scale_per_word = tl.broadcast_to(scale.to(dtype)[:, :, :, None], (STEPS, ROWS, MMA_K // 16, 2))
    factors = tl.reshape(scale_per_word, (STEPS, ROWS, MMA_K // 8, 1, 1, 1))
    values = unpack_int4(words, WEIGHT_FORMAT, dtype) * tl.full((1, 1, 1, 1, 1, 1), UNIT, dtype)
    return to_word_order(values * factors, WEIGHT_FORMAT, STEPS, ROWS, MMA_K)


@triton.jit
def load_scale(ptrs, in_bounds, WEIGHT_FORMAT: tl.constexpr, MISSING_FACTOR_LOG2: tl.constexpr):
    """Load weight scales; return scale * 2^MISSING_FACTOR_LOG2 in float32.

    The factor compensates for MMA results that are too small (`missing_factor_log2`). The scales of
    e2m1 are E8M0 exponents. 255 gives NaN. With bf16, scales of 2^50 or more give infinity.

    ptrs: pointers to the scales.
    in_bounds: the result is 0 where this is False. None if all scales are in bounds.
    """
    scale = tl.load(ptrs)
    if is_e2m1(WEIGHT_FORMAT):
        # A masked load, or bytes packed two to a register, would be slower.
        result = scale_values(
            hide_from_optimizer(scale.to(tl.int32)), WEIGHT_FORMAT, MISSING_FACTOR_LOG2, in_bounds
        )
    else:
        result = scale_values(_to_float32(scale), WEIGHT_FORMAT, MISSING_FACTOR_LOG2)
        if in_bounds is not None:
            result = tl.where(in_bounds, result, 0.0)
    return result


@triton.jit
def _to_float32(scale):
    """Convert bf16 scales to float32 in assembly. Return scales of other dtypes unchanged.

    Without the assembly, the compiler would keep the 16-bit values across the loop, two in a
    register, and unpack them in every iteration.
    """
    if USE_INLINE_ASM and scale.dtype == tl.bfloat16:
        scale = tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.u32.u16 t, $1; shl.b32 $0, t, 16; }",
            "=r,h", [scale], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return scale


@triton.jit
def scale_values(
    scale, WEIGHT_FORMAT: tl.constexpr, MISSING_FACTOR_LOG2: tl.constexpr, in_bounds=None
):
    """Like `load_scale`, for scales that are already loaded. E8M0 exponents need in_bounds."""
    if is_e2m1(WEIGHT_FORMAT):
        # Nine bits: the exponent and one bit of the significand. 510 is infinity, 511 is NaN.
        exponent = scale.to(tl.int32)
        max_bits = 510 + ((exponent + 1) >> 8)
        if in_bounds is not None:
            max_bits = tl.where(in_bounds, max_bits, 0)
        # NaN-free: integer operands
        bits = tl.minimum(2 * (exponent + MISSING_FACTOR_LOG2), max_bits)
        result = (bits << 22).to(tl.float32, bitcast=True)
    else:
        result = scale.to(tl.float32) * 2.0**MISSING_FACTOR_LOG2
    return result


@triton.jit
def load_zero_points(
    ptrs, shift, HAS_ZERO_POINTS: tl.constexpr, UNPACKED_WITHOUT_OFFSET: tl.constexpr
):
    """Load 4-bit zero points as float32.

    Unpacked integers are q - 8, or q if UNPACKED_WITHOUT_OFFSET. The zero points get the same
    offset. Without HAS_ZERO_POINTS, the zero point is 8.

    ptrs: pointers to bytes with the zero points of two weight rows.
    shift: the position of the zero point in its byte, bit 0 or 4.
    UNPACKED_WITHOUT_OFFSET: `unpacks_without_offset`.
    """
    if HAS_ZERO_POINTS:
        zero_point = (hide_from_optimizer(tl.load(ptrs).to(tl.int32)) >> shift) & 15
        result = (zero_point if UNPACKED_WITHOUT_OFFSET else zero_point - 8).to(tl.float32)
    else:
        result = tl.full((1, 1, 1), 8.0 if UNPACKED_WITHOUT_OFFSET else 0.0, tl.float32)
    return result


@triton.jit
def multiply_words(
    words, x, zero_point, WEIGHT_FORMAT: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, MMA_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return (weights - zero points) @ x, without scales, float32 (STEPS, ROWS, BLOCK_M).

    The zero points are not subtracted from each weight. Instead, the product of the zero point and
    the sum of x along K is subtracted from the result.

    words: int32 (STEPS, ROWS, MMA_K / 8), packed weights.
    x: (STEPS, MMA_K, BLOCK_M) activations in word order, from `prescale`.
    zero_point: (STEPS, ROWS, 1), from `load_zero_points`.
    """
    acc = tl.zeros((STEPS, ROWS, BLOCK_M), tl.float32)
    if HAS_ZERO_POINTS or unpacks_without_offset(WEIGHT_FORMAT, x.dtype):
        # An MMA with all-ones weights sums x along K. Every row of the result is the same.
        one_code: tl.constexpr = 1 if unpacks_without_offset(WEIGHT_FORMAT, x.dtype) else 9
        ones = tl.full(
            (STEPS, 16, MMA_K // 8), 0x11111111 * one_code - (1 << 32) * (one_code // 8), tl.int32
        )
        sums = tl.dot(unpack_words(ones, WEIGHT_FORMAT, x.dtype, STEPS, 16, MMA_K), x)
        # Use a reshape: `[:, None]` would move the values through shared memory.
        sums = tl.reshape(sums, (STEPS, 1, 16, BLOCK_M))
        if HAS_ZERO_POINTS:
            zero_point_terms = tl.reshape(zero_point, (STEPS, ROWS // 16, 16, 1)) * -sums
        else:
            zero_point_terms = tl.broadcast_to(sums * -8.0, (STEPS, ROWS // 16, 16, BLOCK_M))
        acc = tl.reshape(zero_point_terms, (STEPS, ROWS, BLOCK_M))
    return tl.dot(unpack_words(words, WEIGHT_FORMAT, x.dtype, STEPS, ROWS, MMA_K), x, acc)
