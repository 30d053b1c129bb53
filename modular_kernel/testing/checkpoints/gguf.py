"""Write tiny GGUF files with random blocks, and return their exact values.

    sample = write_gguf(folder / "model.gguf", "qwen3moe", ("Q4_0", "Q4_0", "Q8_0"))
    sample.expected_output(x_TH, weights_TK, ids_TK)   # float64

GGUF types store blocks of 32, 64 or 256 values as integer codes with scales. For each type, a
function draws codes and scales at random, and returns the bytes of the blocks and their values. The
layouts and names follow the comments in ggml: d is the scale of a block, and m or dmin its minimum.
No code is shared with `modular_kernel.checkpoints`.
"""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from modular_kernel import checkpoints
from modular_kernel.testing.checkpoints.formats import E2M1, F64
from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS
from modular_kernel.testing.checkpoints.samples import FAMILIES, Sample

Blocks = tuple[torch.Tensor, torch.Tensor]  # bytes of each block, uint8; their values, float64
_TYPE_NUMBERS = {
    "F32": 0, "F16": 1, "BF16": 30, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8,
    "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ3_S": 21,
    "IQ4_XS": 23, "MXFP4": 39, "NVFP4": 40, "TQ1_0": 34, "TQ2_0": 35, "IQ1_M": 29, "IQ1_S": 19,
    "IQ2_XXS": 16, "IQ2_XS": 17, "IQ2_S": 22, "IQ3_XXS": 18,
}  # fmt: skip
_STRING, _ARRAY, _UINT32, _FLOAT32, _BOOL, _INT32 = 8, 9, 4, 6, 7, 5
_STRUCT_CODES = {_UINT32: "I", _FLOAT32: "f", _BOOL: "?", _INT32: "i"}


def _draw_scales(shape: tuple[int, ...], gain: float, g: torch.Generator) -> torch.Tensor:
    """Draw float16 scales of both signs."""
    sign = torch.randint(0, 2, shape, generator=g) * 2 - 1
    return ((0.6 + 0.8 * torch.rand(shape, generator=g)) * sign * gain).half()


def _to_bytes(halves: torch.Tensor) -> torch.Tensor:
    return halves.contiguous().view(torch.uint8)


