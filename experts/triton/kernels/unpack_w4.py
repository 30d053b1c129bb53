"""Device functions that unpack int32 words, each with eight 4-bit weights of one row.

WEIGHT_FORMAT is the format of a word:

    "integer"        eight unsigned 4-bit integers, one per nibble, the low nibble first
    "e2m1"           eight e2m1 values (4-bit floating point of mxfp4), one per nibble, low first
    "e2m1_repacked"  eight e2m1 values whose bits are reordered, so that fewer instructions unpack
                     them (`modular_kernel.quant.repacking`)
    "nvfp4"          like "e2m1", but with e4m3 scales instead of E8M0

Two weights are unpacked at a time, to the two 16-bit halves of a 32-bit register. The unpacked
weights are bf16 or fp16. Some of them are too small by a power of two (`missing_factor_log2`),
because moving bits is faster than converting values.
"""

from collections.abc import Callable

import triton
import triton.language as tl


# The functions below return PTX for pair i. W is the word ($4), or the word shifted right by 8. A
# mask selects two nibbles: 0x000F000F selects the lowest nibble of each half, and 0x00F000F0 the
# next nibble of each half.
def _make_ptx(pair: Callable[[int], str]) -> tl.constexpr:
    """Return PTX that unpacks the word in register $4 to two 16-bit values in each of $0 to $3.

    pair: a function of i = 0 or 1. It returns PTX that moves nibbles i and i + 4 of W to the two
        halves of T.
    """
    code = "shr.b32 w, $4, 8; "
    for j in range(4):
        code += pair(j % 2).replace("W", "w" if j > 1 else "$4").replace("T", f"${j}")
    return tl.constexpr("{ .reg .b32 w, u, v; " + code + "}")


def _make_integers_bf16_ptx(i: int) -> str:
    """Return PTX that puts integers q into the low bits of two bf16 values.

    A bf16 value whose bit pattern is an integer p below 2^8 equals p * 2^-133. The results are
    therefore q * 2^-133 for i = 0 and 16 * q * 2^-133 for i = 1.
    """
    return f"and.b32 T, W, {0x000F000F << 4 * i:#010x}; "


def _make_integers_fp16_ptx(i: int) -> str:
    """Return PTX that computes q - 8 in fp16 for two integers q.

    The bits 0x6400 | q represent 1024 + q in fp16, and 0x6400 | 16 q represent 1024 + 16 q.
    """
    factor, offset = ((0x3C003C00, 0xE408E408), (0x2C002C00, 0xD480D480))[i]
    return (
        f"lop3.b32 T, W, {0x000F000F << 4 * i:#010x}, 0x64006400, 0xEA; "
        f"mov.b32 u, {factor:#010x}; mov.b32 v, {offset:#010x}; fma.rn.f16x2 T, T, u, v; "
    )


def _make_e2m1_bf16_ptx(i: int) -> str:
    """Return PTX that moves two e2m1 codes to the sign bit and the field boundary of bf16 values.

    An e2m1 code has a sign bit, two exponent bits and a mantissa bit. A multiplication makes two
    shifted copies of the code. The first one has the sign bit in place, and the second one has the
    exponent and mantissa bits in place.
    """
    copies = (1 << 12 - 4 * i) + (1 << 6 - 4 * i)
    return (
        f"and.b32 T, W, {0x000F000F << 4 * i:#010x}; "
        f"mul.lo.u32 T, T, {copies}; and.b32 T, T, 0x81C081C0; "
    )


def _make_e2m1_fp16_ptx(i: int) -> str:
    """Like `_make_e2m1_bf16_ptx`, for fp16.

    The PTX uses shifts, because the two copies of a code would overlap.
    """
    exponent_and_mantissa = f"shl.b32 u, W, {9 - 4 * i}; "
    return (
        f"shl.b32 T, W, {12 - 4 * i}; {exponent_and_mantissa}"
        "and.b32 u, u, 0x0E000E00; lop3.b32 T, T, 0x80008000, u, 0xEA; "
    )


