"""Unpacking of GGUF blocks that store indices into a codebook (ggml's types IQ1, IQ2 and IQ3).

A block has 256 consecutive values of a row. An index selects an entry of the type's codebook, which
is 8 values (4 for IQ3). The values are then given signs or, for IQ1, shifted by plus or minus a
constant delta, and multiplied by a scale. The bytes of a block are, in their order, with d in
float16 and little-endian words:

    IQ1_S    d, 32 bytes of indices, 8 words (16 bits), each with 3 more bits for 4 indices, a scale
             and a sign of delta
    IQ1_M    32 bytes of indices, 16 bytes, each with 3 more bits and a sign of delta for 2 indices,
             4 words (16 bits), each with 4 scales of 3 bits and 4 bits of d
    IQ2_XXS  d, then 8 times: 4 bytes of indices, a word (32 bits) with 4 sign indices and a scale
    IQ2_XS   d, 32 words (16 bits) with an index of 9 bits and a sign index, 8 bytes with 2 scales
    IQ2_S    d, 32 bytes of indices, 32 bytes of signs, 8 bytes with 2 more bits for 4 indices,
             8 bytes with 2 scales
    IQ3_XXS  d, 64 bytes of indices, 8 words (32 bits) with 4 sign indices and a scale
    IQ3_S    d, 64 bytes of indices, 8 bytes with 1 more bit for 8 indices, 32 bytes of signs,
             4 bytes with 2 scales

A scale applies to 16 values (IQ1_M, IQ2_XS, IQ2_S) or 32 values (other types). A sign index of 7
bits has the signs of seven values. The eighth sign makes the number of negative signs even.
"""

import json
from functools import cache
from pathlib import Path

import torch

_FactorsAndCodes = tuple[torch.Tensor, torch.Tensor]
_CODEBOOK_FILE = Path(__file__).with_name("data") / "ggml_codebooks.json"


