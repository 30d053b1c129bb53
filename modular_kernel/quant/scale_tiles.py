"""Tiles of weights that share a scale, E8M0 scales, and packing of two 4-bit values per byte."""

import torch

from modular_kernel.errors import DtypeError
from modular_kernel.spec.problem import dtype_name
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.utils.tensor_checks import check_tensor


def unpack_pairs(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """Unpack uint8 along `dim` into one 4-bit value per byte, low nibble first."""
    return torch.stack([packed & 15, packed >> 4], dim + 1).flatten(dim, dim + 1)


def pack_pairs(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Pack pairs of 4-bit values along `dim` into bytes. The first value is in the low nibble."""
    shape = values.shape
    pairs = values.reshape(*shape[:dim], shape[dim] // 2, 2, *shape[dim + 1 :])
    return pairs.select(dim + 1, 0) | (pairs.select(dim + 1, 1) << 4)


def e8m0_to_float(scale: torch.Tensor) -> torch.Tensor:
    """Convert E8M0 scales s to float32: exactly 2^(s - 127), and NaN for s = 255.

    Raise DtypeError for another dtype, and the errors of `check_tensor`.

    scale: uint8 or float8_e8m0fnu of any shape.
    """
    check_tensor("scale", scale)
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise DtypeError("scale", got=dtype_name(scale.dtype), need="uint8 or float8_e8m0fnu")
    exponent = scale.view(torch.uint8).int()
    bits = torch.where(exponent == 0, 0x00400000, exponent << 23)  # 2^-127 is subnormal
    return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)


def expand_scales(tiles: torch.Tensor, scheme: QuantScheme, rows: int, depth: int) -> torch.Tensor:
    """Expand values of tiles to a tensor that broadcasts to the weights (e, rows, depth)."""
    if scheme.granularity == "tensor":
        return tiles[:, None, None]
    if scheme.granularity == "channel":
        return tiles[:, :, None]
    if scheme.granularity == "block":
        tiles = tiles.repeat_interleave(min(scheme.group[0], rows), 1)[:, :rows]
    return tiles.repeat_interleave(min(scheme.group[-1], depth), 2)[:, :, :depth]


def compute_tile_bounds(
    w_eNK: torch.Tensor, scheme: QuantScheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maximum and the minimum of each tile of weights.

    Both have the shape of the argument `tiles` of `expand_scales`. Partial tiles are padded with
    zeros, so their maximum is at least 0 and their minimum at most 0.
    """
    e, rows, depth = w_eNK.shape
    if scheme.granularity == "tensor":
        return w_eNK.amax((1, 2)), w_eNK.amin((1, 2))
    if scheme.granularity == "channel":
        return w_eNK.amax(2), w_eNK.amin(2)
    tile_rows = scheme.group[0] if scheme.granularity == "block" else 1
    tile_rows, tile_depth = min(tile_rows, rows), min(scheme.group[-1], depth)
    padded = torch.nn.functional.pad(w_eNK, (0, -depth % tile_depth, 0, -rows % tile_rows))
    tiles = padded.view(
        e, ceil_div(rows, tile_rows), tile_rows, ceil_div(depth, tile_depth), tile_depth
    )
    maximum, minimum = tiles.amax((2, 4)), tiles.amin((2, 4))
    return maximum, minimum


def ceil_div(value: int, step: int) -> int:
    return -(-value // step)