def _pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Put value j into the low nibble of byte j, and value j + 16 into the high nibble."""
    return (codes[:, :16] | codes[:, 16:] << 4).to(torch.uint8)


def _q8_0(count: int, gain: float, g: torch.Generator) -> Blocks:
    codes = torch.randint(-128, 128, (count, 32), generator=g)
    d = _draw_scales((count, 1), gain / 64, g)
    packed = codes.to(torch.int8).view(torch.uint8)
    return torch.cat([_to_bytes(d), packed], 1), codes * d.to(F64)


def _q4_0(count: int, gain: float, g: torch.Generator) -> Blocks:
    codes = torch.randint(0, 16, (count, 32), generator=g)
    d = _draw_scales((count, 1), gain / 4, g)
    return torch.cat([_to_bytes(d), _pack_nibbles(codes)], 1), (codes - 8) * d.to(F64)


def _q4_1(count: int, gain: float, g: torch.Generator) -> Blocks:
    codes = torch.randint(0, 16, (count, 32), generator=g)
    d, m = _draw_scales((count, 1), gain / 4, g), _draw_scales((count, 1), gain, g)
    stored = torch.cat([_to_bytes(d), _to_bytes(m), _pack_nibbles(codes)], 1)
    return stored, codes * d.to(F64) + m.to(F64)


def _pack_fifth_bits(codes: torch.Tensor) -> torch.Tensor:
    """Put bit 4 of value j into bit j of a 32-bit word; return its 4 bytes, little-endian."""
    word = sum((codes[:, j] >> 4 & 1) << j for j in range(32))
    assert isinstance(word, torch.Tensor)
    return torch.stack([word >> 8 * byte & 255 for byte in range(4)], 1).to(torch.uint8)


def _q5_0(count: int, gain: float, g: torch.Generator) -> Blocks:
    codes = torch.randint(0, 32, (count, 32), generator=g)
    d = _draw_scales((count, 1), gain / 8, g)
    stored = torch.cat([_to_bytes(d), _pack_fifth_bits(codes), _pack_nibbles(codes & 15)], 1)
    return stored, (codes - 16) * d.to(F64)


def _q5_1(count: int, gain: float, g: torch.Generator) -> Blocks:
    codes = torch.randint(0, 32, (count, 32), generator=g)
    d, m = _draw_scales((count, 1), gain / 8, g), _draw_scales((count, 1), gain, g)
    halves = _pack_nibbles(codes & 15)
    stored = torch.cat([_to_bytes(d), _to_bytes(m), _pack_fifth_bits(codes), halves], 1)
    return stored, codes * d.to(F64) + m.to(F64)


# The levels of IQ4_NL and IQ4_XS, by code.
_IQ4 = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=F64
)


def _iq4_nl(count: int, gain: float, g: torch.Generator) -> Blocks:
    codes = torch.randint(0, 16, (count, 32), generator=g)
    d = _draw_scales((count, 1), gain / 64, g)
    return torch.cat([_to_bytes(d), _pack_nibbles(codes)], 1), _IQ4[codes] * d.to(F64)


def _iq4_xs(count: int, gain: float, g: torch.Generator) -> Blocks:
    codes = torch.randint(0, 16, (count, 256), generator=g)
    scales = torch.randint(0, 64, (count, 8), generator=g)
    d = _draw_scales((count, 1), gain / 2048, g)
    high = torch.zeros(count, dtype=torch.int64)
    low = torch.zeros(count, 4, dtype=torch.int64)
    packed_codes, values = [], torch.empty(count, 256, dtype=F64)
    for j in range(8):
        group = slice(32 * j, 32 * j + 32)
        high |= scales[:, j] >> 4 << 2 * j
        low[:, j // 2] |= (scales[:, j] & 15) << 4 * (j % 2)
        packed_codes.append(_pack_nibbles(codes[:, group]))
        values[:, group] = _IQ4[codes[:, group]] * (d.to(F64)[:, 0] * (scales[:, j] - 32))[:, None]
    words = torch.stack([high & 255, high >> 8], 1).to(torch.uint8)
    return torch.cat([_to_bytes(d), words, low.to(torch.uint8), *packed_codes], 1), values


def _nvfp4(count: int, gain: float, g: torch.Generator) -> Blocks:
    """Return blocks of zeros. Tests use this type only to check that loading refuses it."""
    return torch.zeros(count, 36, dtype=torch.uint8), torch.zeros(count, 64, dtype=F64)


@cache
def _load_codebook(name: str) -> torch.Tensor:
    """Return the entries of a codebook, float64 (entries, 8 or 4)."""
    path = Path(checkpoints.__file__).with_name("data") / "ggml_codebooks.json"
    stored = json.loads(path.read_text(encoding="utf-8"))[name]
    return torch.tensor(
        [[stored["levels"][int(level)] for level in entry] for entry in stored["entries"].split()],
        dtype=F64,
    )


class _Fields:
    """Blocks whose bits are set field by field. Fields are little-endian."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.bytes = torch.zeros(count, nbytes, dtype=torch.int64)

    def put(self, byte: int, bit: int, value: torch.Tensor) -> None:
        """Write values, (count,), from bit `bit` of byte `byte` on, also into later bytes."""
        shifted = value << bit
        for place in range(8):
            if bool((shifted >> 8 * place).any()):
                self.bytes[:, byte + place] |= shifted >> 8 * place & 255

    def blocks(self, d: torch.Tensor | None = None, offset: int = 0) -> torch.Tensor:
        """Return the uint8 bytes. If `d` is given, its float16 values start at byte `offset`."""
        out = self.bytes.to(torch.uint8)
        if d is not None:
            out[:, offset : offset + 2] = _to_bytes(d)
        return out


