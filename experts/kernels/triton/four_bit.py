"""Device functions: int32 words of eight 4-bit weights to operands of a product.

Word c of a row holds the weights k = 8c to 8c + 7, the low nibble first. A mask takes nibbles j and
j + 4 out at once as the two halves of a register, so the weights of a step are multiplied in an
order of their own; the rows they meet are read in the same one (`in_word_order`).
"""

from collections.abc import Callable

import triton
import triton.language as tl


# A mask takes two nibbles out of the word, $4, or of it shifted by 8, at once: the lowest of each
# half by 0x000F000F, the next one by 0x00F000F0.
def _by_pairs(pair: Callable[[int], str]) -> tl.constexpr:
    """pair(i): instructions for nibbles i and i + 4 of word W, into the halves of T."""
    code = "shr.b32 w, $4, 8; "
    for j in range(4):
        code += pair(j % 2).replace("W", "w" if j > 1 else "$4").replace("T", f"${j}")
    return tl.constexpr("{ .reg .b32 w, u, v; " + code + "}")


def _counts(i: int) -> str:
    """Nibbles as they read at the low end of bf16: q 2^-133, or 16 q 2^-133. Below 2^8 these bits
    count on from the subnormal numbers into the least normal ones."""
    return f"and.b32 T, W, {0x000F000F << 4 * i:#010x}; "


def _integers_fp16(i: int) -> str:
    """q - 8: 0x6400 | q is 1024 + q in fp16, and 0x6400 | 16 q is 1024 + 16 q."""
    one, less = ((0x3C003C00, 0xE408E408), (0x2C002C00, 0xD480D480))[i]
    return (
        f"lop3.b32 T, W, {0x000F000F << 4 * i:#010x}, 0x64006400, 0xEA; "
        f"mov.b32 u, {one:#010x}; mov.b32 v, {less:#010x}; fma.rn.f16x2 T, T, u, v; "
    )


def _e2m1_bf16(i: int) -> str:
    """e2m1 codes (sign, two exponent bits, one mantissa bit) at the top of bf16's fields: a product
    puts one copy where the sign belongs and one where the rest does."""
    copies = (1 << 12 - 4 * i) + (1 << 6 - 4 * i)
    return (
        f"and.b32 T, W, {0x000F000F << 4 * i:#010x}; "
        f"mul.lo.u32 T, T, {copies}; and.b32 T, T, 0x81C081C0; "
    )


def _e2m1_fp16(i: int) -> str:
    """As _e2m1_bf16; there the copies would overlap."""
    right = f"shl.b32 u, W, {9 - 4 * i}; "
    return (
        f"shl.b32 T, W, {12 - 4 * i}; {right}"
        "and.b32 u, u, 0x0E000E00; lop3.b32 T, T, 0x80008000, u, 0xEA; "
    )


_INTEGER_BF16: tl.constexpr = _by_pairs(_counts)
_INTEGER_FP16: tl.constexpr = _by_pairs(_integers_fp16)
_E2M1_BF16: tl.constexpr = _by_pairs(_e2m1_bf16)
_E2M1_FP16: tl.constexpr = _by_pairs(_e2m1_fp16)
# The interpreter, for which kernels are decorated or not, knows no assembler.
_ASSEMBLE: tl.constexpr = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def opaque(value):
    """value, an int32 or int64, and nothing else of it known to the compiler; no instruction."""
    if _ASSEMBLE and value.dtype.primitive_bitwidth == 64:
        value = tl.inline_asm_elementwise(
            "mov.b64 $0, $1;", "=l,l", [value], dtype=tl.int64, is_pure=True, pack=1
        )
    elif _ASSEMBLE:
        value = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=True, pack=1
        )
    return value


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
        column = tl.minimum(first + inner + outer % BLOCK_N, count - 1)
        rows = (inner * 0, column * STEP + up)
    return rows


@triton.jit
def times(rows, stride):
    """Offsets of `rows_of` that lie `stride` apart."""
    return rows[0] * stride, rows[1] * stride


