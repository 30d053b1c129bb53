"""The kernel that tiles 4-bit weights equals its reference, and skips experts without rows."""

import pytest
import torch
from w4_samples import INTEGERS, SCHEMES, random_weights

from experts.triton.grouped_w4.bitwise_reference import untile_weights
from experts.triton.grouped_w4.kernel_launches import tile_experts, tiled_shapes
from experts.triton.grouped_w4.layout import TiledWeights, list_tile_rows

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted")


@pytest.mark.parametrize(
    ("quant", "scales"),
    [*((quant, torch.float32) for quant in SCHEMES), *((q, torch.float16) for q in INTEGERS)],
)
@pytest.mark.parametrize(
    ("columns", "depth", "gated", "step"),
    [(72, 64, False, 1), (200, 416, True, 1), (136, 288, True, 2), (320, 160, False, 1)],
)
def test_tile_experts_equals_the_reference(
    columns: int, depth: int, gated: bool, step: int, quant: str, scales: torch.dtype
) -> None:
    sample = random_weights(
        quant, 3, 2 * columns if gated else columns, depth, low=0, high=256, scales=scales
    )
    if sample.scheme.matrix_scales:
        sample.scale.view(torch.uint8)[0, 5, 1] = 127
    up_row = 1 if step == 2 else columns
    starts = torch.tensor([0, 5, 5, 6], dtype=torch.int32)
    expected = sample.tiled(list_tile_rows(columns, step, up_row, gated=gated))
    product = sample.product(columns, step, up_row, gated=gated)
    for first, count in ((0, 3), (1, 2)):
        shapes = tiled_shapes(count, columns, depth, sample.packed_format, gated=gated)
        actual_tiles = TiledWeights(*(torch.full(shape, 7, dtype=torch.int32) for shape in shapes))
        tile_experts(product, starts, actual_tiles, first)
        for expert in range(first, first + count):
            for actual, reference in zip(actual_tiles, expected, strict=True):
                unwritten = torch.full_like(reference[expert], 7)  # expert 1 has no rows
                expected_tensor = unwritten if expert == 1 else reference[expert]
                assert torch.equal(actual[expert - first], expected_tensor)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, -1])
@pytest.mark.parametrize("quant", [INTEGERS[0], INTEGERS[2]])
def test_a_nan_scale_gives_nan_weights(quant: str, bits: int) -> None:
    sample = random_weights(quant, 1, 64, 64, scales=torch.float32)
    sample.scale.view(torch.int32)[0, 3, 0] = bits
    shapes = tiled_shapes(1, 64, 64, sample.packed_format, gated=False)
    actual_tiles = TiledWeights(*(torch.zeros(shape, dtype=torch.int32) for shape in shapes))
    starts = torch.tensor([0, 1], dtype=torch.int32)
    tile_experts(sample.product(64, 1, 0, gated=False), starts, actual_tiles, 0)
    for tiled in (actual_tiles, sample.tiled(list_tile_rows(64, 1, 0, gated=False))):
        values = untile_weights(tiled, sample.packed_format)[0, :64]
        assert values[3].isnan().all()
        assert torch.cat([values[:3], values[4:]]).isfinite().all()
