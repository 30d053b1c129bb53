"""The tiled layout of scales that block-scaled matrix instructions read: its definition, round
trips and padding.
"""

import pytest
import torch

from modular_kernel.quant.scale_layout import (
    STEP_BYTES,
    from_tiles,
    scale_offset,
    tiled_shape,
    to_tiles,
)

SHAPES = [(128, 16), (128, 8), (256, 32), (1, 1), (130, 17), (384, 180), (127, 4), (640, 40)]


def make_scales(*shape: int) -> torch.Tensor:
    """Return bytes from 1 to 251, which differ between neighbors and from the padding."""
    return (torch.arange(torch.Size(shape).numel()) % 251 + 1).to(torch.uint8).view(shape)


@pytest.mark.parametrize(("rows", "groups"), SHAPES)
def test_every_scale_is_at_its_offset(rows: int, groups: int) -> None:
    scale = make_scales(rows, groups)
    tiled_bytes = to_tiles(scale).flatten()
    offsets = torch.tensor(
        [[scale_offset(r, g, groups) for g in range(groups)] for r in range(rows)]
    )
    assert torch.equal(tiled_bytes[offsets], scale)
    assert offsets.unique().numel() == rows * groups
    is_padding = torch.ones(tiled_bytes.numel(), dtype=torch.bool)
    is_padding[offsets.flatten()] = False
    assert not tiled_bytes[is_padding].any()
    assert tuple(to_tiles(scale).shape) == tiled_shape(rows, groups)


@pytest.mark.parametrize(("rows", "groups"), SHAPES)
def test_from_tiles_inverts_to_tiles(rows: int, groups: int) -> None:
    scale = make_scales(3, rows, groups).view(torch.float8_e4m3fn)
    tiled = to_tiles(scale)
    assert tuple(tiled.shape) == (3, *tiled_shape(rows, groups))
    assert torch.equal(from_tiles(tiled, rows, groups), scale.view(torch.uint8))
    # The rows of each expert are padded separately.
    assert torch.equal(tiled[1], to_tiles(scale[1]))


def test_offsets_equal_values_computed_by_hand() -> None:
    """Row 33 is the second row of the second group of 32 rows, so it is in line 1 at byte 4."""
    assert scale_offset(0, 0, 16) == 0
    assert scale_offset(0, 3, 16) == 3
    assert scale_offset(0, 4, 16) == 512
    assert scale_offset(1, 0, 16) == 16
    assert scale_offset(33, 2, 16) == 16 + 4 + 2
    assert scale_offset(127, 15, 16) == STEP_BYTES - 1
    assert scale_offset(128, 0, 16) == STEP_BYTES
    assert scale_offset(0, 16, 32) == STEP_BYTES
    assert scale_offset(128, 0, 32) == 2 * STEP_BYTES


def test_offsets_equal_the_cutlass_layout() -> None:
    """The atom in CUTLASS is ((32, 4), (16, 4)) : ((16, 4), (0, 1)). Atoms are ordered along the
    groups first.
    """
    groups = 32
    for row in range(0, 256, 7):
        for group in range(groups):
            inner, outer = divmod(row % 128, 32)[::-1]
            atom = row // 128 * (groups // 4) + group // 4
            assert (
                scale_offset(row, group, groups) == atom * 512 + inner * 16 + outer * 4 + group % 4
            )
