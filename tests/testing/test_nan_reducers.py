"""The NaN rule in reducers: NaN in the row or router weight of a pair reaches only its token.

A pair is a token and one of its experts. The tests cover every reducer, weighted and unweighted.
Values that no pair reads are always NaN: rows and weights of skipped pairs and of experts on other
ranks, and unused rows of batches.
"""

from collections.abc import Callable

import pytest
import torch
from ops_fixtures import DEVICE, make_path_fixture, random_normal

from modular_kernel.ops import reduce as reduce_ops
from modular_kernel.spec.problem import IdSpace
from modular_kernel.tensors import DispatchedRouting, ExpertRows
from topk_reduce import (
    KeepTopK,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceNaiveBatched,
    TopKWeightAndReduceNoOp,
)

path = make_path_fixture(reduce_ops)

T, K, H, E, C = 4, 3, 48, 5, 6
# Experts 0 to 4 are on this rank, 5 and 6 on other ranks. Token 3 has no pair on this rank.
IDS = torch.tensor([[0, 1, 2], [3, -1, 4], [4, 6, 0], [-1, 5, -1]], dtype=torch.int32)
IS_LOCAL = (IDS >= 0) & (IDS < E)
SCALE = 1.5
KEEP_TOPK = {"weighted": KeepTopK(weighted=True), "unweighted": KeepTopK(weighted=False)}


def make_routing() -> DispatchedRouting:
    """Return a routing with an expert map: five of seven experts are on this rank."""
    expert_map = torch.arange(7, dtype=torch.int32)
    expert_map[E:] = -1
    invalid = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    ids, expert_map = IDS.to(DEVICE), expert_map.to(DEVICE)
    return DispatchedRouting(None, ids, IdSpace.GLOBAL, 7, expert_map, invalid)


def make_weights() -> torch.Tensor:
    return (random_normal(T, K, seed=1).abs() + 0.5).masked_fill(~IS_LOCAL.to(DEVICE), torch.nan)


def make_batched_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows (e, C, H), NaN where unused, and the row index of each pair."""
    row_of_pair, counts = torch.full((T, K), -1, dtype=torch.int32), [0] * E
    for t, k in IS_LOCAL.nonzero().tolist():
        e = int(IDS[t, k])
        row_of_pair[t, k] = e * C + counts[e]
        counts[e] += 1
    rows = torch.full((E * C, H), torch.nan, device=DEVICE)
    used = row_of_pair[IS_LOCAL].long().to(DEVICE)
    rows[used] = random_normal(len(used), H, seed=2)
    return rows.view(E, C, H), row_of_pair.to(DEVICE)


def make_token_rows(weighted: bool) -> ExpertRows:
    """Return rows (T, K, H), NaN for pairs that are skipped or on other ranks."""
    rows = random_normal(T, K, H, seed=2).masked_fill(~IS_LOCAL.to(DEVICE)[..., None], torch.nan)
    return ExpertRows(rows, None, make_weights() if weighted else None, SCALE, make_routing(), E)


def make_expert_batches(weighted: bool) -> ExpertRows:
    rows, row_of_pair = make_batched_rows()
    return ExpertRows(rows, row_of_pair, make_weights() if weighted else None, SCALE)


# Name -> (reducer, its input, whether it sums).
REDUCERS = {
    "contiguous": (TopKWeightAndReduceContiguous(), make_token_rows, True),
    "naive batched": (TopKWeightAndReduceNaiveBatched(), make_expert_batches, True),
    "top-k of tokens, weighted": (KEEP_TOPK["weighted"], make_token_rows, False),
    "top-k of tokens": (KEEP_TOPK["unweighted"], make_token_rows, False),
    "top-k of batches, weighted": (KEEP_TOPK["weighted"], make_expert_batches, False),
    "top-k of batches": (KEEP_TOPK["unweighted"], make_expert_batches, False),
}


def get_row_of_pair(expert_rows: ExpertRows, t: int, k: int) -> torch.Tensor:
    if expert_rows.row_of_pair_TK is None:
        return expert_rows.rows[t, k]
    return expert_rows.rows.view(-1, H)[int(expert_rows.row_of_pair_TK[t, k])]


def compute_expected_output(expert_rows: ExpertRows, *, sums: bool, weighted: bool) -> torch.Tensor:
    """Return the float64 output, computed from the local pairs only."""
    out = torch.zeros(T, K, H, dtype=torch.float64)
    for t, k in IS_LOCAL.nonzero().tolist():
        value = get_row_of_pair(expert_rows, t, k).cpu().double()
        if weighted:
            weight = (
                1.0
                if expert_rows.topk_weights_TK is None
                else float(expert_rows.topk_weights_TK[t, k])
            )
            value = value * weight * SCALE
        out[t, k] = value
    return out.sum(1) if sums else out


def check_reducer(name: str, weighted: bool, set_nan: Callable[[ExpertRows], None]) -> torch.Tensor:
    """Compare a reducer with `compute_expected_output` on rows that `set_nan` changes. Return where
    the output is NaN.
    """
    reducer, make_rows, sums = REDUCERS[name]
    expert_rows = make_rows(weighted)
    set_nan(expert_rows)
    out = torch.full((T, H) if sums else (T, K, H), torch.nan, device=DEVICE)
    reducer.apply(expert_rows, out)
    is_weighted = reducer.weighted if isinstance(reducer, KeepTopK) else True
    expected = compute_expected_output(expert_rows, sums=sums, weighted=is_weighted)
    assert torch.equal(out.cpu().isnan(), expected.isnan())
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    return expected.isnan()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", REDUCERS)
def test_unread_rows_and_weights_do_not_reach_the_output(name: str, weighted: bool) -> None:
    """Skipped pairs, pairs of other ranks and unused rows are NaN in every input."""
    assert not check_reducer(name, weighted, lambda expert_rows: None).any()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", REDUCERS)
def test_nan_in_a_row_reaches_only_its_token_and_column(name: str, weighted: bool) -> None:
    def set_nan(expert_rows: ExpertRows) -> None:
        get_row_of_pair(expert_rows, 1, 2)[H // 3] = torch.nan

    is_nan = check_reducer(name, weighted, set_nan)
    assert is_nan[1].any()
    assert int(is_nan.sum()) == 1


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("name", REDUCERS)
def test_nan_in_a_weight_reaches_all_columns_if_weights_are_used(name: str) -> None:
    def set_nan(expert_rows: ExpertRows) -> None:
        assert expert_rows.topk_weights_TK is not None
        expert_rows.topk_weights_TK[2, 0] = torch.nan

    reducer, is_nan = REDUCERS[name][0], check_reducer(name, True, set_nan)
    reads_weights = not isinstance(reducer, KeepTopK) or reducer.weighted
    assert int(is_nan.sum()) == (H if reads_weights else 0)


def test_the_noop_reducer_copies_nan() -> None:
    rows, out = random_normal(T, H, seed=2), torch.zeros(T, H, device=DEVICE)
    rows[2, 5] = torch.nan
    TopKWeightAndReduceNoOp().apply(ExpertRows(rows, None, None, 1.0), out)
    assert torch.equal(out.isnan(), rows.isnan())
    assert torch.equal(out.nan_to_num(), rows.nan_to_num())
