"""Measurements of `mk profile` on one rank: timed planned calls, and traced eager calls.

- End-to-end times are those of planned calls. On a GPU, a planned call is a replay of a CUDA graph
  if the pairing can be captured. It is timed with events before torch's profiler is loaded, because
  a loaded profiler slows down launches.
- Stage times come from traces of eager calls of the same plan. Under a profiler, a plan runs the
  host code of the parts, which marks the stages, instead of replaying launches. The host queues the
  calls while the GPU sleeps, so that the GPU never waits for the host.

An idle GPU boosts its clocks for a short time. Before calls of either kind, the graph (if there is
one) is therefore replayed until the clocks have settled. The L2 cache is overwritten before each
call.
"""

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function, schedule

from modular_kernel.catalog import check, load_catalog, make_kernel, needs_triton
from modular_kernel.errors import CapacityError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.measure.environment import Environment, collect_environment
from modular_kernel.measure.records import INTERPRETER
from modular_kernel.measure.roofline import (
    Peaks,
    compute_type,
    measure_link_bandwidth,
    measure_peaks,
)
from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.measure.stage_roofline import RankLoad
from modular_kernel.measure.timing import (
    L2Flush,
    capture_graphs,
    make_clock,
    make_l2_flush,
    measure_host_cost,
    time_runs_ms,
)
from modular_kernel.plan import Plan
from modular_kernel.profiling.chrome import BARRIER
from modular_kernel.profiling.inputs import ProfileInputs, make_inputs
from modular_kernel.replay import stages
from modular_kernel.select.budget import count_ranks_sharing_memory, format_gigabytes, free_bytes
from modular_kernel.select.inputs import weight_bytes
from modular_kernel.select.process_group import GroupRanks, SingleProcess
from modular_kernel.spec.problem import Machine, Problem, dtype_name
from modular_kernel.tensors import ExpertWeights
from modular_kernel.text import format_count

_CYCLES_PER_SECOND = 2.0e9  # upper bound of GPU clocks
# Upper bound of the host time of a call under the profiler, relative to a call without it.
_MAX_PROFILER_SLOWDOWN = 3.0
_MIN_SLEEP_SECONDS, _MAX_SLEEP_SECONDS = 5e-3, 0.5
# On an H200, clocks settle within 65 ms. More replays would only enlarge the trace.
_WARMUP_SECONDS, _MAX_WARMUP_REPLAYS = 0.1, 100
_UNTIMED_CALLS = 3
_BARRIERS = 5  # see chrome.barrier_spread_us
_REPLAYS, _REPLAYS_ON_CPU = 40, 4  # fixed, because all ranks must make the same number of calls
_PROFILER_PREFIX = b"USDT:"  # prefix of lines that kineto prints to stderr since torch 2.13


