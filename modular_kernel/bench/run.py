"""Runs the benchmark of `mk bench`.

The run measures the hardware's peak rates, and then every layer in every case. A case (`LayerCase`)
is a layer's shape, a number of tokens and a routing. The output of a layer is compared with a
float64 reference before the layer is timed. Layers are timed one after the other, whereas
`bench.interleaved` alternates them.
"""

import gc
import itertools
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from modular_kernel.bench.candidates import Candidate, Layer
from modular_kernel.bench.launch_count import count_launches
from modular_kernel.measure.adapter_roofline import adapter_bytes
from modular_kernel.measure.cases import Input, LayerCase, make_input, make_weights, operand_types
from modular_kernel.measure.check import (
    ExpectedOutput,
    check_calls,
    check_unchanged,
    compute_expected_output,
    count_inputs_to_check,
)
from modular_kernel.measure.environment import collect_environment
from modular_kernel.measure.records import (
    FAILED,
    INTERPRETER,
    OK,
    REFUSED,
    WRONG,
    Report,
    Row,
    add_peer_ratios,
)
from modular_kernel.measure.roofline import (
    Peaks,
    Work,
    compute_roofline,
    compute_type,
    compute_work,
    expert_bytes,
    measure_peaks,
)
from modular_kernel.measure.routing_patterns import Load, count_load
from modular_kernel.measure.timing import (
    Call,
    Rotation,
    Timing,
    choose_rotation,
    l2_bytes,
    measure_host_cost,
    time_calls,
)
from modular_kernel.spec.problem import Machine, dtype_name
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights
from modular_kernel.text import format_count
from modular_kernel.utils.time_limit import TimeLimitReached, time_limit

_MAX_NOTE_CHARACTERS = 300
ReportCallback = Callable[[Report], object]


@dataclass(frozen=True)
class BenchJob:
    """Options of a benchmark, whose record has one row for each case and candidate.

    graph: whether to time replays of CUDA graphs instead of eager calls.
    target_ms: milliseconds of device time for which each row is timed.
    bandwidth: bytes per second for the roofline; None measures it.
    deadline: seconds after `started` at which the run ends, even within a row; None for no limit.
    started: a value of time.monotonic(); None means the call of `run`.
    command: the command line, for the record.
    """

    cases: tuple[LayerCase, ...]
    candidates: tuple[Candidate, ...]
    machine: Machine
    graph: bool = True
    target_ms: float = 20.0
    bandwidth: float | None = None
    deadline: float | None = None
    started: float | None = None
    command: str = ""


def run(
    job: BenchJob,
    on_report: ReportCallback = lambda _report: None,
    on_row: Callable[[str], object] = lambda _row: None,
) -> Report:
    """Run the job and return its report.

    on_report: called after every row with the report of the rows so far.
    on_row: called with a description of each row before it is measured.
    """
    with torch.no_grad():
        return _BenchmarkRun(job, on_report, on_row).run()


@dataclass
class WeightSets:
    """The sets of weights of one shape, created on first use.

    Consecutive calls use different sets, so that a call does not find its weights in the L2 cache
    (measure.timing.Rotation).

    cases: all cases of the shape.
    sets: the sets created so far, by index.
    """

    cases: tuple[LayerCase, ...]
    device: torch.device
    sets: dict[int, ExpertWeights] = field(default_factory=dict)

    def weights(self, index: int) -> ExpertWeights:
        if index not in self.sets:
            self.sets[index] = make_weights(self.cases[0].problem, self.device, index)
        return self.sets[index]

    @property
    def max_tokens(self) -> int:
        return max(case.problem.tokens for case in self.cases)


class SetupError(RuntimeError):
    """Raised for a layer whose setup failed earlier."""


