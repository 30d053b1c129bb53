"""Run one rank of a fault scenario: one rank fails, and the others must raise in time.

`fault_matrix` sends `run_faulty_rank` to the ranks of a pool. The scenarios run with any exchange
class ("part") that creates its communicator from a process group and whose timeout is MK_TIMEOUT_S.
A part that reports errors asynchronously must provide `check()`, which waits for the device and
raises CommunicationError. The manager of a part is the object through which it communicates.
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
from modular_kernel.settings import use_timeout
from modular_kernel.spec.problem import Machine, Parallel, Problem
from modular_kernel.testing.cases.inputs import FencedCopier, Inputs, make_inputs
from modular_kernel.testing.cases.rank_inputs import inputs_of_rank

FAULTY_RANK = 1  # the rank that fails
TIMEOUT_S = 1.0  # timeout of an exchange, unless the machine is busy; see `_measure_timeout`
MAX_TIMEOUT_S = 8.0  # timeout of an exchange on a busy machine
TIMEOUT_PER_CALL = 5.0  # minimum timeout as a multiple of the time of a call
SLACK_S = 2.0  # how much longer than the timeout the other ranks may take to raise an error
RECOVERY_TIMEOUT_S = 10.0  # timeout of calls that must succeed
# Maps the point at which the faulty rank fails to the phases in which other ranks may detect it.
POINTS: dict[str, frozenset[str]] = {
    "before dispatch": frozenset({"counts", "dispatch"}),
    "in dispatch": frozenset({"dispatch", "combine"}),
    "after dispatch": frozenset({"combine"}),
    "before combine": frozenset({"combine"}),
    "in combine": frozenset({"combine", "counts", "dispatch"}),
}
KINDS_AT_POINTS = ("killed", "stopped", "late")
KINDS = (*KINDS_AT_POINTS, "raises", "overflow", "refuses", "disagrees")
SIZES: dict[str, object] = {"hidden": 48, "intermediate": 40, "experts": 8, "top_k": 3}
TOKENS = (4, 3, 5, 4)  # tokens of each rank, repeated cyclically
CPU_LAYER: tuple[tuple[str, object], ...] = (*SIZES.items(), ("dtype", torch.float32))
# NVLink libraries support only bfloat16 and hidden sizes that are multiples of 512.
GPU_LAYER: tuple[tuple[str, object], ...] = (
    *{**SIZES, "hidden": 2048, "intermediate": 128, "top_k": 2}.items(),
    ("dtype", torch.bfloat16),
)


@dataclass(frozen=True)
class Scenario:
    """A fault of rank 1 in a layer that is called twice.

    Kinds:

    - "killed", "stopped", "late": the process of rank 1 is killed, stopped or delayed at `point`.
    - "raises": its prepare (if `point` is "before dispatch") or its experts raise an exception.
    - "overflow": it passes more tokens than problem.tokens.
    - "refuses": it passes x with another dtype, so that its call is refused.
    - "disagrees": its problem is changed by the fields in `faulty_changes`; the key "experts_part"
      selects a different experts part.

    Raises ConfigurationError for an unknown kind or point.

    Attributes:
        part: name of a PrepareAndFinalize.
        kind: one of KINDS, as described above.
        point: one of POINTS, or "".
        faulty_changes: fields of the problem that rank 1 changes, with kind "disagrees".
        layer: fields of the problem.
        experts_part: name of an experts part; None means the first one that is compatible.
        timeout_s: timeout of an exchange, in seconds. It is longer on a busy machine.
        checked: argument of the part's manager. If False, the ranks compare their arguments on the
            host in the first call only.
    """

    part: str
    kind: str
    point: str = ""
    faulty_changes: tuple[tuple[str, object], ...] = ()
    layer: tuple[tuple[str, object], ...] = CPU_LAYER
    experts_part: str | None = None
    timeout_s: float = TIMEOUT_S
    checked: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigurationError("kind", got=self.kind, need=f"one of {', '.join(KINDS)}")
        if self.kind in KINDS_AT_POINTS and self.point not in POINTS:
            raise ConfigurationError("point", got=self.point, need=f"one of {', '.join(POINTS)}")

    @property
    def phases(self) -> frozenset[str]:
        """The phases in which the other ranks may detect the fault."""
        if self.kind == "raises" and self.point:
            return frozenset({"counts", "dispatch"})
        if self.kind != "raises" and not self.point:
            return frozenset({"counts", "dispatch", "construct"})
        phases = POINTS[self.point or "after dispatch"]
        # ReplicatedEP sends headers in the dispatch, and waits for them in the combine only.
        sends_headers = self.part.startswith("ReplicatedEP") and not self.checked
        return phases | {"dispatch"} if sends_headers else phases

    def __str__(self) -> str:
        if self.kind == "raises":
            return f"exception inside {'its prepare' if self.point else 'the experts'}"
        if self.kind == "refuses":
            return "x of another dtype"
        if self.kind == "overflow":
            return "more tokens than problem.tokens"
        if self.kind == "disagrees":
            names = (name.replace("experts_part", "pairing") for name, _ in self.faulty_changes)
            return "another " + ", ".join(names)
        return f"{self.kind} {self.point}"


@dataclass(frozen=True)
class RankReport:
    """Result of one rank.

    Attributes:
        error: type of the error that ended the calls, or "".
        message: message of the error, or "".
        seconds: time until the error.
        num_completed: number of completed calls, all with correct output.
        phase, peers: attributes of a CommunicationError.
        last_record: newest record of the rank's exchanges, if its manager keeps records.
        usable_again: whether a new kernel works afterwards.
        timeout_s: timeout of an exchange in this run.
    """

    error: str
    message: str
    seconds: float
    num_completed: int
    phase: str = ""
    peers: tuple[int, ...] = ()
    last_record: str = ""
    usable_again: bool = False
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True)
class FaultContext:
    """A scenario on one rank.

    Attributes:
        scenario: the scenario.
        rank, world_size, group: this rank, the number of ranks, and the process group.
        folder: folder in which each rank that has finished creates a file, named by its number.
        pids: process ids by rank.
        timeout_s: timeout of an exchange, the same on all ranks.
    """

    scenario: Scenario
    rank: int
    world_size: int
    group: Any
    folder: str
    pids: tuple[int, ...]
    timeout_s: float = TIMEOUT_S

    @cached_property
    def machine(self) -> Machine:
        return this_machine(device="cuda" if dist.get_backend(self.group) == "nccl" else "cpu")

    def make_problem(self, **changes: Any) -> Problem:
        """Make this rank's problem, with one token more than any rank passes."""
        parallel = Parallel(self.world_size, rank=self.rank)
        fields: dict[str, Any] = {**dict(self.scenario.layer), **changes}
        return Problem(tokens=max(self.tokens_W) + 1, parallel=parallel, **fields)

    @property
    def is_replicated(self) -> bool:
        requires = load_catalog().prepare_finalize(self.scenario.part).requires
        return requires.replicated_input

    @property
    def tokens_W(self) -> tuple[int, ...]:
        tokens = tuple(TOKENS[rank % len(TOKENS)] for rank in range(self.world_size))
        return (tokens[0],) * self.world_size if self.is_replicated else tokens

    def make_inputs(self, problem: Problem, tokens_W: tuple[int, ...]) -> Inputs:
        """Make this rank's tokens, and the weights of its experts."""
        total = tokens_W[0] if self.is_replicated else sum(tokens_W)
        global_problem = replace(problem, tokens=total, parallel=Parallel())
        start = 0 if self.is_replicated else sum(tokens_W[: self.rank])
        device = torch.device(self.machine.device)
        rows = slice(start, start + tokens_W[self.rank])
        all_inputs = make_inputs(global_problem, "uniform", torch.device("cpu"))
        return inputs_of_rank(all_inputs, rows, problem, FencedCopier(device), strided=False)

    def choose_experts(self, problem: Problem) -> str:
        """Return the scenario's experts part, or the first one that is compatible with the part."""
        if self.scenario.experts_part is not None:
            return self.scenario.experts_part
        preferred = ("TorchExperts", "NaiveBatchedExperts")
        for name in (*preferred, *load_catalog().names("experts")):
            if check(self.scenario.part, name, problem, self.machine).ok:
                return name
        return preferred[0]  # make_kernel reports why they are not compatible

    def make_kernel(self, problem: Problem, experts: str) -> FusedMoEModularKernel:
        part, group = self.scenario.part, self.group
        if not self.scenario.checked:
            part_class: Any = load_catalog().prepare_finalize(part)
            group = part_class.manager_class(group, checked=False)
        return make_kernel(part, experts, problem, group=group, machine=self.machine)

    def synchronize_ranks(self) -> None:
        """Wait for all ranks, so that earlier delays do not count toward the timeout."""
        dist.barrier(self.group)

    def mark_finished(self) -> None:
        Path(self.folder, str(self.rank)).touch()

    def wait_for_others(self) -> None:
        """Wait until all ranks except the faulty one have finished, or a timeout expires."""
        deadline = time.monotonic() + self.timeout_s + 2 * SLACK_S
        marker_files = [
            Path(self.folder, str(r)) for r in range(self.world_size) if r != FAULTY_RANK
        ]
        while not all(path.exists() for path in marker_files) and time.monotonic() < deadline:
            time.sleep(0.01)


