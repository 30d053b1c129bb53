"""Device functions: int32 words of eight 4-bit weights to operands of a product.

Word c of a row holds the weights k = 8c to 8c + 7. Two of them come out at once as the halves of a
register (`unpack_int4`): j and j + 4, or 2j and 2j + 1 of repacked words. So the weights of a step
are multiplied in an order of their own; the rows they meet are read in the same one
(`in_word_order`).
"""

import triton
import triton.language as tl

from experts.triton.kernels.unpack_w4 import (
    ASSEMBLE,
    boost_of,
    counts_from_zero,
    is_e2m1,
    opaque,
    unpack_int4,
)


@triton.jit
def rows_of(
    first, count, inner, outer, STEP: tl.constexpr, UP_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """Rows of weights of columns `first` to first + BLOCK_N, of gate and then of up where there are
    twice as many, as two summands: block row inner + outer is meant. What comes of `outer`, the
    firsts of equal shares of BLOCK_N, is known to the compiler if that is, unless `count` columns
    leave a rest (not EVEN_N): past the last one it is read again.
    """
    up = outer // BLOCK_N * UP_ROW
    if EVEN_N:
        rows = ((first + inner) * STEP, outer % BLOCK_N * STEP + up)
    else:
        column = tl.minimum(first + inner + outer % BLOCK_N, count - 1)  # NaN-free: integers
        rows = (inner * 0, column * STEP + up)
    return rows


@triton.jit
def times(rows, stride):
    """Offsets of `rows_of` that lie `stride` apart."""
    return rows[0] * stride, rows[1] * stride


# Registers of one lane that a product takes side by side along the depth: two hold four values of
# weights that were bytes before triton 3.9, and one holds two values from then on. The order that
# agrees with it needs no exchange between lanes.
_TWO_REGISTERS: tl.constexpr = tl.constexpr(
    tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9)
)


