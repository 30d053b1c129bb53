"""Blocks of ggml's types as weights of a scheme, or as numbers.

A block has consecutive values of a row. With d and dmin in float16:

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

`ggml_codebooks` has IQ1, IQ2 and IQ3. A byte of TQ1_0 has five values, the last 4 bytes four: q is
the first digit, in base 3, of the byte as a fraction of 256, and the byte is multiplied by 3 for
the next. In blocks of 32 values, byte j has value j in the low nibble and value j + 16 in the high
one, and the groups of IQ4_XS are like them. Q4_K, Q5_K and IQ4_XS have a scale s of 6 bits for 32
values, Q2_K, Q3_K and Q6_K one for 16. All products are exact in float32; a sum or a difference is
rounded once.
"""

from collections.abc import Callable

import torch

from modular_kernel.checkpoints.ggml_codebooks import code_parts
from modular_kernel.quant.scale_tiles import pack_pairs
from modular_kernel.spec.quantization import QuantScheme

_GROUPS = 8  # of 32 values in a block of 256
# The levels of IQ4_NL and IQ4_XS.
_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantize_blocks(type_name: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return the values of blocks, float32. blocks: uint8 (..., blocks, bytes of a block)."""
    if type_name in _VALUES:
        return _VALUES[type_name](blocks).flatten(-2)
    factors, codes = code_parts(type_name, blocks)
    return codes.float().mul_(factors[..., None]).flatten(-3)


def group_weights(
    type_name: str, scheme: QuantScheme, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (w, scale) of a scheme that has the values of blocks exactly, in groups of 32.

    blocks: uint8 (rows, blocks, bytes). w: uint8, (rows, K) or packed (rows, K / 2). scale: (rows,
    K / 32), float16, float32 where a block has scales of its own, or bytes of mxfp4.
    """
    if scheme.weight == "float4_e2m1":
        return _packed(blocks[..., 1:]).flatten(-2), blocks[..., 0].contiguous()
    if type_name == "IQ4_XS":
        scale, codes = _iq4_xs_parts(blocks)
        return _level_codes(codes).flatten(-3), scale.flatten(-2)
    if type_name in _CODEBOOKS:
        scale, codes = code_parts(type_name, blocks)
        return (codes.view(torch.uint8) ^ 0x80).flatten(-3), scale.flatten(-2)
    if type_name in _TERNARY:
        scale = _float16(blocks[..., -2:]).expand(*blocks.shape[:-1], _GROUPS)
        return (_TERNARY[type_name](blocks) + 127).flatten(-2), scale.flatten(-2)
    scale = _float16(blocks[..., :2])[..., 0]
    if type_name == "Q8_0":
        return (blocks[..., 2:] ^ 0x80).flatten(-2), scale
    if type_name == "Q5_0":
        return (_five_bits(blocks[..., 2:]) + 112).flatten(-2), scale  # minus 16, and plus 128
    if type_name == "IQ4_NL":
        return _level_codes(_nibbles(blocks[..., 2:])).flatten(-2), scale
    if scheme.packed:
        return _packed(blocks[..., 2:]).flatten(-2), scale
    return (_nibbles(blocks[..., 2:]) + 120).flatten(-2), scale  # minus 8, and plus 128


def _float16(pairs: torch.Tensor) -> torch.Tensor:
    return pairs.contiguous().view(torch.float16)


def _split(values: torch.Tensor, parts: int) -> torch.Tensor:
    """Return (..., parts, n) of (..., parts n)."""
    return values.reshape(*values.shape[:-1], parts, -1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the low nibbles of the bytes of each block, then the high ones, uint8."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _packed(packed: torch.Tensor) -> torch.Tensor:
    """Return the nibbles of each block in pairs of neighbors, the even value low."""
    return pack_pairs(_nibbles(packed), packed.dim() - 1)


def _five_bits(stored: torch.Tensor) -> torch.Tensor:
    """Return codes of 5 bits from 4 bytes of high bits and 16 bytes of low nibbles."""
    bits = stored[..., :4, None] >> torch.arange(8, dtype=torch.uint8, device=stored.device)
    return _nibbles(stored[..., 4:]) | (bits & 1).flatten(-2) << 4


def _levels(codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(_LEVELS, dtype=torch.float32, device=codes.device)[codes.int()]


def _level_codes(codes: torch.Tensor) -> torch.Tensor:
    """Return the levels of codes plus 128, uint8."""
    levels = torch.tensor(_LEVELS, dtype=torch.int16, device=codes.device) + 128
    return levels.to(torch.uint8)[codes.int()]


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = blocks[..., 2:].view(torch.int8).float()
    return codes.mul_(_float16(blocks[..., :2]).float())


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[..., 2:]).float().sub_(8)
    return codes.mul_(_float16(blocks[..., :2]).float())


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    factors = _float16(blocks[..., :4]).float()
    codes = _nibbles(blocks[..., 4:]).float()
    return codes.mul_(factors[..., :1]).add_(factors[..., 1:])


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _five_bits(blocks[..., 2:]).float().sub_(16)
    return codes.mul_(_float16(blocks[..., :2]).float())


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    factors = _float16(blocks[..., :4]).float()
    codes = _five_bits(blocks[..., 4:]).float()
    return codes.mul_(factors[..., :1]).add_(factors[..., 1:])


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _levels(_nibbles(blocks[..., 2:])).mul_(_float16(blocks[..., :2]).float())


def _iq4_xs_parts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of groups, float32 (..., 8), and their codes (..., 8, 32)."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    high = (blocks[..., 2:4, None] >> shifts & 3).flatten(-2)
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2)
    factor = _float16(blocks[..., :2]).float()
    scale = (low | high << 4).float().sub_(32).mul_(factor)
    return scale, _nibbles(_split(blocks[..., 8:], _GROUPS))


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    scale, codes = _iq4_xs_parts(blocks)
    return _levels(codes).mul_(scale[..., None]).flatten(-2)


def _two_bits(stored: torch.Tensor) -> torch.Tensor:
    """Return codes of 2 bits (..., 256) from 64 bytes: of each 32 bytes first the lowest bits."""
    halves = _split(stored, 2)
    return torch.cat([halves >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)


def _ternary_codes_of_2_bits(blocks: torch.Tensor) -> torch.Tensor:
    return _two_bits(blocks[..., :64])


def _ternary_codes_of_digits(blocks: torch.Tensor) -> torch.Tensor:
    """Return codes from 0 to 2 of TQ1_0, uint8 (..., 256)."""
    digits = [
        stored * power  # of what is left of the fraction, modulo 256
        for stored, powers in (
            (blocks[..., :32], (1, 3, 9, 27, 81)),
            (blocks[..., 32:48], (1, 3, 9, 27, 81)),
            (blocks[..., 48:52], (1, 3, 9, 27)),
        )
        for power in powers
    ]
    return (torch.cat(digits, -1).short() * 3 >> 8).to(torch.uint8)


def _ternary(codes: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    return codes.float().sub_(1).mul_(_float16(blocks[..., -2:]).float())


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    factors, packed = _float16(blocks[..., 80:]).float(), blocks[..., :16]
    scales = (packed & 15).float() * factors[..., :1]
    minima = (packed >> 4).float() * factors[..., 1:]
    codes = _split(_two_bits(blocks[..., 16:80]), 16).float()
    return codes.mul_(scales[..., None]).sub_(minima[..., None]).flatten(-2)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    # Scale i has four bits in byte i % 8 of the first bytes, and two in byte i % 4 of the others.
    pairs = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    scales = (torch.cat([low & 15, low >> 4], -1) | pairs << 4).float().sub_(32)
    scales = scales * _float16(blocks[..., 108:]).float()
    bits = torch.cat([blocks[..., :32] >> group & 1 for group in range(_GROUPS)], -1)
    codes = (_two_bits(blocks[..., 32:96]) | bits << 2).float().sub_(4)
    return _split(codes, 16).mul_(scales[..., None]).flatten(-2)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float32, device=blocks.device)
    levels = torch.cat([levels, -levels])
    exponents = blocks[..., :1].int() - 127
    return torch.ldexp(levels[_nibbles(blocks[..., 1:]).int()], exponents)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _scaled_groups(blocks, _pairs_of_groups(blocks[..., 16:]))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    bits = torch.stack([blocks[..., 16:48] >> group & 1 for group in range(_GROUPS)], -2)
    return _scaled_groups(blocks, _pairs_of_groups(blocks[..., 48:]) | bits << 4)


def _pairs_of_groups(stored: torch.Tensor) -> torch.Tensor:
    """Return codes (..., 8, 32) from 128 bytes: each 32 have a group low and the next one high."""
    codes = _split(stored, _GROUPS // 2)
    return torch.stack([codes & 15, codes >> 4], -2).flatten(-3, -2)


def _scaled_groups(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return (d s) q - (dmin m). codes: q, (..., 8, 32)."""
    factors, packed = _float16(blocks[..., :4]).float(), blocks[..., 4:16]
    low, high, last = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    # Groups 0 to 3 have 6 bits of a byte; the others four bits of `last`, and two of the first.
    scales = torch.cat([low & 63, (last & 15) | (low >> 6 << 4)], -1).float()
    minima = torch.cat([high & 63, (last >> 4) | (high >> 6 << 4)], -1).float()
    scales, minima = scales * factors[..., :1], minima * factors[..., 1:]
    return (codes * scales[..., None] - minima[..., None]).flatten(-2)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low, high = _split(blocks[..., :128], 2), _split(blocks[..., 128:192], 2)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scales = scales * _float16(blocks[..., 208:]).float()
    # Each half of 128 values: 32 low nibbles, 32 more, then their high nibbles.
    nibbles = torch.cat([low & 15, low >> 4], -1)
    pairs = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    codes = (nibbles | (pairs << 4)).flatten(-2).float().sub_(32)
    return (_split(codes, 16) * scales[..., None]).flatten(-2)


def _floats(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks.contiguous().view(dtype).float()


# Types with a codebook and a scale for 32 values.
_CODEBOOKS = ("IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ3_S")
_TERNARY = {"TQ1_0": _ternary_codes_of_digits, "TQ2_0": _ternary_codes_of_2_bits}
_VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F32": _floats(torch.float32),
    "F16": _floats(torch.float16),
    "BF16": _floats(torch.bfloat16),
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "TQ1_0": lambda blocks: _ternary(_ternary_codes_of_digits(blocks), blocks),
    "TQ2_0": lambda blocks: _ternary(_ternary_codes_of_2_bits(blocks), blocks),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