@dataclass
class LayerInstances:
    """The layers of one candidate for one shape: one per set of weights, set up on first use.

    ready: layers that are set up.
    failure: message of a failed setup. The exception itself is not stored, because its traceback
        would keep tensors alive.
    """

    candidate: Candidate
    weight_sets: WeightSets
    ready: list[Layer] = field(default_factory=list)
    failure: str = ""

    @cached_property
    def first(self) -> Layer:
        """The layer for the first set of weights, which `layer(0)` sets up."""
        return self.candidate.make()

    def layer(self, index: int) -> Layer:
        """Return the layer for the set of weights `index`.

        Raises the exception of a failed setup, and SetupError in later calls.
        """
        while len(self.ready) <= index:
            if self.failure:
                raise SetupError(self.failure)
            try:
                layer = self.candidate.make() if self.ready else self.first
                problem = self.weight_sets.cases[0].problem.with_tokens(self.weight_sets.max_tokens)
                layer.setup(problem, self.weight_sets.weights(len(self.ready)))
            except Exception as error:
                self.failure = f"setup: {format_error(error)}"
                raise
            self.ready.append(layer)
        return self.ready[index]

    def free(self) -> None:
        self.ready.clear()
        self.__dict__.pop("first", None)


@dataclass(frozen=True)
class _RowCalls:
    """The calls to time for one row, as functions without arguments.

    layer: the layer of the first call.
    rotation: how the calls rotate over inputs and sets of weights.
    loads: the expert load of each input.
    checks: calls to verify, with their expected outputs. The last of them is also the last of
        `calls`.
    """

    calls: tuple[Call, ...]
    layer: Layer
    rotation: Rotation
    loads: tuple[Load, ...]
    checks: tuple[tuple[Call, ExpectedOutput], ...]