def unpack_codes(type_name: str, blocks: torch.Tensor) -> _FactorsAndCodes:
    """Unpack blocks to factors and codes, whose exact products are the values.

    type_name: name in ggml.
    blocks: (..., bytes per block) uint8.

    Returns factors (..., groups) float32, and codes (..., groups, values per group) int8, from -62
    to 62.
    """
    factors, codes = _UNPACKERS[type_name](blocks.contiguous())
    return factors, _split_last_dim(codes, codes.shape[-1] // factors.shape[-1])


@cache
def _load_codebook(name: str, device: torch.device) -> torch.Tensor:
    """Return a codebook, (entries, 8 or 4) int8. The file stores entries as indices of `levels`."""
    codebook = json.loads(_CODEBOOK_FILE.read_text(encoding="utf-8"))[name]
    rows = [
        [codebook["levels"][int(digit)] for digit in entry] for entry in codebook["entries"].split()
    ]
    return torch.tensor(rows, dtype=torch.int8, device=device)


def _look_up(name: str, index: torch.Tensor) -> torch.Tensor:
    """Return the entries of a codebook for index (..., n), as (..., n, 8 or 4) int8."""
    return _load_codebook(name, index.device)[index]


def _read_float16(raw_bytes: torch.Tensor) -> torch.Tensor:
    return raw_bytes.contiguous().view(torch.float16).float()


def _split_last_dim(values: torch.Tensor, size: int) -> torch.Tensor:
    """Reshape (..., n) to (..., n / size, size)."""
    return values.reshape(*values.shape[:-1], -1, size)


def _combine_bytes(raw_bytes: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Combine bytes to little-endian int64 words of `nbytes` bytes."""
    values = _split_last_dim(raw_bytes.long(), nbytes)
    words = values[..., 0]
    for byte in range(1, nbytes):
        words = words | values[..., byte] << 8 * byte
    return words


def _extract_bits(values: torch.Tensor, shifts: tuple[int, ...], bits: int) -> torch.Tensor:
    """Extract `bits` bits of each value at each shift: (..., n) to (..., n * len(shifts)) int64."""
    positions = torch.tensor(shifts, dtype=torch.int64, device=values.device)
    return (values.long()[..., None] >> positions & ((1 << bits) - 1)).flatten(-2)


def _apply_signs(values: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Negate values (..., n, 8) whose bit in the bytes of signs (..., n) is set."""
    is_negative = _extract_bits(signs[..., None], tuple(range(8)), 1)
    return torch.where(is_negative.bool(), -values, values)


def _complete_signs(index: torch.Tensor) -> torch.Tensor:
    """Complete 7-bit sign indices to bytes. Bit 7 makes the number of set bits even."""
    parity = index ^ index >> 4
    parity = parity ^ parity >> 2
    return index | ((parity ^ parity >> 1) & 1) << 7


def _unpack_iq1(
    indices: torch.Tensor, high_bits: torch.Tensor, is_negative: torch.Tensor
) -> torch.Tensor:
    """Return 8 * (entry + delta) with delta = 1/8 or -1/8, (..., n, 8) int8."""
    delta = torch.where(is_negative.bool(), -1, 1).to(torch.int8)
    return _look_up("IQ1_S", indices.long() | high_bits << 8) * 8 + delta[..., None]


def _unpack_iq1_s(blocks: torch.Tensor) -> _FactorsAndCodes:
    d, words = _read_float16(blocks[..., :2]), _combine_bytes(blocks[..., 34:], 2)
    factors = d * ((words >> 12 & 7) * 2 + 1) / 8
    is_negative = (words >> 15).repeat_interleave(4, -1)
    codes = _unpack_iq1(blocks[..., 2:34], _extract_bits(words, (0, 3, 6, 9), 3), is_negative)
    return factors, codes.flatten(-2)


def _unpack_iq1_m(blocks: torch.Tensor) -> _FactorsAndCodes:
    words = _combine_bytes(blocks[..., 48:], 2)
    shifts = torch.tensor([0, 4, 8, 12], dtype=torch.int64, device=words.device)
    d_bits = ((words >> 12) << shifts).sum(-1, keepdim=True)
    d_int16 = torch.where(d_bits > 0x7FFF, d_bits - 0x10000, d_bits).to(torch.int16)
    d = d_int16.view(torch.float16).float()
    factors = d * (_extract_bits(words, (0, 3, 6, 9), 3) * 2 + 1) / 8
    nibbles = _extract_bits(blocks[..., 32:48], (0, 4), 4)
    return factors, _unpack_iq1(blocks[..., :32], nibbles & 7, nibbles >> 3).flatten(-2)


def _unpack_iq2_xxs(blocks: torch.Tensor) -> _FactorsAndCodes:
    groups = _split_last_dim(blocks[..., 2:], 8)
    words = _combine_bytes(groups[..., 4:], 4)[..., 0]
    factors = _read_float16(blocks[..., :2]) * ((words >> 28).float() + 0.5) * 0.25
    signs = _complete_signs(_extract_bits(words, (0, 7, 14, 21), 7))
    codes = _apply_signs(_look_up("IQ2_XXS", groups[..., :4].flatten(-2).long()), signs)
    return factors, codes.flatten(-2)


def _compute_iq2_factors(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return _read_float16(blocks[..., :2]) * (_extract_bits(scales, (0, 4), 4).float() + 0.5) * 0.25


def _unpack_iq2_xs(blocks: torch.Tensor) -> _FactorsAndCodes:
    words = _combine_bytes(blocks[..., 2:66], 2)
    codes = _apply_signs(_look_up("IQ2_XS", words & 511), _complete_signs(words >> 9))
    return _compute_iq2_factors(blocks, blocks[..., 66:]), codes.flatten(-2)


def _unpack_iq2_s(blocks: torch.Tensor) -> _FactorsAndCodes:
    high = _extract_bits(blocks[..., 66:74], (0, 2, 4, 6), 2)
    values = _look_up("IQ2_S", blocks[..., 2:34].long() | high << 8)
    codes = _apply_signs(values, blocks[..., 34:66])
    return _compute_iq2_factors(blocks, blocks[..., 74:]), codes.flatten(-2)


def _unpack_iq3_xxs(blocks: torch.Tensor) -> _FactorsAndCodes:
    words = _combine_bytes(blocks[..., 66:], 4)
    factors = _read_float16(blocks[..., :2]) * ((words >> 28).float() + 0.5) * 0.5
    values = _look_up("IQ3_XXS", blocks[..., 2:66].long()).flatten(-2)
    signs = _complete_signs(_extract_bits(words, (0, 7, 14, 21), 7))
    return factors, _apply_signs(_split_last_dim(values, 8), signs).flatten(-2)


def _unpack_iq3_s(blocks: torch.Tensor) -> _FactorsAndCodes:
    factors = _read_float16(blocks[..., :2]) * (_extract_bits(blocks[..., 106:], (0, 4), 4) * 2 + 1)
    high = _extract_bits(blocks[..., 66:74], tuple(range(8)), 1)
    values = _look_up("IQ3_S", blocks[..., 2:66].long() | high << 8)
    values = _split_last_dim(values.flatten(-2), 8)
    return factors, _apply_signs(values, blocks[..., 74:106]).flatten(-2)


_UNPACKERS = {
    "IQ1_S": _unpack_iq1_s,
    "IQ1_M": _unpack_iq1_m,
    "IQ2_XXS": _unpack_iq2_xxs,
    "IQ2_XS": _unpack_iq2_xs,
    "IQ2_S": _unpack_iq2_s,
    "IQ3_XXS": _unpack_iq3_xxs,
    "IQ3_S": _unpack_iq3_s,
}
