"""Memory layout of tiled 4-bit weights and scales, for GEMMs that unpack weights in registers.

A tile has four blocks of 64 weight rows, two per warpgroup. K is split into steps of 64. The data
of one step of a tile is contiguous: (64, 32) int32 words of weights, 16 lines per block, followed
by (lines, 16) int32 words of scales.

Thread t of a warpgroup owns words 4 t to 4 t + 3 of a block. They hold rows r and r + 8 of the 16
rows of its warp, where r = t % 32 / 4, with one word per row and half step (32 columns). In wgmma's
register layout, lane c = t % 4 holds columns 2c, 2c + 1, 2c + 8 and 2c + 9 of every 16 columns, so
a word holds the column pairs at 2c, 2c + 8, 2c + 16 and 2c + 24. Activations therefore keep their
order along K. All codes of a word share one scale; with NVFP4, every two pairs do.

Pairs of e2m1 codes are packed as in `modular_kernel.quant.repacking`. Of integers, pair i is in
bits 4i to 4i + 3 of the two halves of a word. Scales are stored in groups of four words, in the
order of the threads that share rows:

    mxfp4     A group has one word for each of the four blocks. Its bytes are ordered by row (r,
              then r + 8), then by half step. A byte is the exponent of the bf16 factor that turns
              codes, read as bits of bf16 numbers, into weights. For scales of 4 and more the
              factor would overflow, so factors are multiplied by 2^-50 and results by 2^50. Scales
              of 2^52 and more become infinite; a weight below 2^-76 may lose its last bit.
    nvfp4     A group has one word for each of the two rows in each of the two blocks of the
              warpgroup. A byte is the scale of 16 columns of the step, times 2^-19, with five
              exponent and three significand bits. The sign of a scale is moved to its codes; codes
              whose scale is zero are zero.
    integers  As for nvfp4, or one word per row and half step if the group size is not a multiple
              of 64. A word is 2^83 times the scale in float32, with the zero point, if any, in the
              last four bits. Codes are read as the low bits of bf16 numbers, which are 2^-133 times
              the code, so unpacked weights are 2^-50 times the true ones. Scales of 2^45 and more
              overflow.
"""

from typing import NamedTuple

import torch

from experts.triton.operands import scale_group, word_format
from modular_kernel.spec.problem import dtype_name
from modular_kernel.spec.quantization import QuantScheme

BLOCK = 64  # rows per block, and columns (K) per step
BLOCKS_PER_TILE = 4
GROUP = 32  # columns covered by one word of each of the four lanes that share a row
LINES, LINE = 16 * BLOCKS_PER_TILE, 32  # shape of the words of one step of a tile
SCALE_LINES_PER_ROW_WORD = 8  # lines of scales in which each of 128 rows has one word
SCALE_LINE = 16  # words per line of scales
_SCALE_SHIFT = {"e2m1": 50, "nvfp4": 19, "integer": 50}


class PackedFormat(NamedTuple):
    """The format of tiled words and scales.

    Kernels get `str(packed_format)` as the constexpr PACKED_FORMAT.

    kind: "e2m1", "nvfp4" or "integer". The other fields apply to integers only.
    groups: scale words per row and K step.
    scale: dtype of the original scales.
    zero: whether there are zero points.
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
        """Return n, where unpacked weights are the true weights times 2^-n."""
        return _SCALE_SHIFT[self.kind]

    def __str__(self) -> str:
        if self.kind != "integer":
            return self.kind
        return f"{self.kind} {self.groups} {self.scale}{' zero' * self.zero}"


def packed_format_of(
    scheme: QuantScheme, depth: int, scale: torch.dtype = torch.float32
) -> PackedFormat:
    """Return the format of weights of `scheme` with K = depth and scales of dtype `scale`."""
    kind = word_format(scheme)
    if kind != "integer":
        return PackedFormat("nvfp4" if kind == "nvfp4" else "e2m1")
    _, group = scale_group(scheme, depth)
    return PackedFormat(kind, 2 if group % BLOCK else 1, dtype_name(scale), scheme.zero_points)


class TiledWeights(NamedTuple):
    """TiledWeights weights as int32 tensors.

    words is (e, tiles, steps, 64, 32), and scales is (e, tiles, steps, lines, 16).
    """

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
    """Return the weight row of each row of each tile, (tiles, 256) int64; -1 is padding.

    Output column n uses weight row n * step and, for up, row n * step + up_row. In a gated GEMM,
    blocks alternate: the gate rows of 64 columns, then the up rows of the same columns.
    """
    sides = 2 if gated else 1
    per_tile = BLOCKS_PER_TILE // sides * BLOCK
    tiles = -(-columns // per_tile)
    column = torch.arange(tiles * per_tile, device="cpu").view(
        tiles, BLOCKS_PER_TILE // sides, 1, BLOCK
    )
    row = column * step + torch.arange(sides, device="cpu").view(sides, 1) * up_row
    return torch.where(column < columns, row, -1).view(tiles, BLOCKS_PER_TILE * BLOCK)
