"""What one rank does: make the pairings on the same inputs, time planned calls, trace eager ones.

Two things are measured apart. The total that users get is that of a planned call: on a GPU a
replayed CUDA graph where the pairing can be captured, timed by events, with no profiler loaded
(once it was, launches are slower). The stages are those of eager calls of the same plan under
torch's profiler, which runs the parts' host code instead of replaying. They are queued behind a
pause of the GPU, so that it never waits for the host. A GPU that rested runs faster at first than
its power limit lets it go on, so that the graph, where there is one, is replayed for a while before
calls of either kind; and the L2 cache is overwritten before each, so that all find it cold.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function, schedule

from modular_kernel.catalog import check, load_catalog, make_kernel, needs_triton
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.machine import torch_twins
from modular_kernel.measure.environment import Environment, environment
from modular_kernel.measure.records import INTERPRETER
from modular_kernel.measure.roofline import Peaks, measure_link, measure_peaks, operand_type
from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.measure.stage_roofline import RankLoad
from modular_kernel.measure.timing import Wiper, capture, clock_of, host_cost, samples_ms, wiper_of
from modular_kernel.plan import Plan
from modular_kernel.profiling.chrome import BARRIER
from modular_kernel.profiling.inputs import ProfileInputs, make_inputs
from modular_kernel.profiling.stderr import without_own_lines
from modular_kernel.replay import stages
from modular_kernel.spec.problem import Machine, Problem, dtype_name
from modular_kernel.tensors import ExpertWeights

_CYCLES_PER_S = 2.0e9  # of a GPU, or fewer
_SPARE = 3.0  # times what the host takes for an eager call that nobody profiles
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 5e-3, 0.5
# Seen on an H200: clocks settle within 65 ms. More replays than that would only fill the trace.
_HEAT_S, _MOST_HEAT = 0.1, 100
_WARM_CALLS = 3
_BARRIERS = 5  # of which the one that let go most equally tells how far clocks agree
_REPLAYS, _REPLAYS_ON_CPU = 40, 4  # fixed: ranks that wait for each other make as many


@dataclass(frozen=True)
class ProfileJob:
    """What to profile. pairs: (PrepareAndFinalize, experts), one or two. calls: traced ones.

    traces: for each pair how its traces' paths begin. command: how to repeat it. prepared: each
    pair has weights that its kernel prepared once, before, where it prepares any.
    """

    pairs: tuple[tuple[str, str], ...]
    problem: Problem
    machine: Machine
    routing: RoutingKind
    calls: int
    traces: tuple[Path, ...]
    command: str = ""
    prepared: bool = False


@dataclass(frozen=True)
class Total:
    """Planned calls, as users make them. us: the median of one call's microseconds, samples_us: all
    of them. mode: "graph" or "eager" on a GPU, "cpu" or "interpreter". host_us: until a call that
    is not in a graph returns, allocations: of device memory in it; None on a CPU."""

    us: float
    samples_us: tuple[float, ...]
    mode: str
    host_us: float | None
    allocations: float | None

    @property
    def spread(self) -> float:
        """The middle half of the samples over their median."""
        quarters = quantiles(self.samples_us, n=4)
        return (quarters[2] - quarters[0]) / self.us if self.us else 0.0


@dataclass(frozen=True)
class Memory:
    """Bytes. workspace: what the plan holds, its output apart. peak: most that torch's allocator
    gave out above what the inputs take, buffers included; None on a CPU. prepared: of weights that
    were prepared, which are among the inputs."""

    workspace: int
    peak: int | None
    prepared: int = 0


@dataclass(frozen=True)
class Recorded:
    """One pairing on one rank."""

    pairing: str
    trace: Path
    total: Total
    memory: Memory


@dataclass(frozen=True)
class RankRecord:
    """Everything one rank measured. link: bytes per second to the next rank's GPU, if known.
    difference: RMS of the second pairing's output less the first's, over the first's."""

    rank: int
    environment: Environment
    peaks: Peaks
    link: float | None
    load: RankLoad
    pairs: tuple[Recorded, ...]
    difference: float | None


def record_rank(rank: int, world_size: int, group: Any, job: ProfileJob) -> RankRecord:
    """Do a job on one rank; every rank of the group does. group: None where there is one rank."""
    problem = replace(job.problem, parallel=replace(job.problem.parallel, rank=rank))
    device = _device(job.machine)
    catalog = load_catalog()
    replicated = any(catalog.prepare_finalize(pf).requires.replicated_input for pf, _ in job.pairs)
    with torch.no_grad():
        types = dict.fromkeys((operand_type(problem, problem.scheme), dtype_name(problem.dtype)))
        peaks = measure_peaks(device, types)
        inputs = make_inputs(problem, device, job.routing, replicated=replicated)
        link = _link(device, rank, world_size)
        bench = _Bench(job, problem, device, group, inputs)
        recorded, outputs = bench.run()
    difference = _difference(outputs) if len(outputs) > 1 else None
    where = environment(device, job.command)
    return RankRecord(rank, where, peaks, link, inputs.load, recorded, difference)


