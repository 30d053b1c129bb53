"""Blocks of ggml's types as weights of a scheme, or as numbers.

A block has consecutive values of a row. With d and dmin in float16:

    Q8_0    32 values    d, 32 int8 q                                 d q
    Q4_0    32 values    d, 16 bytes                                  d (q - 8)
    MXFP4   32 values    a byte e (E8M0), 16 bytes                    e2m1(q) 2^(e - 127)
    Q4_K   256 values    d, dmin, 12 bytes of scales, 128 bytes       (d s) q - (dmin m)
    Q6_K   256 values    128 bytes, 64 bytes, 16 int8 scales s, d     (d s) (q - 32)

Byte j of Q4_0 and MXFP4 has value j in the low nibble and value j + 16 in the high one. Q4_K has
eight scales s and eight m of 6 bits, one of each for 32 values; Q6_K has a scale for 16 values. The
products of Q4_K and Q6_K are exact in float32; the difference in Q4_K is rounded once.
"""

from collections.abc import Callable

import torch

from modular_kernel.quant.scale_tiles import pack_pairs
from modular_kernel.spec.quantization import QuantScheme

_Q4_K_GROUPS = 8


def dequantize_blocks(type_name: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return the values of blocks, float32. blocks: uint8 (..., blocks, bytes of a block)."""
    return _VALUES[type_name](blocks).flatten(-2)


def group_weights(
    type_name: str, scheme: QuantScheme, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (w, scale) of a scheme that has the values of blocks exactly, in groups of 32.

    blocks: uint8 (rows, blocks, bytes). w: uint8, (rows, K) or packed (rows, K / 2). scale: float16
    (rows, K / 32), or bytes of mxfp4.
    """
    if scheme.weight == "float4_e2m1":
        return _packed(blocks[..., 1:]).flatten(-2), blocks[..., 0].contiguous()
    scale = _float16(blocks[..., :2])[..., 0]
    if type_name == "Q8_0":
        return (blocks[..., 2:] ^ 0x80).flatten(-2), scale
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


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = blocks[..., 2:].view(torch.int8).float()
    return codes.mul_(_float16(blocks[..., :2]).float())


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[..., 2:]).float().sub_(8)
    return codes.mul_(_float16(blocks[..., :2]).float())


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float32, device=blocks.device)
    levels = torch.cat([levels, -levels])
    exponents = blocks[..., :1].int() - 127
    return torch.ldexp(levels[_nibbles(blocks[..., 1:]).int()], exponents)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    factors, packed = _float16(blocks[..., :4]).float(), blocks[..., 4:16]
    low, high, last = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    # Groups 0 to 3 have 6 bits of a byte; the others four bits of `last`, and two of the first.
    scales = torch.cat([low & 63, (last & 15) | (low >> 6 << 4)], -1).float()
    minima = torch.cat([high & 63, (last >> 4) | (high >> 6 << 4)], -1).float()
    scales, minima = scales * factors[..., :1], minima * factors[..., 1:]
    codes = _split(blocks[..., 16:], _Q4_K_GROUPS // 2)
    codes = torch.stack([codes & 15, codes >> 4], -2).flatten(-3, -2)  # (..., 8 groups, 32)
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


_VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F32": _floats(torch.float32),
    "F16": _floats(torch.float16),
    "BF16": _floats(torch.bfloat16),
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "MXFP4": _mxfp4,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