def get_pid(rank: int, world_size: int, group: object) -> int:
    return os.getpid()


def run_faulty_rank(
    rank: int,
    world_size: int,
    group: Any,
    scenario: Scenario,
    folder: str,
    pids: tuple[int, ...],
) -> RankReport:
    """Run one rank of a scenario; report the error that it raised, and after how many seconds."""
    context = FaultContext(scenario, rank, world_size, group, folder, pids)
    context = replace(context, timeout_s=_measure_timeout(context))
    run = _run_with_other_layer if scenario.kind == "disagrees" else _run_with_fault
    report = replace(run(context), timeout_s=context.timeout_s)
    if scenario.kind == "killed":
        return report
    return replace(report, usable_again=_is_usable(context))


def _measure_timeout(context: FaultContext) -> float:
    """Return the timeout of an exchange, the same on all ranks.

    This is the timeout of the scenario, or TIMEOUT_PER_CALL times the time of a call on the slowest
    rank if that is longer, up to MAX_TIMEOUT_S. Calls are slower if other processes use the CPUs.
    The first call also imports modules and compiles kernels, which must not count toward the
    timeout of later calls.
    """
    problem = context.make_problem()
    inputs = context.make_inputs(problem, context.tokens_W)
    with use_timeout(RECOVERY_TIMEOUT_S):
        kernel = context.make_kernel(problem, context.choose_experts(problem))
    kernel(inputs.x_TH, inputs.weights, inputs.routing)
    context.synchronize_ranks()
    started = time.monotonic()
    for _ in range(2):
        kernel(inputs.x_TH, inputs.weights, inputs.routing)
    _raise_pending_errors(kernel)
    call_s = (time.monotonic() - started) / 2
    slowest_s = torch.tensor(call_s, dtype=torch.float64, device=context.machine.device)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX, group=context.group)
    timeout_s = min(MAX_TIMEOUT_S, TIMEOUT_PER_CALL * float(slowest_s))
    return max(context.scenario.timeout_s, timeout_s)


