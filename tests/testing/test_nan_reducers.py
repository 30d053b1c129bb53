"""One rule for NaN in reducers: a row or weight that is read is NaN in its token, in no other.

Every reducer, weighted and not, with NaN in a row of a pair, in its router weight, and in what no
pair reads: rows and weights of skipped pairs and of experts elsewhere, and unused batched rows.
"""

from collections.abc import Callable

import pytest
import torch
from ops_samples import DEVICE, kernel_and_twin, random

from modular_kernel.ops import reduce as module
from modular_kernel.spec.problem import IdSpace
from modular_kernel.tensors import DispatchedRouting, ExpertRows
from topk_reduce import (
    KeepTopK,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceNaiveBatched,
    TopKWeightAndReduceNoOp,
)

path = kernel_and_twin(module)

T, K, H, E, C = 4, 3, 48, 5, 6
# Experts 0 to 4 are here; 5 and 6 are elsewhere. Token 3 has no pair here.
IDS = torch.tensor([[0, 1, 2], [3, -1, 4], [4, 6, 0], [-1, 5, -1]], dtype=torch.int32)
HERE = (IDS >= 0) & (IDS < E)
SCALE = 1.5
KEEP = {"weighted": KeepTopK(weighted=True), "unweighted": KeepTopK(weighted=False)}


def routing() -> DispatchedRouting:
    """The routing of pairs by local ids, over a map of seven experts to the five here."""
    table = torch.arange(7, dtype=torch.int32)
    table[E:] = -1
    invalid = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    ids, table = IDS.to(DEVICE), table.to(DEVICE)
    return DispatchedRouting(None, ids, IdSpace.GLOBAL, 7, table, invalid)


def weights() -> torch.Tensor:
    return (random(T, K, seed=1).abs() + 0.5).masked_fill(~HERE.to(DEVICE), torch.nan)


def batched_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows (e, C, H), NaN where no pair is, and the row of each pair."""
    row_of_pair, taken = torch.full((T, K), -1, dtype=torch.int32), [0] * E
    for t, k in HERE.nonzero().tolist():
        e = int(IDS[t, k])
        row_of_pair[t, k] = e * C + taken[e]
        taken[e] += 1
    rows = torch.full((E * C, H), torch.nan, device=DEVICE)
    read = row_of_pair[HERE].long().to(DEVICE)
    rows[read] = random(len(read), H, seed=2)
    return rows.view(E, C, H), row_of_pair.to(DEVICE)


def by_token(weighted: bool) -> ExpertRows:
    """Rows (T, K, H), NaN for pairs that are skipped or elsewhere."""
    rows = random(T, K, H, seed=2).masked_fill(~HERE.to(DEVICE)[..., None], torch.nan)
    return ExpertRows(rows, None, weights() if weighted else None, SCALE, routing(), E)


def by_expert(weighted: bool) -> ExpertRows:
    rows, row_of_pair = batched_rows()
    return ExpertRows(rows, row_of_pair, weights() if weighted else None, SCALE)


# Name -> (reducer, its input, whether it sums).
REDUCERS = {
    "contiguous": (TopKWeightAndReduceContiguous(), by_token, True),
    "naive batched": (TopKWeightAndReduceNaiveBatched(), by_expert, True),
    "top-k of tokens, weighted": (KEEP["weighted"], by_token, False),
    "top-k of tokens": (KEEP["unweighted"], by_token, False),
    "top-k of batches, weighted": (KEEP["weighted"], by_expert, False),
    "top-k of batches": (KEEP["unweighted"], by_expert, False),
}


def row_of(given: ExpertRows, t: int, k: int) -> torch.Tensor:
    """Return the row of a pair, to write to."""
    if given.row_of_pair_TK is None:
        return given.rows[t, k]
    return given.rows.view(-1, H)[int(given.row_of_pair_TK[t, k])]


def exact(given: ExpertRows, *, sums: bool, weighted: bool) -> torch.Tensor:
    """Return the output in float64, pair by pair: nothing of a pair that is not here is read."""
    out = torch.zeros(T, K, H, dtype=torch.float64)
    for t, k in HERE.nonzero().tolist():
        value = row_of(given, t, k).cpu().double()
        if weighted:
            weight = 1.0 if given.topk_weights_TK is None else float(given.topk_weights_TK[t, k])
            value = value * weight * SCALE
        out[t, k] = value
    return out.sum(1) if sums else out


def check(name: str, weighted: bool, harm: Callable[[ExpertRows], None]) -> torch.Tensor:
    """Reduce with a NaN, compare with the exact output, and return where that is NaN."""
    reducer, make, sums = REDUCERS[name]
    given = make(weighted)
    harm(given)
    out = torch.full((T, H) if sums else (T, K, H), torch.nan, device=DEVICE)
    reducer.apply(given, out)
    scaled = reducer.weighted if isinstance(reducer, KeepTopK) else True
    want = exact(given, sums=sums, weighted=scaled)
    assert torch.equal(out.cpu().isnan(), want.isnan())
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-5, atol=1e-6, equal_nan=True)
    return want.isnan()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", REDUCERS)
def test_what_no_pair_reads_is_in_no_output(name: str, weighted: bool) -> None:
    """Skipped pairs, pairs of experts elsewhere, and unused rows: all NaN in every sample."""
    assert not check(name, weighted, lambda given: None).any()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", REDUCERS)
def test_a_row_reaches_its_token_in_its_columns(name: str, weighted: bool) -> None:
    def harm(given: ExpertRows) -> None:
        row_of(given, 1, 2)[H // 3] = torch.nan

    is_nan = check(name, weighted, harm)
    assert is_nan[1].any()
    assert int(is_nan.sum()) == 1


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("name", REDUCERS)
def test_a_weight_reaches_all_columns_where_it_is_read(name: str) -> None:
    def harm(given: ExpertRows) -> None:
        assert given.topk_weights_TK is not None
        given.topk_weights_TK[2, 0] = torch.nan

    reducer, is_nan = REDUCERS[name][0], check(name, True, harm)
    reads = not isinstance(reducer, KeepTopK) or reducer.weighted
    assert int(is_nan.sum()) == (H if reads else 0)


def test_rows_that_are_summed_already_are_copied() -> None:
    rows, out = random(T, H, seed=2), torch.zeros(T, H, device=DEVICE)
    rows[2, 5] = torch.nan
    TopKWeightAndReduceNoOp().apply(ExpertRows(rows, None, None, 1.0), out)
    assert torch.equal(out.isnan(), rows.isnan())
    assert torch.equal(out.nan_to_num(), rows.nan_to_num())
