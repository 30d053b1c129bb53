"""The launch that tiles weights is its torch twin, for experts that have rows."""

import pytest
import torch
from test_grouped_w4_layout import weights

from experts.triton.grouped_w4.layout import Tiled, rows_of_tiles, tile_weights
from experts.triton.grouped_w4.product import tile_experts, tiled_shapes
from experts.triton.operands import Product
from modular_kernel.repacked import repack
from modular_kernel.schemes import QuantScheme

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted")


@pytest.mark.parametrize("repacked", [False, True])
@pytest.mark.parametrize(
    ("columns", "depth", "gated", "step"),
    [(72, 64, False, 1), (200, 416, True, 1), (136, 288, True, 2), (320, 160, False, 1)],
)
def test_the_launch_is_the_twin(
    columns: int, depth: int, gated: bool, step: int, repacked: bool
) -> None:
    w, scale, _ = weights(3, 2 * columns if gated else columns, depth, 0, 256)
    up_row = 1 if step == 2 else columns
    starts = torch.tensor([0, 5, 5, 6], dtype=torch.int32)
    expected = tile_weights(w, scale, rows_of_tiles(columns, step, up_row, gated=gated))
    given = repack(w) if repacked else w
    scheme = QuantScheme.parse(f"mxfp4_w4a16:repacked={str(repacked).lower()}")
    product = Product(
        given, scale, None, None, None, None, scheme, columns, step, up_row, {"GATED": gated}
    )
    for first, count in ((0, 3), (1, 2)):
        shapes = tiled_shapes(count, columns, depth, gated=gated)
        got = Tiled(*(torch.full(shape, 7, dtype=torch.int32) for shape in shapes))
        tile_experts(product, starts, got, first)
        for expert in range(first, first + count):
            for made, wanted in zip(got, expected, strict=True):
                unused = torch.full_like(wanted[expert], 7)
                want = unused if expert == 1 else wanted[expert]
                assert torch.equal(made[expert - first], want)
