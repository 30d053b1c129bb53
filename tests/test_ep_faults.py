"""Faults over gloo ranks: whoever survives raises in time, and says which rank to look at."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ep_layers import ALL2ALL, GATHERED, REPLICATED, Layer

from experts.torch_experts import TorchExperts
from modular_kernel.catalog import make_kernel, this_machine
from modular_kernel.errors import CapacityError, CommunicationError
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.stress.fault_matrix import (
    FaultResult,
    as_json,
    markdown,
    parts_to_try,
    run_matrix,
    run_scenario,
    scenarios,
    summary,
)
from modular_kernel.testing.stress.faults import (
    DEADLINE_S,
    SLACK_S,
    VICTIM,
    RankReport,
    Scenario,
    outcome,
    outcome_of,
)
from prepare_finalize import TorchGroup
from prepare_finalize.rendezvous.failure_log import FailureBoard, LastCalls, culprits

WORLD = 3
LONG_S = 10.0  # a deadline that no rank waits for which is told
AT_ONCE_S = LONG_S / 2  # on a busy machine, too
TOKENS = {REPLICATED: (4, 4, 4), GATHERED: (4, 3, 5), ALL2ALL: (4, 3, 5)}
POINTS = {  # where the victim goes away -> in which exchange the others find out, here
    "before dispatch": {"counts"},
    "in dispatch": {"dispatch", "combine"},
    "after dispatch": {"combine"},
    "before combine": {"combine"},
    "in combine": {"combine", "counts"},
}


class OtherExperts(TorchExperts):
    """The same under another name: another pairing."""


@dataclass(frozen=True)
class Fault:
    """other: what the victim alone means."""

    part: str
    other: dict[str, object] = field(default_factory=dict)

    @property
    def layer(self) -> Layer:
        return Layer(self.part, TOKENS[self.part], placement="linear")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(WORLD, grace=LONG_S + 2 * SLACK_S) as ranks:
        yield ranks


# --------------------------------------------------------------------------------- on the ranks


def disagree(rank: int, world: int, group: object, fault: Fault) -> RankReport:
    """The victim means another layer; then all mean one again, with the same manager."""
    layer = fault.layer
    options = dict(fault.other) if rank == VICTIM else {}
    experts = options.pop("experts_part", "TorchExperts")
    part = options.pop("part", fault.part)
    tokens_W = options.pop("tokens_W", layer.tokens_W)
    mine = replace(layer, part=part, tokens_W=tokens_W, fields=options)
    given = mine.inputs_of(rank)
    dist.barrier(group)  # what a busy machine delays is not to be blamed on a rank
    manager = TorchGroup(group, deadline_s=LONG_S)
    kernel = make_kernel(part, experts, mine.problem(rank), group=manager)
    report = outcome_of(lambda: kernel(given.x_TH, given.weights, given.routing), manager)
    given = layer.inputs_of(rank)
    kernel = make_kernel(fault.part, "TorchExperts", layer.problem(rank), group=manager)
    again = kernel(given.x_TH, given.weights, given.routing)
    fresh = make_kernel(fault.part, "TorchExperts", layer.problem(rank), group=TorchGroup(group))
    want = fresh(given.x_TH, given.weights, given.routing)
    return replace(report, serves_again=torch.equal(again, want))


# ------------------------------------------------------------------------------------ the tests


def assert_survivor(report: RankReport, phases: set[str]) -> None:
    assert report.error == "CommunicationError", report
    assert report.peers == (VICTIM,), report.message
    assert report.phase in phases, report.message
    assert report.seconds <= DEADLINE_S + SLACK_S, report
    last = json.loads(report.last)
    assert last["phase"] == report.phase
    assert last["state"].startswith("failed: "), last


MATRIX = [
    *[(ALL2ALL, kind, point) for kind in ("killed", "stopped", "late") for point in POINTS],
    (GATHERED, "killed", "in dispatch"),
    (GATHERED, "stopped", "before combine"),
    (GATHERED, "late", "before dispatch"),
    (REPLICATED, "killed", "before combine"),
    (REPLICATED, "stopped", "before dispatch"),
    (REPLICATED, "late", "after dispatch"),
]


@pytest.mark.share(3)
@pytest.mark.parametrize(("part", "kind", "point"), MATRIX)
def test_a_rank_that_goes_away(pool: RankPool, part: str, kind: str, point: str) -> None:
    result = run_scenario(Scenario(part, kind, point), pool)
    assert result.findings() == []
    for rank in (0, 2):
        assert_survivor(result.reports[rank], POINTS[point])
    if kind == "killed":
        assert set(result.lost) == {VICTIM}
    else:
        # It finds that the others have given it up, or the one that did so first.
        assert result.reports[VICTIM].error == "CommunicationError"
        assert result.reports[VICTIM].peers in ((0, 2), (0,), (2,))


@pytest.mark.parametrize("part", [ALL2ALL, GATHERED, REPLICATED])
def test_an_exception_inside_the_experts_of_one_rank(pool: RankPool, part: str) -> None:
    result = run_scenario(Scenario(part, "raises", deadline_s=LONG_S), pool)
    assert result.findings() == []
    assert result.reports[VICTIM].error == "RuntimeError"
    assert result.reports[VICTIM].message == "these experts are broken"
    for rank in (0, 2):
        assert_survivor(result.reports[rank], {"combine"})
        assert "broke off its call: RuntimeError" in result.reports[rank].message
        assert result.reports[rank].seconds < AT_ONCE_S


@pytest.mark.parametrize("part", [ALL2ALL, GATHERED, REPLICATED])
def test_too_many_tokens_on_one_rank(pool: RankPool, part: str) -> None:
    result = run_scenario(Scenario(part, "overflow", deadline_s=LONG_S), pool)
    assert result.findings() == []
    assert result.reports[VICTIM].error == CapacityError.__name__
    assert result.reports[VICTIM].seconds < AT_ONCE_S
    for rank in (0, 2):
        report = result.reports[rank]
        assert (report.error, report.phase) == ("CommunicationError", "counts"), report
        assert report.peers == (VICTIM,)
        assert "rank 1 refused its call 2 of layer 1 with CapacityError" in report.message
        assert report.seconds < AT_ONCE_S


@pytest.mark.parametrize("kind", ["raises", "refuses"])
@pytest.mark.parametrize("part", [ALL2ALL, GATHERED, REPLICATED])
def test_a_rank_that_comes_to_no_exchange_tells_the_others(
    pool: RankPool, part: str, kind: str
) -> None:
    point = "before dispatch" if kind == "raises" else ""
    result = run_scenario(Scenario(part, kind, point, deadline_s=LONG_S), pool)
    assert result.findings() == []
    for rank in (0, 2):
        assert result.reports[rank].phase == "counts"
        assert "rank 1 refused its call 2 of layer 1" in result.reports[rank].message
        assert result.reports[rank].seconds < AT_ONCE_S


def test_the_matrix_runs_side_by_side_and_says_what_it_found() -> None:
    other = (("hidden", 64),)
    wanted = [Scenario(ALL2ALL, "killed", "before combine"), Scenario(ALL2ALL, "overflow"),
              Scenario(ALL2ALL, "disagrees", other=other)]  # fmt: skip
    results = run_matrix(wanted, 2, "gloo", lanes=2)
    assert [result.findings() for result in results] == [[], [], []]
    lines = markdown(results).splitlines()
    assert len(lines) == 2 + len(wanted)
    assert lines[-1].startswith("| TorchAll2All | another hidden | 0.")
    assert summary(results).startswith("3 scenarios, 0 with findings")
    assert json.loads(json.dumps(as_json(results)))[2]["scenario"] == "another hidden"


def test_every_part_over_gloo_has_its_scenarios() -> None:
    assert set(parts_to_try(2, "gloo")) >= {REPLICATED, GATHERED, ALL2ALL}
    wanted = scenarios(ALL2ALL, "gloo")
    assert len(set(map(str, wanted))) == len(wanted) >= 12


def test_a_matrix_whose_time_is_up_begins_nothing() -> None:
    (result,) = run_matrix([Scenario(ALL2ALL, "overflow")], 2, "gloo", seconds=-1)
    assert result.findings() == [f"rank {rank}: not begun: the time was up" for rank in (0, 1)]


def test_a_call_that_returns_something_else_is_an_error() -> None:
    layer = Layer(ALL2ALL, (4,))
    cpu = this_machine(device="cpu")
    pair = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
    kernel = make_kernel(*pair, layer.problem(0), machine=cpu)
    given = layer.inputs_of(0)
    good = kernel(given.x_TH, given.weights, given.routing)
    right = outcome(kernel, given, good)
    assert (right.error, right.good) == ("", 2)
    wrong = outcome(kernel, given, good + 1)
    assert (wrong.error, wrong.message) == ("AssertionError", "a call returned, and was wrong")
    assert outcome(kernel, given, None).error == "AssertionError"


def test_findings_of_a_part_that_takes_a_fault_badly() -> None:
    """Each thing that may go wrong is found, one at a time."""
    killed = Scenario(ALL2ALL, "killed", "in dispatch")
    good = RankReport("CommunicationError", "m", 2.0, 1, "dispatch", (VICTIM,), serves_again=True)
    dead = {VICTIM: "died: killed by signal SIGKILL"}

    def findings(scenario: Scenario, lost: dict[int, str], *reports: RankReport) -> list[str]:
        ranks = [rank for rank in range(3) if rank not in lost]
        return FaultResult(
            scenario, 3, dict(zip(ranks, reports, strict=True)), lost, 0.0
        ).findings()

    assert findings(killed, dead, good, good) == []
    late = replace(killed, kind="late")
    assert findings(late, {}, good, good, good) == []
    bad = {
        "rank 2: raised nothing": replace(good, error=""),
        "rank 2: raised AssertionError": replace(good, error="AssertionError"),
        "rank 2: names (0,)": replace(good, peers=(0,)),
        "rank 2: in counts": replace(good, phase="counts"),
        "rank 2: took 3.1 s": replace(good, seconds=3.1),
    }
    for text, report in bad.items():
        (found,) = findings(killed, dead, good, report)
        assert found.startswith(text)
    (found,) = findings(late, {}, good, replace(good, error=""), good)
    assert found == "rank 1: raised nothing"
    (found,) = findings(late, {}, good, good, replace(good, serves_again=False))
    assert "does not serve again" in found
    (found,) = findings(killed, {**dead, 2: "did not answer"}, good)
    assert found == "rank 2: did not answer"
    assert findings(late, dead, good, good) == ["rank 1: died: killed by signal SIGKILL"]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"hidden": 64}, "hidden 48, 64, 48"),
        ({"top_k": 2}, "top_k 3, 2, 3"),
        ({"experts": 9}, "experts 8, 9, 8"),
        ({"tokens_W": (4, 7, 5)}, "tokens 6, 8, 6"),
        ({"dtype": torch.bfloat16}, "another dtype"),
        ({"quant": "int8_w8a8_channel"}, "scheme"),
        ({"routed_scaling_factor": 2.0}, "pairing"),
        ({"experts_part": OtherExperts}, "pairing"),
        ({"part": GATHERED}, "pairing"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_ranks_that_mean_another_layer(pool: RankPool, other: dict[str, object], told: str) -> None:
    """Found before anything is sent, by every rank, at once; and the manager serves on."""
    reports = pool.run(disagree, Fault(ALL2ALL, other), timeout=30)
    for rank, report in enumerate(reports):
        assert report.error == "CommunicationError", report
        assert report.phase == "counts"
        assert report.seconds < AT_ONCE_S
        assert told in report.message
        assert report.peers == ((0, 2) if rank == VICTIM else (VICTIM,))
        assert report.serves_again


def test_replicated_ranks_pass_as_many_tokens(pool: RankPool) -> None:
    other = {"tokens_W": (3, 3, 3)}
    reports = pool.run(disagree, Fault(REPLICATED, other), timeout=30)
    assert {report.error for report in reports} == {"CommunicationError"}
    assert all("tokens 5, 4, 5" in report.message for report in reports)


def test_calls_in_flight_when_one_fails(pool: RankPool) -> None:
    """The second call of a manager that failed raises at once, and names the same rank."""
    reports = pool.run(second_of_two, Fault(ALL2ALL), timeout=30)
    assert reports[VICTIM] is None
    for rank in (0, 2):
        first, second = reports[rank]
        assert_survivor(first, {"combine"})
        assert second.error == "CommunicationError"
        assert second.peers == (VICTIM,)
        assert second.seconds < DEADLINE_S


def second_of_two(
    rank: int, world: int, group: object, fault: Fault
) -> tuple[RankReport, RankReport] | None:
    given = fault.layer.inputs_of(rank)
    dist.barrier(group)
    manager = TorchGroup(group, deadline_s=DEADLINE_S)
    kernel = make_kernel(fault.part, "TorchExperts", fault.layer.problem(rank), group=manager)
    pending = [kernel.start(given.x_TH, given.weights, given.routing) for _ in range(2)]
    if rank == VICTIM:
        return None  # and finishes neither
    first, second = (outcome_of(each.finish, manager) for each in pending)
    return first, second


def test_ranks_that_finish_in_another_order_are_told_with_the_next_call(pool: RankPool) -> None:
    reports = pool.run(another_order, Fault(ALL2ALL), timeout=30)
    for rank, report in enumerate(reports):
        assert report.error == "CommunicationError", report
        assert "the exchanges before it in another order" in report.message
        assert report.peers == ((0, 2) if rank == VICTIM else (VICTIM,))


def another_order(rank: int, world: int, group: object, fault: Fault) -> RankReport:
    layer = replace(fault.layer, tokens_W=(4, 4, 4), routing="all_to_one")
    given = layer.inputs_of(rank)
    dist.barrier(group)
    manager = TorchGroup(group, deadline_s=DEADLINE_S)
    kernel = make_kernel(fault.part, "TorchExperts", layer.problem(rank), group=manager)
    pending = [kernel.start(given.x_TH, given.weights, given.routing) for _ in range(2)]
    for each in reversed(pending) if rank == VICTIM else pending:
        each.finish()
    call = lambda: kernel(given.x_TH, given.weights, given.routing)  # noqa: E731
    return outcome_of(call, manager)


def test_another_thread_that_calls_while_a_manager_fails_is_told(pool: RankPool) -> None:
    """While the others are asked who failed, the communicator is gone already."""
    assert pool.run(ask_while_it_fails, timeout=30)[0] == ["CommunicationError"]


def ask_while_it_fails(rank: int, world: int, group: object) -> list[str]:
    manager = TorchGroup(group, deadline_s=0.5)
    if rank:
        return []  # and comes to no exchange
    post, found = manager._board.post, []

    def asked(record: dict[str, Any], until_s: float) -> object:
        try:
            manager.all_reduce(torch.ones(1), step=2, phase="combine")
        except Exception as error:  # noqa: BLE001  its type is looked at
            found.append(type(error).__name__)
        return post(record, until_s)

    manager._board.post = asked  # type: ignore[method-assign,assignment]
    with pytest.raises(CommunicationError):
        manager.all_reduce(torch.ones(1), step=1, phase="combine").wait()
    return found


# -------------------------------------------------------------------------------- without ranks


def failed(step: int, phase: str, waited_s: float) -> dict[str, object]:
    return {"step": step, "phase": phase, "waited_s": waited_s}


@pytest.mark.parametrize(
    ("rank", "records", "peers", "why"),
    [
        (0, {0: (2, "counts", 0.0), 1: (2, "counts", 0.0)}, (2,), "no sign of life"),
        (0, {0: (2, "counts", 0), 1: (2, "counts", 0), 2: (1, "combine", 0)}, (2,), "earlier"),
        (0, {0: (2, "combine", 0), 1: (2, "dispatch", 0), 2: (2, "combine", 0)}, (1,), "earlier"),
        (
            0,
            {0: (1, "counts", 1.4), 1: (1, "counts", 1.3), 2: (1, "counts", 0)},
            (2,),
            "1.4 s late",
        ),
        (2, {0: (1, "counts", 1.4), 1: (1, "counts", 1.3), 2: (1, "counts", 0)}, (0, 1), "gave up"),
        (0, {0: (1, "counts", 0), 1: (1, "counts", 0), 2: (1, "counts", 0)}, (1, 2), "failed too"),
    ],
)
def test_who_is_to_blame(
    rank: int, records: dict[int, tuple[int, str, float]], peers: tuple[int, ...], why: str
) -> None:
    told = {each: failed(*record) for each, record in records.items()}
    blamed, reason = culprits(rank, 3, told, deadline_s=1.0)
    assert blamed == peers
    assert why in reason


class SilentStore:
    """Its host takes what it is sent, and never answers."""

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        time.sleep(60)
        return False


def test_a_store_that_does_not_answer_holds_nobody_up() -> None:
    start = time.monotonic()
    board = FailureBoard(SilentStore(), 0, 2)
    assert board.post(failed(1, "counts", 0.0), start + 0.8) is None
    assert time.monotonic() - start < 1.5


def test_last_calls_are_json_lines_of_the_latest(tmp_path: Path) -> None:
    calls = LastCalls(rank=3, most=2)
    for step in (1, 2, 3):
        calls.end(calls.begin(step, "dispatch", 100 * step))
    calls.begin(4, "combine", 7)
    calls.write(tmp_path / "calls.jsonl")
    records = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert [(r["rank"], r["step"], r["phase"], r["bytes"], r["state"]) for r in records] == [
        (3, 3, "dispatch", 300, "done"),
        (3, 4, "combine", 7, "under way"),
    ]
    assert records[0]["ended_s"] >= records[0]["started_s"] > 0
    assert records[1]["ended_s"] is None