@triton.jit
def in_word_order(
    values, FORMAT: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr
):
    """Bring (STEPS, ROWS, DEPTH) in order of k to the order in which `unpack_words` gives weights.

    Words go (lane of four, register), values by the bits of k: a warp's four lanes along the depth
    of a product each take whole words. Last come the two halves of a register, after the lanes or,
    with two registers side by side, after those.
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
    """Where to read a row for `rows_in_word_order`: (1, DEPTH / 32, 1, 32) offsets along k.

    Eight values side by side meet one word. The words of four lanes, DEPTH / 4 apart, are brought
    together, so that reading a tile of them from shared memory meets no bank twice.
    """
    word = tl.arange(0, DEPTH // 32)[None, :, None, None] * 8
    k = tl.arange(0, 32)[None, None, None, :]
    return word + (k // 8) * (DEPTH // 4) + k % 8


@triton.jit
def first_of_eight(DEPTH: tl.constexpr):
    """`word_order_offsets` rounded down to words: the same for the eight values of one."""
    word = tl.arange(0, DEPTH // 32)[None, :, None, None] * 8
    k = tl.arange(0, 32)[None, None, None, :]
    return word + (k // 8) * (DEPTH // 4)


@triton.jit
def rows_in_word_order(
    a, FORMAT: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr
):
    """Bring (STEPS, DEPTH / 32, ROWS, 32) read at `word_order_offsets` to (STEPS, DEPTH, ROWS)."""
    lanes = tl.reshape(a, (STEPS, DEPTH // 32, ROWS, 4, 8))
    rows = tl.reshape(tl.permute(lanes, (0, 2, 3, 1, 4)), (STEPS, ROWS, DEPTH))
    return tl.permute(in_word_order(rows, FORMAT, STEPS, ROWS, DEPTH), (0, 2, 1))


@triton.jit
def boosted(x, FORMAT: tl.constexpr, DEPTH: tl.constexpr):
    """x (STEPS, DEPTH, ROWS) in word order as products with unpacked weights need it.

    Exact below 2^63. Counts of odd k come 16 times too large (see _counts).
    """
    if x.dtype == tl.bfloat16 and FORMAT != "nvfp4":
        if is_e2m1(FORMAT):
            x = x * tl.full((1, 1, 1), boost_of(FORMAT, 0), tl.bfloat16)
        else:
            # Values between an even k and the odd one after it, in word order.
            APART: tl.constexpr = 2 if _TWO_REGISTERS else 8
            even = tl.full((1, DEPTH // APART // 2, 1, 1), boost_of(FORMAT, 0), tl.bfloat16)
            odd = tl.full((1, DEPTH // APART // 2, 1, 1), boost_of(FORMAT, 1), tl.bfloat16)
            # Constants alone, so that the compiler can load x as products take it.
            boost = tl.permute(tl.join(even, odd), (0, 1, 4, 2, 3))
            split = tl.reshape(x, (x.shape[0], DEPTH // APART // 2, 2, APART, x.shape[2]))
            x = tl.reshape(split * boost, x.shape)
    return x


@triton.jit
def unpack_words(
    words, FORMAT: tl.constexpr, dtype: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """int32 (STEPS, ROWS, DEPTH / 8) to `unpack_int4` in the order of `in_word_order`."""
    return in_word_order(unpack_int4(words, FORMAT, dtype), FORMAT, STEPS, ROWS, DEPTH)


@triton.jit
def unpack_scaled_words(
    words, scale, FORMAT: tl.constexpr, dtype: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """As unpack_words, each weight of nvfp4 times the scale of its group, exactly.

    scale: e4m3 (STEPS, ROWS, DEPTH / 16), one for two words.
    """
    UNIT: tl.constexpr = 2.0**126 if dtype == tl.bfloat16 else 2.0**14
    two = tl.broadcast_to(scale.to(dtype)[:, :, :, None], (STEPS, ROWS, DEPTH // 16, 2))
    each = tl.reshape(two, (STEPS, ROWS, DEPTH // 8, 1, 1, 1))
    values = unpack_int4(words, FORMAT, dtype) * tl.full((1, 1, 1, 1, 1, 1), UNIT, dtype)
    return in_word_order(values * each, FORMAT, STEPS, ROWS, DEPTH)


@triton.jit
def load_scale(ptrs, inside, FORMAT: tl.constexpr, LACK: tl.constexpr):
    """float32 scales times 2^LACK, 0 where `inside` (None for everywhere) is false; of e2m1 from
    E8M0 exponents. Infinite where that overflows, which for bf16 is from 2^50 on; NaN of 255."""
    scale = tl.load(ptrs)
    if is_e2m1(FORMAT):
        # A mask of the load, or values that stay bytes and are taken two at once, cost more.
        result = scale_values(opaque(scale.to(tl.int32)), FORMAT, LACK, inside)
    else:
        result = scale_values(_widened(scale), FORMAT, LACK)
        if inside is not None:
            result = tl.where(inside, result, 0.0)
    return result


@triton.jit
def _widened(scale):
    """scale; of bf16 as float32 at once, so that a loop does not carry 16 bits from step to step,
    two to a register."""
    if ASSEMBLE and scale.dtype == tl.bfloat16:
        scale = tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.u32.u16 t, $1; shl.b32 $0, t, 16; }",
            "=r,h", [scale], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return scale


@triton.jit
def scale_values(scale, FORMAT: tl.constexpr, LACK: tl.constexpr, inside=None):
    """As load_scale, of what is loaded; `inside` counts for exponents alone."""
    if is_e2m1(FORMAT):
        # An exponent and one bit of the significand: 510 is infinity, 511 is NaN.
        exponent = scale.to(tl.int32)
        most = 510 + ((exponent + 1) >> 8)
        if inside is not None:
            most = tl.where(inside, most, 0)
        bits = tl.minimum(2 * (exponent + LACK), most)  # NaN-free: integers
        result = (bits << 22).to(tl.float32, bitcast=True)
    else:
        result = scale.to(tl.float32) * 2.0**LACK
    return result


@triton.jit
def load_zero(ptrs, shift, HAS_ZERO: tl.constexpr, FROM_ZERO: tl.constexpr):
    """float32 zero points, less the 8 that unpacked weights are without if not FROM_ZERO."""
    if HAS_ZERO:
        zero = (opaque(tl.load(ptrs).to(tl.int32)) >> shift) & 15
        result = (zero if FROM_ZERO else zero - 8).to(tl.float32)
    else:
        result = tl.full((1, 1, 1), 8.0 if FROM_ZERO else 0.0, tl.float32)
    return result


@triton.jit
def multiply_words(
    words, x, zero, FORMAT: tl.constexpr, HAS_ZERO: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """float32 (STEPS, ROWS, M): weights less their zero points times x, without scales.

    words: int32 (STEPS, ROWS, DEPTH / 8); x: (STEPS, DEPTH, M) in word order, `boosted`; zero: as
    load_zero gives it, (STEPS, ROWS, 1).
    """
    start = tl.zeros((STEPS, ROWS, M), tl.float32)
    if HAS_ZERO or counts_from_zero(FORMAT, x.dtype):
        # Sums of x along the depth, from a product with ones: the same in each of its rows.
        one: tl.constexpr = 1 if counts_from_zero(FORMAT, x.dtype) else 9
        ones = tl.full((STEPS, 16, DEPTH // 8), 0x11111111 * one - (1 << 32) * (one // 8), tl.int32)
        sums = tl.dot(unpack_words(ones, FORMAT, x.dtype, STEPS, 16, DEPTH), x)
        # By reshape: `[:, None]` would send them through shared memory.
        sums = tl.reshape(sums, (STEPS, 1, 16, M))
        if HAS_ZERO:
            zeros = tl.reshape(zero, (STEPS, ROWS // 16, 16, 1)) * -sums
        else:
            zeros = tl.broadcast_to(sums * -8.0, (STEPS, ROWS // 16, 16, M))
        start = tl.reshape(zeros, (STEPS, ROWS, M))
    return tl.dot(unpack_words(words, FORMAT, x.dtype, STEPS, ROWS, DEPTH), x, start)
