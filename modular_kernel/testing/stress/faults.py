"""Behavior of ranks in a fault scenario: one rank fails, the others must raise in time.

Works for any part over ranks that makes its communication from a process group and takes its
deadline from MK_DEADLINE_S. A part that does not wait for the device within a call, and so raises
errors later, provides `check()`, which waits and raises CommunicationError.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from modular_kernel.catalog import check, load_catalog, make_kernel, this_machine
from modular_kernel.errors import CommunicationError, ConfigurationError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.settings import use_deadline
from modular_kernel.spec.problem import Machine, Parallel, Problem
from modular_kernel.testing.cases.inputs import FencedMemory, Inputs, make_inputs
from modular_kernel.testing.cases.rank_inputs import inputs_of_rank

VICTIM = 1
DEADLINE_S = 1.0
SLACK_S = 2.0  # time that a survivor may take in addition to the deadline
AGAIN_S = 10.0  # deadline of calls that must succeed
POINTS: dict[
    str, frozenset[str]
] = {  # where the victim fails -> phases in which others may detect it
    "before dispatch": frozenset({"counts", "dispatch"}),
    "in dispatch": frozenset({"dispatch", "combine"}),
    "after dispatch": frozenset({"combine"}),
    "before combine": frozenset({"combine"}),
    "in combine": frozenset({"combine", "counts", "dispatch"}),
}
KINDS_AT_POINTS = ("killed", "stopped", "late")
KINDS = (*KINDS_AT_POINTS, "raises", "overflow", "refuses", "disagrees")
SIZES: dict[str, object] = {"hidden": 48, "intermediate": 40, "experts": 8, "top_k": 3}
TOKENS = (4, 3, 5, 4)  # per rank, repeated cyclically
CPU_LAYER: tuple[tuple[str, object], ...] = (*SIZES.items(), ("dtype", torch.float32))
# Supported by NVLink libraries: multiples of 512 columns, bfloat16.
GPU_LAYER: tuple[tuple[str, object], ...] = (
    *{**SIZES, "hidden": 2048, "intermediate": 128, "top_k": 2}.items(),
    ("dtype", torch.bfloat16),
)


@dataclass(frozen=True)
class Scenario:
    """A fault at rank 1 of a layer that is called twice.

    kind: "killed", "stopped" or "late", at a point of POINTS; "raises", in its prepare if the point
    is "before dispatch", else in its experts; "overflow": it passes more tokens than
    problem.tokens; "refuses": it passes x of another dtype; "disagrees": its problem has the fields
    of `other` ("experts_part" names other experts). experts: None uses the first that pair with the
    part. Raises ConfigurationError for an unknown kind or point.
    """

    part: str
    kind: str
    point: str = ""
    other: tuple[tuple[str, object], ...] = ()
    layer: tuple[tuple[str, object], ...] = CPU_LAYER
    experts: str | None = None
    deadline_s: float = DEADLINE_S

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigurationError("kind", got=self.kind, need=f"one of {', '.join(KINDS)}")
        if self.kind in KINDS_AT_POINTS and self.point not in POINTS:
            raise ConfigurationError("point", got=self.point, need=f"one of {', '.join(POINTS)}")

    @property
    def phases(self) -> frozenset[str]:
        """The phases in which survivors may detect the fault."""
        if self.kind == "raises" and not self.point:
            return frozenset({"combine"})
        if self.kind == "raises":
            return frozenset({"counts", "dispatch"})
        early = frozenset({"counts", "dispatch", "construct"})
        return POINTS[self.point] if self.point else early

    def __str__(self) -> str:
        if self.kind == "raises":
            return f"exception inside {'its prepare' if self.point else 'the experts'}"
        if self.kind == "refuses":
            return "x of another dtype"
        if self.kind == "overflow":
            return "more tokens than problem.tokens"
        if self.kind == "disagrees":
            return "another " + ", ".join(name.replace("experts_part", "pairing") for name, _ in
                                          self.other)  # fmt: skip
        return f"{self.kind} {self.point}"


@dataclass(frozen=True)
class RankReport:
    """Result of one rank.

    error: name of the error, or "". good: number of completed calls, all with correct output. last:
    the newest record of its exchanges, if its manager keeps records.
    """

    error: str
    message: str
    seconds: float
    good: int
    phase: str = ""
    peers: tuple[int, ...] = ()
    last: str = ""
    serves_again: bool = False


@dataclass(frozen=True)
class FaultContext:
    """A scenario on one rank. folder: a finished rank creates a file there named by its number."""

    scenario: Scenario
    rank: int
    world_size: int
    group: Any
    folder: str
    pids: tuple[int, ...]

    @cached_property
    def machine(self) -> Machine:
        return this_machine(device="cuda" if dist.get_backend(self.group) == "nccl" else "cpu")

    def problem(self, **changes: Any) -> Problem:
        """Return this rank's problem, for one token more than any rank passes."""
        parallel = Parallel(self.world_size, rank=self.rank)
        fields: dict[str, Any] = {**dict(self.scenario.layer), **changes}
        return Problem(tokens=max(self.tokens_W) + 1, parallel=parallel, **fields)

    @property
    def replicated(self) -> bool:
        requires = load_catalog().prepare_finalize(self.scenario.part).requires
        return requires.replicated_input

    @property
    def tokens_W(self) -> tuple[int, ...]:
        tokens = tuple(TOKENS[rank % len(TOKENS)] for rank in range(self.world_size))
        return (tokens[0],) * self.world_size if self.replicated else tokens

    def inputs(self, problem: Problem, tokens_W: tuple[int, ...]) -> Inputs:
        """Return this rank's tokens and the weights of its experts."""
        total = tokens_W[0] if self.replicated else sum(tokens_W)
        whole = replace(problem, tokens=total, parallel=Parallel())
        start = 0 if self.replicated else sum(tokens_W[: self.rank])
        device = torch.device(self.machine.device)
        rows = slice(start, start + tokens_W[self.rank])
        all_inputs = make_inputs(whole, "uniform", torch.device("cpu"))
        return inputs_of_rank(all_inputs, rows, problem, FencedMemory(device), strided=False)

    def experts(self, problem: Problem) -> str:
        """Return the scenario's experts, or the first in the catalog that pair with the part."""
        if self.scenario.experts is not None:
            return self.scenario.experts
        preferred = ("TorchExperts", "NaiveBatchedExperts")
        for name in (*preferred, *load_catalog().names("experts")):
            if check(self.scenario.part, name, problem, self.machine).ok:
                return name
        return preferred[0]  # make_kernel then reports why it does not pair

    def kernel(self, problem: Problem, experts: str) -> FusedMoEModularKernel:
        return make_kernel(
            self.scenario.part, experts, problem, group=self.group, machine=self.machine
        )

    def meet(self) -> None:
        """Synchronize all ranks, so that a delay of a busy machine is not attributed to a rank."""
        dist.barrier(self.group)

    def through(self) -> None:
        Path(self.folder, str(self.rank)).touch()

    def wait_for_others(self) -> None:
        """Wait until every rank but the victim has finished, for a limited time."""
        end = time.monotonic() + self.scenario.deadline_s + 2 * SLACK_S
        others = [Path(self.folder, str(r)) for r in range(self.world_size) if r != VICTIM]
        while not all(path.exists() for path in others) and time.monotonic() < end:
            time.sleep(0.01)