def _device(machine: Machine) -> torch.device:
    if machine.device != "cuda":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _link(device: torch.device, rank: int, world_size: int) -> float | None:
    if device.type != "cuda" or world_size < 2:
        return None
    return measure_link(device, torch.device("cuda", (rank + 1) % world_size))


def _difference(outputs: Sequence[torch.Tensor]) -> float:
    first, second = (each.double() for each in outputs)
    norm = float(first.square().mean().sqrt())
    return float((second - first).square().mean().sqrt()) / norm if norm else math.nan


@dataclass(frozen=True)
class _Load:
    """A graph to replay until clocks have settled, and the seconds that it takes; or none."""

    run: Callable[[], torch.Tensor] | None = None
    run_s: float = 0.0

    def replays(self) -> int:
        if self.run is None:
            return 0
        return min(math.ceil(_HEAT_S / max(self.run_s, 1e-9)), _MOST_HEAT)


class _Bench:
    """The pairings of one job on one rank, in the order in which they are measured."""

    def __init__(
        self,
        job: ProfileJob,
        problem: Problem,
        device: torch.device,
        group: Any,
        inputs: ProfileInputs,
    ) -> None:
        self.job, self.problem, self.device, self.group = job, problem, device, group
        self.inputs = inputs
        # An inplace layer overwrites x, so that the next pairing would find another.
        self.x_TH = inputs.x_TH.clone() if problem.inplace else inputs.x_TH
        self.on_gpu = device.type == "cuda"
        self.wipe: Wiper = wiper_of(device)
        self.clock = clock_of(device)
        self.weights: dict[str, ExpertWeights] = {}  # prepared ones, by the pairing

    def run(self) -> tuple[tuple[Recorded, ...], list[torch.Tensor]]:
        """Record each pairing; return what was recorded, and its output."""
        made = [self._made(*pair) for pair in self.job.pairs]
        outputs = [output for _, _, output in made]
        calls = [partial(self._call, plan) for plan, _, _ in made]
        totals, loads = self._totals(calls)
        recorded = []
        for (plan, memory, _), total, load, stem in zip(
            made, totals, loads, self.job.traces, strict=True
        ):
            name = f"{stem.name}-rank{self.problem.parallel.rank}.trace.json"
            trace = stem.with_name(name)
            self._trace(plan, load, trace)
            plan.kernel.prepare_finalize.check()
            recorded.append(Recorded(plan.kernel.pairing, trace, total, memory))
        return tuple(recorded), outputs

    def _call(self, plan: Plan) -> torch.Tensor:
        given, weights = self.inputs, self._weights_of(_kernel_of(plan))
        if self.on_gpu:
            return plan(given.x_TH, weights, given.routing)
        with self._as_users_run(_kernel_of(plan)):
            return plan(given.x_TH, weights, given.routing)

    def _weights_of(self, kernel: FusedMoEModularKernel) -> ExpertWeights:
        return self.weights.get(kernel.pairing, self.inputs.weights)

    def _prepared(self, kernel: FusedMoEModularKernel) -> int:
        """Prepare the weights of a pairing, and return how many bytes that takes."""
        if not self.job.prepared:
            return 0
        with self._as_users_run(kernel):
            self.weights[kernel.pairing] = kernel.prepare_weights(self.inputs.weights)
        return sum(spec.nbytes for spec in kernel.experts.prepared_specs().values())

    def _as_users_run(self, kernel: FusedMoEModularKernel) -> AbstractContextManager[None]:
        """Operations beside parts of plain torch are not interpreted, either."""
        parts = type(kernel.prepare_finalize), type(kernel.experts)
        return torch_twins(wanted=not needs_triton(*parts))

    def _made(self, pf: str, experts: str) -> tuple[Plan, Memory, torch.Tensor]:
        """Return a plan after calls that compile and load everything.

        With it come its memory and what the first call returned.
        """
        before = self._allocated(reset=True)
        kernel = make_kernel(pf, experts, self.problem, group=self.group, machine=self.job.machine)
        prepared = self._prepared(kernel)
        plan, given = kernel.plan(), self.inputs
        x_TH = self.x_TH.clone() if self.problem.inplace else self.x_TH
        with self._as_users_run(kernel):
            output = plan(x_TH, self._weights_of(kernel), given.routing).clone()
        for _ in range(_WARM_CALLS if self.on_gpu else 0):
            self._call(plan)
        self.clock.wait()
        kernel.prepare_finalize.check()
        peak = None
        if self.on_gpu:
            peak = torch.cuda.max_memory_allocated(self.device) - before - prepared
        return plan, Memory(plan.nbytes, peak, prepared), output

    def _allocated(self, *, reset: bool) -> int:
        if not self.on_gpu:
            return 0
        if reset:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def _totals(
        self, calls: Sequence[Callable[[], torch.Tensor]]
    ) -> tuple[list[Total], list[_Load]]:
        """Of each planned call; those of two pairings in the order A, B, B, A. And what loads the
        GPU as each of them does."""
        runs, modes, loads = [], [], []
        for (pf, experts), call in zip(self.job.pairs, calls, strict=True):
            run, mode = self._captured(pf, experts, call)
            runs.append(run)
            modes.append(mode)
            loads.append(_Load(run, self._once_s(run)) if mode == "graph" else _Load())
        order = [*range(len(runs)), *reversed(range(len(runs)))]
        replays = (_REPLAYS if self.on_gpu else _REPLAYS_ON_CPU) // 2
        samples: list[list[float]] = [[] for _ in runs]
        for index in order:
            samples[index] += self._samples(runs[index], replays, loads[index])
        # No graph is replayed any more, and no profiler was loaded yet.
        hosts = [host_cost(call, self.device) for call in calls]
        totals = [
            Total(
                median(own),
                tuple(own),
                mode,
                None if host is None else host.us,
                None if host is None else host.allocations,
            )
            for own, mode, host in zip(samples, modes, hosts, strict=True)
        ]
        return totals, loads

    def _captured(
        self, pf: str, experts: str, call: Callable[[], torch.Tensor]
    ) -> tuple[Callable[[], torch.Tensor], str]:
        """One call in a CUDA graph, where every rank could capture it; else as it is."""
        if not self.on_gpu:
            interpreted = self.job.machine.interpreter and needs_triton(pf, experts)
            return call, INTERPRETER if interpreted else "cpu"
        promise = replace(self.problem, graph=True)
        runs = capture([[call]]) if check(pf, experts, promise, self.job.machine).ok else None
        if self._largest(0.0 if runs else 1.0) or runs is None:
            return call, "eager"
        return runs[0], "graph"

    def _samples(self, run: Callable[[], torch.Tensor], replays: int, load: _Load) -> list[float]:
        """Microseconds of each of some calls, behind the load behind which stages are traced, and
        one that is not counted."""
        self._barrier()
        calls = repeat(run, load.replays() + replays + 1)
        return [ms * 1e3 for ms in samples_ms(calls, self.clock, self.wipe)[-replays:]]

    def _once_s(self, run: Callable[[], torch.Tensor]) -> float:
        """Seconds of a call, the slowest rank's: ranks that wait for each other make as many."""
        self._barrier()
        start = self.clock.mark()
        run()
        end = self.clock.mark()
        self.clock.wait()
        return self._largest(self.clock.ms(start, end)) / 1e3

    def _trace(self, plan: Plan, load: _Load, path: Path) -> None:
        """Write a Chrome trace of some eager calls.

        The step before it pays for the profiler itself.
        """
        call, pause = partial(self._call, plan), self._pause(plan)
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.on_gpu else [])
        watch = torch.profiler.profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
            acc_events=True,
        )
        with without_own_lines(), watch as profiler:
            for _ in range(2):
                self._queue(call, load, pause)
                profiler.step()

    def _queue(self, call: Callable[[], torch.Tensor], load: _Load, pause: float) -> None:
        """Make the calls to trace, behind a time of the GPU in which the host queues them all."""
        for _ in range(_BARRIERS):
            with record_function(BARRIER):
                self._barrier()
        if self.on_gpu:
            self._occupy(load, pause)
        for _ in range(self.job.calls):
            if self.wipe is not None:
                self.wipe()
            with record_function(stages.CALL):
                call()
        self.clock.wait()

    def _occupy(self, load: _Load, pause: float) -> None:
        """Have the GPU sleep for `pause` seconds, in which the host queues all, then load it."""
        torch.cuda._sleep(int(pause * _CYCLES_PER_S))  # type: ignore[no-untyped-call]
        for _ in range(load.replays()):
            if self.wipe is not None:
                self.wipe()
            assert load.run is not None
            load.run()

    def _pause(self, plan: Plan) -> float:
        """Seconds that are enough for the host to queue all calls under the profiler."""
        if not self.on_gpu:
            return 0.0
        given, seconds = self.inputs, 0.0
        for _ in range(2):  # the kernel's own calls: a plan's would be replayed
            self._barrier()
            start = time.perf_counter()
            kernel = _kernel_of(plan)
            kernel(given.x_TH, self._weights_of(kernel), given.routing)
            seconds = time.perf_counter() - start
        wanted = _SPARE * self._largest(seconds) * self.job.calls
        return min(max(wanted, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)

    def _largest(self, value: float) -> float:
        """Over all ranks."""
        if self.group is None:
            return value
        told = torch.tensor([value], dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, group=self.group)
        return float(told)

    def _barrier(self) -> None:
        """All ranks are here, and their GPUs have nothing to do."""
        self.clock.wait()
        if self.group is not None:
            torch.distributed.barrier(self.group)
            self.clock.wait()


def _kernel_of(plan: Plan) -> FusedMoEModularKernel:
    """Return the kernel that made a plan, which can be called as well."""
    assert isinstance(plan.kernel, FusedMoEModularKernel)
    return plan.kernel