def _run_with_fault(context: FaultContext) -> RankReport:
    """Make a correct call, then up to two calls. The faulty rank fails in one of them."""
    scenario, problem = context.scenario, context.make_problem()
    inputs = context.make_inputs(problem, context.tokens_W)
    context.synchronize_ranks()
    with use_timeout(context.timeout_s):
        kernel = context.make_kernel(problem, context.choose_experts(problem))
    expected = kernel(inputs.x_TH, inputs.weights, inputs.routing).clone()
    _raise_pending_errors(kernel)
    context.synchronize_ranks()
    if context.rank == FAULTY_RANK and scenario.kind == "overflow":
        too_many_tokens_W = tuple(problem.tokens + 4 for _ in context.tokens_W)
        inputs = context.make_inputs(problem, too_many_tokens_W)
    elif context.rank == FAULTY_RANK and scenario.kind == "refuses":
        inputs = replace(inputs, x_TH=inputs.x_TH.double())
    elif context.rank == FAULTY_RANK:
        _install_fault(kernel, context)
    report = run_two_calls(kernel, inputs, expected)
    context.mark_finished()
    if scenario.kind == "stopped" and context.rank == (FAULTY_RANK + 1) % context.world_size:
        context.wait_for_others()
        os.kill(context.pids[FAULTY_RANK], signal.SIGCONT)
    return report


def _run_with_other_layer(context: FaultContext) -> RankReport:
    """Make up to two calls, in which the faulty rank uses a different layer."""
    changes: dict[str, Any] = (
        dict(context.scenario.faulty_changes) if context.rank == FAULTY_RANK else {}
    )
    experts = changes.pop("experts_part", None)
    problem = context.make_problem(**changes)
    inputs = context.make_inputs(problem, context.tokens_W)
    context.synchronize_ranks()
    started = time.monotonic()
    try:
        with use_timeout(context.timeout_s):
            kernel = context.make_kernel(
                problem, experts or context.choose_experts(context.make_problem())
            )
    except Exception as error:  # noqa: BLE001  a constructor may detect the different layer
        return _make_error_report(error, time.monotonic() - started, 0)
    return run_two_calls(kernel, inputs, None)


