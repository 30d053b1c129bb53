"""Faults over gloo ranks: whoever survives raises in time, and says which rank to look at."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ep_layers import ALL2ALL, GATHERED, REPLICATED, Layer

from experts.torch_experts import TorchExperts
from modular_kernel.catalog import make_kernel
from modular_kernel.errors import CapacityError, CommunicationError
from modular_kernel.testing.ranks import RankError, RankPool
from prepare_finalize.all2all import TorchGroup
from prepare_finalize.all2all.last_calls import FailureBoard, LastCalls, culprits

WORLD, VICTIM = 3, 1
DEADLINE_S = 1.0
SLACK_S = 2.0  # what a survivor may take beyond the deadline
TOKENS = {REPLICATED: (4, 4, 4), GATHERED: (4, 3, 5), ALL2ALL: (4, 3, 5)}
POINTS = {  # where the victim goes away -> in which exchange the others may find out
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
    """kind: killed, stopped, late, raises, or "" for another problem on the victim alone."""

    part: str
    kind: str
    point: str = "before dispatch"
    other: dict[str, object] = field(default_factory=dict)
    folder: str = ""
    pids: tuple[int, ...] = ()

    @property
    def layer(self) -> Layer:
        return Layer(self.part, TOKENS[self.part], placement="linear")


@dataclass(frozen=True)
class Report:
    """What became of one rank. good: calls it completed, all of them with the right output."""

    error: str
    message: str
    seconds: float
    good: int
    phase: str = ""
    peers: tuple[int, ...] = ()
    last: str = ""
    serves_again: bool = False


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(WORLD, grace=DEADLINE_S + 2 * SLACK_S) as ranks:
        yield ranks


# --------------------------------------------------------------------------------- on the ranks


def pid_of(rank: int, world: int, group: object) -> int:
    return os.getpid()


def suffer(rank: int, world: int, group: object, fault: Fault) -> Report:
    """A good call, then up to two of which the victim breaks one."""
    layer = fault.layer
    given = layer.inputs_of(rank)
    dist.barrier(group)  # what a busy machine delays is not to be blamed on a rank
    manager = TorchGroup(group, deadline_s=DEADLINE_S)
    kernel = make_kernel(fault.part, "TorchExperts", layer.problem(rank), group=manager)
    good = kernel(given.x_TH, given.weights, given.routing).clone()
    dist.barrier(group)
    if rank == VICTIM:
        arm(kernel, manager, fault)
    report = outcome(lambda: kernel(given.x_TH, given.weights, given.routing), good, manager)
    Path(fault.folder, str(rank)).touch()
    if rank == (VICTIM + 1) % world and fault.kind == "stopped":
        wait_for_others(fault.folder, world)
        os.kill(fault.pids[VICTIM], signal.SIGCONT)
    if fault.kind == "killed":
        return report
    return replace(report, serves_again=serves_again(rank, group, layer, good))


def outcome(call: Callable[[], torch.Tensor], good: torch.Tensor, manager: TorchGroup) -> Report:
    start, done = time.monotonic(), 0
    try:
        for _ in range(2):
            out = call()
            assert torch.equal(out, good), "a completed call is a right one"
            done += 1
    except CommunicationError as error:
        seconds = time.monotonic() - start
        last = manager.last_calls.json_lines().splitlines()[-1]
        return Report(
            "CommunicationError", str(error), seconds, done, error.phase, error.peers, last
        )
    except Exception as error:  # noqa: BLE001  the parent looks at what it was
        return Report(type(error).__name__, str(error), time.monotonic() - start, done)
    return Report("", "", time.monotonic() - start, done)


def arm(kernel, manager: TorchGroup, fault: Fault) -> None:
    """Have the victim break down once, at the point."""
    armed = [True]

    def break_down() -> None:
        if not armed.pop():
            return
        armed.append(False)
        if fault.kind == "raises":
            raise RuntimeError("these experts are broken")
        if fault.kind == "late":
            wait_for_others(fault.folder, manager.world_size)
        else:
            number = signal.SIGKILL if fault.kind == "killed" else signal.SIGSTOP
            os.kill(os.getpid(), number)

    start, apply = manager._start, kernel.experts.apply

    def watched_start(launch, tensors, step, phase):
        if fault.point == "before dispatch" and phase == "counts":
            break_down()
        if fault.point == "before combine" and phase == "combine":
            break_down()
        begun = start(launch, tensors, step, phase)
        if fault.point == f"in {phase}":
            break_down()
        return begun

    def watched_apply(*args, **options) -> None:
        if fault.point == "after dispatch":
            break_down()
        apply(*args, **options)

    manager._start, kernel.experts.apply = watched_start, watched_apply


def wait_for_others(folder: str, world: int) -> None:
    until = time.monotonic() + DEADLINE_S + 2 * SLACK_S
    others = [Path(folder, str(rank)) for rank in range(world) if rank != VICTIM]
    while not all(path.exists() for path in others) and time.monotonic() < until:
        time.sleep(0.01)


def serves_again(rank: int, group: object, layer: Layer, good: torch.Tensor) -> bool:
    """Whether the caller's group is as good as ever: a new manager works on it."""
    given = layer.inputs_of(rank)
    kernel = layer.kernel(rank, TorchGroup(group, deadline_s=10))
    return torch.equal(kernel(given.x_TH, given.weights, given.routing), good)


