"""Tiles of a weight matrix that share a scale, and pairs of values that share a byte."""

import torch

from modular_kernel.errors import DtypeError
from modular_kernel.spec.problem import dtype_name
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.utils.tensor_checks import check_tensor


def unpack_pairs(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """Unpack uint8 with two values a byte along `dim`, the low nibble first: one value a byte."""
    return torch.stack([packed & 15, packed >> 4], dim + 1).flatten(dim, dim + 1)


def pack_pairs(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Pack one nibble a byte to two along `dim`, the even one low."""
    shape = values.shape
    pairs = values.reshape(*shape[:dim], shape[dim] // 2, 2, *shape[dim + 1 :])
    return pairs.select(dim + 1, 0) | (pairs.select(dim + 1, 1) << 4)


def from_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """Return 2^(s - 127) in float32, by its bits: exact, subnormal for 0, NaN for 255.

    scale: uint8 or float8_e8m0fnu of any shape. DtypeError for another dtype, and every error of
    `check_tensor`.
    """
    check_tensor("scale", scale)
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise DtypeError("scale", got=dtype_name(scale.dtype), need="uint8 or float8_e8m0fnu")
    exponent = scale.view(torch.uint8).int()
    bits = torch.where(exponent == 0, 0x00400000, exponent << 23)
    return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)


def spread(tiles: torch.Tensor, scheme: QuantScheme, rows: int, depth: int) -> torch.Tensor:
    """Spread one value a tile to one a weight: broadcastable to (e, rows, depth)."""
    if scheme.granularity == "tensor":
        return tiles[:, None, None]
    if scheme.granularity == "channel":
        return tiles[:, :, None]
    if scheme.granularity == "block":
        tiles = tiles.repeat_interleave(min(scheme.group[0], rows), 1)[:, :rows]
    return tiles.repeat_interleave(min(scheme.group[-1], depth), 2)[:, :, :depth]


def extremes(w_eNK: torch.Tensor, scheme: QuantScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest and smallest weight of each tile, zeros past a ragged end included."""
    e, rows, depth = w_eNK.shape
    if scheme.granularity == "tensor":
        return w_eNK.amax((1, 2)), w_eNK.amin((1, 2))
    if scheme.granularity == "channel":
        return w_eNK.amax(2), w_eNK.amin(2)
    bn = scheme.group[0] if scheme.granularity == "block" else 1
    bn, bk = min(bn, rows), min(scheme.group[-1], depth)
    padded = torch.nn.functional.pad(w_eNK, (0, -depth % bk, 0, -rows % bn))
    tiles = padded.view(e, ceil_div(rows, bn), bn, ceil_div(depth, bk), bk)
    high, low = tiles.amax((2, 4)), tiles.amin((2, 4))
    return high, low


def ceil_div(value: int, step: int) -> int:
    return -(-value // step)
