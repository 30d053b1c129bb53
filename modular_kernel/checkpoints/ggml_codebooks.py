"""Blocks of ggml's types that store indices into a codebook (IQ1, IQ2, IQ3).

A block has 256 consecutive values of a row. An index selects 8 values of a codebook, of IQ3 4. With
d in float16:

    IQ1_S    d, 32 bytes of indices, 8 words with 3 bits of 4 indices, a scale and a sign of delta
    IQ1_M    32 bytes of indices, 16 bytes with 3 bits and a sign of delta of 2 indices, 4 words
             with 4 scales of 3 bits and a quarter of d
    IQ2_XXS  d, 8 times 4 bytes of indices and a word with 4 indices of signs and a scale
    IQ2_XS   d, 32 words with an index of 9 bits and one of signs, 8 bytes with 2 scales
    IQ2_S    d, 32 bytes of indices, 32 bytes of signs, 8 bytes with 2 bits of 4 indices, 8 bytes
             with 2 scales
    IQ3_XXS  d, 64 bytes of indices, 8 words with 4 indices of signs and a scale
    IQ3_S    d, 64 bytes of indices, 8 bytes with a bit of 8 indices, 32 bytes of signs, 4 bytes
             with 2 scales

A scale has 16 values (IQ1_M, IQ2_XS, IQ2_S) or 32. An index of signs has the signs of seven values;
the number of negative ones of eight is even. The values are codes times factors, exact in float32.
"""

import json
from functools import cache
from pathlib import Path

import torch

Parts = tuple[torch.Tensor, torch.Tensor]  # factors and codes
_DATA = Path(__file__).with_name("data") / "ggml_codebooks.json"