class _BenchmarkRun:
    """One run of a job.

    stopped: the reason why the run ended early, or "".
    """

    def __init__(
        self, job: BenchJob, on_report: ReportCallback, on_row: Callable[[str], object]
    ) -> None:
        self.job, self.on_report, self.on_row = job, on_report, on_row
        self.started = time.monotonic() if job.started is None else job.started
        self.device = torch.device(job.machine.device)
        schemes = [QuantScheme.parse(candidate.quant) for candidate in job.candidates]
        compute_types = [
            compute_type(case.problem, scheme)
            for case in job.cases
            for scheme in [QuantScheme.parse("none"), *schemes]
        ]
        compute_types += [dtype_name(case.problem.dtype) for case in job.cases]
        self.peaks: Peaks = measure_peaks(self.device, compute_types, bandwidth=job.bandwidth)
        self.environment = collect_environment(self.device, job.command)
        self.rows: list[Row] = []
        self.expected: dict[tuple[LayerCase, int, int, str], ExpectedOutput] = {}
        self.stopped = ""

    def run(self) -> Report:
        for case, instances in self._iterate_cases():
            self.on_row(
                f"{instances.candidate.name}, {case.shape}, "
                f"{format_count(case.problem.tokens, 'token')}"
            )
            self.rows.append(self._measure_row(case, instances))
            self._report()
        if self.device.type == "cuda" and not self.stopped:
            self._count_launches()
        return self._report()

    def _report(self) -> Report:
        peaks = asdict(self.peaks)
        report = Report(self.environment, peaks, add_peer_ratios(self.rows), self.stopped)
        self.on_report(report)
        return report

    def _iterate_cases(self) -> Iterator[tuple[LayerCase, LayerInstances]]:
        """Yield every case with the layers of every candidate.

        Only the weights of one shape and the layers of one candidate are in memory at a time.
        """
        shape_key = lambda case: (case.shape, str(case.problem.with_tokens(1)))  # noqa: E731
        for _, cases in itertools.groupby(self.job.cases, shape_key):
            weight_sets = WeightSets(tuple(cases), self.device)
            for candidate in self.job.candidates:
                instances = LayerInstances(candidate, weight_sets)
                for case in weight_sets.cases:
                    yield case, instances
                    self._free_memory()
                instances.free()
            weight_sets.sets.clear()

    def _free_memory(self) -> None:
        if not self.stopped and not self._is_past_deadline:
            free_memory(self.device)

    @property
    def _is_past_deadline(self) -> bool:
        seconds_left = self._seconds_left
        return seconds_left is not None and seconds_left <= 0

    @property
    def _seconds_left(self) -> float | None:
        """Seconds until the deadline; None without a deadline."""
        limit = self.job.deadline
        return None if limit is None else limit - (time.monotonic() - self.started)

    def _measure_row(self, case: LayerCase, instances: LayerInstances) -> Row:
        row = make_empty_row(case, instances.candidate)
        if self.stopped or self._is_past_deadline:
            return replace(row, note=self.stopped or "after the deadline")
        try:
            with time_limit(self._seconds_left):
                reason = instances.first.refusal(case.problem)
                if reason is not None:
                    return replace(row, status=REFUSED, note=reason)
                return self._check_and_time(row, case, instances)
        except TimeLimitReached:
            return replace(row, note="stopped at the deadline")
        # A layer can raise any exception. Report it in the row and continue with the other rows.
        except Exception as error:  # noqa: BLE001
            if not is_device_usable(self.device):
                self.stopped = f"{instances.candidate.name} broke the CUDA context"
            return replace(row, status=FAILED, note=format_error(error))

    def _make_calls(self, case: LayerCase, instances: LayerInstances) -> _RowCalls:
        scheme = QuantScheme.parse(instances.candidate.quant)
        expert_map = instances.weight_sets.weights(0).expert_map

        def draw_input(index: int) -> tuple[Input, Load]:
            item = make_input(case, self.device, index)
            return item, count_load(item.routing, case.problem, expert_map)

        first, load = draw_input(0)
        work = compute_work(case.problem, scheme, [load])
        rotation = self._choose_rotation(case, work, instances)
        inputs, loads = zip((first, load), *map(draw_input, range(1, rotation.calls)), strict=True)
        layers = [instances.layer(index) for index in range(rotation.weight_sets)]
        calls = tuple(
            partial(layers[index % rotation.weight_sets].call, item.x_TH, item.routing)
            for index, item in enumerate(inputs)
        )
        # Compute the expected outputs before any call, because a layer may overwrite x.
        checks = []
        for index in select_inputs_to_verify(rotation.calls, count_inputs_to_check(case.problem)):
            if index < rotation.calls:
                item, call, weight_set = inputs[index], calls[index], index % rotation.weight_sets
            else:  # an untimed input
                item, weight_set = draw_input(index)[0], 0
                call = partial(layers[0].call, item.x_TH, item.routing)
            checks.append(
                (call, self._compute_expected(case, instances, item, (index, weight_set)))
            )
        return _RowCalls(calls, layers[0], rotation, loads, tuple(checks))

    def _choose_rotation(self, case: LayerCase, work: Work, instances: LayerInstances) -> Rotation:
        memory = 0
        if self.device.type == "cuda":
            memory = torch.cuda.get_device_properties(self.device).total_memory
        scheme = QuantScheme.parse(instances.candidate.quant)
        set_bytes = case.problem.e * expert_bytes(case.problem, scheme)
        set_bytes += instances.first.setup_bytes(case.problem)
        if (spec := case.problem.adapters) is not None:
            set_bytes += spec.adapters * adapter_bytes(case.problem)
        l2 = l2_bytes(self.device)
        return choose_rotation(work.bytes, set_bytes, case.problem.tokens, l2=l2, memory=memory)

    def _compute_expected(
        self, case: LayerCase, instances: LayerInstances, inputs: Input, indices: tuple[int, int]
    ) -> ExpectedOutput:
        """Return the expected output, which is cached because candidates share inputs and weights.

        indices: index of the input, and index of the set of weights.
        """
        key = (case, *indices, instances.candidate.quant)
        if key not in self.expected:
            scheme = QuantScheme.parse(instances.candidate.quant)
            self.expected[key] = compute_expected_output(
                case, inputs, instances.weight_sets.weights(indices[1]), scheme
            )
        return self.expected[key]

    def _check_and_time(self, row: Row, case: LayerCase, instances: LayerInstances) -> Row:
        """Verify the layer's outputs, time it if they are correct, and return the row."""
        scheme = QuantScheme.parse(instances.candidate.quant)
        row_calls = self._make_calls(case, instances)
        work = compute_work(case.problem, scheme, row_calls.loads)
        floor = compute_roofline(work, case.problem, scheme, self.peaks)
        checked = check_calls(row_calls.checks, case.problem)
        result = checked.result
        row = replace(
            row,
            calls=row_calls.rotation.calls,
            weight_sets=row_calls.rotation.weight_sets,
            touched=work.touched,
            skew=sum(load.skew for load in row_calls.loads) / len(row_calls.loads),
            flops=work.flops,
            bytes=work.bytes,
            floor_us=floor.us,
            floor_bound=floor.bound,
            error=result.error,
            error_bound=result.bound,
        )
        if result.failure:
            return replace(row, status=WRONG, note=result.failure)
        timing = time_calls(
            row_calls.calls,
            self.device,
            graph=self.job.graph and row_calls.layer.graph,
            flush=row_calls.rotation.flush,
            target_ms=self.job.target_ms,
        )
        result = check_unchanged(timing.last_output, row_calls.checks[-1][1], checked, case.problem)
        if result.failure:
            note = f"after {timing.mode} calls: {result.failure}"
            return replace(row, status=WRONG, note=note, error=result.error)
        host_time = measure_host_cost(row_calls.calls[0], self.device)
        eager_us = self._measure_eager_time(row_calls, timing)
        graph = self.device.type == "cuda" and self.job.graph
        return replace(
            row,
            status=OK,
            note="not captured" if graph and not timing.mode.startswith("graph") else "",
            us=timing.us,
            us_min=timing.us_min,
            spread=timing.spread,
            mode=INTERPRETER if row_calls.layer.interpreted else timing.mode,
            replays=timing.replays,
            over_floor=None if row_calls.layer.interpreted else timing.us / floor.us,
            eager_us=eager_us,
            host_us=host_time.us if host_time else None,
            allocations=host_time.allocations if host_time else None,
        )

    def _measure_eager_time(self, row_calls: _RowCalls, timing: Timing) -> float | None:
        """Return the microseconds of an eager call, or None on a CPU."""
        if self.device.type != "cuda":
            return None
        if timing.mode.startswith("eager"):
            return timing.us
        ms = self.job.target_ms / 4
        flush = row_calls.rotation.flush
        return time_calls(row_calls.calls, self.device, graph=False, flush=flush, target_ms=ms).us

    def _count_launches(self) -> None:
        """Count the kernel launches of every timed row.

        This runs after all timing, because the profiler slows down later launches.
        """
        for index, (case, instances) in enumerate(self._iterate_cases()):
            row = self.rows[index]
            if not row.is_timed or self._is_past_deadline:
                continue
            try:
                with time_limit(self._seconds_left):
                    inputs = make_input(case, self.device, 0)
                    call = partial(instances.layer(0).call, inputs.x_TH, inputs.routing)
                    call()
                    count = count_launches(call, self.device)
            except TimeLimitReached:
                return
            except Exception as error:  # noqa: BLE001  the row keeps its times
                self.rows[index] = replace(row, note=f"launches: {format_error(error)}")
                continue
            self.rows[index] = replace(row, launches=count)