def pid_of(rank: int, world_size: int, group: object) -> int:
    return os.getpid()


def run_faulty_rank(
    rank: int,
    world_size: int,
    group: Any,
    scenario: Scenario,
    folder: str,
    pids: tuple[int, ...],
) -> RankReport:
    """Run one rank of a scenario; return what it raised, and when."""
    stage = FaultContext(scenario, rank, world_size, group, folder, pids)
    report = (
        _run_with_other_layer(stage) if scenario.kind == "disagrees" else _run_with_fault(stage)
    )
    if scenario.kind == "killed":
        return report
    return replace(report, serves_again=_serves_again(stage))


def _run_with_fault(stage: FaultContext) -> RankReport:
    """Make a correct call, then up to two calls; the victim fails in one of them."""
    scenario, problem = stage.scenario, stage.problem()
    inputs = stage.inputs(problem, stage.tokens_W)
    stage.meet()
    with use_deadline(scenario.deadline_s):
        kernel = stage.kernel(problem, stage.experts(problem))
    good = kernel(inputs.x_TH, inputs.weights, inputs.routing).clone()
    _raise_pending_errors(kernel)
    stage.meet()
    if stage.rank == VICTIM and scenario.kind == "overflow":
        too_many_W = tuple(problem.tokens + 4 for _ in stage.tokens_W)
        inputs = stage.inputs(problem, too_many_W)
    elif stage.rank == VICTIM and scenario.kind == "refuses":
        inputs = replace(inputs, x_TH=inputs.x_TH.double())
    elif stage.rank == VICTIM:
        _install_fault(kernel, stage)
    report = outcome(kernel, inputs, good)
    stage.through()
    if scenario.kind == "stopped" and stage.rank == (VICTIM + 1) % stage.world_size:
        stage.wait_for_others()
        os.kill(stage.pids[VICTIM], signal.SIGCONT)
    return report


def _run_with_other_layer(stage: FaultContext) -> RankReport:
    """Let the victim use another layer."""
    changes: dict[str, Any] = dict(stage.scenario.other) if stage.rank == VICTIM else {}
    experts = changes.pop("experts_part", None)
    problem = stage.problem(**changes)
    inputs = stage.inputs(problem, stage.tokens_W)
    stage.meet()
    started = time.monotonic()
    try:
        with use_deadline(stage.scenario.deadline_s):
            kernel = stage.kernel(problem, experts or stage.experts(stage.problem()))
    except Exception as error:  # noqa: BLE001  a part may detect it in its constructor
        return _raised(error, time.monotonic() - started, 0)
    return outcome(kernel, inputs, None)