def code_parts(type_name: str, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors and codes of blocks, whose products are the values.

    blocks: uint8 (..., bytes of a block). factors: float32 (..., groups). codes: int8 (..., groups,
    values of a group), from -62 to 62.
    """
    factors, codes = _PARTS[type_name](blocks.contiguous())
    return factors, _rows(codes, codes.shape[-1] // factors.shape[-1])


@cache
def _codebook(name: str, device: torch.device) -> torch.Tensor:
    """Return the values of each entry, int8 (entries, 8 or 4)."""
    stored = json.loads(_DATA.read_text(encoding="utf-8"))[name]
    rows = [
        [stored["levels"][int(digit)] for digit in entry] for entry in stored["entries"].split()
    ]
    return torch.tensor(rows, dtype=torch.int8, device=device)


def _entries(name: str, index: torch.Tensor) -> torch.Tensor:
    """Return the values of the entries of a codebook: (..., n) to int8 (..., n, values)."""
    return _codebook(name, index.device)[index]


def _float16(pairs: torch.Tensor) -> torch.Tensor:
    return pairs.contiguous().view(torch.float16).float()


def _rows(values: torch.Tensor, size: int) -> torch.Tensor:
    """Return (..., n) as (..., n / size, size)."""
    return values.reshape(*values.shape[:-1], -1, size)


def _words(stored: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return little-endian words of bytes, int64."""
    values = _rows(stored.long(), nbytes)
    words = values[..., 0]
    for byte in range(1, nbytes):
        words = words | values[..., byte] << 8 * byte
    return words


def _bits(values: torch.Tensor, shifts: tuple[int, ...], bits: int) -> torch.Tensor:
    """Return the bits of each value at each shift, side by side: (..., n) to (..., n shifts)."""
    positions = torch.tensor(shifts, dtype=torch.int64, device=values.device)
    return (values.long()[..., None] >> positions & ((1 << bits) - 1)).flatten(-2)


def _signed(values: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Negate values (..., n, 8), int8, where the bytes of signs (..., n) have a bit."""
    negative = _bits(signs[..., None], tuple(range(8)), 1)
    return torch.where(negative.bool(), -values, values)


def _even_signs(index: torch.Tensor) -> torch.Tensor:
    """Return bytes of signs of their lower seven bits, with an even number of ones."""
    parity = index ^ index >> 4
    parity = parity ^ parity >> 2
    return index | ((parity ^ parity >> 1) & 1) << 7


def _iq1(indices: torch.Tensor, high: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """Return eight times the values of entries plus or minus an eighth, int8 (..., n, 8)."""
    delta = torch.where(negative.bool(), -1, 1).to(torch.int8)
    return _entries("IQ1_S", indices.long() | high << 8) * 8 + delta[..., None]


def _iq1_s(blocks: torch.Tensor) -> Parts:
    d, words = _float16(blocks[..., :2]), _words(blocks[..., 34:], 2)
    factors = d * ((words >> 12 & 7) * 2 + 1) / 8
    negative = (words >> 15).repeat_interleave(4, -1)
    codes = _iq1(blocks[..., 2:34], _bits(words, (0, 3, 6, 9), 3), negative)
    return factors, codes.flatten(-2)


def _iq1_m(blocks: torch.Tensor) -> Parts:
    words = _words(blocks[..., 48:], 2)
    quarters = (words >> 12) << torch.tensor([0, 4, 8, 12], dtype=torch.int64, device=words.device)
    bits = quarters.sum(-1, keepdim=True)
    d = torch.where(bits > 0x7FFF, bits - 0x10000, bits).to(torch.int16).view(torch.float16).float()
    factors = d * (_bits(words, (0, 3, 6, 9), 3) * 2 + 1) / 8
    nibbles = _bits(blocks[..., 32:48], (0, 4), 4)
    return factors, _iq1(blocks[..., :32], nibbles & 7, nibbles >> 3).flatten(-2)


def _iq2_xxs(blocks: torch.Tensor) -> Parts:
    groups = _rows(blocks[..., 2:], 8)
    words = _words(groups[..., 4:], 4)[..., 0]
    factors = _float16(blocks[..., :2]) * ((words >> 28).float() + 0.5) * 0.25
    signs = _even_signs(_bits(words, (0, 7, 14, 21), 7))
    codes = _signed(_entries("IQ2_XXS", groups[..., :4].flatten(-2).long()), signs)
    return factors, codes.flatten(-2)


def _iq2_factors(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return _float16(blocks[..., :2]) * (_bits(scales, (0, 4), 4).float() + 0.5) * 0.25


def _iq2_xs(blocks: torch.Tensor) -> Parts:
    words = _words(blocks[..., 2:66], 2)
    codes = _signed(_entries("IQ2_XS", words & 511), _even_signs(words >> 9))
    return _iq2_factors(blocks, blocks[..., 66:]), codes.flatten(-2)


def _iq2_s(blocks: torch.Tensor) -> Parts:
    high = _bits(blocks[..., 66:74], (0, 2, 4, 6), 2)
    values = _entries("IQ2_S", blocks[..., 2:34].long() | high << 8)
    codes = _signed(values, blocks[..., 34:66])
    return _iq2_factors(blocks, blocks[..., 74:]), codes.flatten(-2)


def _iq3_xxs(blocks: torch.Tensor) -> Parts:
    words = _words(blocks[..., 66:], 4)
    factors = _float16(blocks[..., :2]) * ((words >> 28).float() + 0.5) * 0.5
    values = _entries("IQ3_XXS", blocks[..., 2:66].long()).flatten(-2)
    signs = _even_signs(_bits(words, (0, 7, 14, 21), 7))
    return factors, _signed(_rows(values, 8), signs).flatten(-2)


def _iq3_s(blocks: torch.Tensor) -> Parts:
    factors = _float16(blocks[..., :2]) * (_bits(blocks[..., 106:], (0, 4), 4) * 2 + 1)
    high = _bits(blocks[..., 66:74], tuple(range(8)), 1)
    values = _entries("IQ3_S", blocks[..., 2:66].long() | high << 8)
    values = _rows(values.flatten(-2), 8)
    return factors, _signed(values, blocks[..., 74:106]).flatten(-2)


_PARTS = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}
