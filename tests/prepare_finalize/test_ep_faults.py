"""Faults on gloo ranks: the other ranks raise within the timeout, and name the faulty rank."""

import pytest
from ep_fault_ranks import AT_ONCE_S, LONG_S, assert_reports_faulty_rank, make_three_ranks_fixture
from ep_layers import ALL2ALL, GATHERED, REPLICATED

from modular_kernel.errors import CapacityError
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.stress.fault_matrix import run_scenario
from modular_kernel.testing.stress.faults import FAULTY_RANK, Scenario

pool = make_three_ranks_fixture()
# The exchanges in which the other ranks may detect a fault, by the point at which it occurs.
PHASES_BY_POINT = {
    "before dispatch": {"counts"},
    "in dispatch": {"dispatch", "combine"},
    "after dispatch": {"combine"},
    "before combine": {"combine"},
    "in combine": {"combine", "counts"},
}
MATRIX = [
    *[
        (ALL2ALL, kind, point)
        for kind in ("killed", "stopped", "late")
        for point in PHASES_BY_POINT
    ],
    (GATHERED, "killed", "in dispatch"),
    (GATHERED, "stopped", "before combine"),
    (GATHERED, "late", "before dispatch"),
    (REPLICATED, "killed", "before combine"),
    (REPLICATED, "stopped", "before dispatch"),
    (REPLICATED, "late", "after dispatch"),
]


@pytest.mark.share(3)
@pytest.mark.parametrize(("part", "kind", "point"), MATRIX)
def test_other_ranks_name_a_rank_that_exits_or_is_late(
    pool: RankPool, part: str, kind: str, point: str
) -> None:
    result = run_scenario(Scenario(part, kind, point), pool)
    assert result.findings() == []
    for rank in (0, 2):
        assert_reports_faulty_rank(result.reports[rank], PHASES_BY_POINT[point])
    if kind == "killed":
        assert set(result.lost) == {FAULTY_RANK}
    else:
        # The faulty rank names both other ranks, or only the one that failed first.
        assert result.reports[FAULTY_RANK].error == "CommunicationError"
        assert result.reports[FAULTY_RANK].peers in ((0, 2), (0,), (2,))


@pytest.mark.parametrize("part", [ALL2ALL, GATHERED, REPLICATED])
def test_an_exception_in_the_experts_of_one_rank_is_reported_at_once(
    pool: RankPool, part: str
) -> None:
    result = run_scenario(Scenario(part, "raises", timeout_s=LONG_S), pool)
    assert result.findings() == []
    assert result.reports[FAULTY_RANK].error == "RuntimeError"
    assert result.reports[FAULTY_RANK].message == "these experts are broken"
    for rank in (0, 2):
        assert_reports_faulty_rank(result.reports[rank], {"combine"})
        assert "aborted its call: RuntimeError" in result.reports[rank].message
        assert result.reports[rank].seconds < AT_ONCE_S


@pytest.mark.parametrize("part", [ALL2ALL, GATHERED, REPLICATED])
def test_too_many_tokens_on_one_rank_are_reported_at_once(pool: RankPool, part: str) -> None:
    result = run_scenario(Scenario(part, "overflow", timeout_s=LONG_S), pool)
    assert result.findings() == []
    assert result.reports[FAULTY_RANK].error == CapacityError.__name__
    assert result.reports[FAULTY_RANK].seconds < AT_ONCE_S
    for rank in (0, 2):
        report = result.reports[rank]
        assert (report.error, report.phase) == ("CommunicationError", "counts"), report
        assert report.peers == (FAULTY_RANK,)
        assert "rank 1 refused its call 2 of layer 1 with CapacityError" in report.message
        assert report.seconds < AT_ONCE_S


@pytest.mark.parametrize("kind", ["raises", "refuses"])
@pytest.mark.parametrize("part", [ALL2ALL, GATHERED, REPLICATED])
def test_a_rank_that_fails_before_an_exchange_notifies_the_others(
    pool: RankPool, part: str, kind: str
) -> None:
    point = "before dispatch" if kind == "raises" else ""
    result = run_scenario(Scenario(part, kind, point, timeout_s=LONG_S), pool)
    assert result.findings() == []
    for rank in (0, 2):
        assert result.reports[rank].phase == "counts"
        assert "rank 1 refused its call 2 of layer 1" in result.reports[rank].message
        assert result.reports[rank].seconds < AT_ONCE_S
