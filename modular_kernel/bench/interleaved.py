"""Runs the benchmark of `make bench` (tools/bench.py), which alternates the layers of a case.

The clock rate of a GPU depends on its previous load, so the times of layers that run one after the
other cannot be compared to within a few percent. This module sets up all layers of a case in one
process, each with a CUDA graph of several calls on different inputs. In each round, every graph is
replayed once, in random order. The time of a layer is the median over rounds, divided by the number
of calls per graph. Before timing, the output of every layer is compared with a float64 reference.
After timing, the output of a replay is compared with the output of the checked call.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median, quantiles

import torch

from modular_kernel.bench.candidates import Candidate
from modular_kernel.bench.run import (
    LayerInstances,
    WeightSets,
    format_error,
    free_memory,
    is_device_usable,
    make_empty_row,
    select_inputs_to_verify,
)
from modular_kernel.measure.cases import Input, LayerCase, make_input
from modular_kernel.measure.check import (
    CheckedCalls,
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
    SKIPPED,
    WRONG,
    Report,
    Row,
    add_peer_ratios,
)
from modular_kernel.measure.roofline import (
    compute_roofline,
    compute_type,
    compute_work,
    expert_bytes,
    measure_peaks,
)
from modular_kernel.measure.routing_patterns import count_load
from modular_kernel.measure.timing import (
    Call,
    Rotation,
    call_all,
    capture_graphs,
    choose_rotation,
    l2_bytes,
    make_clock,
    make_l2_flush,
)
from modular_kernel.spec.problem import Machine, dtype_name
from modular_kernel.spec.quantization import QuantScheme

ROUNDS = 21
_MIN_WARMUP_ROUNDS, _MAX_WARMUP_ROUNDS = 2, 200

CaseCallback = Callable[[str], object]


@dataclass(frozen=True)
class CaseBlock:
    """The cases of one shape, and the layers to compare in them.

    candidates: layers whose operands have the same types (measure.cases.operand_types).
    """

    cases: tuple[LayerCase, ...]
    candidates: tuple[Candidate, ...]

    @property
    def name(self) -> str:
        schemes = dict.fromkeys(candidate.quant for candidate in self.candidates)
        return f"{self.cases[0].shape} {', '.join(schemes)}"


@dataclass(frozen=True)
class Comparison:
    """A run over several blocks.

    rounds: number of timed rounds per case.
    seconds: time limit, after which no case is started; None for no limit. The remaining time is
        divided equally among the remaining blocks.
    bandwidth: bytes per second for rooflines; None measures it.
    missing: layers whose packages are not installed, for the record.
    command: the command line, for the record.
    compile_only: whether to set up every layer and call it once with each number of tokens, without
        timing.
    """

    blocks: tuple[CaseBlock, ...]
    machine: Machine
    rounds: int = ROUNDS
    seconds: float | None = None
    bandwidth: float | None = None
    missing: tuple[str, ...] = ()
    command: str = ""
    compile_only: bool = False


def run_interleaved(
    comparison: Comparison,
    on_case: CaseCallback = lambda _line: None,
    on_report: Callable[[Report], object] = lambda _report: None,
) -> Report:
    """Run the comparison and return its report.

    on_case: called with a line of text about each case.
    on_report: called after each case with the report of the rows so far. The callback can save the
        report, in case a library terminates the process later.
    """
    with torch.no_grad():
        return _ComparisonRun(comparison, on_case, on_report).run()


@dataclass
class _CheckedLayer:
    """A layer that has been set up and checked, and can be timed if its results are correct.

    index: index of its row in the case.
    runs: functions that replay a CUDA graph, or make the calls if they cannot be captured. There is
        one function per call if the L2 cache is overwritten before each call, and otherwise one for
        all calls.
    calls: number of calls that `runs` make together.
    mode: see measure.timing.Timing.
    checked: result of the check.
    expected: expected output of the last call.
    times_us: microseconds of a call, one entry per run and round.
    """

    index: int
    runs: list[Call]
    calls: int
    mode: str
    checked: CheckedCalls
    expected: ExpectedOutput
    times_us: list[float] = field(default_factory=list)


class _ComparisonRun:
    """One run of a comparison.

    block_deadline: value of time.monotonic() after which no case of the block is started.
    stopped: the reason why the run ended early, or "".
    """

    def __init__(
        self, comparison: Comparison, on_case: CaseCallback, on_report: Callable[[Report], object]
    ) -> None:
        self.comparison, self.on_case, self.on_report = comparison, on_case, on_report
        self.device = torch.device(comparison.machine.device)
        self.started = time.monotonic()
        self.environment = collect_environment(self.device, comparison.command)
        self.rows: list[Row] = []
        self.stopped = ""
        self.block_deadline = math.inf
        compute_types = [
            compute_type(case.problem, QuantScheme.parse(candidate.quant))
            for block in comparison.blocks
            for case in block.cases[:1]
            for candidate in block.candidates
        ]
        compute_types += [dtype_name(block.cases[0].problem.dtype) for block in comparison.blocks]
        # With compile_only, the peaks are not used, so they are measured with small operands.
        self.peaks = measure_peaks(
            self.device,
            compute_types,
            bandwidth=comparison.bandwidth,
            **({"size": 64, "nbytes": 1 << 20} if comparison.compile_only else {}),
        )
        self.expected: dict[tuple[int, str], ExpectedOutput] = {}

    def run(self) -> Report:
        blocks = self.comparison.blocks
        for number, block in enumerate(blocks):
            if self.comparison.seconds is not None:
                now = time.monotonic()
                seconds_left = self.comparison.seconds - (now - self.started)
                self.block_deadline = now + seconds_left / (len(blocks) - number)
            if self.comparison.compile_only:
                self._compile(block)
            else:
                self._measure(block)
        return self._report()

    def _report(self) -> Report:
        return Report(
            self.environment,
            asdict(self.peaks),
            add_peer_ratios(self.rows),
            self.stopped,
            missing=self.comparison.missing,
        )

    def _compile(self, block: CaseBlock) -> None:
        """Set up each layer and call it once with each number of tokens. Failures are reported."""
        weight_sets = WeightSets(block.cases, self.device)
        for candidate in block.candidates:
            instances = LayerInstances(candidate, weight_sets)
            if instances.first.tuned:
                # The first call times tile sizes, which other compiling processes would disturb.
                continue
            for case in {case.problem.tokens: case for case in block.cases}.values():
                try:
                    if instances.first.refusal(case.problem) is None:
                        inputs = make_input(case, self.device, 0)
                        instances.layer(0).call(inputs.x_TH, inputs.routing)
                except Exception as error:  # noqa: BLE001  the timed run reports it in a row
                    self.on_case(
                        f"{case.shape} T={case.problem.tokens} {candidate.name}: {error}"[:200]
                    )
            instances.free()
            free_memory(self.device)

    def _measure(self, block: CaseBlock) -> None:
        weight_sets = WeightSets(block.cases, self.device)
        all_instances = [LayerInstances(candidate, weight_sets) for candidate in block.candidates]
        for case in block.cases:
            rows = self._measure_case(case, all_instances, weight_sets)
            self.rows += rows
            self.on_case(format_case(rows))
            self.on_report(self._report())
        all_instances.clear()
        weight_sets.sets.clear()
        self._free_memory()

    def _free_memory(self) -> None:
        if not self.stopped:
            free_memory(self.device)

    def _measure_case(
        self, case: LayerCase, all_instances: Sequence[LayerInstances], weight_sets: WeightSets
    ) -> list[Row]:
        """Check every layer, time those with correct results, and return a row for each layer."""
        rows = [make_empty_row(case, instances.candidate) for instances in all_instances]
        if self.stopped or time.monotonic() > self.block_deadline:
            note = self.stopped or "not started: the time limit had passed"
            return [replace(row, note=note) for row in rows]
        rotation = self._choose_rotation(case, all_instances)
        inputs = [make_input(case, self.device, index) for index in range(rotation.calls)]
        self.expected.clear()
        ready: list[_CheckedLayer] = []
        for index, instances in enumerate(all_instances):
            try:
                rows[index] = self._fill_in_work(rows[index], case, instances, rotation, inputs)
                reason = instances.first.refusal(case.problem)
                if reason is not None:
                    rows[index] = replace(rows[index], status=REFUSED, note=reason)
                    continue
                checked_layer = self._set_up_and_check(
                    index, case, instances, rotation, inputs, weight_sets
                )
                result = checked_layer.checked.result
                rows[index] = replace(
                    rows[index],
                    error=result.error,
                    error_bound=result.bound,
                    note=instances.first.note(case.problem),
                )
                if result.failure:
                    rows[index] = replace(rows[index], status=WRONG, note=result.failure)
                else:
                    ready.append(checked_layer)
            # A library can raise any exception. The row reports it, and other layers are measured.
            except Exception as error:  # noqa: BLE001
                rows[index] = replace(rows[index], status=FAILED, note=format_error(error))
                if not is_device_usable(self.device):
                    self.stopped = f"{instances.candidate.name} broke the CUDA context"
                    return rows
        self._time_rounds(ready, rotation)
        for checked_layer in ready:
            rows[checked_layer.index] = self._make_timed_row(
                rows[checked_layer.index], case, checked_layer
            )
        ready.clear()
        self._free_memory()
        return rows

    def _choose_rotation(
        self, case: LayerCase, all_instances: Sequence[LayerInstances]
    ) -> Rotation:
        """Return the rotation of calls over inputs and sets of weights, which all layers share.

        Their weights have the same types and differ only in the granularity of scales, so the
        scheme of the first layer determines the bytes.
        """
        scheme = QuantScheme.parse(all_instances[0].candidate.quant)
        load = count_load(make_input(case, self.device, 0).routing, case.problem)
        work = compute_work(case.problem, scheme, [load])
        unquantized = expert_bytes(case.problem, QuantScheme.parse("none"))
        weight_bytes = case.problem.e * (
            unquantized + len(all_instances) * expert_bytes(case.problem, scheme)
        )
        # `choose_rotation` limits weights to a fifth of the memory. Here, the weights of all layers
        # are in memory at the same time, so the limit is doubled.
        memory = 2 * int(self.environment.get("memory_bytes") or 0)
        l2 = l2_bytes(self.device)
        return choose_rotation(work.bytes, weight_bytes, case.problem.tokens, l2=l2, memory=memory)

    def _fill_in_work(
        self,
        row: Row,
        case: LayerCase,
        instances: LayerInstances,
        rotation: Rotation,
        inputs: Sequence[Input],
    ) -> Row:
        scheme = QuantScheme.parse(instances.candidate.quant)
        loads = [count_load(item.routing, case.problem) for item in inputs]
        work = compute_work(case.problem, scheme, loads)
        floor = compute_roofline(work, case.problem, scheme, self.peaks)
        return replace(
            row,
            calls=rotation.calls,
            weight_sets=rotation.weight_sets,
            touched=work.touched,
            skew=sum(load.skew for load in loads) / len(loads),
            flops=work.flops,
            bytes=work.bytes,
            floor_us=floor.us,
            floor_bound=floor.bound,
        )

    def _set_up_and_check(
        self,
        index: int,
        case: LayerCase,
        instances: LayerInstances,
        rotation: Rotation,
        inputs: Sequence[Input],
        weight_sets: WeightSets,
    ) -> _CheckedLayer:
        """Set up a layer, compare its outputs with the reference, and capture its calls.

        index: index of the layer's row.
        """
        layers = [instances.layer(number) for number in range(rotation.weight_sets)]
        for layer in layers:
            layer.tune(case.problem)
        input_indices = select_inputs_to_verify(rotation.calls, count_inputs_to_check(case.problem))
        # If outputs have few values, the check needs more inputs than the timed calls have.
        untimed = [
            make_input(case, self.device, n) for n in range(len(inputs), max(input_indices) + 1)
        ]
        items = [*inputs, *untimed]
        calls = [
            partial(layers[number % rotation.weight_sets].call, item.x_TH, item.routing)
            for number, item in enumerate(items)
        ]
        checks = []
        for number in input_indices:
            weights = weight_sets.weights(number % rotation.weight_sets)
            key = number, instances.candidate.quant
            if key not in self.expected:
                scheme = QuantScheme.parse(instances.candidate.quant)
                self.expected[key] = compute_expected_output(case, items[number], weights, scheme)
            checks.append((calls[number], self.expected[key]))
        checked = check_calls(checks, case.problem)
        timed = calls[: rotation.calls]
        groups: list[list[Call]] = [[call] for call in timed] if rotation.flush else [list(timed)]
        runs: list[Call] = [partial(call_all, group) for group in groups]
        mode = "cpu"
        if self.device.type == "cuda" and not checked.result.failure:
            for call in timed:
                call()
            captured = capture_graphs(groups) if layers[0].graph else None
            runs = captured or runs
            mode = ("eager" if captured is None else "graph") + "+flush" * rotation.flush
        if layers[0].interpreted:
            mode = INTERPRETER
        return _CheckedLayer(index, runs, rotation.calls, mode, checked, checks[-1][1])

    def _time_rounds(self, layers: Sequence[_CheckedLayer], rotation: Rotation) -> None:
        """Replay the layers in rounds, each in a new random order, and append to `times_us`."""
        if not layers:
            return
        clock = make_clock(self.device)
        flush_l2 = make_l2_flush(self.device) if rotation.flush else None
        rng = random.Random(len(self.rows))

        def replay(rounds: int) -> list[tuple[_CheckedLayer, float]]:
            marks = []
            for _ in range(rounds):
                for layer in rng.sample(layers, len(layers)):
                    for run in layer.runs:
                        if flush_l2 is not None:
                            flush_l2()
                        start = clock.mark()
                        run()
                        marks.append((layer, start, clock.mark()))
            clock.wait()  # only once, so that the host queues work while the GPU is busy
            return [(layer, clock.ms(start, end)) for layer, start, end in marks]

        round_ms = sum(ms for _, ms in replay(1)) or 1e-3
        if clock.settle_ms:
            warmup_rounds = math.ceil(clock.settle_ms / round_ms)
            replay(min(max(warmup_rounds, _MIN_WARMUP_ROUNDS), _MAX_WARMUP_ROUNDS))
        for layer, ms in replay(self.comparison.rounds):
            layer.times_us.append(ms / (layer.calls / len(layer.runs)) * 1e3)

    def _make_timed_row(self, row: Row, case: LayerCase, layer: _CheckedLayer) -> Row:
        """Check the output of a replay, and return the row with the times."""
        # Fill the output with NaN between two replays, so that unwritten values fail the check.
        last_output = layer.runs[-1]()
        last_output.fill_(math.nan)
        last_output = layer.runs[-1]()
        result = check_unchanged(last_output, layer.expected, layer.checked, case.problem)
        if result.failure:
            note = f"after {layer.mode} calls: {result.failure}"
            return replace(row, status=WRONG, note=note, error=result.error)
        us = median(layer.times_us)
        spread = 0.0
        if len(layer.times_us) > 1:
            low, _, high = quantiles(layer.times_us, n=4)
            spread = (high - low) / us
        interpreted = layer.mode == INTERPRETER
        assert row.floor_us is not None
        return replace(
            row,
            status=OK,
            us=us,
            us_min=min(layer.times_us),
            spread=spread,
            mode=layer.mode,
            replays=len(layer.times_us),
            over_floor=None if interpreted else us / row.floor_us,
        )


def format_case(rows: Sequence[Row]) -> str:
    """Format a case as one line with the microseconds or the status of each layer."""
    first = rows[0]
    results = [
        f"{row.layer} {row.us:.1f}" if row.us is not None else f"{row.layer} {row.status}"
        for row in rows
        if row.status != REFUSED
    ]
    if all(row.status == SKIPPED for row in rows):
        results = [first.note]
    return f"{first.shape} {first.operands} T={first.tokens} {first.routing}: {', '.join(results)}"
