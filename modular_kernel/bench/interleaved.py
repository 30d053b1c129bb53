"""Interleaved timing of the layers of a cell: each is replayed once in every round.

The clocks of a GPU depend on its previous load, so timing one layer after the other would not be a
fair comparison. Here all layers of a cell are first set up in one process, each with a CUDA graph
of several calls on different inputs. In each round every graph is replayed once, in random order.
The time is the median over rounds, divided by the number of calls per graph. Every layer is
compared with the float64 reference before it is timed, and its replayed output with the eager one
afterwards.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median, quantiles

import torch

from modular_kernel.bench.candidates import BenchOffer
from modular_kernel.bench.run import (
    LayerSets,
    WeightSets,
    blank_row,
    device_works,
    free_memory,
    inputs_to_verify,
    short_error,
)
from modular_kernel.measure import records as status
from modular_kernel.measure.cases import Input, LayerCase, make_input
from modular_kernel.measure.check import (
    CheckedCalls,
    ExpectedOutput,
    check_calls,
    check_unchanged,
    compute_expected_output,
    num_inputs_to_check,
)
from modular_kernel.measure.environment import collect_environment
from modular_kernel.measure.records import Report, Row, add_peer_ratios
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
    capture_graphs,
    choose_rotation,
    l2_bytes,
    make_clock,
    make_l2_flush,
)
from modular_kernel.spec.problem import Machine, dtype_name
from modular_kernel.spec.quantization import QuantScheme

ROUNDS = 21
_MIN_UNTIMED, _MAX_UNTIMED = 2, 200  # rounds before the timed ones

CellCallback = Callable[[str], object]


@dataclass(frozen=True)
class Block:
    """Cells of one shape, and the layers to compare in them.

    cells: all of the same shape. offers: layers with equal `measure.cases.operand_types`.
    """

    cells: tuple[LayerCase, ...]
    offers: tuple[BenchOffer, ...]

    @property
    def name(self) -> str:
        schemes = dict.fromkeys(offer.quant for offer in self.offers)
        return f"{self.cells[0].shape} {', '.join(schemes)}"


@dataclass(frozen=True)
class Comparison:
    """A run over several blocks.

    rounds: number of timed replays of each layer in a cell. seconds: time limit, after which no
    cell is started; None for no limit. When a block starts, it gets an equal share of the time
    left.
    bandwidth: bytes per second for rooflines; None measures it. missing: names of layers whose
    packages are not installed, with the packages. command: the command line, for the record.
    compile_only: whether to set up every layer and call it once with each number of tokens, without
    timing.
    """

    blocks: tuple[Block, ...]
    machine: Machine
    rounds: int = ROUNDS
    seconds: float | None = None
    bandwidth: float | None = None
    missing: tuple[str, ...] = ()
    command: str = ""
    compile_only: bool = False


def run_interleaved(
    comparison: Comparison,
    on_cell: CellCallback = lambda _line: None,
    on_report: Callable[[Report], object] = lambda _report: None,
) -> Report:
    """Run the comparison and return its report.

    on_cell: called with a line of text about each cell. on_report: called with the report so far
    after each cell, so that it can be saved in case a library ends the process.
    """
    with torch.no_grad():
        return _Run(comparison, on_cell, on_report).report()


@dataclass
class _ReadyLayer:
    """A layer with correct results, ready to be timed.

    index: of its row in the cell. runs: one graph of all calls; one graph per call if the L2 cache
    is overwritten before each; or functions that make the calls if they cannot be captured. calls:
    number of calls that `runs` make together. mode: see measure.timing.Timing. checked, expected:
    result of the check, and expected output of the last call. times_us: time of one call, by round.
    """

    index: int
    runs: list[Call]
    calls: int
    mode: str
    checked: CheckedCalls
    expected: ExpectedOutput
    times_us: list[float] = field(default_factory=list)


class _Run:
    """One run of a comparison. block_ends: time.monotonic() after which no cell is started."""

    def __init__(
        self, comparison: Comparison, on_cell: CellCallback, on_report: Callable[[Report], object]
    ) -> None:
        self.comparison, self.on_cell, self.on_report = comparison, on_cell, on_report
        self.device = torch.device(comparison.machine.device)
        self.started = time.monotonic()
        self.environment = collect_environment(self.device, comparison.command)
        self.rows: list[Row] = []
        self.stopped = ""
        self.block_ends = math.inf
        types = [
            compute_type(cell.problem, QuantScheme.parse(offer.quant))
            for block in comparison.blocks
            for cell in block.cells[:1]
            for offer in block.offers
        ]
        types += [dtype_name(block.cells[0].problem.dtype) for block in comparison.blocks]
        # Compilation needs no rates, so spend little time on them.
        self.peaks = measure_peaks(
            self.device,
            types,
            bandwidth=comparison.bandwidth,
            **({"size": 64, "nbytes": 1 << 20} if comparison.compile_only else {}),
        )
        self.expected: dict[tuple[int, str], ExpectedOutput] = {}

    def report(self) -> Report:
        blocks = self.comparison.blocks
        for number, block in enumerate(blocks):
            if self.comparison.seconds is not None:
                now = time.monotonic()
                left = self.comparison.seconds - (now - self.started)
                self.block_ends = now + left / (len(blocks) - number)
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

    def _compile(self, block: Block) -> None:
        """Set up each layer and call it once with each number of tokens; report failures."""
        weight_sets = WeightSets(block.cells, self.device)
        for offer in block.offers:
            layers = LayerSets(offer, weight_sets)
            if layers.first.tuned:
                continue  # it times launches, which other processes would disturb
            for cell in {cell.problem.tokens: cell for cell in block.cells}.values():
                try:
                    if layers.first.refusal(cell.problem) is None:
                        inputs = make_input(cell, self.device, 0)
                        layers.layer(0).call(inputs.x_TH, inputs.routing)
                except Exception as error:  # noqa: BLE001  the run that measures reports it
                    self.on_cell(
                        f"{cell.shape} T={cell.problem.tokens} {offer.name}: {error}"[:200]
                    )
            layers.free()
            free_memory(self.device)

    def _measure(self, block: Block) -> None:
        weight_sets = WeightSets(block.cells, self.device)
        candidates = [LayerSets(offer, weight_sets) for offer in block.offers]
        for cell in block.cells:
            rows = self._measure_cell(cell, candidates, weight_sets)
            self.rows += rows
            self.on_cell(cell_line(rows))
            self.on_report(self._report())
        candidates.clear()
        weight_sets.sets.clear()
        self._free()

    def _free(self) -> None:
        if not self.stopped:
            free_memory(self.device)

    def _measure_cell(
        self, cell: LayerCase, candidates: Sequence[LayerSets], weight_sets: WeightSets
    ) -> list[Row]:
        """Check every candidate, then time those that are correct; return a row for each."""
        rows = [blank_row(cell, candidate.offer) for candidate in candidates]
        if self.stopped or time.monotonic() > self.block_ends:
            note = self.stopped or "not started: the time had ended"
            return [replace(row, note=note) for row in rows]
        schedule = self._schedule(cell, candidates)
        inputs = [make_input(cell, self.device, index) for index in range(schedule.calls)]
        self.expected.clear()
        ready: list[_ReadyLayer] = []
        for index, candidate in enumerate(candidates):
            try:
                rows[index] = self._describe(rows[index], cell, candidate, schedule, inputs)
                reason = candidate.first.refusal(cell.problem)
                if reason is not None:
                    rows[index] = replace(rows[index], status=status.REFUSED, note=reason)
                    continue
                item = self._check(index, cell, candidate, schedule, inputs, weight_sets)
                result = item.checked.result
                rows[index] = replace(
                    rows[index],
                    error=result.error,
                    error_bound=result.bound,
                    note=candidate.first.note(cell.problem),
                )
                if result.failure:
                    rows[index] = replace(rows[index], status=status.WRONG, note=result.failure)
                else:
                    ready.append(item)
            # A library can raise anything. Report it and continue with the other layers.
            except Exception as error:  # noqa: BLE001
                rows[index] = replace(rows[index], status=status.FAILED, note=short_error(error))
                if not device_works(self.device):
                    self.stopped = f"{candidate.offer.name} broke the CUDA context"
                    return rows
        self._time(ready, schedule)
        for item in ready:
            rows[item.index] = self._timed_row(rows[item.index], cell, item)
        ready.clear()
        self._free()
        return rows

    def _schedule(self, cell: LayerCase, candidates: Sequence[LayerSets]) -> Rotation:
        """Return the rotation of calls over inputs and sets of weights.

        The candidates differ only in the granularity of their scales, so they share one schedule.
        """
        scheme = QuantScheme.parse(candidates[0].offer.quant)
        load = count_load(make_input(cell, self.device, 0).routing, cell.problem)
        work = compute_work(cell.problem, scheme, [load])
        unquantized = expert_bytes(cell.problem, QuantScheme.parse("none"))
        weight_bytes = cell.problem.e * (
            unquantized + len(candidates) * expert_bytes(cell.problem, scheme)
        )
        # All candidates are in memory at the same time, so allow twice the memory of a single one.
        memory = 2 * int(self.environment.get("memory_bytes") or 0)
        l2 = l2_bytes(self.device)
        return choose_rotation(work.bytes, weight_bytes, cell.problem.tokens, l2=l2, memory=memory)

    def _describe(
        self,
        row: Row,
        cell: LayerCase,
        candidate: LayerSets,
        schedule: Rotation,
        inputs: Sequence[Input],
    ) -> Row:
        """Return the row with the work and the roofline of the cell."""
        scheme = QuantScheme.parse(candidate.offer.quant)
        loads = [count_load(item.routing, cell.problem) for item in inputs]
        work = compute_work(cell.problem, scheme, loads)
        floor = compute_roofline(work, cell.problem, scheme, self.peaks)
        return replace(
            row,
            calls=schedule.calls,
            weight_sets=schedule.weight_sets,
            touched=work.touched,
            skew=sum(load.skew for load in loads) / len(loads),
            flops=work.flops,
            bytes=work.bytes,
            floor_us=floor.us,
            floor_bound=floor.bound,
        )

    def _check(
        self,
        index: int,
        cell: LayerCase,
        candidate: LayerSets,
        schedule: Rotation,
        inputs: Sequence[Input],
        weight_sets: WeightSets,
    ) -> _ReadyLayer:
        """Set up a layer, compare its calls with the reference, and capture them.

        index: of the layer's row.
        """
        layers = [candidate.layer(number) for number in range(schedule.weight_sets)]
        for layer in layers:
            layer.tune(cell.problem)
        numbers = inputs_to_verify(schedule.calls, num_inputs_to_check(cell.problem))
        # Outputs with few values need more inputs than those of the timed calls.
        untimed = [make_input(cell, self.device, n) for n in range(len(inputs), max(numbers) + 1)]
        items = [*inputs, *untimed]
        calls = [
            partial(layers[number % schedule.weight_sets].call, item.x_TH, item.routing)
            for number, item in enumerate(items)
        ]
        checks = []
        for number in numbers:
            weights = weight_sets.weights(number % schedule.weight_sets)
            key = number, candidate.offer.quant
            if key not in self.expected:
                scheme = QuantScheme.parse(candidate.offer.quant)
                self.expected[key] = compute_expected_output(cell, items[number], weights, scheme)
            checks.append((calls[number], self.expected[key]))
        checked = check_calls(checks, cell.problem)
        timed = calls[: schedule.calls]
        groups: list[list[Call]] = [[call] for call in timed] if schedule.flush else [list(timed)]
        runs: list[Call] = [partial(_call_all, group) for group in groups]
        mode = "cpu"
        if self.device.type == "cuda" and not checked.result.failure:
            for call in timed:
                call()
            captured = capture_graphs(groups) if layers[0].graph else None
            runs = captured or runs
            mode = ("eager" if captured is None else "graph") + "+flush" * schedule.flush
        if layers[0].interpreted:
            mode = status.INTERPRETER
        return _ReadyLayer(index, runs, schedule.calls, mode, checked, checks[-1][1])

    def _time(self, ready: Sequence[_ReadyLayer], schedule: Rotation) -> None:
        """Replay the layers in rounds, each in a random order, and append to their times."""
        if not ready:
            return
        clock = make_clock(self.device)
        flush_l2 = make_l2_flush(self.device) if schedule.flush else None
        order = random.Random(len(self.rows))

        def replay(rounds: int) -> list[tuple[_ReadyLayer, float]]:
            marks = []
            for _ in range(rounds):
                for item in order.sample(ready, len(ready)):
                    for run in item.runs:
                        if flush_l2 is not None:
                            flush_l2()
                        start = clock.mark()
                        run()
                        marks.append((item, start, clock.mark()))
            clock.wait()  # once, so that launches are queued while the GPU is busy
            return [(item, clock.ms(start, end)) for item, start, end in marks]

        round_ms = sum(ms for _, ms in replay(1)) or 1e-3
        untimed = math.ceil(clock.settle_ms / round_ms)
        if clock.settle_ms:
            replay(min(max(untimed, _MIN_UNTIMED), _MAX_UNTIMED))
        for item, ms in replay(self.comparison.rounds):
            item.times_us.append(ms / (item.calls / len(item.runs)) * 1e3)

    def _timed_row(self, row: Row, cell: LayerCase, item: _ReadyLayer) -> Row:
        """Return the row with the times, after comparing a replay's output with the checked one."""
        last = item.runs[-1]()
        last.fill_(math.nan)
        last = item.runs[-1]()
        result = check_unchanged(last, item.expected, item.checked, cell.problem)
        if result.failure:
            note = f"after {item.mode} calls: {result.failure}"
            return replace(row, status=status.WRONG, note=note, error=result.error)
        us = median(item.times_us)
        spread = 0.0
        if len(item.times_us) > 1:
            low, _, high = quantiles(item.times_us, n=4)
            spread = (high - low) / us
        interpreted = item.mode == status.INTERPRETER
        assert row.floor_us is not None
        return replace(
            row,
            status=status.OK,
            us=us,
            us_min=min(item.times_us),
            spread=spread,
            mode=item.mode,
            replays=len(item.times_us),
            over_floor=None if interpreted else us / row.floor_us,
        )


def _call_all(calls: Sequence[Call]) -> torch.Tensor:
    last = calls[0]()
    for call in calls[1:]:
        last = call()
    return last


def cell_line(rows: Sequence[Row]) -> str:
    """Format a cell as one line: the microseconds or the status of each layer."""
    first = rows[0]
    parts = [
        f"{row.layer} {row.us:.1f}" if row.us is not None else f"{row.layer} {row.status}"
        for row in rows
        if row.status != status.REFUSED
    ]
    if all(row.status == status.SKIPPED for row in rows):
        parts = [first.note]
    return f"{first.shape} {first.operands} T={first.tokens} {first.routing}: {', '.join(parts)}"
