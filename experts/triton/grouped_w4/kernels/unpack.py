"""Device functions that unpack 4-bit weights to bf16, in the register layout of wgmma operands.

A word is an int32 with eight 4-bit codes. A block has 64 weight rows and 64 columns along K. In the
layout of wgmma, four threads share weight rows r and r + 8 and their scales. Each thread has four
words of a block, two words per row: one for columns 0 to 31 and one for columns 32 to 63.
PACKED_FORMAT is the str of a `layout.PackedFormat`, which describes how words and scales are
encoded.

The PTX code in this module uses these registers: $0 to $15 receive pairs of bf16 values, $16 to $19
hold the words, and $20 and the following registers hold the scales.
"""

from itertools import product

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK = gl.constexpr(64)  # weight rows per MMA, and K per step
_WORDS = 4  # words per thread and block
_E2M1_MASK = "0x81C081C0"
# PTX that moves pair i of word W to the bf16 fields of t; see `modular_kernel.quant.repacking`.
_E2M1_PAIRS = (
    f"and.b32 t, W, {_E2M1_MASK}; ",
    f"shl.b32 t, W, 3; and.b32 t, t, {_E2M1_MASK}; ",
    f"shl.b32 t, W, 6; shl.b32 u, W, 1; lop3.b32 t, t, u, {_E2M1_MASK}, 0x28; ",
    f"shr.u32 t, W, 3; shl.b32 u, W, 2; lop3.b32 t, t, u, {_E2M1_MASK}, 0x28; ",
)
# A bf16 with bit pattern n < 2^8 has the value n * 2^-133, so masking an integer into the low bits
# of a bf16 converts it. This PTX moves pair i of integers q from word W, or from w = W >> 8, to the
# bf16 halves of t. The halves are then q * 2^-133 (even i) or 16 * q * 2^-133 (odd i).
_INTEGER_PAIRS = tuple(
    f"and.b32 t, {w}, {mask}; " for w in "Ww" for mask in ("0x000F000F", "0x00F000F0")
)
_MINUS_8 = "0x80088008"  # -8 * 2^-133 in both halves
_ONE_SIXTEENTH = "0x3D803D80"  # 2^-4 in both halves


def _make_e2m1_ptx() -> str:
    """Return PTX for mxfp4 weights.

    Byte j of $20 is the bf16 exponent field of the scale of word j.
    """
    code = ""
    for j in range(_WORDS):
        code += f"prmt.b32 s, $20, 0, 0x4{j}4{j}; shl.b32 s, s, 7; "
        for i, pair in enumerate(_E2M1_PAIRS):
            code += pair.replace("W", f"${16 + j}") + f"mul.bf16x2 ${4 * j + i}, t, s; "
    return code


def _make_nvfp4_ptx() -> str:
    """Return PTX for NVFP4 weights.

    $20 and $21 hold the scales of the two rows, one byte per 16 columns. Bits 7 to 3 of a byte are
    the bf16 exponent field minus 224. Bits 2 to 0 are the upper three bits of the mantissa.
    """
    code = ""
    for j in range(_WORDS):
        for i, pair in enumerate(_E2M1_PAIRS):
            if i % 2 == 0:
                byte = 2 * (j % 2) + i // 2
                code += f"prmt.b32 s, ${20 + j // 2}, 0, 0x4{byte}4{byte}; "
                code += "mad.lo.u32 s, s, 16, 0x70007000; "
            code += pair.replace("W", f"${16 + j}") + f"mul.bf16x2 ${4 * j + i}, t, s; "
    return code


def _make_scale_ptx(word: str, scale: str, zero: bool) -> str:
    """Return PTX that decodes a scale word of integer weights into registers.

    The code writes these registers:

        f  the scale in float32
        h  f rounded to bf16 (float16 and bfloat16 scales)
        l  f - h (float16 scales), or h / 16 (bfloat16 scales without zero points)
        m  -zero * 2^-133 (scales with zero points)
        k  m * h (bfloat16 scales without zero points)

    Without zero points, the caller has set m to -8 * 2^-133.

    word: the register of the scale word.
    scale: the dtype of the original scales.
    zero: whether there are zero points.
    """
    code = f"and.b32 f, {word}, 0xFFFFFFF0; " if zero else f"mov.b32 f, {word}; "
    if scale != "float32":
        code += "cvt.rn.bf16x2.f32 h, f, f; "
    if scale == "float16":
        code += "and.b32 u, h, 0xFFFF0000; sub.f32 l, f, u; cvt.rn.bf16x2.f32 l, l, l; "
    if zero:
        code += f"lop3.b32 m, {word}, 15, 0x8000, 0xEA; prmt.b32 m, m, 0, 0x1010; "
    elif scale == "bfloat16":
        code += "mul.bf16x2 l, h, e; mul.bf16x2 k, h, m; "
    return code


