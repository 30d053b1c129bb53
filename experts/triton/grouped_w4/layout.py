"""Memory layout of tiled 4-bit weights and scales, for GEMMs that unpack weights in registers.

A tile has four blocks of 64 weight rows, two blocks per warpgroup. K is split into steps of 64. The
data of one step of a tile is contiguous: (64, 32) int32 words of weights, which are 16 lines per
block, followed by (lines, 16) int32 words of scales.

Thread t of a warpgroup owns words 4 t to 4 t + 3 of a block. These words hold rows r and r + 8 of
the 16 rows of its warp, where r = t % 32 / 4. There is one word per row and half step (32 columns).
In the register layout of wgmma, lane c = t % 4 holds columns 2c, 2c + 1, 2c + 8 and 2c + 9 of every
16 columns. A word therefore holds the column pairs at 2c, 2c + 8, 2c + 16 and 2c + 24, and
activations keep their order along K. All codes of a word share one scale. With NVFP4, the codes of
two pairs share one scale.

Pairs of e2m1 codes are packed as in `modular_kernel.quant.repacking`. Pair i of integers is in bits
4i to 4i + 3 of the two halves of a word. Scales are stored in groups of four words, in the order of
the threads that share rows:

    mxfp4     A group has one word for each of the four blocks. The bytes of a word are ordered by
              row (r, then r + 8), then by half step. A byte is the exponent of the bf16 factor that
              converts codes to weights. Codes are interpreted as bits of bf16 numbers. With scales
              of 4 or more, the factor would overflow, so factors are multiplied by 2^-50, and the
              output of the GEMM by 2^50. Scales of 2^52 or more become infinite. A weight below
              2^-76 may lose its last bit.
    nvfp4     A group has one word for each of the two rows in each of the two blocks of the
              warpgroup. A byte is the scale of 16 columns of the step, times 2^-19, with five
              exponent bits and three significand bits. The sign of a scale is moved to its codes.
              Codes whose scale is zero become zero.
    integers  Groups are as for nvfp4. If the group size is not a multiple of 64, there is one word
              per row and half step. A word is 2^83 times the scale in float32. Its last four bits
              hold the zero point, if there are zero points. Codes are interpreted as the low bits
              of bf16 numbers, whose value is 2^-133 times the code, so unpacked weights are
              weight * 2^-50. Scales of 2^45 or more overflow.
"""

from typing import NamedTuple

import torch

from experts.triton.operands import scale_group, word_format
from modular_kernel.spec.problem import dtype_name
from modular_kernel.spec.quantization import QuantScheme

BLOCK = 64  # rows per block, and columns (K) per step
BLOCKS_PER_TILE = 4
GROUP = 32  # columns covered by one word of each of the four lanes that share a row
LINES_PER_STEP, WORDS_PER_LINE = 16 * BLOCKS_PER_TILE, 32  # shape of the words of a step of a tile
SCALE_LINES_PER_HALF = 8  # lines of scales that hold one word for each of 128 rows, half a tile
WORDS_PER_SCALE_LINE = 16
_SCALE_SHIFT = {"e2m1": 50, "nvfp4": 19, "integer": 50}


class PackedFormat(NamedTuple):
    """The format of tiled words and scales.

    Kernels take `str(packed_format)` as the constexpr PACKED_FORMAT.

    kind: "e2m1", "nvfp4" or "integer". The fields below apply only to integers.
    groups: scale words per row and K step.
    scale: name of the dtype of the original scales.
    zero: whether there are zero points.
    """

    kind: str
    groups: int = 1
    scale: str = "float32"
    zero: bool = False

    @property
    def lines(self) -> int:
        """Return the number of lines of scales per step of a tile."""
        return (
            SCALE_LINES_PER_HALF if self.kind == "e2m1" else 2 * self.groups * SCALE_LINES_PER_HALF
        )

    @property
    def scale_shift(self) -> int:
        """Return the integer n for which unpacked weights are weight * 2^-n."""
        return _SCALE_SHIFT[self.kind]

    def __str__(self) -> str:
        if self.kind != "integer":
            return self.kind
        return f"{self.kind} {self.groups} {self.scale}{' zero' * self.zero}"


def choose_packed_format(
    scheme: QuantScheme, k: int, scale_dtype: torch.dtype = torch.float32
) -> PackedFormat:
    """Return the format of tiled weights whose original scales have dtype scale_dtype."""
    kind = word_format(scheme)
    if kind != "integer":
        return PackedFormat("nvfp4" if kind == "nvfp4" else "e2m1")
    _, group = scale_group(scheme, k)
    groups = 2 if group % BLOCK else 1
    return PackedFormat(kind, groups, dtype_name(scale_dtype), scheme.zero_points)


class TiledWeights(NamedTuple):
    """Weights in the tiled layout, as int32 tensors.

    words: (e, tiles, steps, 64, 32).
    scales: (e, tiles, steps, lines, 16).
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


def list_tile_rows(
    columns: int, gate_stride: int, up_row_offset: int, *, gated: bool
) -> torch.Tensor:
    """Return the weight row of each row of each tile, (tiles, 256) int64. -1 marks padding.

    In a gated GEMM, blocks alternate: a block of the gate rows of 64 columns is followed by a block
    of the up rows of the same columns.

    columns: output columns.
    gate_stride: weight rows per output column. Column n uses weight row n * gate_stride and, for
        up, weight row n * gate_stride + up_row_offset.
    gated: whether the GEMM computes gate and up columns.
    """
    num_matrices = 2 if gated else 1
    columns_per_tile = BLOCKS_PER_TILE // num_matrices * BLOCK
    tiles = -(-columns // columns_per_tile)
    column = torch.arange(tiles * columns_per_tile, device="cpu").view(
        tiles, BLOCKS_PER_TILE // num_matrices, 1, BLOCK
    )
    row = (
        column * gate_stride
        + torch.arange(num_matrices, device="cpu").view(num_matrices, 1) * up_row_offset
    )
    return torch.where(column < columns, row, -1).view(tiles, BLOCKS_PER_TILE * BLOCK)