_INTEGER_BF16: tl.constexpr = _make_ptx(_make_integers_bf16_ptx)
_INTEGER_FP16: tl.constexpr = _make_ptx(_make_integers_fp16_ptx)
_E2M1_BF16: tl.constexpr = _make_ptx(_make_e2m1_bf16_ptx)
_E2M1_FP16: tl.constexpr = _make_ptx(_make_e2m1_fp16_ptx)
# The interpreter does not support inline assembly.
USE_INLINE_ASM: tl.constexpr = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def hide_from_optimizer(value):
    """Return `value`, an int32 or int64, so that the compiler does not know how it was computed.

    The compiler can then not move the computation or merge it with others. The function emits no
    instruction.
    """
    if USE_INLINE_ASM and value.dtype.primitive_bitwidth == 64:
        value = tl.inline_asm_elementwise(
            "mov.b64 $0, $1;", "=l,l", [value], dtype=tl.int64, is_pure=True, pack=1
        )
    elif USE_INLINE_ASM:
        value = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=True, pack=1
        )
    return value


@triton.constexpr_function
def is_e2m1(word_format: str) -> bool:
    """Return whether words hold e2m1 values with E8M0 scales (mxfp4)."""
    return word_format in ("e2m1", "e2m1_repacked")


@triton.constexpr_function
def holds_e2m1(word_format: str) -> bool:
    """Return whether words hold e2m1 values, with any kind of scales."""
    return is_e2m1(word_format) or word_format == "nvfp4"


# Unpacked weights are bit patterns interpreted as floats, which may be subnormal, so they are too
# small by a power of two: 2^-126 for e2m1 in bf16, 2^-14 for e2m1 in fp16, and 2^-133 for integers
# in bf16. In bf16, products with such weights would underflow float32, so x is first multiplied by
# `prescale_factor` (see `prescale`).
@triton.constexpr_function
def prescale_factor(word_format: str, odd: int) -> float:
    """Return the factor for bf16 activations at even k (odd = 0) or at odd k (odd = 1)."""
    return 2.0**48 if is_e2m1(word_format) else 2.0 ** (64 - 4 * odd)


@triton.constexpr_function
def unpacks_without_offset(word_format: str, dtype: tl.dtype) -> bool:
    """Return whether unpacked integers are the codes q. Otherwise, they are q - 8.

    dtype: the dtype of the unpacked weights.
    """
    return not holds_e2m1(word_format) and dtype == tl.bfloat16


@triton.constexpr_function
def missing_factor_log2(word_format: str, dtype: tl.dtype) -> int:
    """Return log2 of the factor by which results of the MMA are too small.

    The operands of the MMA are unpacked weights, and activations that were multiplied by
    `prescale_factor`. The result is 0 for NVFP4, because its weights are multiplied by the factor
    before the MMA.

    dtype: the dtype of the activations.
    """
    if word_format == "nvfp4":
        return 0
    if dtype == tl.bfloat16:
        return 126 - 48 if is_e2m1(word_format) else 133 - 64
    return 14 if is_e2m1(word_format) else 0


@triton.jit
def e8m0_values(exponents):
    """Convert E8M0 scales (8-bit exponents) to float32: 2^(exponent - 127), NaN for 255."""
    return tl.where(exponents == 255, float("nan"), tl.exp2(exponents.to(tl.float32) - 127.0))