# dtype of the scale -> PTX that multiplies t = q - zero by the scale with one rounding and writes
# register TO. A float16 scale is the sum of the bf16 values h and l. t * l is exact, because l has
# few bits.
_MULTIPLY_BY_SCALE = {
    "bfloat16": "mul.bf16x2 TO, t, h; ",
    "float16": "mul.bf16x2 u, t, l; fma.rn.bf16x2 TO, t, h, u; ",
    "float32": "shl.b32 u, t, 16; and.b32 t, t, 0xFFFF0000; mul.f32 u, u, f; mul.f32 t, t, f; "
    "cvt.rn.bf16x2.f32 TO, t, u; ",
}


def _make_integer_ptx(groups: int, scale: str, zero: bool) -> str:
    """Return PTX that computes (q - zero) * scale for integers q.

    Scale words are float32, with one word per row (groups = 1), or one word per row and 32 columns
    (groups = 2). With zero points, the last four bits of a scale word are the zero point. For a
    bf16 scale without zero points, 8 * scale is exact, so (q - 8) * scale is a single FMA.

    groups: scale words per row and block.
    scale: the dtype of the original scales.
    zero: whether there are zero points.
    """
    code = f"mov.b32 m, {_MINUS_8}; mov.b32 e, {_ONE_SIXTEENTH}; "
    for j in range(_WORDS):
        if j % 2 == 0 or groups == 2:
            code += _make_scale_ptx(f"${20 + (j if groups == 2 else j // 2)}", scale, zero)
        code += f"shr.u32 w, ${16 + j}, 8; "
        for i, pair in enumerate(_INTEGER_PAIRS):
            register = f"${4 * j + i}"
            code += pair.replace("W", f"${16 + j}")
            if scale == "bfloat16" and not zero:
                code += f"fma.rn.bf16x2 {register}, t, {'l' if i % 2 else 'h'}, k; "
            else:
                subtract = "fma.rn.bf16x2 t, t, e, m; " if i % 2 else "add.bf16x2 t, t, m; "
                code += subtract + _MULTIPLY_BY_SCALE[scale].replace("TO", register)
    return code


def _build_ptx() -> dict[str, str]:
    """Return the PTX of each PACKED_FORMAT."""
    code_by_format = {"e2m1": _make_e2m1_ptx(), "nvfp4": _make_nvfp4_ptx()}
    for groups, scale, zero in product((1, 2), _MULTIPLY_BY_SCALE, (False, True)):
        packed_format = f"integer {groups} {scale}{' zero' * zero}"
        code_by_format[packed_format] = _make_integer_ptx(groups, scale, zero)
    registers = "{ .reg .b32 s, t, u, w, f, h, l, k, m, e; "
    return {packed_format: registers + code + "}" for packed_format, code in code_by_format.items()}


_PTX_BY_FORMAT = gl.constexpr(_build_ptx())


@gluon.constexpr_function
def _get_ptx(packed_format: str) -> str:
    return _PTX_BY_FORMAT.value[packed_format]


@gluon.constexpr_function
def _count_scale_words(packed_format: str) -> int:
    """Return the number of scale words per block that the four threads of a row share."""
    return {"e2m1": 1, "nvfp4": 2}.get(
        packed_format, 4 if packed_format.startswith("integer 2") else 2
    )


@gluon.constexpr_function
def _make_constraints(scales: int) -> str:
    return ",".join(["=&r"] * 16 + ["r"] * (4 + scales))


@gluon.jit
def _join4(a, b, c, d):
    """Join four tensors, in order, to one of shape (..., 2, 2)."""
    return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def _load_scale_quads(smem):
    """Load words (8, 16) from shared memory as four tensors (32, 1), whose rows four lanes share.

    Tensor i has word i of every group of four words.
    """
    LOAD_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 0], [0, 0], [0, 4], [0, 8], [1, 0]], [[2, 0], [4, 0]], [], [8, 16]
    )
    QUAD_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    even, odd = smem.load(LOAD_LAYOUT).reshape((32, 2, 2)).split()
    s0, s2 = even.split()
    s1, s3 = odd.split()
    s0 = gl.convert_layout(s0, gl.SliceLayout(1, QUAD_LAYOUT), assert_trivial=True)
    s1 = gl.convert_layout(s1, gl.SliceLayout(1, QUAD_LAYOUT), assert_trivial=True)
    s2 = gl.convert_layout(s2, gl.SliceLayout(1, QUAD_LAYOUT), assert_trivial=True)
    s3 = gl.convert_layout(s3, gl.SliceLayout(1, QUAD_LAYOUT), assert_trivial=True)
    return (
        gl.expand_dims(s0, 1),
        gl.expand_dims(s1, 1),
        gl.expand_dims(s2, 1),
        gl.expand_dims(s3, 1),
    )


