"""Device functions: int32 words of eight 4-bit weights to values.

FORMAT says what a word holds: an "integer" or "e2m1" code a nibble, the low one first, or codes of
"e2m1_repacked", whose bits `modular_kernel.quant.repacking` has reordered. "nvfp4" is "e2m1" but
for its scales.
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
ASSEMBLE: tl.constexpr = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def opaque(value):
    """value, an int32 or int64, and nothing else of it known to the compiler; no instruction."""
    if ASSEMBLE and value.dtype.primitive_bitwidth == 64:
        value = tl.inline_asm_elementwise(
            "mov.b64 $0, $1;", "=l,l", [value], dtype=tl.int64, is_pure=True, pack=1
        )
    elif ASSEMBLE:
        value = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=True, pack=1
        )
    return value


@triton.constexpr_function
def is_e2m1(form: str) -> bool:
    """Whether words of this format hold e2m1 values, and their scales are E8M0 exponents."""
    return form in ("e2m1", "e2m1_repacked")


@triton.constexpr_function
def holds_e2m1(form: str) -> bool:
    """Whether words of this format hold e2m1 values, whatever their scales are."""
    return is_e2m1(form) or form == "nvfp4"


# Weights in bf16, and e2m1 values in fp16, come as their bits read, subnormals included: e2m1
# times 2^-126 or 2^-14, counts times 2^-133. Products of such weights in bf16 would leave float32's
# range, so that the rows they meet are `boosted` first, by two to these powers.
@triton.constexpr_function
def boost_of(form: str, odd: int) -> float:
    """Return the factor of a value of x in bf16, for an even or an odd k."""
    return 2.0**48 if is_e2m1(form) else 2.0 ** (64 - 4 * odd)


@triton.constexpr_function
def counts_from_zero(form: str, dtype: tl.dtype) -> bool:
    """Whether unpacked integers are q, rather than q - 8."""
    return not holds_e2m1(form) and dtype == tl.bfloat16


@triton.constexpr_function
def lacking(form: str, dtype: tl.dtype) -> int:
    """log2 of the factor that products of unpacked weights and `boosted` rows lack. Those of nvfp4
    lack none: a weight has its factor before it meets its scale."""
    if form == "nvfp4":
        return 0
    if dtype == tl.bfloat16:
        return 126 - 48 if is_e2m1(form) else 133 - 64
    return 14 if is_e2m1(form) else 0


@triton.jit
def e8m0_values(exponents):
    """float32 2^(exponent - 127) of bytes, NaN of 255."""
    return tl.where(exponents == 255, float("nan"), tl.exp2(exponents.to(tl.float32) - 127.0))


@triton.jit
def _plain(words, J: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Nibble J of each word as a value, where there is no assembler."""
    code = (words >> (4 * J)) & 15
    if holds_e2m1(FORMAT):
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
    """Return the values in the lower and the upper half of an int32. The compiler sees that they
    were one, and makes them one again where a product takes them so."""
    low = pair.to(tl.int16).to(dtype, bitcast=True)
    return low, (pair >> 16).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def _repacked(words, dtype: tl.constexpr):
    """Values 2i and 2i + 1 of repacked words as the halves of int32 i: five shifts and four masks,
    as `modular_kernel.quant.repacking.unpack_words` does it, which leave them in bf16's fields."""
    w = words.to(tl.uint32, bitcast=True)
    p0 = w & 0x81C081C0
    p1 = (w << 3) & 0x81C081C0
    p2 = ((w << 6) ^ (w << 1)) & 0x81C081C0
    p3 = ((w >> 3) ^ (w << 2)) & 0x81C081C0
    if dtype == tl.float16:
        p0 = _fp16_fields(p0)
        p1 = _fp16_fields(p1)
        p2 = _fp16_fields(p2)
        p3 = _fp16_fields(p3)
    return (
        p0.to(tl.int32, bitcast=True),
        p1.to(tl.int32, bitcast=True),
        p2.to(tl.int32, bitcast=True),
        p3.to(tl.int32, bitcast=True),
    )


@triton.jit
def _fp16_fields(pair):
    """Two e2m1 values in bf16's fields to those of fp16, whose exponent ends three bits higher."""
    return ((pair & 0x01C001C0) << 3) | (pair & 0x80008000)


@triton.jit
def unpack_int4(words, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """int32 (...) to (..., 2, 2, 2) by the bits of k, the highest first: q or q - 8
    (`counts_from_zero`), or e2m1 values, in bf16 or fp16.

    Exact but for a factor (`lacking`).
    """
    if FORMAT == "e2m1_repacked":
        p0, p1, p2, p3 = _repacked(words, dtype)
        v0, v1 = _halves(p0, dtype)
        v2, v3 = _halves(p1, dtype)
        v4, v5 = _halves(p2, dtype)
        v6, v7 = _halves(p3, dtype)
    elif ASSEMBLE:
        if dtype == tl.bfloat16:
            code: tl.constexpr = _E2M1_BF16 if holds_e2m1(FORMAT) else _INTEGER_BF16
        else:
            code: tl.constexpr = _E2M1_FP16 if holds_e2m1(FORMAT) else _INTEGER_FP16
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            code, "=&r,=&r,=&r,=&r,r", [words], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )
        v0, v4 = _halves(p0, dtype)
        v1, v5 = _halves(p1, dtype)
        v2, v6 = _halves(p2, dtype)
        v3, v7 = _halves(p3, dtype)
    else:
        v0 = _plain(words, 0, FORMAT, dtype)
        v1 = _plain(words, 1, FORMAT, dtype)
        v2 = _plain(words, 2, FORMAT, dtype)
        v3 = _plain(words, 3, FORMAT, dtype)
        v4 = _plain(words, 4, FORMAT, dtype)
        v5 = _plain(words, 5, FORMAT, dtype)
        v6 = _plain(words, 6, FORMAT, dtype)
        v7 = _plain(words, 7, FORMAT, dtype)
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.join(even, odd)
