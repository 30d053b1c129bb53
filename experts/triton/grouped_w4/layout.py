"""How 4-bit weights and their scales lie for products that take them from registers.

Weight rows go in tiles of four blocks of 64, two for each of two warpgroups; the depth in steps of
64. What a step of a tile takes lies together: (64, 32) int32 words, 16 lines a block, and
(Form.lines, 16) int32 words of scales. Of a block, thread t of 128 has words 4 t to 4 t + 3: those
of weight rows r and r + 8 of its warp's sixteen, r = t % 32 / 4, and for each row one of both
halves, of 32, of the step. wgmma wants of lane c = t % 4 values 2c, 2c + 1, 2c + 8 and 2c + 9 of
sixteen: so a word holds the pairs at 2c, 2c + 8, 2c + 16 and 2c + 24. Thus tokens are read as they
are, and a word has one scale, or of nvfp4 one for two of its pairs.

e2m1 codes are in words as `modular_kernel.quant.repacking` has pairs; of integers pair i are bits
4i to 4i + 3 of either half. Scales come in fours of words, in the order of those threads that share
rows:

    mxfp4     one word for each of the four blocks, of four bytes: by row, by half of the step. A
              byte is the exponent of the bf16 number that the codes, as they read in bf16's
              fields, are to be multiplied by. It would be too large from a scale of 4 on: so all
              are less by 2^50, and results are multiplied by it. From 2^52 on a scale is infinite;
              a weight below 2^-76 may lose its last bit.
    nvfp4     by warpgroup; of each of its blocks a word for each row, of four bytes, one for 16 of
              the step: five bits of an exponent and three of a significand, less by 2^19. Codes
              have their scale's sign; those of a scale of zero are zero.
    integers  by warpgroup; of each of its blocks a word for each row, or, of groups that no 64
              divides, for each row and half of the step: 2^83 times the scale in float32, of which
              the last four bits are the zero point, if there is one. Products take codes as they
              read at the low end of bf16's fields, times 2^-133, so that weights are less by 2^50.
              A scale from 2^45 on gives no number.
"""

from typing import NamedTuple

import torch

from experts.triton.operands import scale_group, word_format
from modular_kernel.spec.problem import dtype_name
from modular_kernel.spec.quantization import QuantScheme

BLOCK = 64  # rows of a block, and the depth of a step
BLOCKS = 4  # of a tile
GROUP = 32  # of the depth that a word covers, with three others
LINES, LINE = 16 * BLOCKS, 32  # words of a step of a tile
QUADS = 8  # lines of scales, of one word for each of 128 rows
SCALE_LINE = 16  # words of a line of scales
_LOWERED = {"e2m1": 50, "nvfp4": 19, "integer": 50}


class Form(NamedTuple):
    """What words and scales hold. Its text tells kernels so.

    kind: "e2m1", "nvfp4" or "integer". Of integers: groups: words of scales that a row has in a
    step of the depth. scale: what was rounded to float32's bits. zero: whether there are zero
    points.
    """

    kind: str
    groups: int = 1
    scale: str = "float32"
    zero: bool = False

    @property
    def lines(self) -> int:
        """How many lines the scales of a step of a tile are."""
        return QUADS if self.kind == "e2m1" else 2 * self.groups * QUADS

    @property
    def lowered(self) -> int:
        """Return n where weights are less by 2^n."""
        return _LOWERED[self.kind]

    def __str__(self) -> str:
        if self.kind != "integer":
            return self.kind
        return f"{self.kind} {self.groups} {self.scale}{' zero' * self.zero}"


def form_of(scheme: QuantScheme, depth: int, scale: torch.dtype = torch.float32) -> Form:
    """Return how weights of this scheme and depth lie whose scales are of this dtype."""
    kind = word_format(scheme)
    if kind != "integer":
        return Form("nvfp4" if kind == "nvfp4" else "e2m1")
    _, group = scale_group(scheme, depth)
    return Form(kind, 2 if group % BLOCK else 1, dtype_name(scale), scheme.zero_points)


class Tiled(NamedTuple):
    """Weights of all experts: (e, tiles, steps, 64, 32), and (e, tiles, steps, form.lines, 16)."""

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
