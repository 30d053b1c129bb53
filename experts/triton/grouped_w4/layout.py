"""Memory layout of tiled 4-bit weights and scales for GEMMs that unpack weights in registers.

A tile has four blocks of 64 weight rows, two per warpgroup. K is split into steps of 64. The data
of one step of a tile is contiguous: (64, 32) int32 words, 16 lines per block, and (lines, 16)
int32 words of scales.

In a block, thread t of 128 has words 4 t to 4 t + 3, for weight rows r and r + 8 of the 16 rows of
its warp, r = t % 32 / 4, and for each row one word per half (32 columns) of the step. Out of every
16 columns, wgmma takes columns 2c, 2c + 1, 2c + 8 and 2c + 9 from lane c = t % 4, so a word has the
pairs at 2c, 2c + 8, 2c + 16 and 2c + 24. The order of the tokens along K is unchanged, and a word
has a single scale, or with NVFP4 one per two pairs.

e2m1 codes are packed in words by pairs as in `modular_kernel.quant.repacking`. For integers, pair i
is in bits 4i to 4i + 3 of the two halves. Scales are stored as groups of four words, in the order
of the threads that share rows:

    mxfp4     One word per block, for all four blocks, with four bytes: by row, then by half of the
              step. A byte is the exponent of the bf16 factor of the codes as read in the bf16
              fields. Because it would overflow from a scale of 4 on, all factors are lowered by
              2^50 and results are multiplied by 2^50. Scales from 2^52 on become infinite; a weight
              below 2^-76 may lose its last bit.
    nvfp4     Per warpgroup and block, one word per row, with four bytes, one per 16 columns of the
              step: five exponent and three significand bits, lowered by 2^19. The sign of a scale
              is applied to its codes; codes with a scale of zero are zero.
    integers  Per warpgroup and block, one word per row or, if groups are not multiples of 64, per
              row and half of the step: 2^83 times the scale in float32, whose last four bits are
              the zero point, if any. Codes are read as low bf16 bits, times 2^-133, so weights are
              lowered by 2^50. A scale from 2^45 on gives no finite number.
"""

from typing import NamedTuple

import torch

from experts.triton.operands import scale_group, word_format
from modular_kernel.spec.problem import dtype_name
from modular_kernel.spec.quantization import QuantScheme

BLOCK = 64  # rows per block, and K per step
BLOCKS_PER_TILE = 4  # per tile
GROUP = 32  # K elements covered by a word together with three others
LINES, LINE = 16 * BLOCKS_PER_TILE, 32  # words per step of a tile: lines, and words per line
SCALE_LINES_PER_ROW_WORD = 8  # lines of scales if each of 128 rows has one word
SCALE_LINE = 16  # words per line of scales
_SCALE_SHIFT = {"e2m1": 50, "nvfp4": 19, "integer": 50}


class PackedFormat(NamedTuple):
    """The format of tiled words and scales; str(form) is the FORM constant of the kernels.

    kind: "e2m1", "nvfp4" or "integer". For integers only: groups: scale words per row and K step.
    scale: the dtype of the original scales. zero: whether there are zero points.
    """

    kind: str
    groups: int = 1
    scale: str = "float32"
    zero: bool = False

    @property
    def lines(self) -> int:
        """Return the lines of scales per step of a tile."""
        return (
            SCALE_LINES_PER_ROW_WORD
            if self.kind == "e2m1"
            else 2 * self.groups * SCALE_LINES_PER_ROW_WORD
        )

    @property
    def scale_shift(self) -> int:
        """Return n if unpacked weights are the true values times 2^-n."""
        return _SCALE_SHIFT[self.kind]

    def __str__(self) -> str:
        if self.kind != "integer":
            return self.kind
        return f"{self.kind} {self.groups} {self.scale}{' zero' * self.zero}"


def form_of(scheme: QuantScheme, depth: int, scale: torch.dtype = torch.float32) -> PackedFormat:
    """Return the form for weights of `scheme` with K = depth and scales of dtype `scale`."""
    kind = word_format(scheme)
    if kind != "integer":
        return PackedFormat("nvfp4" if kind == "nvfp4" else "e2m1")
    _, group = scale_group(scheme, depth)
    return PackedFormat(kind, 2 if group % BLOCK else 1, dtype_name(scale), scheme.zero_points)


class Tiled(NamedTuple):
    """Tiled weights: words (e, tiles, steps, 64, 32), scales (e, tiles, steps, form.lines, 16)."""

    words: torch.Tensor
    scales: torch.Tensor

    @property
    def tiles(self) -> int:
        """Return the number of tiles per expert."""
        return self.words.shape[1]

    @property
    def steps(self) -> int:
        """Return the number of K steps."""
        return self.words.shape[2]


def rows_of_tiles(columns: int, step: int, up_row: int, *, gated: bool) -> torch.Tensor:
    """Return the weight row of each row of each tile, (tiles, 256) int64; -1 for none.

    Column n uses row n * step, and row n * step + up_row for up. In a gated GEMM every second block
    has up rows, for the columns of the preceding block.
    """
    sides = 2 if gated else 1
    per_tile = BLOCKS_PER_TILE // sides * BLOCK
    tiles = -(-columns // per_tile)
    column = torch.arange(tiles * per_tile).view(tiles, BLOCKS_PER_TILE // sides, 1, BLOCK)
    row = column * step + torch.arange(sides).view(sides, 1) * up_row
    return torch.where(column < columns, row, -1).view(tiles, BLOCKS_PER_TILE * BLOCK)