def free_memory(device: torch.device) -> None:
    """Collect garbage, and return the cached memory of a GPU to the driver."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_device_usable(device: torch.device) -> bool:
    """Return whether kernels can still run.

    After an illegal memory access, every later CUDA call of the process fails.
    """
    try:
        torch.ones(1, device=device).sum().item()
    except RuntimeError:
        return False
    return True


def format_error(error: Exception) -> str:
    """Return the type and message of an exception, shortened for a row's note.

    An exception without a message, such as most assertions, is described by the line of code that
    raised it.
    """
    message = str(error)
    frames = traceback.extract_tb(error.__traceback__)
    if not message and frames:
        last = frames[-1]
        message = f"{last.line} ({Path(last.filename).name}, line {last.lineno})"
    return f"{type(error).__name__}: {message}"[:_MAX_NOTE_CHARACTERS]


def select_inputs_to_verify(calls: int, minimum: int) -> list[int]:
    """Return the indices of the inputs to verify, at least `minimum` of them.

    The result contains the first and the last input of the timed calls, 0 and calls - 1. If more
    inputs are needed, inputs from index `calls` on are inserted before the last input.

    calls: number of timed calls.
    """
    untimed = range(calls, calls + max(minimum - min(calls, 2), 0))
    return [*dict.fromkeys([0, *untimed, calls - 1])] if calls > 1 else [*untimed, 0]


def make_empty_row(case: LayerCase, candidate: Candidate) -> Row:
    """Return the row of a case and a candidate, without results."""
    problem = case.problem
    return Row(
        shape=case.shape,
        experts=problem.experts,
        top_k=problem.top_k,
        hidden=problem.hidden,
        intermediate=problem.intermediate,
        tokens=problem.tokens,
        dtype=dtype_name(problem.dtype),
        problem=str(problem),
        routing=str(case.routing),
        layer=candidate.name,
        origin=candidate.origin,
        quant=candidate.quant,
        prepared=candidate.prepared,
        library=candidate.library,
        operands=operand_types(problem, QuantScheme.parse(candidate.quant)),
    )