@triton.jit
def in_word_order(values, STEPS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """(STEPS, ROWS, DEPTH) in order of k to the order in which `unpack_words` gives weights.

    Words go (lane of four, register), nibbles (half, upper bit, lower bit): a warp's four lanes
    along the depth of a product each take whole words.
    """
    split = tl.reshape(values, (STEPS, ROWS, 4, DEPTH // 32, 2, 2, 2))
    return tl.reshape(tl.permute(split, (0, 1, 5, 3, 2, 6, 4)), (STEPS, ROWS, DEPTH))


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
def rows_in_word_order(a, STEPS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """(STEPS, DEPTH / 32, ROWS, 32) read at `word_order_offsets` to (STEPS, DEPTH, ROWS)."""
    lanes = tl.reshape(a, (STEPS, DEPTH // 32, ROWS, 4, 8))
    rows = tl.reshape(tl.permute(lanes, (0, 2, 3, 1, 4)), (STEPS, ROWS, DEPTH))
    return tl.permute(in_word_order(rows, STEPS, ROWS, DEPTH), (0, 2, 1))


# Weights in bf16, and e2m1 values in fp16, come as their bits read, subnormals included: e2m1
# times 2^-126 or 2^-14, counts times 2^-133. Products of such weights in bf16 would leave float32's
# range, so that the rows they meet are `boosted` first, by two to these powers.
@triton.constexpr_function
def boost_of(e2m1: bool, odd: int) -> float:
    """The factor of a value of x in bf16, for an even or an odd k."""
    return 2.0**48 if e2m1 else 2.0 ** (64 - 4 * odd)


@triton.constexpr_function
def counts_from_zero(e2m1: bool, dtype: tl.dtype) -> bool:
    """Whether unpacked integers are q, rather than q - 8."""
    return not e2m1 and dtype == tl.bfloat16


@triton.constexpr_function
def lacking(e2m1: bool, dtype: tl.dtype) -> int:
    """log2 of the factor that products of unpacked weights and `boosted` rows lack."""
    if dtype == tl.bfloat16:
        return 126 - 48 if e2m1 else 133 - 64
    return 14 if e2m1 else 0


@triton.jit
def boosted(x, E2M1: tl.constexpr, DEPTH: tl.constexpr):
    """x (STEPS, DEPTH, ROWS) in word order as products with unpacked weights need it.

    Exact below 2^63. Counts of odd k come 16 times too large (see _counts).
    """
    if x.dtype == tl.bfloat16:
        if E2M1:
            x = x * tl.full((1, 1, 1), boost_of(E2M1, 0), tl.bfloat16)
        else:
            even = tl.full((1, DEPTH // 4, 1, 1), boost_of(E2M1, 0), tl.bfloat16)
            odd = tl.full((1, DEPTH // 4, 1, 1), boost_of(E2M1, 1), tl.bfloat16)
            # Constants alone, so that the compiler can load x as products take it.
            boost = tl.permute(tl.join(even, odd), (0, 1, 4, 2, 3))
            four = tl.reshape(x, (x.shape[0], DEPTH // 4, 2, 2, x.shape[2]))
            x = tl.reshape(four * boost, x.shape)
    return x


@triton.jit
def _plain(words, J: tl.constexpr, E2M1: tl.constexpr, dtype: tl.constexpr):
    """Nibble J of each word as a value, where there is no assembler."""
    code = (words >> (4 * J)) & 15
    if E2M1:
        low = code & 7
        quarters = tl.where(low < 4, 2 * low, (2 + (low & 1)) << (low >> 1))
        unit: tl.constexpr = 2.0**-128 if dtype == tl.bfloat16 else 2.0**-16
        result = tl.where(code < 8, quarters, -quarters).to(tl.float32) * unit
    elif dtype == tl.bfloat16:
        unit: tl.constexpr = 2.0 ** (4 * (J % 2) - 133)
        result = code.to(tl.float32) * unit
    else:
        result = (code - 8).to(tl.float32)
    return result.to(dtype)


@triton.jit
def _halves(pair, dtype: tl.constexpr):
    """The values in the lower and the upper half of an int32. The compiler sees that they were
    one, and makes them one again where a product takes them so."""
    low = pair.to(tl.int16).to(dtype, bitcast=True)
    return low, (pair >> 16).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def nibbles(words, E2M1: tl.constexpr, dtype: tl.constexpr):
    """int32 (...) to (..., 2, 2, 2) by the bits of k, the highest first: q or q - 8
    (`counts_from_zero`), or e2m1 values.

    Exact but for a factor (`lacking`).
    """
    if _ASSEMBLE:
        if dtype == tl.bfloat16:
            code: tl.constexpr = _E2M1_BF16 if E2M1 else _INTEGER_BF16
        else:
            code: tl.constexpr = _E2M1_FP16 if E2M1 else _INTEGER_FP16
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            code, "=&r,=&r,=&r,=&r,r", [words], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )
        v0, v4 = _halves(p0, dtype)
        v1, v5 = _halves(p1, dtype)
        v2, v6 = _halves(p2, dtype)
        v3, v7 = _halves(p3, dtype)
    else:
        v0 = _plain(words, 0, E2M1, dtype)
        v1 = _plain(words, 1, E2M1, dtype)
        v2 = _plain(words, 2, E2M1, dtype)
        v3 = _plain(words, 3, E2M1, dtype)
        v4 = _plain(words, 4, E2M1, dtype)
        v5 = _plain(words, 5, E2M1, dtype)
        v6 = _plain(words, 6, E2M1, dtype)
        v7 = _plain(words, 7, E2M1, dtype)
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.join(even, odd)


@triton.jit
def unpack_words(
    words, E2M1: tl.constexpr, dtype: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """int32 (STEPS, ROWS, DEPTH / 8) to `nibbles` in the order of `in_word_order`."""
    return in_word_order(nibbles(words, E2M1, dtype), STEPS, ROWS, DEPTH)


@triton.jit
def load_scale(ptrs, inside, E2M1: tl.constexpr, LACK: tl.constexpr):
    """float32 scales times 2^LACK, 0 where `inside` (None for everywhere) is false; of e2m1 from
    E8M0 exponents. Infinite where that overflows, which for bf16 is from 2^50 on."""
    scale = tl.load(ptrs)
    if E2M1:
        # A mask of the load, or values that stay bytes and are taken two at once, cost more.
        most = 255 if inside is None else tl.where(inside, 255, 0)
        result = scale_values(opaque(scale.to(tl.int32)), E2M1, LACK, most)
    else:
        result = scale_values(_widened(scale), E2M1, LACK)
        if inside is not None:
            result = tl.where(inside, result, 0.0)
    return result


@triton.jit
def _widened(scale):
    """scale; of bf16 as float32 at once, so that a loop does not carry 16 bits from step to step,
    two to a register."""
    if _ASSEMBLE and scale.dtype == tl.bfloat16:
        scale = tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.u32.u16 t, $1; shl.b32 $0, t, 16; }",
            "=r,h", [scale], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return scale


@triton.jit
def scale_values(scale, E2M1: tl.constexpr, LACK: tl.constexpr, most=255):
    """As load_scale, of what is loaded; most: of an exponent, 255 or 0 for nothing."""
    if E2M1:
        exponent = tl.minimum(scale.to(tl.int32) + LACK, most)
        result = (exponent << 23).to(tl.float32, bitcast=True)
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
    words, x, zero, E2M1: tl.constexpr, HAS_ZERO: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """float32 (STEPS, ROWS, M): weights less their zero points times x, without scales.

    words: int32 (STEPS, ROWS, DEPTH / 8); x: (STEPS, DEPTH, M) in word order, `boosted`; zero: as
    load_zero gives it, (STEPS, ROWS, 1).
    """
    start = tl.zeros((STEPS, ROWS, M), tl.float32)
    if HAS_ZERO or counts_from_zero(E2M1, x.dtype):
        # Sums of x along the depth, from a product with ones: the same in each of its rows.
        one: tl.constexpr = 1 if counts_from_zero(E2M1, x.dtype) else 9
        ones = tl.full((STEPS, 16, DEPTH // 8), 0x11111111 * one - (1 << 32) * (one // 8), tl.int32)
        sums = tl.dot(unpack_words(ones, E2M1, x.dtype, STEPS, 16, DEPTH), x)
        # By reshape: `[:, None]` would send them through shared memory.
        sums = tl.reshape(sums, (STEPS, 1, 16, M))
        if HAS_ZERO:
            zeros = tl.reshape(zero, (STEPS, ROWS // 16, 16, 1)) * -sums
        else:
            zeros = tl.broadcast_to(sums * -8.0, (STEPS, ROWS // 16, 16, M))
        start = tl.reshape(zeros, (STEPS, ROWS, M))
    return tl.dot(unpack_words(words, E2M1, x.dtype, STEPS, ROWS, DEPTH), x, start)