@dataclass(frozen=True)
class ProfileJob:
    """The pairings and calls to profile.

    pairs: names of the PrepareAndFinalize and the experts part of one or two pairings.
    calls: number of calls to trace.
    traces: beginning of the path of each pairing's traces.
    command: the command line, for the record.
    prepared: whether to use prepared weights in pairings that support them.
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
class EndToEndTime:
    """End-to-end time of planned calls.

    us: median microseconds of a call.
    samples_us: microseconds of all calls.
    mode: "graph" or "eager" on a GPU, and otherwise "cpu" or "interpreter".
    host_us: host time of a call outside a graph; None on a CPU.
    allocations: number of device memory allocations of such a call; None on a CPU.
    """

    us: float
    samples_us: tuple[float, ...]
    mode: str
    host_us: float | None
    allocations: float | None

    @property
    def spread(self) -> float:
        """Interquartile range of the samples, divided by their median."""
        quartiles = quantiles(self.samples_us, n=4)
        return (quartiles[2] - quartiles[0]) / self.us if self.us else 0.0


@dataclass(frozen=True)
class Memory:
    """Memory use in bytes.

    workspace: buffers of the plan, without the output.
    peak: peak of torch's allocator, with buffers and without inputs; None on a CPU.
    prepared: prepared weights, which count as inputs.
    """

    workspace: int
    peak: int | None
    prepared: int = 0


@dataclass(frozen=True)
class PairRecord:
    """Measurements of one pairing on one rank."""

    pairing: str
    trace: Path
    total: EndToEndTime
    memory: Memory


@dataclass(frozen=True)
class RankRecord:
    """All measurements of one rank.

    link: bytes per second to the next rank's GPU, if measured.
    difference: root mean square of the difference of both pairings' outputs, divided by the RMS of
        the first output; None for a single pairing.
    """

    rank: int
    environment: Environment
    peaks: Peaks
    link: float | None
    load: RankLoad
    pairs: tuple[PairRecord, ...]
    difference: float | None


def record_rank(rank: int, world_size: int, group: Any, job: ProfileJob) -> RankRecord:
    """Run a job on one rank. All ranks of `group` must call this; it is None for a single rank."""
    problem = replace(job.problem, parallel=replace(job.problem.parallel, rank=rank))
    device = _select_device(job.machine)
    catalog = load_catalog()
    replicated = any(catalog.prepare_finalize(pf).requires.replicated_input for pf, _ in job.pairs)
    with torch.no_grad():
        _check_memory(problem, device, group)
        operand_types = dict.fromkeys(
            (compute_type(problem, problem.scheme), dtype_name(problem.dtype))
        )
        peaks = measure_peaks(device, operand_types)
        inputs = make_inputs(problem, device, job.routing, replicated=replicated)
        link = _measure_link(device, rank, world_size)
        records, outputs = _JobRunner(job, problem, device, group, inputs).run()
    difference = _compute_relative_difference(outputs) if len(outputs) > 1 else None
    environment = collect_environment(device, job.command)
    return RankRecord(rank, environment, peaks, link, inputs.load, records, difference)


def _check_memory(problem: Problem, device: torch.device, group: Any) -> None:
    """Raise CapacityError on every rank unless the weights of every rank fit into its memory."""
    ranks = SingleProcess() if group is None else GroupRanks(group)
    required_bytes = weight_bytes(problem)
    num_sharing_ranks = count_ranks_sharing_memory(ranks, device)
    free_memory = free_bytes(device)
    rank_fits = ranks.all_gather(
        free_memory is None or required_bytes * num_sharing_ranks <= free_memory
    )
    if not all(rank_fits):
        free_memory = min(count for count in ranks.all_gather(free_memory) if count is not None)
        raise _make_memory_error(problem, num_sharing_ranks, free_memory)


def _make_memory_error(problem: Problem, num_sharing_ranks: int, free_memory: int) -> CapacityError:
    """Return the error for the weights of one layer that do not fit into the free memory.

    num_sharing_ranks: number of ranks whose weights are in the same memory.
    """
    required_bytes = weight_bytes(problem) * num_sharing_ranks
    unquantized_bytes = weight_bytes(replace(problem, quant="none")) * num_sharing_ranks
    got = f"{format_gigabytes(unquantized_bytes)} in {dtype_name(problem.dtype)}"
    if problem.scheme.quantized:
        # The unquantized and the quantized weights are in memory at the same time.
        quantized = format_gigabytes(required_bytes - unquantized_bytes)
        total = format_gigabytes(required_bytes)
        got += f" and, quantized from them, {quantized} in {problem.quant}: {total}"
    holder = f"on each of {num_sharing_ranks} ranks" if num_sharing_ranks > 1 else "of one layer"
    need = f"at most {format_gigabytes(free_memory)}, the free memory"
    max_experts = int(problem.experts * free_memory / required_bytes)
    if max_experts >= problem.top_k:
        need += f"; {format_count(max_experts, 'expert')} would fit (--experts {max_experts})"
    what = f"weights of {format_count(problem.e, 'expert')} {holder}"
    return CapacityError(what, got=got, need=need)


def _select_device(machine: Machine) -> torch.device:
    if machine.device != "cuda":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _measure_link(device: torch.device, rank: int, world_size: int) -> float | None:
    if device.type != "cuda" or world_size < 2:
        return None
    return measure_link_bandwidth(device, torch.device("cuda", (rank + 1) % world_size))


def _compute_relative_difference(outputs: Sequence[torch.Tensor]) -> float:
    first, second = (output.double() for output in outputs)
    norm = float(first.square().mean().sqrt())
    return float((second - first).square().mean().sqrt()) / norm if norm else math.nan


@dataclass(frozen=True)
class _WarmUp:
    """A graph to replay until the GPU's clocks have settled.

    replay: replays the graph; None if there is none.
    replay_seconds: seconds per replay.
    """

    replay: Callable[[], torch.Tensor] | None = None
    replay_seconds: float = 0.0

    @property
    def replays(self) -> int:
        if self.replay is None:
            return 0
        count = math.ceil(_WARMUP_SECONDS / max(self.replay_seconds, 1e-9))
        return min(count, _MAX_WARMUP_REPLAYS)


class _JobRunner:
    """Records all pairings of a job on one rank."""

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
        # A call of an inplace problem overwrites x, which the next pairing needs unchanged.
        self.x_TH = inputs.x_TH.clone() if problem.inplace else inputs.x_TH
        self.on_gpu = device.type == "cuda"
        self.flush_l2: L2Flush = make_l2_flush(device)
        self.clock = make_clock(device)
        self.prepared_weights: dict[str, ExpertWeights] = {}  # by pairing

    def run(self) -> tuple[tuple[PairRecord, ...], list[torch.Tensor]]:
        """Record each pairing, and return the records and the outputs."""
        prepared_plans = [self._make_plan(*pair) for pair in self.job.pairs]
        outputs = [output for _, _, output in prepared_plans]
        calls = [partial(self._call, plan) for plan, _, _ in prepared_plans]
        totals, warm_ups = self._time_end_to_end(calls)
        records = []
        for (plan, memory, _), total, warm_up, path_prefix in zip(
            prepared_plans, totals, warm_ups, self.job.traces, strict=True
        ):
            file_name = f"{path_prefix.name}-rank{self.problem.parallel.rank}.trace.json"
            trace = path_prefix.with_name(file_name)
            self._trace(plan, warm_up, trace)
            plan.kernel.prepare_finalize.check()
            records.append(PairRecord(plan.kernel.pairing, trace, total, memory))
        return tuple(records), outputs

    def _call(self, plan: Plan) -> torch.Tensor:
        inputs, weights = self.inputs, self._get_weights(_get_kernel_of_plan(plan))
        if self.on_gpu:
            return plan(inputs.x_TH, weights, inputs.routing)
        with self._use_torch_references(_get_kernel_of_plan(plan)):
            return plan(inputs.x_TH, weights, inputs.routing)

    def _get_weights(self, kernel: FusedMoEModularKernel) -> ExpertWeights:
        return self.prepared_weights.get(kernel.pairing, self.inputs.weights)

    def _prepare_weights(self, kernel: FusedMoEModularKernel) -> int:
        """Prepare the weights of a pairing if the job requests it, and return their bytes."""
        if not self.job.prepared:
            return 0
        with self._use_torch_references(kernel):
            self.prepared_weights[kernel.pairing] = kernel.prepare_weights(self.inputs.weights)
        return sum(spec.nbytes for spec in kernel.experts.prepared_specs().values())

    def _use_torch_references(self, kernel: FusedMoEModularKernel) -> AbstractContextManager[None]:
        """Return a context in which operations run as torch references if no part needs Triton."""
        parts = type(kernel.prepare_finalize), type(kernel.experts)
        return prefer_torch_reference(enabled=not needs_triton(*parts))

    def _make_plan(self, pf: str, experts: str) -> tuple[Plan, Memory, torch.Tensor]:
        """Make a plan and its first calls. Return the plan, its memory use and its output."""
        allocated_before = self._get_allocated_bytes(reset=True)
        kernel = make_kernel(
            *(pf, experts, self.problem),
            group=self.group,
            machine=self.job.machine,
            auto_prepare=False,
        )
        prepared = self._prepare_weights(kernel)
        plan, inputs = kernel.plan(), self.inputs
        x_TH = self.x_TH.clone() if self.problem.inplace else self.x_TH
        with self._use_torch_references(kernel):
            output = plan(x_TH, self._get_weights(kernel), inputs.routing).clone()
        for _ in range(_UNTIMED_CALLS if self.on_gpu else 0):
            self._call(plan)
        self.clock.wait()
        kernel.prepare_finalize.check()
        peak = None
        if self.on_gpu:
            peak = torch.cuda.max_memory_allocated(self.device) - allocated_before - prepared
        return plan, Memory(plan.nbytes, peak, prepared), output

    def _get_allocated_bytes(self, *, reset: bool) -> int:
        if not self.on_gpu:
            return 0
        if reset:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def _time_end_to_end(
        self, calls: Sequence[Callable[[], torch.Tensor]]
    ) -> tuple[list[EndToEndTime], list[_WarmUp]]:
        """Time the planned calls. Two pairings A and B are timed in the order A, B, B, A.

        Returns the end-to-end time and the warm-up of each pairing.
        """
        runs, modes, warm_ups = [], [], []
        for (pf, experts), call in zip(self.job.pairs, calls, strict=True):
            run, mode = self._capture(pf, experts, call)
            runs.append(run)
            modes.append(mode)
            warm_ups.append(
                _WarmUp(run, self._measure_call_seconds(run)) if mode == "graph" else _WarmUp()
            )
        order = [*range(len(runs)), *reversed(range(len(runs)))]
        replays = (_REPLAYS if self.on_gpu else _REPLAYS_ON_CPU) // 2
        samples: list[list[float]] = [[] for _ in runs]
        for index in order:
            samples[index] += self._measure_samples_us(runs[index], replays, warm_ups[index])
        # Measure host times after all replays, but before a profiler is loaded.
        host_times = [measure_host_cost(call, self.device) for call in calls]
        totals = [
            EndToEndTime(
                median(microseconds),
                tuple(microseconds),
                mode,
                None if host_time is None else host_time.us,
                None if host_time is None else host_time.allocations,
            )
            for microseconds, mode, host_time in zip(samples, modes, host_times, strict=True)
        ]
        return totals, warm_ups

    def _capture(
        self, pf: str, experts: str, call: Callable[[], torch.Tensor]
    ) -> tuple[Callable[[], torch.Tensor], str]:
        """Return the replay of a captured call and "graph".

        If any rank cannot capture the call, return the call itself and its mode on every rank.
        """
        if not self.on_gpu:
            interpreted = self.job.machine.interpreter and needs_triton(pf, experts)
            return call, INTERPRETER if interpreted else "cpu"
        graph_problem = replace(self.problem, graph=True)
        runs = (
            capture_graphs([[call]])
            if check(pf, experts, graph_problem, self.job.machine).ok
            else None
        )
        if self._max_over_ranks(0.0 if runs else 1.0) or runs is None:
            return call, "eager"
        return runs[0], "graph"

    def _measure_samples_us(
        self, run: Callable[[], torch.Tensor], replays: int, warm_up: _WarmUp
    ) -> list[float]:
        """Return the microseconds of `replays` calls, after the warm-up and one untimed call."""
        self._barrier()
        calls = repeat(run, warm_up.replays + replays + 1)
        return [ms * 1e3 for ms in time_runs_ms(calls, self.clock, self.flush_l2)[-replays:]]

    def _measure_call_seconds(self, run: Callable[[], torch.Tensor]) -> float:
        """Return the seconds of one call on the slowest rank."""
        self._barrier()
        start = self.clock.mark()
        run()
        end = self.clock.mark()
        self.clock.wait()
        return self._max_over_ranks(self.clock.ms(start, end)) / 1e3

    def _trace(self, plan: Plan, warm_up: _WarmUp, path: Path) -> None:
        """Write a Chrome trace of eager calls.

        All calls run twice. The profiler initializes during the first run, which is not recorded.
        """
        call, sleep_seconds = partial(self._call, plan), self._estimate_sleep_seconds(plan)
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.on_gpu else [])
        profile = torch.profiler.profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
            acc_events=True,
        )
        with suppress_profiler_lines(), profile as profiler:
            for _ in range(2):
                self._run_calls(call, warm_up, sleep_seconds)
                profiler.step()

    def _run_calls(
        self, call: Callable[[], torch.Tensor], warm_up: _WarmUp, sleep_seconds: float
    ) -> None:
        """Queue the calls to trace while the GPU is busy, and wait for them to finish."""
        for _ in range(_BARRIERS):
            with record_function(BARRIER):
                self._barrier()
        if self.on_gpu:
            self._queue_warm_up(warm_up, sleep_seconds)
        for _ in range(self.job.calls):
            if self.flush_l2 is not None:
                self.flush_l2()
            with record_function(stages.CALL):
                call()
        self.clock.wait()

    def _queue_warm_up(self, warm_up: _WarmUp, sleep_seconds: float) -> None:
        """Queue a sleep of the GPU, during which the host can queue all calls, and the warm-up."""
        torch.cuda._sleep(int(sleep_seconds * _CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
        for _ in range(warm_up.replays):
            if self.flush_l2 is not None:
                self.flush_l2()
            assert warm_up.replay is not None
            warm_up.replay()

    def _estimate_sleep_seconds(self, plan: Plan) -> float:
        """Return the seconds that the host needs to queue all calls under the profiler."""
        if not self.on_gpu:
            return 0.0
        inputs, seconds = self.inputs, 0.0
        # Call the kernel, because the plan would replay its launches. The second call is timed.
        for _ in range(2):
            self._barrier()
            start = time.perf_counter()
            kernel = _get_kernel_of_plan(plan)
            kernel(inputs.x_TH, self._get_weights(kernel), inputs.routing)
            seconds = time.perf_counter() - start
        seconds_needed = _MAX_PROFILER_SLOWDOWN * self._max_over_ranks(seconds) * self.job.calls
        return min(max(seconds_needed, _MIN_SLEEP_SECONDS), _MAX_SLEEP_SECONDS)

    def _max_over_ranks(self, value: float) -> float:
        """Return the maximum of `value` over all ranks."""
        if self.group is None:
            return value
        maximum = torch.tensor([value], dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(maximum, torch.distributed.ReduceOp.MAX, group=self.group)
        return float(maximum)

    def _barrier(self) -> None:
        """Wait until all ranks have arrived and their GPUs are idle."""
        self.clock.wait()
        if self.group is not None:
            torch.distributed.barrier(self.group)
            self.clock.wait()


def _get_kernel_of_plan(plan: Plan) -> FusedMoEModularKernel:
    """Return the kernel that created the plan. Unlike the plan, it does not replay launches."""
    assert isinstance(plan.kernel, FusedMoEModularKernel)
    return plan.kernel


@contextmanager
def suppress_profiler_lines() -> Iterator[None]:
    """Drop the lines that torch's profiler prints to stderr inside the context.

    C++ code prints them, so file descriptor 2 is redirected instead of `sys.stderr`. All other
    output to stderr is buffered and written at the end of the context.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as buffered:
        saved_fd = os.dup(2)
        os.dup2(buffered.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved_fd, 2)
            os.close(saved_fd)
            buffered.seek(0)
            for line in buffered:
                if not line.startswith(_PROFILER_PREFIX):
                    os.write(2, line)