def disagree(rank: int, world: int, group: object, fault: Fault) -> Report:
    """The victim means another layer; then all mean one again, with the same manager."""
    layer = fault.layer
    mine = layer
    options = dict(fault.other) if rank == VICTIM else {}
    experts = options.pop("experts_part", "TorchExperts")
    part = options.pop("part", fault.part)
    tokens_W = options.pop("tokens_W", layer.tokens_W)
    mine = replace(layer, part=part, tokens_W=tokens_W, fields=options)
    given = mine.inputs_of(rank)
    dist.barrier(group)  # what a busy machine delays is not to be blamed on a rank
    manager = TorchGroup(group, deadline_s=DEADLINE_S)
    kernel = make_kernel(part, experts, mine.problem(rank), group=manager)
    report = outcome(
        lambda: kernel(given.x_TH, given.weights, given.routing), torch.empty(0), manager
    )
    given = layer.inputs_of(rank)
    kernel = make_kernel(fault.part, "TorchExperts", layer.problem(rank), group=manager)
    again = kernel(given.x_TH, given.weights, given.routing)
    fresh = make_kernel(fault.part, "TorchExperts", layer.problem(rank), group=TorchGroup(group))
    want = fresh(given.x_TH, given.weights, given.routing)
    return replace(report, serves_again=torch.equal(again, want))


def overflow(rank: int, world: int, group: object, fault: Fault) -> Report:
    """The victim passes more tokens than its problem says."""
    layer = fault.layer
    given = layer.inputs_of(rank)
    dist.barrier(group)  # what a busy machine delays is not to be blamed on a rank
    manager = TorchGroup(group, deadline_s=DEADLINE_S)
    kernel = make_kernel(fault.part, "TorchExperts", layer.problem(rank), group=manager)
    if rank == VICTIM:
        given = replace(layer, tokens_W=(9, 9, 9)).inputs_of(rank)
    return outcome(
        lambda: kernel(given.x_TH, given.weights, given.routing), torch.empty(0), manager
    )


# ------------------------------------------------------------------------------------ the tests


def with_pids(pool: RankPool, fault: Fault, folder: Path) -> Fault:
    return replace(fault, folder=str(folder), pids=tuple(pool.run(pid_of)))


def assert_survivor(report: Report, phases: set[str]) -> None:
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


@pytest.mark.parametrize(("part", "kind", "point"), MATRIX)
def test_a_rank_that_goes_away(
    pool: RankPool, tmp_path: Path, part: str, kind: str, point: str
) -> None:
    fault = with_pids(pool, Fault(part, kind, point), tmp_path)
    if kind == "killed":
        with pytest.raises(RankError) as raised:
            pool.run(suffer, fault, timeout=30)
        assert set(raised.value.failures) == {VICTIM}, raised.value
        reports = raised.value.results
    else:
        reports = dict(enumerate(pool.run(suffer, fault, timeout=30)))
    for rank in set(range(WORLD)) - {VICTIM}:
        assert_survivor(reports[rank], POINTS[point])
        assert reports[rank].serves_again is (kind != "killed")
    if kind != "killed":
        # It finds that the others have given it up, or the one that did so first.
        assert reports[VICTIM].error == "CommunicationError", reports[VICTIM]
        assert reports[VICTIM].peers in ((0, 2), (0,), (2,))


@pytest.mark.parametrize("part", [ALL2ALL, GATHERED, REPLICATED])
def test_an_exception_inside_the_experts_of_one_rank(
    pool: RankPool, tmp_path: Path, part: str
) -> None:
    fault = with_pids(pool, Fault(part, "raises", "after dispatch"), tmp_path)
    reports = pool.run(suffer, fault, timeout=30)
    assert reports[VICTIM].error == "RuntimeError"
    assert reports[VICTIM].message == "these experts are broken"
    for rank in (0, 2):
        assert_survivor(reports[rank], {"combine"})
        assert reports[rank].serves_again


