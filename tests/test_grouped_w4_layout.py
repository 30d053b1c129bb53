"""e2m1 weights in the order of products from registers: the same values, bit by bit."""

import pytest
import torch

from experts.triton.grouped_w4.layout import rows_of_tiles, tile_weights, untiled
from modular_kernel.errors import DtypeError, ShapeError

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def weights(experts: int, rows: int, depth: int, low: int = 100, high: int = 150):
    """Return bytes, exponents and float32 values of random weights."""
    draw = torch.Generator().manual_seed(0)
    shape = (experts, rows, depth // 2)
    w = torch.randint(256, shape, generator=draw, dtype=torch.uint8)
    groups = (experts, rows, depth // 32)
    scale = torch.randint(low, high, groups, generator=draw, dtype=torch.uint8)
    codes = torch.stack((w & 15, w >> 4), -1).flatten(-2).long()
    factor = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
    return w, scale, (E2M1[codes].double() * factor).float()


@pytest.mark.parametrize(("low", "high"), [(46, 127), (100, 129), (129, 179)])
@pytest.mark.parametrize("depth", [64, 160, 192])
@pytest.mark.parametrize(("gated", "step"), [(False, 1), (True, 1), (True, 2)])
def test_weights_come_back_bit_by_bit(
    low: int, high: int, depth: int, gated: bool, step: int
) -> None:
    columns = 200
    w, scale, values = weights(2, 2 * columns if gated else columns, depth, low, high)
    up_row = 1 if step == 2 else columns
    rows = rows_of_tiles(columns, step, up_row, gated=gated)
    got = untiled(tile_weights(w, scale, rows))
    taken = rows.flatten()
    expected = torch.zeros_like(got)
    expected[:, taken >= 0, :depth] = values[:, taken[taken >= 0]]
    assert torch.equal(got, expected)
    assert sorted(taken[taken >= 0].tolist()) == list(range(w.shape[1]))


def test_what_is_no_number_stays_none() -> None:
    w, scale, _ = weights(1, 64, 64)
    scale[0, 3, 1] = 255
    got = untiled(tile_weights(w, scale, rows_of_tiles(64, 1, 0, gated=False)))
    assert not got[0, 3, 32:].isfinite().any()
    assert got[0, 3, :32].isfinite().all()
    assert got[0, :3].isfinite().all()


def test_other_tensors_are_refused() -> None:
    w, scale, _ = weights(1, 64, 64)
    rows = rows_of_tiles(64, 1, 0, gated=False)
    with pytest.raises(DtypeError):
        tile_weights(w.int(), scale, rows)
    with pytest.raises(ShapeError):
        tile_weights(w, scale[:, :, :1], rows)
