"""How scales of nvfp4 lie for Blackwell's block-scaled products: in blocks of 128 rows by 4 groups.

An instruction multiplies 64 values of a row, 4 groups, and finds the scales of 128 rows in 512
bytes: in line `row % 32`, 16 bytes long, the 4 bytes of `row // 32`. Blocks of a step, 16 groups or
256 values, follow each other; then come those of the next step, then those of the next 128 rows:

    byte = ((row // 128) steps + group // 16) 2048 + (group % 16 // 4) 512
           + (row % 32) 16 + (row % 128 // 32) 4 + group % 4

Rows are padded to 128 and groups to 16, with zeros. With groups padded to 4 alone this is what
CUTLASS calls the scale factor layout of SM100, `tile_atom_to_shape_SF`.
"""

import torch

ROWS = 128  # of a block
STEP = 16  # groups of a step
STEP_BYTES = ROWS * STEP


def steps_of(groups: int) -> int:
    """Return how many steps so many groups of a row take."""
    return -(-groups // STEP)


def tiled_shape(rows: int, groups: int) -> tuple[int, int]:
    """Return the shape of the scales of (rows, groups): blocks of rows, and bytes of each."""
    return -(-rows // ROWS), steps_of(groups) * STEP_BYTES


def byte_of(row: int, group: int, groups: int) -> int:
    """Return where the scale of a row and group is, counted from the first one."""
    step = row // ROWS * steps_of(groups) + group // STEP
    line = group % STEP // 4 * 512 + row % 32 * 16
    return step * STEP_BYTES + line + row % ROWS // 32 * 4 + group % 4


def to_tiles(scale: torch.Tensor) -> torch.Tensor:
    """Return scales (..., N, G), a byte each, as (..., blocks, bytes), uint8; padding is 0."""
    *outer, rows, groups = scale.shape
    padded = torch.nn.functional.pad(scale.view(torch.uint8), (0, -groups % STEP, 0, -rows % ROWS))
    blocks, steps = padded.shape[-2] // ROWS, padded.shape[-1] // STEP
    # In turn: block, which 32 rows, which of them; step, which 4 groups, which of them.
    parts = padded.reshape(-1, blocks, 4, 32, steps, 4, 4).permute(0, 1, 4, 5, 3, 2, 6)
    return parts.reshape(*outer, blocks, steps * STEP_BYTES)


def from_tiles(tiled: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """Return (..., N, G) uint8 of what `to_tiles` gives; padding is not looked at."""
    *outer, blocks, size = tiled.shape
    steps = size // STEP_BYTES
    parts = tiled.view(torch.uint8).reshape(-1, blocks, steps, 4, 32, 4, 4)
    whole = parts.permute(0, 1, 5, 4, 2, 3, 6).reshape(*outer, blocks * ROWS, steps * STEP)
    return whole[..., :rows, :groups].contiguous()