@triton.jit
def _unpack_nibble(words, J: tl.constexpr, WEIGHT_FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Return nibble J of each word, as the inline assembly would unpack it.

    Used in the interpreter, which does not support inline assembly.
    """
    code = (words >> (4 * J)) & 15
    if holds_e2m1(WEIGHT_FORMAT):
        magnitude = code & 7
        quarters = tl.where(magnitude < 4, 2 * magnitude, (2 + (magnitude & 1)) << (magnitude >> 1))
        unit: tl.constexpr = 2.0**-128 if dtype == tl.bfloat16 else 2.0**-16
        result = tl.where(code < 8, quarters, -quarters).to(tl.float32) * unit
    elif dtype == tl.bfloat16:
        unit: tl.constexpr = 2.0 ** (4 * (J % 2) - 133)
        result = code.to(tl.float32) * unit
    else:
        result = (code - 8).to(tl.float32)
    return result.to(dtype)


@triton.jit
def _split_halves(pair, dtype: tl.constexpr):
    """Return the values in the lower and in the upper 16 bits of an int32, as `dtype`.

    If an MMA takes both values in one register, the compiler emits no instruction.
    """
    low = pair.to(tl.int16).to(dtype, bitcast=True)
    return low, (pair >> 16).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def _unpack_repacked(words, dtype: tl.constexpr):
    """Unpack words in the "e2m1_repacked" format to four int32 with two 16-bit values each.

    The halves of int32 i are the values of k = 2i and 2i + 1. As in
    `modular_kernel.quant.repacking.unpack_words`, five shifts and four masks move the bits of the
    values to the fields of bf16.
    """
    w = words.to(tl.uint32, bitcast=True)
    p0 = w & 0x81C081C0
    p1 = (w << 3) & 0x81C081C0
    p2 = ((w << 6) ^ (w << 1)) & 0x81C081C0
    p3 = ((w >> 3) ^ (w << 2)) & 0x81C081C0
    if dtype == tl.float16:
        p0 = _move_to_fp16_fields(p0)
        p1 = _move_to_fp16_fields(p1)
        p2 = _move_to_fp16_fields(p2)
        p3 = _move_to_fp16_fields(p3)
    return (
        p0.to(tl.int32, bitcast=True),
        p1.to(tl.int32, bitcast=True),
        p2.to(tl.int32, bitcast=True),
        p3.to(tl.int32, bitcast=True),
    )


@triton.jit
def _move_to_fp16_fields(pair):
    """Move two e2m1 values from the fields of bf16 to the fields of fp16.

    The exponent field of fp16 ends three bits higher.
    """
    return ((pair & 0x01C001C0) << 3) | (pair & 0x80008000)


@triton.jit
def unpack_int4(words, WEIGHT_FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Unpack int32 words (...) to weights (..., 2, 2, 2). The new axes are the three bits of k % 8.

    The highest bit comes first. The weights are bf16 or fp16: e2m1 values, or the integers q or q -
    8 (`unpacks_without_offset`). They are exact except for a factor that is a power of two
    (`missing_factor_log2`).
    """
    if WEIGHT_FORMAT == "e2m1_repacked":
        p0, p1, p2, p3 = _unpack_repacked(words, dtype)
        v0, v1 = _split_halves(p0, dtype)
        v2, v3 = _split_halves(p1, dtype)
        v4, v5 = _split_halves(p2, dtype)
        v6, v7 = _split_halves(p3, dtype)
    elif USE_INLINE_ASM:
        if dtype == tl.bfloat16:
            code: tl.constexpr = _E2M1_BF16 if holds_e2m1(WEIGHT_FORMAT) else _INTEGER_BF16
        else:
            code: tl.constexpr = _E2M1_FP16 if holds_e2m1(WEIGHT_FORMAT) else _INTEGER_FP16
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            code, "=&r,=&r,=&r,=&r,r", [words], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )
        v0, v4 = _split_halves(p0, dtype)
        v1, v5 = _split_halves(p1, dtype)
        v2, v6 = _split_halves(p2, dtype)
        v3, v7 = _split_halves(p3, dtype)
    else:
        v0 = _unpack_nibble(words, 0, WEIGHT_FORMAT, dtype)
        v1 = _unpack_nibble(words, 1, WEIGHT_FORMAT, dtype)
        v2 = _unpack_nibble(words, 2, WEIGHT_FORMAT, dtype)
        v3 = _unpack_nibble(words, 3, WEIGHT_FORMAT, dtype)
        v4 = _unpack_nibble(words, 4, WEIGHT_FORMAT, dtype)
        v5 = _unpack_nibble(words, 5, WEIGHT_FORMAT, dtype)
        v6 = _unpack_nibble(words, 6, WEIGHT_FORMAT, dtype)
        v7 = _unpack_nibble(words, 7, WEIGHT_FORMAT, dtype)
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.join(even, odd)