def _draw_signs(count: int, g: torch.Generator, *, even: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the signs of 8 values; return their bits and their factors (1 or -1).

    even: whether an even number of signs is negative, so that the first 7 bits determine the
        eighth.
    """
    negative = torch.randint(0, 2, (count, 8), generator=g)
    if even:
        negative[:, 7] = negative[:, :7].sum(1) % 2
    bits = sum(negative[:, j] << j for j in range(7 if even else 8))
    assert isinstance(bits, torch.Tensor)
    return bits, 1 - 2 * negative.to(F64)


def _make_iq_function(kind: str) -> Callable[[int, float, torch.Generator], Blocks]:
    """Return a function that draws blocks of a type with a codebook and signs."""
    nbytes = {"IQ2_XXS": 66, "IQ2_XS": 74, "IQ2_S": 82, "IQ3_XXS": 98, "IQ3_S": 110}[kind]
    codebook = _load_codebook(kind)
    per_scale = 16 if kind in ("IQ2_XS", "IQ2_S") else 32

    def make(count: int, gain: float, g: torch.Generator) -> Blocks:
        d = _draw_scales((count, 1), gain / (64 if kind == "IQ3_S" else 128), g)
        fields, values = _Fields(count, nbytes), torch.empty(count, 256, dtype=F64)
        scales = torch.randint(0, 16, (count, 256 // per_scale), generator=g)
        for first in range(0, 256, 8):
            n, group = first // 8, first // 32  # indices of the 8 and of the 32 values
            scale = scales[:, first // per_scale]
            draws = torch.randint(0, len(codebook), (2, count), generator=g)
            sign_bits, signs = _draw_signs(count, g, even=kind in ("IQ2_XXS", "IQ2_XS", "IQ3_XXS"))
            index = draws[0]
            entry = (
                codebook[index]
                if codebook.shape[1] == 8
                else codebook[draws].transpose(0, 1).flatten(1)
            )
            if kind == "IQ2_XXS":
                fields.put(2 + 8 * group + n % 4, 0, index)
                fields.put(6 + 8 * group, 7 * (n % 4), sign_bits)
                fields.put(6 + 8 * group, 28, scale)
            elif kind == "IQ2_XS":
                fields.put(2 + 2 * n, 0, index | sign_bits << 9)
                fields.put(66 + group, 4 * (n // 2 % 2), scale)
            elif kind == "IQ2_S":
                fields.put(2 + n, 0, index & 255)
                fields.put(34 + n, 0, sign_bits)
                fields.put(66 + group, 2 * (n % 4), index >> 8)
                fields.put(74 + group, 4 * (n // 2 % 2), scale)
            elif kind == "IQ3_XXS":
                for half, entry_index in enumerate(draws):
                    fields.put(2 + 2 * n + half, 0, entry_index)
                fields.put(66 + 4 * group, 7 * (n % 4), sign_bits)
                fields.put(66 + 4 * group, 28, scale)
            else:
                for half, entry_index in enumerate(draws):
                    fields.put(2 + 2 * n + half, 0, entry_index & 255)
                    fields.put(66 + group, (2 * n + half) % 8, entry_index >> 8)
                fields.put(74 + n, 0, sign_bits)
                fields.put(106 + group // 2, 4 * (group % 2), scale)
            unit = {"IQ3_S": 1 + 2 * scale, "IQ3_XXS": (scale + 0.5) / 2}.get(
                kind, (scale + 0.5) / 4
            )
            values[:, first : first + 8] = entry * signs * (d[:, 0].to(F64) * unit)[:, None]
        return fields.blocks(d), values

    return make


def _iq1_s(count: int, gain: float, g: torch.Generator) -> Blocks:
    d, fields, values = _draw_scales((count, 1), gain / 8, g), _Fields(count, 50), []
    for group in range(8):
        scale, negative = (torch.randint(0, bound, (count,), generator=g) for bound in (8, 2))
        fields.put(34 + 2 * group, 12, scale | negative << 3)
        for n in range(4):
            index = torch.randint(0, 2048, (count,), generator=g)
            fields.put(2 + 4 * group + n, 0, index & 255)
            fields.put(34 + 2 * group, 3 * n, index >> 8)
            entry = _load_codebook("IQ1_S")[index] + (0.125 - 0.25 * negative.to(F64))[:, None]
            values.append(entry * (d[:, 0].to(F64) * (2 * scale + 1))[:, None])
    return fields.blocks(d), torch.cat(values, 1)


def _iq1_m(count: int, gain: float, g: torch.Generator) -> Blocks:
    d, fields, values = _draw_scales((count, 1), gain / 8, g), _Fields(count, 56), []
    bits = d[:, 0].view(torch.int16).long() & 0xFFFF
    for quarter in range(4):
        fields.put(48 + 2 * quarter, 12, bits >> 4 * quarter & 15)
    for group in range(16):
        scale = torch.randint(0, 8, (count,), generator=g)
        fields.put(48 + 2 * (group // 4), 3 * (group % 4), scale)
        for n in range(2 * group, 2 * group + 2):
            index, negative = (
                torch.randint(0, bound, (count,), generator=g) for bound in (2048, 2)
            )
            fields.put(n, 0, index & 255)
            fields.put(32 + n // 2, 4 * (n % 2), index >> 8 | negative << 3)
            entry = _load_codebook("IQ1_S")[index] + (0.125 - 0.25 * negative.to(F64))[:, None]
            values.append(entry * (d[:, 0].to(F64) * (2 * scale + 1))[:, None])
    return fields.blocks(), torch.cat(values, 1)


def _tq2_0(count: int, gain: float, g: torch.Generator) -> Blocks:
    codes, d = torch.randint(0, 3, (count, 256), generator=g), _draw_scales((count, 1), gain, g)
    return torch.cat([_pack_2bit_codes(codes), _to_bytes(d)], 1), (codes - 1) * d.to(F64)


def _tq1_0(count: int, gain: float, g: torch.Generator) -> Blocks:
    """Draw base-3 digits. A byte stores 5 values that are 32 or 16 apart, or 4 that are 4 apart."""
    codes, d = torch.randint(0, 3, (count, 256), generator=g), _draw_scales((count, 1), gain, g)
    packed = []
    for first, step, digits in ((0, 32, 5), (160, 16, 5), (240, 4, 4)):
        number = sum(
            codes[:, first + step * digit : first + step * (digit + 1)] * 3 ** (4 - digit)
            for digit in range(digits)
        )
        packed.append((number * 256 + 242) // 243)  # number / 243 in units of 1 / 256, rounded up
    return torch.cat([*packed, _to_bytes(d)], 1).to(torch.uint8), (codes - 1) * d.to(F64)


def _mxfp4(count: int, gain: float, g: torch.Generator) -> Blocks:
    codes = torch.randint(0, 16, (count, 32), generator=g)
    exponent = torch.randint(124, 127, (count, 1), generator=g) + int(
        torch.tensor(gain).log2().floor()
    )
    values = E2M1[codes] * torch.exp2(exponent.to(F64) - 127)
    return torch.cat([exponent.to(torch.uint8), _pack_nibbles(codes)], 1), values


def _pack_2bit_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes of 2 bits into 64 bytes. In each 128 values, value j is in byte j % 32."""
    packed = torch.zeros(len(codes), 64, dtype=torch.int64)
    for value in range(256):
        half, place = divmod(value, 128)
        packed[:, 32 * half + place % 32] |= (codes[:, value] & 3) << 2 * (place // 32)
    return packed.to(torch.uint8)


def _q2_k(count: int, gain: float, g: torch.Generator) -> Blocks:
    codes = torch.randint(0, 4, (count, 256), generator=g)
    scales, minima = (torch.randint(0, 16, (count, 16), generator=g) for _ in range(2))
    d, dmin = _draw_scales((count, 1), gain / 8, g), _draw_scales((count, 1), gain / 16, g)
    values = torch.empty(count, 256, dtype=F64)
    for j in range(16):
        group = slice(16 * j, 16 * j + 16)
        scale, minimum = (d.to(F64)[:, 0] * scales[:, j], dmin.to(F64)[:, 0] * minima[:, j])
        values[:, group] = scale[:, None] * codes[:, group] - minimum[:, None]
    factors = (scales | minima << 4).to(torch.uint8)
    return torch.cat([factors, _pack_2bit_codes(codes), _to_bytes(d), _to_bytes(dmin)], 1), values


def _q3_k(count: int, gain: float, g: torch.Generator) -> Blocks:
    codes = torch.randint(0, 8, (count, 256), generator=g)
    scales = torch.randint(0, 64, (count, 16), generator=g)
    d = _draw_scales((count, 1), gain / 64, g)
    high = torch.zeros(count, 32, dtype=torch.int64)
    for value in range(256):
        high[:, value % 32] |= (codes[:, value] >> 2) << value // 32
    packed = torch.zeros(count, 12, dtype=torch.int64)
    values = torch.empty(count, 256, dtype=F64)
    for j in range(16):
        packed[:, j % 8] |= (scales[:, j] & 15) << 4 * (j // 8)
        packed[:, 8 + j % 4] |= scales[:, j] >> 4 << 2 * (j // 4)
        group = slice(16 * j, 16 * j + 16)
        scale = d.to(F64)[:, 0] * (scales[:, j] - 32)
        values[:, group] = (codes[:, group] - 4) * scale[:, None]
    stored = [high.to(torch.uint8), _pack_2bit_codes(codes), packed.to(torch.uint8)]
    return torch.cat([*stored, _to_bytes(d)], 1), values


def _q4_k(count: int, gain: float, g: torch.Generator) -> Blocks:
    return _draw_k_blocks(count, gain, g, bits=4)


def _q5_k(count: int, gain: float, g: torch.Generator) -> Blocks:
    return _draw_k_blocks(count, gain, g, bits=5)


def _draw_k_blocks(count: int, gain: float, g: torch.Generator, *, bits: int) -> Blocks:
    """Draw blocks of Q4_K or Q5_K, which differ in the number of bits of a code."""
    codes = torch.randint(0, 1 << bits, (count, 256), generator=g)
    scales, minima = (torch.randint(0, 64, (count, 8), generator=g) for _ in range(2))
    d, dmin = _draw_scales((count, 1), gain / 256, g), _draw_scales((count, 1), gain / 64, g)
    packed = torch.zeros(count, 12, dtype=torch.int64)
    for j in range(4):
        packed[:, j] = scales[:, j] | scales[:, j + 4] >> 4 << 6
        packed[:, j + 4] = minima[:, j] | minima[:, j + 4] >> 4 << 6
        packed[:, j + 8] = scales[:, j + 4] & 15 | (minima[:, j + 4] & 15) << 4
    quants = torch.zeros(count, 128, dtype=torch.int64)
    for i in range(4):  # 32 bytes with 64 values
        low = codes[:, 64 * i : 64 * i + 32] & 15
        high = codes[:, 64 * i + 32 : 64 * i + 64] & 15
        quants[:, 32 * i : 32 * i + 32] = low | high << 4
    values = torch.empty(count, 256, dtype=F64)
    for j in range(8):
        group = slice(32 * j, 32 * j + 32)
        scale, minimum = (d.to(F64)[:, 0] * scales[:, j], dmin.to(F64)[:, 0] * minima[:, j])
        values[:, group] = scale[:, None] * codes[:, group] - minimum[:, None]
    fifth = torch.zeros(count, 32, dtype=torch.int64)
    for j in range(8):
        fifth |= (codes[:, 32 * j : 32 * j + 32] >> 4) << j
    fifth_bits = [fifth] if bits == 5 else []
    stored = torch.cat([packed, *fifth_bits, quants], 1).to(torch.uint8)
    return torch.cat([_to_bytes(d), _to_bytes(dmin), stored], 1), values


def _q6_k(count: int, gain: float, g: torch.Generator) -> Blocks:
    codes = torch.randint(0, 64, (count, 256), generator=g)
    scales = torch.randint(-128, 128, (count, 16), generator=g)
    d = _draw_scales((count, 1), gain / 1024, g)
    low = torch.zeros(count, 128, dtype=torch.int64)
    high = torch.zeros(count, 64, dtype=torch.int64)
    for half in range(2):
        for place in range(32):
            first = 128 * half + place  # the other codes are 32, 64 and 96 after it
            q1, q2, q3, q4 = (codes[:, first + 32 * part] for part in range(4))
            low[:, 64 * half + place] = q1 & 15 | (q3 & 15) << 4
            low[:, 64 * half + place + 32] = q2 & 15 | (q4 & 15) << 4
            high[:, 32 * half + place] = q1 >> 4 | q2 >> 4 << 2 | q3 >> 4 << 4 | q4 >> 4 << 6
    values = torch.empty(count, 256, dtype=F64)
    for j in range(16):
        group = slice(16 * j, 16 * j + 16)
        values[:, group] = (codes[:, group] - 32) * (d.to(F64)[:, 0] * scales[:, j])[:, None]
    stored = torch.cat([low, high], 1).to(torch.uint8)
    signed = scales.to(torch.int8).view(torch.uint8)
    return torch.cat([stored, signed, _to_bytes(d)], 1), values


def _make_float_function(dtype: torch.dtype) -> Callable[[int, float, torch.Generator], Blocks]:
    def make(count: int, gain: float, g: torch.Generator) -> Blocks:
        values = (torch.randn(count, 1, generator=g) * gain).to(dtype)
        return _to_bytes(values), values.to(F64)

    return make


_DRAW_FUNCTIONS: dict[str, Callable[[int, float, torch.Generator], Blocks]] = {
    "F32": _make_float_function(torch.float32),
    "F16": _make_float_function(torch.float16),
    "BF16": _make_float_function(torch.bfloat16),
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    **{
        kind: _make_iq_function(kind) for kind in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
    },
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "NVFP4": _nvfp4,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def matrix(
    kind: str, shape: tuple[int, ...], gain: float, g: torch.Generator
) -> tuple[bytes, torch.Tensor]:
    """Draw a tensor of the type `kind`; return its bytes and its values in float64.

    gain: factor by which all values are multiplied.
    """
    count = torch.Size(shape).numel()
    is_large = kind.endswith("_K") or (kind.startswith(("IQ", "TQ")) and kind != "IQ4_NL")
    values = 1 if kind in ("F32", "F16", "BF16") else 256 if is_large else 32
    values = 64 if kind == "NVFP4" else values
    stored, exact = _DRAW_FUNCTIONS[kind](count // values, gain / shape[-1] ** 0.5, g)
    return stored.numpy().tobytes(), exact.reshape(shape)


# Maps an architecture to (model family, metadata that only this architecture has).
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3moe": ("qwen3_moe", {}),
    "llama": ("mixtral", {}),
    "deepseek2": (
        "deepseek_v3",
        {
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
        },
    ),
    "glm4moe": (
        "glm4_moe",
        {
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "nextn_predict_layers": 1,
        },
    ),
    "gpt-oss": ("gpt_oss", {}),
}


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor as it is stored in a file."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


def write_gguf(  # noqa: PLR0913 (independent options)
    path: Path,
    architecture: str = "qwen3moe",
    types: tuple[str, str, str] | Mapping[int, tuple[str, str, str]] = ("Q4_0", "Q4_0", "Q4_0"),
    *,
    experts: int = 4,
    hidden: int = 256,
    intermediate: int = 256,
    top_k: int = 2,
    fused: bool = False,
    metadata: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, Any]], None] | None = None,
    files: int = 1,
    seed: int = 0,
) -> Sample:
    """Write a model; return it with the exact weights of its last layer with experts.

    types: types of the gate, up and down matrices, either of layer 0 or by layer. Layers without an
        entry, up to the last layer with experts, are dense.
    fused: whether gate and up are stored in one tensor.
    metadata: entries that are added to the default metadata, or replace default entries; None
        removes an entry.
    change: modifies the dictionary from names to tensors (`_StoredTensor`) before they are written.
    files: number of files among which the tensors are divided.
    """
    g = torch.Generator().manual_seed(seed)
    family, extra_metadata = ARCHITECTURES[architecture]
    by_layer = types if isinstance(types, Mapping) else {0: types}
    layers = max(by_layer) + 1 + (architecture == "glm4moe")
    tensors = {"token_embd.weight": _StoredTensor("F32", (8, hidden), bytes(4 * 8 * hidden))}
    w1 = w2 = torch.empty(0)
    b1 = b2 = None
    for layer in range(layers):
        prefix = f"blk.{layer}."
        tensors[f"{prefix}ffn_norm.weight"] = _StoredTensor("F32", (hidden,), bytes(4 * hidden))
        if layer not in by_layer:
            continue
        gate_type, up_type, down_type = by_layer[layer]
        sizes = (experts, intermediate, hidden)
        gate, up = matrix(gate_type, sizes, 1.0, g), matrix(up_type, sizes, 1.7, g)
        down = matrix(down_type, (experts, hidden, intermediate), 1.0, g)
        if fused:
            expert_bytes = len(gate[0]) // experts
            data = b"".join(
                matrix_bytes[e * expert_bytes : (e + 1) * expert_bytes]
                for e in range(experts)
                for matrix_bytes in (gate[0], up[0])
            )
            fused_shape = (experts, 2 * intermediate, hidden)
            tensors[f"{prefix}ffn_gate_up_exps.weight"] = _StoredTensor(
                gate_type, fused_shape, data
            )
        else:
            tensors[f"{prefix}ffn_gate_exps.weight"] = _StoredTensor(gate_type, sizes, gate[0])
            tensors[f"{prefix}ffn_up_exps.weight"] = _StoredTensor(up_type, sizes, up[0])
        tensors[f"{prefix}ffn_down_exps.weight"] = _StoredTensor(
            down_type, (experts, hidden, intermediate), down[0]
        )
        gate_shape = (experts, hidden)
        tensors[f"{prefix}ffn_gate_inp.weight"] = _StoredTensor(
            "F32", gate_shape, matrix("F32", gate_shape, 1.0, g)[0]
        )
        w1, w2 = torch.cat([gate[1], up[1]], 1), down[1]
        if FAMILIES[family].bias:
            biases = [
                matrix("F32", (experts, size), 4.0, g)
                for size in (intermediate, intermediate, hidden)
            ]
            names = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
            for name, bias in zip(names, biases, strict=True):
                shape = tuple(bias[1].shape)
                tensors[f"{prefix}{name}.bias"] = _StoredTensor("F32", shape, bias[0])
            b1, b2 = torch.cat([biases[0][1], biases[1][1]], 1), biases[2][1]
    if change is not None:
        change(tensors)
    size_key = "feed_forward_length" if architecture == "llama" else "expert_feed_forward_length"
    entries = {
        "general.architecture": architecture,
        f"{architecture}.block_count": layers,
        f"{architecture}.embedding_length": hidden,
        f"{architecture}.{size_key}": intermediate,
        f"{architecture}.expert_count": experts,
        f"{architecture}.expert_used_count": top_k,
        **{f"{architecture}.{key}": value for key, value in extra_metadata.items()},
        "tokenizer.ggml.tokens": ["<s>", "ä", ""] * 2000,
        "tokenizer.ggml.token_type": [1, 2, 3] * 2000,
        **(metadata or {}),
    }
    entries = {key: value for key, value in entries.items() if value is not None}
    all_names = list(tensors)
    for number in range(files):
        name = path.name
        if files > 1:
            name = f"{path.stem}-{number + 1:05}-of-{files:05}.gguf"
        file_tensors = {name: tensors[name] for name in all_names[number::files]}
        path.with_name(name).write_bytes(file_bytes(entries if number == 0 else {}, file_tensors))
    scaling = extra_metadata.get("expert_weights_scale", 1.0)
    kind = CHECKPOINT_FORMATS["bf16"]
    return Sample(path, {}, kind, FAMILIES[family], w1, w2, b1, b2, top_k, scaling)


def file_bytes(
    entries: Mapping[str, Any], tensors: Mapping[str, _StoredTensor], *, version: int = 3
) -> bytes:
    """Return the bytes of one GGUF file."""
    alignment = entries.get("general.alignment", 32)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries))
    for key, value in entries.items():
        head += _encode_string(key) + _encode_value(value)
    offset, infos, data = 0, b"", b""
    for name, stored in tensors.items():
        dims = struct.pack(f"<I{len(stored.shape)}Q", len(stored.shape), *stored.shape[::-1])
        infos += (
            _encode_string(name) + dims + struct.pack("<IQ", _TYPE_NUMBERS[stored.kind], offset)
        )
        data += stored.data + bytes(-len(stored.data) % alignment)
        offset = len(data)
    head += infos
    return head + bytes(-len(head) % alignment) + data


def _encode_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _find_value_type(value: Any) -> int:
    if isinstance(value, bool):
        return _BOOL
    return _STRING if isinstance(value, str) else _UINT32 if isinstance(value, int) else _FLOAT32


def _encode_value(value: Any) -> bytes:
    if isinstance(value, list):
        kind = _find_value_type(value[0])
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(
            _encode_value(item)[4:] for item in value
        )
    kind = _find_value_type(value)
    if kind == _STRING:
        return struct.pack("<I", kind) + _encode_string(value)
    return struct.pack(f"<I{_STRUCT_CODES[kind]}", kind, value)
