"""How e2m1 weights lie for products that take them from registers.

Weight rows go in tiles of four blocks of 64, two for each of two warpgroups; the depth in steps of
64. What a step of a tile takes lies together: (64, 32) int32 words, 16 lines a block, and (8, 16)
int32 words of scales. Of a block, thread t of 128 has words 4 t to 4 t + 3: those of weight rows
r and r + 8 of its warp's sixteen, r = t % 32 / 4, and for each row one of both groups of 32 along
the depth. wgmma wants of lane c = t % 4 values 2c, 2c + 1, 2c + 8 and 2c + 9 of sixteen: so
a group's word holds the pairs at 2c, 2c + 8, 2c + 16 and 2c + 24, as `modular_kernel.repacked` has
pairs in words. Thus every word has one scale, and tokens are read as they are.

Scales: four bytes for each four threads and block, of the four words of each of them. A byte is the
exponent of the bf16 number that the codes, as they read in bf16's fields, are to be multiplied by.
It would be too large from a scale of 4 on: so all are less by 2^50, and results are multiplied by
it. From 2^52 on a scale is infinite; a weight below 2^-76 may lose its last bit.
"""

from typing import NamedTuple

import torch

from modular_kernel.errors import DtypeError, ShapeError
from modular_kernel.repacked import repack, unpack_words
from modular_kernel.types import dtype_name

BLOCK = 64  # rows of a block, and the depth of a step
BLOCKS = 4  # of a tile
GROUP = 32  # of the depth that one scale covers
LINES, LINE = 16 * BLOCKS, 32  # words of a step of a tile
SCALE_LINES, SCALE_LINE = 8, 16  # words of its scales
# A code reads as its value times 2^-126, and an exponent e stands for 2^(e - 127) in both formats.
LOWERED = 50
RAISED = 126 - LOWERED  # of a scale's exponent
_INFINITE = 255


class Tiled(NamedTuple):
    """Weights of all experts: (e, tiles, steps, 64, 32), and (e, tiles, steps, 8, 16)."""

    words: torch.Tensor
    scales: torch.Tensor

    @property
    def tiles(self) -> int:
        """How many tiles an expert's weight rows make."""
        return self.words.shape[1]

    @property
    def steps(self) -> int:
        """How many steps the depth makes."""
        return self.words.shape[2]


def rows_of_tiles(columns: int, step: int, up_row: int, *, gated: bool) -> torch.Tensor:
    """Return the weight row of each row of each tile, (tiles, 256) int64; -1 for none.

    Column n uses row n * step, and n * step + up_row for its up value. Of a gated product every
    second block has up rows, those of the columns of the block before.
    """
    sides = 2 if gated else 1
    per_tile = BLOCKS // sides * BLOCK
    tiles = -(-columns // per_tile)
    column = torch.arange(tiles * per_tile).view(tiles, BLOCKS // sides, 1, BLOCK)
    row = column * step + torch.arange(sides).view(sides, 1) * up_row
    return torch.where(column < columns, row, -1).view(tiles, BLOCKS * BLOCK)


def tile_weights(w_eNK: torch.Tensor, scale_eNG: torch.Tensor, rows: torch.Tensor) -> Tiled:
    """Bring weights to this order; rows: as `rows_of_tiles` gives them.

    w_eNK: uint8 (e, N, K / 2), two codes to a byte, the low nibble first along K, a multiple of 32.
    scale_eNG: uint8 E8M0 exponents (e, N, K / 32). ShapeError, DtypeError.
    """
    experts, _, width = w_eNK.shape
    groups = 2 * width // GROUP
    for name, given in (("w", w_eNK), ("scale", scale_eNG)):
        if given.dtype is not torch.uint8:
            raise DtypeError(name, got=dtype_name(given.dtype), need="uint8")
    need = (*w_eNK.shape[:2], groups)
    if 2 * width % GROUP or scale_eNG.shape != need:
        raise ShapeError("scale", got=tuple(scale_eNG.shape), need=f"{need} and a depth of 32s")
    steps, tiles, device = -(-2 * width // BLOCK), len(rows), w_eNK.device
    words = torch.empty((experts, tiles, steps, LINES, LINE), dtype=torch.int32, device=device)
    scales = torch.empty(
        (experts, tiles, steps, SCALE_LINES, SCALE_LINE), dtype=torch.int32, device=device
    )
    taken = rows.to(device).flatten()
    there = (taken >= 0).view(-1, 1)
    for expert in range(experts):  # one copy of one expert's at a time
        codes = torch.zeros((len(taken), steps * BLOCK // 2), dtype=torch.uint8, device=device)
        codes[:, :width] = w_eNK[expert][taken.clamp(min=0)] * there
        # row: warp, half, row; byte: step, group, pair, lane
        split = codes.view(tiles, BLOCKS, 4, 2, 8, steps, 2, 4, 4)
        bytes_ = split.permute(0, 5, 1, 2, 4, 8, 3, 6, 7).reshape(1, -1, 4 * LINE)
        words[expert] = repack(bytes_).view(torch.int32).view(words.shape[1:])
        exponent = torch.zeros((len(taken), steps * 2), dtype=torch.uint8, device=device)
        raised = (scale_eNG[expert].int() + RAISED).clamp_(max=_INFINITE).to(torch.uint8)
        exponent[:, :groups] = raised[taken.clamp(min=0)] * there
        split = exponent.view(tiles, BLOCKS, 4, 2, 8, steps, 2)
        bytes_ = split.permute(0, 5, 2, 4, 1, 3, 6).reshape(-1, 4)
        scales[expert] = bytes_.view(torch.int32).view(scales.shape[1:])
    return Tiled(words, scales)


def untiled(tiled: Tiled) -> torch.Tensor:
    """Return float32 weights (e, tiles * 256, steps * 64) as the kernel unpacks them."""
    experts, tiles, steps = tiled.words.shape[:3]
    pairs = torch.stack(unpack_words(tiled.words.long() & 0xFFFFFFFF), -1)
    both = torch.stack((pairs & 0xFFFF, pairs >> 16), -1).to(torch.int32)
    values = (both << 16).view(torch.float32)
    values = values.view(experts, tiles, steps, BLOCKS, 4, 8, 4, 2, 2, 4, 2)
    exponents = tiled.scales.view(torch.uint8).view(experts, tiles, steps, 4, 8, BLOCKS, 2, 2)
    factor = torch.exp2(exponents.double() - 127).where(exponents < _INFINITE, torch.inf)
    factor = factor.permute(0, 1, 2, 5, 3, 4, 6, 7)
    wide = values.double() * factor[:, :, :, :, :, :, None, :, :, None, None]
    ordered = wide.permute(0, 1, 3, 4, 7, 5, 2, 8, 9, 6, 10)
    whole = ordered.reshape(experts, tiles * BLOCKS * BLOCK, steps * BLOCK) * 2.0**LOWERED
    return whole.float()
