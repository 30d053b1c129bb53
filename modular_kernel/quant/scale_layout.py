"""Layout of nvfp4 scales for Blackwell's block-scaled MMA.

A scale covers a group of 16 values. An instruction multiplies 64 values of each row (4 groups), and
reads the scales of 128 rows from a block of 512 bytes. A block has 32 lines of 16 bytes. Line r
holds the scales of rows r, r + 32, r + 64 and r + 96, 4 bytes for each row, one per group. Four
consecutive blocks form a step (16 groups, 256 values). The steps of the first 128 rows precede the
steps of the next 128 rows:

    byte = ((row // 128) steps + group // 16) 2048 + (group % 16 // 4) 512
           + (row % 32) 16 + (row % 128 // 32) 4 + group % 4

Rows are padded with zeros to a multiple of 128, and groups to a multiple of 16. CUTLASS's scale
factor layout of SM100, `tile_atom_to_shape_SF`, is the same except that it pads groups to a
multiple of 4 only.
"""

import torch

ROWS = 128  # per block
STEP = 16  # groups per step
STEP_BYTES = ROWS * STEP  # bytes of a step of 128 rows


def count_steps(groups: int) -> int:
    """Return the number of steps of a row with `groups` groups."""
    return -(-groups // STEP)


def tiled_shape(rows: int, groups: int) -> tuple[int, int]:
    """Return the shape of scales (rows, groups) in this layout: (ceil(rows / 128), bytes)."""
    return -(-rows // ROWS), count_steps(groups) * STEP_BYTES


def scale_offset(row: int, group: int, groups: int) -> int:
    """Return the byte offset of the scale of a row and a group.

    groups: number of groups of a row.
    """
    step = row // ROWS * count_steps(groups) + group // STEP
    offset_in_step = group % STEP // 4 * 512 + row % 32 * 16
    return step * STEP_BYTES + offset_in_step + row % ROWS // 32 * 4 + group % 4


def to_tiles(scale: torch.Tensor) -> torch.Tensor:
    """Convert scales of one byte, (..., N, G), to this layout, uint8 (..., blocks, bytes)."""
    *batch, rows, groups = scale.shape
    padded = torch.nn.functional.pad(scale.view(torch.uint8), (0, -groups % STEP, 0, -rows % ROWS))
    blocks, steps = padded.shape[-2] // ROWS, padded.shape[-1] // STEP
    # Dimensions of rows: 128 rows, quarter of 32 rows, row. Dimensions of groups: step, block of 4
    # groups, group.
    tiles = padded.reshape(-1, blocks, 4, 32, steps, 4, 4).permute(0, 1, 4, 5, 3, 2, 6)
    return tiles.reshape(*batch, blocks, steps * STEP_BYTES)


def from_tiles(tiled: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """Invert `to_tiles`: return uint8 scales (..., rows, groups) without the padding."""
    *batch, blocks, nbytes = tiled.shape
    steps = nbytes // STEP_BYTES
    tiles = tiled.view(torch.uint8).reshape(-1, blocks, steps, 4, 32, 4, 4)
    scales = tiles.permute(0, 1, 5, 4, 2, 3, 6).reshape(*batch, blocks * ROWS, steps * STEP)
    return scales[..., :rows, :groups].contiguous()
