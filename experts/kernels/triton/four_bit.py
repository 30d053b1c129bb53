"""Device functions: int32 words of eight 4-bit weights to operands of a product.

Word c of a row holds the weights k = 8c to 8c + 7, the low nibble first. A mask takes nibbles j and
j + 4 out at once as the two halves of a register, so the weights of a step are multiplied in an
order of their own; the rows they meet are read in the same one (`in_word_order`).
"""

import triton
import triton.language as tl


def _shift(to: str, j: int, bit: int) -> str:
    """An instruction: word $8 into register `to`, the lowest bit of its nibble j going to `bit`."""
    left = bit - 4 * j
    return f"{'shl' if left > 0 else 'shr'}.b32 {to}, $8, {abs(left)}; "


def _integers(kind: str, offset: int, less: int) -> tl.constexpr:
    """q - 8 for the nibbles q of word $8. offset | q reads as a number more by `-less`.

    Sums by fma, the one operation on pairs of bf16 that sm_80 has.
    """
    one = {"bf16x2": 0x3F803F80, "f16x2": 0x3C003C00}[kind]
    code = "".join(
        _shift("t", j, 0)
        + f"lop3.b32 t, t, 0x000F000F, {offset:#010x}, 0xEA; "
        + f"mov.b32 u, {one:#010x}; mov.b32 v, {less:#010x}; fma.rn.{kind} t, t, u, v; "
        + f"mov.b32 {{${j}, ${j + 4}}}, t; "
        for j in range(4)
    )
    return tl.constexpr("{ .reg .b32 t, u, v; " + code + "}")


def _e2m1(low: int) -> tl.constexpr:
    """e2m1 codes (sign, two exponent bits, one mantissa bit) at the top of a wider format's fields,
    whose mantissa's uppermost bit is bit `low`."""
    mask = (7 << low) * 0x00010001
    code = "".join(
        _shift("t", j, 12)
        + _shift("u", j, low)
        + f"and.b32 u, u, {mask:#010x}; lop3.b32 t, t, 0x80008000, u, 0xEA; "
        + f"mov.b32 {{${j}, ${j + 4}}}, t; "
        for j in range(4)
    )
    return tl.constexpr("{ .reg .b32 t, u; " + code + "}")


# 0x4300 | q is 128 + q in bf16, 0x6400 | q is 1024 + q in fp16.
_INTEGER_BF16: tl.constexpr = _integers("bf16x2", 0x43004300, 0xC308C308)
_INTEGER_FP16: tl.constexpr = _integers("f16x2", 0x64006400, 0xE408E408)
_E2M1_BF16: tl.constexpr = _e2m1(6)
_E2M1_FP16: tl.constexpr = _e2m1(9)
# The interpreter, for which kernels are decorated or not, knows no assembler.
_ASSEMBLE: tl.constexpr = tl.constexpr(not triton.knobs.runtime.interpret)
_OUTPUTS: tl.constexpr = tl.constexpr("=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r")


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
def rows_in_word_order(a, STEPS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """(STEPS, DEPTH / 32, ROWS, 32) read at `word_order_offsets` to (STEPS, DEPTH, ROWS)."""
    lanes = tl.reshape(a, (STEPS, DEPTH // 32, ROWS, 4, 8))
    rows = tl.reshape(tl.permute(lanes, (0, 2, 3, 1, 4)), (STEPS, ROWS, DEPTH))
    return tl.permute(in_word_order(rows, STEPS, ROWS, DEPTH), (0, 2, 1))


# e2m1 values come as they read at the top of a wider format's fields, subnormals included: times
# 2^-126 in bf16, 2^-14 in fp16. Products of such weights in bf16 would leave float32's range, so
# that the rows they meet are `boosted` first. These are log2 of what the products then lack.
E2M1_LACK_BF16: tl.constexpr = tl.constexpr(126 - 48)
E2M1_LACK_FP16: tl.constexpr = tl.constexpr(14)


@triton.jit
def boosted(x):
    """x as products with unpacked e2m1 weights need it; exact below 2^79."""
    if x.dtype == tl.bfloat16:
        x = x * tl.full((1, 1, 1), 2.0**48, tl.bfloat16)
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
    else:
        result = (code - 8).to(tl.float32)
    return result.to(dtype)


@triton.jit
def unpack_words(
    words, E2M1: tl.constexpr, dtype: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """int32 (STEPS, ROWS, DEPTH / 8) to q - 8, or to e2m1 values that lack a factor, all exact.

    In the order of `in_word_order`.
    """
    if _ASSEMBLE and dtype == tl.bfloat16:
        v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
            _E2M1_BF16 if E2M1 else _INTEGER_BF16,
            _OUTPUTS, [words], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
    elif _ASSEMBLE:
        v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
            _E2M1_FP16 if E2M1 else _INTEGER_FP16,
            _OUTPUTS, [words], dtype=(tl.float16,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
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
    return in_word_order(tl.join(even, odd), STEPS, ROWS, DEPTH)