def outcome(kernel: FusedMoEModularKernel, given: Inputs, good: torch.Tensor | None) -> RankReport:
    """Return the report of two calls, each of which must return `good` or raise.

    good: None if the calls must fail.
    """
    exact = kernel.prepare_finalize.requires.deterministic

    def call() -> None:
        out = kernel(given.x_TH, given.weights, given.routing)
        _raise_pending_errors(kernel)
        if good is None:
            raise AssertionError("a call succeeded although ranks use different layers")
        if not (torch.equal(out, good) if exact else torch.allclose(out, good)):
            raise AssertionError("a call returned a wrong result")

    return report_of_calls(call, getattr(kernel.prepare_finalize, "manager", None), calls=2)


def report_of_calls(call: Callable[[], object], manager: Any, *, calls: int = 1) -> RankReport:
    """Return the report of `calls` calls, until one raises.

    manager: the source of `last_calls`, if it has any.
    """
    started, completed = time.monotonic(), 0
    try:
        while completed < calls:
            call()
            completed += 1
    except Exception as error:  # noqa: BLE001  the parent checks the error
        return replace(
            _raised(error, time.monotonic() - started, completed), last=_newest_record(manager)
        )
    return RankReport("", "", time.monotonic() - started, completed)


def _raised(error: Exception, seconds: float, done: int) -> RankReport:
    report = RankReport(type(error).__name__, str(error), seconds, done)
    if isinstance(error, CommunicationError):
        return replace(report, phase=error.phase, peers=error.peers)
    return report


def _newest_record(manager: Any) -> str:
    calls = getattr(manager, "last_calls", None)
    lines = [] if calls is None else calls.json_lines().splitlines()
    return lines[-1] if lines else ""


def _raise_pending_errors(kernel: FusedMoEModularKernel) -> None:
    """Make parts that report errors asynchronously raise them."""
    check_part: Callable[[], object] | None = getattr(kernel.prepare_finalize, "check", None)
    if check_part is not None:
        check_part()


def _install_fault(kernel: FusedMoEModularKernel, stage: FaultContext) -> None:
    """Install hooks that make the victim fail once, at the scenario's point."""
    part, experts, scenario = kernel.prepare_finalize, kernel.experts, stage.scenario
    armed = [True]

    def at(point: str) -> None:
        wanted = scenario.point or "after dispatch"
        if point != wanted or not armed:
            return
        armed.clear()
        _fail(stage)

    def around(name: str, owner: Any, before: str, after: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            at(before)
            result = original(*args, **options)
            at(after)
            return result

        setattr(owner, name, watched)

    # A part that sends and receives separately is in its dispatch between the two.
    around("prepare_no_receive", part, "before dispatch", "in dispatch")
    if not part.has_prepare_no_receive():
        around("prepare", part, "before dispatch", "in dispatch")
    around("apply", experts, "after dispatch", "")
    exchanges = getattr(part, "manager", None)
    in_exchange = hasattr(exchanges, "_start")
    around("finalize", part, "before combine", "" if in_exchange else "in combine")
    if in_exchange:
        _watch_exchanges(exchanges, at)


def _watch_exchanges(manager: Any, at: Callable[[str], None]) -> None:
    """Call `at` between the start of a combine exchange and the wait for it."""
    original_start = manager._start

    def start(launch: Any, tensors: Any, step: int, phase: str) -> Any:
        exchange = original_start(launch, tensors, step, phase)
        if phase == "combine":
            at("in combine")
        return exchange

    manager._start = start


def _fail(stage: FaultContext) -> None:
    kind = stage.scenario.kind
    if kind == "raises":
        raise RuntimeError("this part is broken" if stage.scenario.point else
                           "these experts are broken")  # fmt: skip
    if stage.machine.device == "cuda" and not stage.scenario.point.startswith("in"):
        torch.cuda.synchronize()  # complete all earlier work
    if kind == "late":
        stage.wait_for_others()
    else:
        os.kill(os.getpid(), signal.SIGKILL if kind == "killed" else signal.SIGSTOP)


def _serves_again(stage: FaultContext) -> bool:
    """Return whether a new kernel on the caller's group gives two equal, finite outputs."""
    problem = stage.problem()
    inputs = stage.inputs(problem, stage.tokens_W)
    with use_deadline(AGAIN_S):
        kernel = stage.kernel(problem, stage.experts(problem))
    first = kernel(inputs.x_TH, inputs.weights, inputs.routing).clone()
    again = kernel(inputs.x_TH, inputs.weights, inputs.routing)
    _raise_pending_errors(kernel)
    return bool(first.isfinite().all()) and torch.allclose(first, again)