def run_two_calls(
    kernel: FusedMoEModularKernel, inputs: Inputs, expected: torch.Tensor | None
) -> RankReport:
    """Make up to two calls, each of which must return `expected` or raise an error.

    expected: the expected output; None if the calls must raise.
    """
    is_deterministic = kernel.prepare_finalize.requires.deterministic

    def call() -> None:
        out = kernel(inputs.x_TH, inputs.weights, inputs.routing)
        _raise_pending_errors(kernel)
        if expected is None:
            raise AssertionError("a call succeeded although the ranks use different layers")
        if not (torch.equal(out, expected) if is_deterministic else torch.allclose(out, expected)):
            raise AssertionError("a call returned a wrong result")

    return run_calls(call, getattr(kernel.prepare_finalize, "manager", None), calls=2)


def run_calls(call: Callable[[], object], manager: Any, *, calls: int = 1) -> RankReport:
    """Make up to `calls` calls, stopping at the first error; return the report.

    manager: the part's manager, or None. Exchange records are read from `manager.last_calls`.
    """
    started, completed = time.monotonic(), 0
    try:
        while completed < calls:
            call()
            completed += 1
    except Exception as error:  # noqa: BLE001  the parent checks the error
        return replace(
            _make_error_report(error, time.monotonic() - started, completed),
            last_record=_get_newest_record(manager),
        )
    return RankReport("", "", time.monotonic() - started, completed)


def _make_error_report(error: Exception, seconds: float, num_completed: int) -> RankReport:
    report = RankReport(type(error).__name__, str(error), seconds, num_completed)
    if isinstance(error, CommunicationError):
        return replace(report, phase=error.phase, peers=error.peers)
    return report


def _get_newest_record(manager: Any) -> str:
    calls = getattr(manager, "last_calls", None)
    lines = [] if calls is None else calls.json_lines().splitlines()
    return lines[-1] if lines else ""


def _raise_pending_errors(kernel: FusedMoEModularKernel) -> None:
    """Make parts that report errors asynchronously raise them."""
    check_part: Callable[[], object] | None = getattr(kernel.prepare_finalize, "check", None)
    if check_part is not None:
        check_part()


def _install_fault(kernel: FusedMoEModularKernel, context: FaultContext) -> None:
    """Wrap methods of this rank's parts so that the rank fails once, at the scenario's point."""
    part, experts, scenario = kernel.prepare_finalize, kernel.experts, context.scenario
    armed = [True]

    def reach_point(point: str) -> None:
        fault_point = scenario.point or "after dispatch"
        if point != fault_point or not armed:
            return
        armed.clear()
        _fail(context)

    def wrap(name: str, owner: Any, point_before: str, point_after: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            reach_point(point_before)
            result = original(*args, **options)
            reach_point(point_after)
            return result

        setattr(owner, name, wrapped)

    # When prepare_no_receive returns, the dispatch has been sent but not received.
    wrap("prepare_no_receive", part, "before dispatch", "in dispatch")
    if not part.has_prepare_no_receive():
        wrap("prepare", part, "before dispatch", "in dispatch")
    wrap("apply", experts, "after dispatch", "")
    manager = getattr(part, "manager", None)
    has_exchange_start = hasattr(manager, "_start")
    wrap("finalize", part, "before combine", "" if has_exchange_start else "in combine")
    if has_exchange_start:
        _patch_exchanges(manager, reach_point)


def _patch_exchanges(manager: Any, reach_point: Callable[[str], None]) -> None:
    """Call `reach_point` between the start of a combine exchange and the wait for it."""
    original_start = manager._start

    def start(launch: Any, tensors: Any, step: int, phase: str) -> Any:
        exchange = original_start(launch, tensors, step, phase)
        if phase == "combine":
            reach_point("in combine")
        return exchange

    manager._start = start


def _fail(context: FaultContext) -> None:
    kind = context.scenario.kind
    if kind == "raises":
        subject = "this part is" if context.scenario.point else "these experts are"
        raise RuntimeError(f"{subject} broken")
    if context.machine.device == "cuda" and not context.scenario.point.startswith("in"):
        torch.cuda.synchronize()  # complete all earlier work
    if kind == "late":
        context.wait_for_others()
    else:
        os.kill(os.getpid(), signal.SIGKILL if kind == "killed" else signal.SIGSTOP)


def _is_usable(context: FaultContext) -> bool:
    """Return whether a new kernel on the same group returns two equal and finite outputs."""
    problem = context.make_problem()
    inputs = context.make_inputs(problem, context.tokens_W)
    with use_timeout(RECOVERY_TIMEOUT_S):
        kernel = context.make_kernel(problem, context.choose_experts(problem))
    first_output = kernel(inputs.x_TH, inputs.weights, inputs.routing).clone()
    second_output = kernel(inputs.x_TH, inputs.weights, inputs.routing)
    _raise_pending_errors(kernel)
    return bool(first_output.isfinite().all()) and torch.allclose(first_output, second_output)