@pytest.mark.parametrize("part", [ALL2ALL, GATHERED, REPLICATED])
def test_too_many_tokens_on_one_rank(pool: RankPool, part: str) -> None:
    reports = pool.run(overflow, Fault(part, ""), timeout=30)
    assert reports[VICTIM].error == CapacityError.__name__
    assert reports[VICTIM].seconds < 0.5
    for rank in (0, 2):
        assert_survivor(reports[rank], {"counts"})


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
    reports = pool.run(disagree, Fault(ALL2ALL, "", other=other), timeout=30)
    for rank, report in enumerate(reports):
        assert report.error == "CommunicationError", report
        assert report.phase == "counts"
        assert report.seconds < 0.5
        assert told in report.message
        assert report.peers == ((0, 2) if rank == VICTIM else (VICTIM,))
        assert report.serves_again


def test_replicated_ranks_pass_as_many_tokens(pool: RankPool) -> None:
    other = {"tokens_W": (3, 3, 3)}
    reports = pool.run(disagree, Fault(REPLICATED, "", other=other), timeout=30)
    assert {report.error for report in reports} == {"CommunicationError"}
    assert all("tokens 5, 4, 5" in report.message for report in reports)


def test_calls_in_flight_when_one_fails(pool: RankPool) -> None:
    """The second call of a manager that failed raises at once, and names the same rank."""
    reports = pool.run(second_of_two, Fault(ALL2ALL, ""), timeout=30)
    assert reports[VICTIM] is None
    for rank in (0, 2):
        first, second = reports[rank]
        assert_survivor(first, {"combine"})
        assert second.error == "CommunicationError"
        assert second.peers == (VICTIM,)
        assert second.seconds < 0.5


def second_of_two(
    rank: int, world: int, group: object, fault: Fault
) -> tuple[Report, Report] | None:
    given = fault.layer.inputs_of(rank)
    dist.barrier(group)
    manager = TorchGroup(group, deadline_s=DEADLINE_S)
    kernel = make_kernel(fault.part, "TorchExperts", fault.layer.problem(rank), group=manager)
    pending = [kernel.start(given.x_TH, given.weights, given.routing) for _ in range(2)]
    if rank == VICTIM:
        return None  # and finishes neither
    first, second = (outcome(each.finish, torch.empty(0), manager) for each in pending)
    return first, second


def test_ranks_that_finish_in_another_order_are_told_with_the_next_call(pool: RankPool) -> None:
    reports = pool.run(another_order, Fault(ALL2ALL, ""), timeout=30)
    for rank, report in enumerate(reports):
        assert report.error == "CommunicationError", report
        assert "the exchanges before it in another order" in report.message
        assert report.peers == ((0, 2) if rank == VICTIM else (VICTIM,))


def another_order(rank: int, world: int, group: object, fault: Fault) -> Report:
    layer = replace(fault.layer, tokens_W=(4, 4, 4), routing="all_to_one")
    given = layer.inputs_of(rank)
    dist.barrier(group)
    manager = TorchGroup(group, deadline_s=DEADLINE_S)
    kernel = make_kernel(fault.part, "TorchExperts", layer.problem(rank), group=manager)
    pending = [kernel.start(given.x_TH, given.weights, given.routing) for _ in range(2)]
    for each in reversed(pending) if rank == VICTIM else pending:
        each.finish()
    call = lambda: kernel(given.x_TH, given.weights, given.routing)  # noqa: E731
    return outcome(call, torch.empty(0), manager)


# -------------------------------------------------------------------------------- without ranks


def failed(step: int, phase: str, started_s: float) -> dict[str, object]:
    return {"step": step, "phase": phase, "started_s": started_s}


@pytest.mark.parametrize(
    ("rank", "records", "peers", "why"),
    [
        (0, {0: (2, "counts", 0.0), 1: (2, "counts", 0.0)}, (2,), "no sign of life"),
        (0, {0: (2, "counts", 0), 1: (2, "counts", 0), 2: (1, "combine", 0)}, (2,), "earlier"),
        (0, {0: (2, "combine", 0), 1: (2, "dispatch", 0), 2: (2, "combine", 0)}, (1,), "earlier"),
        (
            0,
            {0: (1, "counts", 0), 1: (1, "counts", 0.1), 2: (1, "counts", 1.4)},
            (2,),
            "1.4 s late",
        ),
        (2, {0: (1, "counts", 0), 1: (1, "counts", 0.1), 2: (1, "counts", 1.4)}, (0, 1), "gave up"),
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
