"""mask_unwritten_pairs: the Triton kernel and its torch reference, against loops over pairs."""

import math

import pytest
import torch

from modular_kernel.errors import ShapeError
from modular_kernel.ops import mask_unwritten
from modular_kernel.ops.mask_unwritten import mask_unwritten_pairs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["kernel", "reference"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test with the Triton kernel, and with the torch reference."""
    if request.param == "reference":
        monkeypatch.setattr(mask_unwritten, "use_triton", lambda tensor: False)
    else:
        assert mask_unwritten.use_triton(torch.empty(0, device=DEVICE)), "no GPU and no interpreter"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize(("rows", "count"), [(0, 0), (1, 0), (3, 2), (200, 137), (200, 200)])
def test_pairs_of_rows_after_the_count_are_skipped(
    rows: int, count: int, top_k: int, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(rows + top_k)
    ids = torch.randint(-2, 6, (rows, top_k), generator=g).to(dtype)
    weights = torch.rand(rows, top_k, generator=g)
    ids[count:] = 10**9
    weights[count:] = torch.nan
    weights[ids < 0] = torch.nan
    out_ids = torch.full((rows, top_k), 99, dtype=torch.int32, device=DEVICE)
    out_weights = torch.full((rows, top_k), torch.nan, device=DEVICE)
    mask_unwritten_pairs(
        ids.to(DEVICE),
        weights.to(DEVICE),
        torch.tensor([7, count], dtype=torch.int32, device=DEVICE)[1],
        out_ids_RK=out_ids,
        out_weights_RK=out_weights,
    )
    for row in range(rows):
        for k in range(top_k):
            valid = row < count and int(ids[row, k]) >= 0
            assert int(out_ids[row, k]) == (int(ids[row, k]) if valid else -1)
            weight = float(out_weights[row, k])
            assert weight == (float(weights[row, k]) if valid else 0.0)
            assert math.isfinite(weight)


def test_wrong_shapes_and_strides_are_refused() -> None:
    ids = torch.zeros(4, 2, dtype=torch.int64, device=DEVICE)
    weights = torch.zeros(4, 2, device=DEVICE)
    out = {"out_ids_RK": ids.int(), "out_weights_RK": weights.clone()}
    count = torch.tensor(2, device=DEVICE)
    with pytest.raises(ShapeError, match=r"weights: got \(3, 2\), .* need a contiguous \(4, 2\)"):
        mask_unwritten_pairs(ids, weights[:3], count, **out)
    with pytest.raises(ShapeError, match="masked ids: got"):
        mask_unwritten_pairs(
            ids, weights, count, **{**out, "out_ids_RK": ids.int().t().contiguous().t()}
        )
    with pytest.raises(ShapeError, match=r"need a contiguous \(4, 2\)"):
        mask_unwritten_pairs(ids.expand(4, 2)[:, :1].expand(4, 2), weights, count, **out)
