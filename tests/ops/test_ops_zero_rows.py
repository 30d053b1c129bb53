"""zero_rows: the Triton kernel and its torch reference."""

import pytest
import torch
from ops_fixtures import DEVICE, make_path_fixture

from modular_kernel.errors import ShapeError
from modular_kernel.ops import zero_rows as zero_rows_module
from modular_kernel.ops.zero_rows import zero_rows

path = make_path_fixture(zero_rows_module)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [1, 72, 4100])
@pytest.mark.parametrize("counts", [(0, 0, 0), (3, 0, 70), (70, 33, 1)])
def test_rows_before_the_count_are_zeroed(
    counts: tuple[int, ...], hidden: int, dtype: torch.dtype
) -> None:
    x_SCH = torch.full((3, 70, hidden), torch.nan, dtype=dtype, device=DEVICE)
    zero_rows(x_SCH, torch.tensor(counts, dtype=torch.int32, device=DEVICE))
    for rows, count in zip(x_SCH, counts, strict=True):
        assert bool((rows[:count] == 0).all())
        assert bool(rows[count:].isnan().all())


@pytest.mark.usefixtures("path")
def test_a_count_beyond_the_segment_does_not_reach_the_next_one() -> None:
    x_SCH = torch.ones(2, 4, 8, device=DEVICE)
    zero_rows(x_SCH, torch.tensor([9, 0], dtype=torch.int32, device=DEVICE))
    assert not x_SCH[0].any()
    assert bool(x_SCH[1].all())


def test_zeroing_no_rows_does_not_fail() -> None:
    zero_rows(torch.ones(2, 0, 8, device=DEVICE), torch.ones(2, dtype=torch.int32, device=DEVICE))


def test_wrong_shapes_and_strides_are_refused() -> None:
    x_SCH = torch.ones(2, 4, 8, device=DEVICE)
    counts = torch.ones(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ShapeError, match=r"counts of rows: got \(1,\), need \(2,\)"):
        zero_rows(x_SCH, counts[:1])
    with pytest.raises(ShapeError, match="rows to zero: got strides"):
        zero_rows(x_SCH.transpose(0, 1).contiguous().transpose(0, 1), counts)
