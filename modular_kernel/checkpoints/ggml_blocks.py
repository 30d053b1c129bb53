"""Conversion of GGUF blocks to the codes and scales of a scheme, or to float32 values.

A block has 32 or 256 consecutive values of a row. The table shows for each type of ggml the bytes
of a block in their order, and the value of a code q. d, dmin and m are float16, s are scales of
groups of values within the block, and table is `_IQ4_VALUES`.

    type    values        bytes                                           value
    Q8_0     32 values    d, 32 int8 q                                    d q
    Q4_0     32 values    d, 16 bytes                                     d (q - 8)
    Q4_1     32 values    d, m, 16 bytes                                  d q + m
    Q5_0     32 values    d, 4 bytes of high bits, 16 bytes               d (q - 16)
    Q5_1     32 values    d, m, 4 bytes of high bits, 16 bytes            d q + m
    IQ4_NL   32 values    d, 16 bytes                                     d table(q)
    MXFP4    32 values    a byte e (E8M0), 16 bytes                       e2m1(q) 2^(e - 127)
    Q2_K    256 values    16 bytes of s and m, 64 bytes, d, dmin          (d s) q - (dmin m)
    Q3_K    256 values    32 bytes of high bits, 64 bytes, 12 of s, d     (d (s - 32)) (q - 4)
    Q4_K    256 values    d, dmin, 12 bytes of s and m, 128 bytes         (d s) q - (dmin m)
    Q5_K    256 values    as Q4_K, with 32 bytes of high bits             (d s) q - (dmin m)
    Q6_K    256 values    128 bytes, 64 bytes, 16 int8 scales s, d        (d s) (q - 32)
    IQ4_XS  256 values    d, 2 bytes and 4 bytes of s, 128 bytes          (d (s - 32)) table(q)
    TQ2_0   256 values    64 bytes, d                                     d (q - 1)
    TQ1_0   256 values    52 bytes, d                                     d (q - 1)

- In blocks of 32 values, and in the groups of IQ4_XS, byte j has value j in the low nibble and
  value j + 16 in the high one.
- Q4_K, Q5_K and IQ4_XS have a scale s of 6 bits for 32 values. Q2_K, Q3_K and Q6_K have a scale for
  16 values.
- A byte of TQ1_0 has five codes, except that each of the last four bytes has four. The codes are
  the digits of byte / 256 in base 3. Multiplying by 3 gives the next code as integer part.

`ggml_codebooks` has the types IQ1, IQ2 and IQ3. All products are exact in float32, and a sum or
difference is rounded once.
"""

from collections.abc import Callable

import torch

from modular_kernel.checkpoints.ggml_codebooks import unpack_codes
from modular_kernel.quant.scale_tiles import pack_pairs
from modular_kernel.spec.quantization import QuantScheme

_GROUPS_PER_BLOCK = 8  # groups of 32 values in a block of 256
# Values of the codes of IQ4_NL and IQ4_XS.
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantize_blocks(type_name: str, blocks: torch.Tensor) -> torch.Tensor:
    """Dequantize blocks to float32.

    type_name: name in ggml, such as "Q4_K".
    blocks: (..., blocks, bytes per block) uint8.

    Returns (..., values).
    """
    if type_name in _DEQUANTIZERS:
        return _DEQUANTIZERS[type_name](blocks).flatten(-2)
    factors, codes = unpack_codes(type_name, blocks)
    return codes.float().mul_(factors[..., None]).flatten(-3)