@gluon.jit
def load_block_scales(smem, WARPGROUP: gl.constexpr, PACKED_FORMAT: gl.constexpr):
    """Load the scales of a K step for the two blocks of warpgroup WARPGROUP.

    Return the `scales` argument of `unpack` for each block.
    """
    COUNT: gl.constexpr = _count_scale_words(PACKED_FORMAT)
    if COUNT == 1:  # one word per block, for both warpgroups
        quads = _load_scale_quads(smem)
        return (quads[2 * WARPGROUP],), (quads[2 * WARPGROUP + 1],)
    elif COUNT == 4:  # one word per row and 32 columns
        first = _load_scale_quads(smem.slice(16 * WARPGROUP, 8, 0))
        return first, _load_scale_quads(smem.slice(16 * WARPGROUP + 8, 8, 0))
    else:  # one word per row
        quads = _load_scale_quads(smem.slice(8 * WARPGROUP, 8, 0))
        return (quads[0], quads[1]), (quads[2], quads[3])


@gluon.jit
def unpack(smem, scales, OPERAND_LAYOUT: gl.constexpr, PACKED_FORMAT: gl.constexpr):
    """Unpack words (16, 32) in shared memory to bf16 (64, 64), multiplied by their scales.

    A thread unpacks four adjacent words: two words of row r, then two words of row r + 8.

    scales: tensors (32, 1) of scale words, from `load_block_scales`.
    OPERAND_LAYOUT: the layout of the result, a register operand of wgmma.
    """
    LOAD_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    QUAD_LAYOUT: gl.constexpr = scales[0].type.layout
    words = smem.load(LOAD_LAYOUT).reshape((32, 4, 2, 2))
    even, odd = words.split()  # columns 0 to 31, and 32 to 63
    w0, w2 = even.split()  # the upper and the lower row
    w1, w3 = odd.split()
    w0 = gl.convert_layout(w0, QUAD_LAYOUT, assert_trivial=True)
    w1 = gl.convert_layout(w1, QUAD_LAYOUT, assert_trivial=True)
    w2 = gl.convert_layout(w2, QUAD_LAYOUT, assert_trivial=True)
    w3 = gl.convert_layout(w3, QUAD_LAYOUT, assert_trivial=True)
    CODE: gl.constexpr = _get_ptx(PACKED_FORMAT)
    CONSTRAINTS: gl.constexpr = _make_constraints(len(scales))
    if len(scales) == 1:
        registers = gl.inline_asm_elementwise(
            CODE, CONSTRAINTS, [w0, w1, w2, w3, scales[0]],
            dtype=(gl.int32,) * 16, is_pure=True, pack=1,
        )  # fmt: skip
    elif len(scales) == 2:
        registers = gl.inline_asm_elementwise(
            CODE, CONSTRAINTS, [w0, w1, w2, w3, scales[0], scales[1]],
            dtype=(gl.int32,) * 16, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        registers = gl.inline_asm_elementwise(
            CODE, CONSTRAINTS, [w0, w1, w2, w3, scales[0], scales[1], scales[2], scales[3]],
            dtype=(gl.int32,) * 16, is_pure=True, pack=1,
        )  # fmt: skip
    upper0 = _join4(registers[0], registers[1], registers[2], registers[3])
    upper1 = _join4(registers[4], registers[5], registers[6], registers[7])
    lower0 = _join4(registers[8], registers[9], registers[10], registers[11])
    lower1 = _join4(registers[12], registers[13], registers[14], registers[15])
    pairs = _join4(upper0, upper1, lower0, lower1)  # (32, 4, pair, pair, row half, group)
    first = pairs.to(gl.int16).to(gl.bfloat16, bitcast=True)
    second = (pairs >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    joined = gl.join(first, second).reshape((4, 8, 4, 4, 2, 2, 2))
    # (warp, row, lane of four, pair, row half, group, second) to rows and columns
    values = joined.permute((0, 4, 1, 5, 3, 2, 6)).reshape((BLOCK, BLOCK))
    return gl.convert_layout(values, OPERAND_LAYOUT, assert_trivial=True)