def repack_blocks(
    type_name: str, scheme: QuantScheme, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert blocks to w and scale of a scheme with groups of 32 columns, without rounding.

    type_name: name in ggml.
    scheme: mxfp4, or 4- or 8-bit integers, whose codes have an offset of 8 or 128.
    blocks: (rows, blocks, bytes per block) uint8.

    Returns w (rows, K) uint8, or (rows, K / 2) if the scheme packs pairs, and scale (rows, K / 32).
    The scale is in E8M0 bytes for mxfp4, float32 for types with several scales per block, and
    float16 for others.
    """
    if scheme.weight == "float4_e2m1":
        return _pack_nibbles(blocks[..., 1:]).flatten(-2), blocks[..., 0].contiguous()
    if type_name == "IQ4_XS":
        scale, codes = _unpack_iq4_xs(blocks)
        return _look_up_codes(codes).flatten(-3), scale.flatten(-2)
    if type_name in _CODEBOOK_TYPES:
        scale, codes = unpack_codes(type_name, blocks)
        return (codes.view(torch.uint8) ^ 0x80).flatten(-3), scale.flatten(-2)
    if type_name in _TERNARY_UNPACKERS:
        scale = _read_float16(blocks[..., -2:]).expand(*blocks.shape[:-1], _GROUPS_PER_BLOCK)
        return (_TERNARY_UNPACKERS[type_name](blocks) + 127).flatten(-2), scale.flatten(-2)
    scale = _read_float16(blocks[..., :2])[..., 0]
    if type_name == "Q8_0":
        return (blocks[..., 2:] ^ 0x80).flatten(-2), scale
    if type_name == "Q5_0":
        return (_unpack_5_bit_codes(blocks[..., 2:]) + 112).flatten(-2), scale  # q - 16 + 128
    if type_name == "IQ4_NL":
        return _look_up_codes(_unpack_nibbles(blocks[..., 2:])).flatten(-2), scale
    if scheme.packed:
        return _pack_nibbles(blocks[..., 2:]).flatten(-2), scale
    return (_unpack_nibbles(blocks[..., 2:]) + 120).flatten(-2), scale  # q - 8 + 128


def _read_float16(stored: torch.Tensor) -> torch.Tensor:
    return stored.contiguous().view(torch.float16)


def _split_last_dim(values: torch.Tensor, parts: int) -> torch.Tensor:
    """Reshape (..., parts * n) to (..., parts, n)."""
    return values.reshape(*values.shape[:-1], parts, -1)


def _unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the low nibbles of all bytes of a block, followed by the high nibbles, as uint8."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _pack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes of `_unpack_nibbles` in packed pairs of neighbors, the even one low."""
    return pack_pairs(_unpack_nibbles(packed), packed.dim() - 1)


def _unpack_5_bit_codes(stored: torch.Tensor) -> torch.Tensor:
    """Return the 5-bit codes of 4 bytes of high bits and 16 bytes of low nibbles."""
    bits = stored[..., :4, None] >> torch.arange(8, dtype=torch.uint8, device=stored.device)
    return _unpack_nibbles(stored[..., 4:]) | (bits & 1).flatten(-2) << 4


def _unpack_2_bit_codes(stored: torch.Tensor) -> torch.Tensor:
    """Return 2-bit codes (..., 256) from 64 bytes.

    The first 32 bytes have the first 128 codes, in the order bits 0 and 1 of all bytes, bits 2 and
    3 of all bytes, and so on.
    """
    halves = _split_last_dim(stored, 2)
    return torch.cat([halves >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)


def _look_up_float(codes: torch.Tensor) -> torch.Tensor:
    """Look up codes of IQ4 in `_IQ4_VALUES`. Returns float32."""
    return torch.tensor(_IQ4_VALUES, dtype=torch.float32, device=codes.device)[codes.int()]


def _look_up_codes(codes: torch.Tensor) -> torch.Tensor:
    """Look up codes of IQ4 in `_IQ4_VALUES`. Returns uint8 with an offset of 128."""
    table = torch.tensor(_IQ4_VALUES, dtype=torch.int16, device=codes.device) + 128
    return table.to(torch.uint8)[codes.int()]


# --- Dequantizers: (..., blocks, bytes per block) uint8 to (..., blocks, values) float32 ---


def _dequantize_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = blocks[..., 2:].view(torch.int8).float()
    return codes.mul_(_read_float16(blocks[..., :2]).float())


def _dequantize_q4_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _unpack_nibbles(blocks[..., 2:]).float().sub_(8)
    return codes.mul_(_read_float16(blocks[..., :2]).float())


def _dequantize_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    factors = _read_float16(blocks[..., :4]).float()
    codes = _unpack_nibbles(blocks[..., 4:]).float()
    return codes.mul_(factors[..., :1]).add_(factors[..., 1:])


def _dequantize_q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _unpack_5_bit_codes(blocks[..., 2:]).float().sub_(16)
    return codes.mul_(_read_float16(blocks[..., :2]).float())


def _dequantize_q5_1(blocks: torch.Tensor) -> torch.Tensor:
    factors = _read_float16(blocks[..., :4]).float()
    codes = _unpack_5_bit_codes(blocks[..., 4:]).float()
    return codes.mul_(factors[..., :1]).add_(factors[..., 1:])


def _dequantize_iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _look_up_float(_unpack_nibbles(blocks[..., 2:])).mul_(
        _read_float16(blocks[..., :2]).float()
    )


def _unpack_iq4_xs(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales (..., 8) float32 and codes (..., 8, 32) uint8 of the groups."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    high = (blocks[..., 2:4, None] >> shifts & 3).flatten(-2)
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2)
    factor = _read_float16(blocks[..., :2]).float()
    scale = (low | high << 4).float().sub_(32).mul_(factor)
    return scale, _unpack_nibbles(_split_last_dim(blocks[..., 8:], _GROUPS_PER_BLOCK))


def _dequantize_iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    scale, codes = _unpack_iq4_xs(blocks)
    return _look_up_float(codes).mul_(scale[..., None]).flatten(-2)


def _unpack_tq2_0(blocks: torch.Tensor) -> torch.Tensor:
    """Return codes from 0 to 2 of TQ2_0, (..., 256) uint8."""
    return _unpack_2_bit_codes(blocks[..., :64])


def _unpack_tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    """Return codes from 0 to 2 of TQ1_0, (..., 256) uint8."""
    fractions = [
        code_bytes * power  # uint8 wraps around, which drops the integer part
        for code_bytes, powers in (
            (blocks[..., :32], (1, 3, 9, 27, 81)),
            (blocks[..., 32:48], (1, 3, 9, 27, 81)),
            (blocks[..., 48:52], (1, 3, 9, 27)),
        )
        for power in powers
    ]
    return (torch.cat(fractions, -1).short() * 3 >> 8).to(torch.uint8)


def _dequantize_ternary(codes: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    return codes.float().sub_(1).mul_(_read_float16(blocks[..., -2:]).float())


def _dequantize_q2_k(blocks: torch.Tensor) -> torch.Tensor:
    factors, packed = _read_float16(blocks[..., 80:]).float(), blocks[..., :16]
    scales = (packed & 15).float() * factors[..., :1]
    minima = (packed >> 4).float() * factors[..., 1:]
    codes = _split_last_dim(_unpack_2_bit_codes(blocks[..., 16:80]), 16).float()
    return codes.mul_(scales[..., None]).sub_(minima[..., None]).flatten(-2)


def _dequantize_q3_k(blocks: torch.Tensor) -> torch.Tensor:
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    # Scale i has its low four bits in byte i % 8 of `low`, and two bits in byte i % 4 of `high`.
    high_bits = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    scales = (torch.cat([low & 15, low >> 4], -1) | high_bits << 4).float().sub_(32)
    scales = scales * _read_float16(blocks[..., 108:]).float()
    bits = torch.cat([blocks[..., :32] >> group & 1 for group in range(_GROUPS_PER_BLOCK)], -1)
    codes = (_unpack_2_bit_codes(blocks[..., 32:96]) | bits << 2).float().sub_(4)
    return _split_last_dim(codes, 16).mul_(scales[..., None]).flatten(-2)


def _dequantize_mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    magnitudes = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    e2m1 = torch.tensor(magnitudes, dtype=torch.float32, device=blocks.device)
    e2m1 = torch.cat([e2m1, -e2m1])
    exponents = blocks[..., :1].int() - 127
    return torch.ldexp(e2m1[_unpack_nibbles(blocks[..., 1:]).int()], exponents)


def _dequantize_q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _scale_k_groups(blocks, _unpack_k_groups(blocks[..., 16:]))


def _dequantize_q5_k(blocks: torch.Tensor) -> torch.Tensor:
    bits = torch.stack([blocks[..., 16:48] >> group & 1 for group in range(_GROUPS_PER_BLOCK)], -2)
    return _scale_k_groups(blocks, _unpack_k_groups(blocks[..., 48:]) | bits << 4)


def _unpack_k_groups(stored: torch.Tensor) -> torch.Tensor:
    """Return the codes (..., 8, 32) of Q4_K and Q5_K from 128 bytes.

    Each run of 32 bytes has one group in the low nibbles and the next group in the high nibbles.
    """
    codes = _split_last_dim(stored, _GROUPS_PER_BLOCK // 2)
    return torch.stack([codes & 15, codes >> 4], -2).flatten(-3, -2)


def _scale_k_groups(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the values (d s) q - (dmin m) of Q4_K and Q5_K from the codes q, (..., 8, 32)."""
    factors, packed = _read_float16(blocks[..., :4]).float(), blocks[..., 4:16]
    low, high, last = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    # For groups 0 to 3, s and m are the low 6 bits of a byte in `low` and `high`. For groups 4 to
    # 7, their low 4 bits are in `last`, and their 2 high bits are the top bits of `low` and `high`.
    scales = torch.cat([low & 63, (last & 15) | (low >> 6 << 4)], -1).float()
    minima = torch.cat([high & 63, (last >> 4) | (high >> 6 << 4)], -1).float()
    scales, minima = scales * factors[..., :1], minima * factors[..., 1:]
    return (codes * scales[..., None] - minima[..., None]).flatten(-2)


def _dequantize_q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low, high = _split_last_dim(blocks[..., :128], 2), _split_last_dim(blocks[..., 128:192], 2)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scales = scales * _read_float16(blocks[..., 208:]).float()
    # Each half has 128 values: the low nibbles of 64 bytes, then their high nibbles.
    nibbles = torch.cat([low & 15, low >> 4], -1)
    high_bits = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    codes = (nibbles | (high_bits << 4)).flatten(-2).float().sub_(32)
    return (_split_last_dim(codes, 16) * scales[..., None]).flatten(-2)


def _make_float_reader(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks.contiguous().view(dtype).float()


# Codebook types with a scale per 32 values. Other types have a scale per 16 values, which no scheme
# supports.
_CODEBOOK_TYPES = ("IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ3_S")
_TERNARY_UNPACKERS = {"TQ1_0": _unpack_tq1_0, "TQ2_0": _unpack_tq2_0}
_DEQUANTIZERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F32": _make_float_reader(torch.float32),
    "F16": _make_float_reader(torch.float16),
    "BF16": _make_float_reader(torch.bfloat16),
    "Q8_0": _dequantize_q8_0,
    "Q4_0": _dequantize_q4_0,
    "Q4_1": _dequantize_q4_1,
    "Q5_0": _dequantize_q5_0,
    "Q5_1": _dequantize_q5_1,
    "IQ4_NL": _dequantize_iq4_nl,
    "IQ4_XS": _dequantize_iq4_xs,
    "MXFP4": _dequantize_mxfp4,
    "TQ1_0": lambda blocks: _dequantize_ternary(_unpack_tq1_0(blocks), blocks),
    "TQ2_0": lambda blocks: _dequantize_ternary(_unpack_tq2_0(blocks), blocks),
    "Q2_K": _dequantize_q2_k,
    "Q3_K": _dequantize_q3_k,
    "Q4_K": _dequantize_q4_k,
    "Q5_K": _dequantize_q5_k,
    "Q6_K": _dequantize_q6_k,
}
