"""A whole run: peaks, then every layer in every cell, each checked before it is timed."""

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch

from modular_kernel.bench import rows as status
from modular_kernel.bench.cases import Cell, Input, make_input, make_weights
from modular_kernel.bench.check import Answer, Finding, answer_to, judge_output
from modular_kernel.bench.environment import environment
from modular_kernel.bench.floor import (
    Peaks,
    Work,
    expert_bytes,
    floor_of,
    measure_peaks,
    operand_type,
    work_of,
)
from modular_kernel.bench.launches import count_launches
from modular_kernel.bench.layers import Layer, Offer
from modular_kernel.bench.method import (
    Call,
    Rotation,
    host_cost,
    l2_bytes,
    rotation,
    time_calls,
)
from modular_kernel.bench.routing import load_of
from modular_kernel.bench.rows import Report, Row, ranked
from modular_kernel.schemes import QuantScheme
from modular_kernel.tensors import ExpertWeights
from modular_kernel.types import Machine, dtype_name

_LONGEST_NOTE = 300
Tell = Callable[[Report], object]


@dataclass(frozen=True)
class Job:
    """What to measure. Each cell with each offer makes one row.

    graph: time replays of CUDA graphs, else eager calls. target_ms: of the device, for one row.
    bandwidth: bytes per second for the floor, None for the measured one. deadline: seconds after
    the start, no row is begun later. command: how to repeat it.
    """

    cells: tuple[Cell, ...]
    offers: tuple[Offer, ...]
    machine: Machine
    graph: bool = True
    target_ms: float = 20.0
    bandwidth: float | None = None
    deadline: float | None = None
    command: str = ""


def run(job: Job, tell: Tell = lambda _report: None) -> Report:
    """Do the job. tell: gets the report so far after every row."""
    with torch.no_grad():
        return _Run(job, tell).report()


@dataclass
class _Stock:
    """The weights of one shape, made when first asked for."""

    cells: tuple[Cell, ...]
    device: torch.device
    sets: dict[int, ExpertWeights] = field(default_factory=dict)

    def weights(self, index: int) -> ExpertWeights:
        if index not in self.sets:
            self.sets[index] = make_weights(self.cells[0].problem, self.device, index)
        return self.sets[index]

    @property
    def most_tokens(self) -> int:
        return max(cell.problem.tokens for cell in self.cells)


@dataclass
class _Team:
    """The objects of one offer on one shape: one for each set of weights, set up when needed."""

    offer: Offer
    stock: _Stock
    ready: list[Layer] = field(default_factory=list)
    failure: Exception | None = None

    def layer(self, index: int) -> Layer:
        while len(self.ready) <= index:
            if self.failure is not None:
                raise self.failure
            try:
                layer = self.offer.make()
                problem = self.stock.cells[0].problem.with_tokens(self.stock.most_tokens)
                layer.setup(problem, self.stock.weights(len(self.ready)))
            except Exception as error:
                self.failure = error
                raise
            self.ready.append(layer)
        return self.ready[index]


class _Run:
    def __init__(self, job: Job, tell: Tell) -> None:
        self.job, self.tell = job, tell
        self.started = time.monotonic()
        self.device = torch.device(job.machine.device)
        schemes = [QuantScheme.parse(offer.quant) for offer in job.offers]
        types = [
            operand_type(cell.problem, scheme)
            for cell in job.cells
            for scheme in [QuantScheme.parse("none"), *schemes]
        ]
        types += [dtype_name(cell.problem.dtype) for cell in job.cells]
        self.peaks: Peaks = measure_peaks(self.device, types, bandwidth=job.bandwidth)
        self.environment = environment(self.device, job.command)
        self.rows: list[Row] = []
        self.answers: dict[tuple[Cell, int, int, str], Answer] = {}
        self.stopped = ""

    def report(self) -> Report:
        for cell, team in self._visits():
            self.rows.append(self._row(cell, team))
            self._tell()
        if self.device.type == "cuda" and not self.stopped:
            self._count_launches()
        return self._tell()

    def _tell(self) -> Report:
        peaks = asdict(self.peaks)
        report = Report(self.environment, peaks, ranked(self.rows), self.stopped)
        self.tell(report)
        return report

    def _visits(self) -> Iterator[tuple[Cell, _Team]]:
        """Every cell with every offer; one shape's weights and one offer's objects at a time."""
        key = lambda cell: (cell.shape, str(cell.problem.with_tokens(1)))  # noqa: E731
        for _, cells in itertools.groupby(self.job.cells, key):
            stock = _Stock(tuple(cells), self.device)
            for offer in self.job.offers:
                team = _Team(offer, stock)
                for cell in stock.cells:
                    yield cell, team
                    self._free()
                del team
                self._free()

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda" and not self.stopped:
            torch.cuda.empty_cache()

    @property
    def _late(self) -> bool:
        limit = self.job.deadline
        return limit is not None and time.monotonic() - self.started > limit

    def _row(self, cell: Cell, team: _Team) -> Row:
        row = blank_row(cell, team.offer)
        if self.stopped or self._late:
            return replace(row, note=self.stopped or "after the deadline")
        try:
            reason = team.offer.make().refusal(cell.problem)
            if reason is not None:
                return replace(row, status=status.REFUSED, note=reason)
            return self._measured(row, cell, team)
        # A layer can fail in any way; that is its row, not the end of the table.
        except Exception as error:  # noqa: BLE001
            if self.device.type == "cuda" and "CUDA error" in str(error):
                self.stopped = f"{team.offer.name} broke the CUDA context"
            note = f"{type(error).__name__}: {error}"[:_LONGEST_NOTE]
            return replace(row, status=status.FAILED, note=note)

    def _rotation(self, cell: Cell, first: Work, scheme: QuantScheme) -> Rotation:
        memory = 0
        if self.device.type == "cuda":
            memory = torch.cuda.get_device_properties(self.device).total_memory
        whole = cell.problem.e * expert_bytes(cell.problem, scheme)
        l2 = l2_bytes(self.device)
        return rotation(first.bytes, whole, cell.problem.tokens, l2=l2, memory=memory)

    def _measured(self, row: Row, cell: Cell, team: _Team) -> Row:
        """The row, checked and, if it is right, timed."""
        scheme, expert_map = QuantScheme.parse(team.offer.quant), team.stock.weights(0).expert_map
        given = make_input(cell, self.device, 0)
        loads = [load_of(given.routing, cell.problem, expert_map)]
        turns = self._rotation(cell, work_of(cell.problem, scheme, loads), scheme)
        inputs = [given, *(make_input(cell, self.device, i) for i in range(1, turns.calls))]
        loads += [load_of(i.routing, cell.problem, expert_map) for i in inputs[1:]]
        work = work_of(cell.problem, scheme, loads)
        floor = floor_of(work, cell.problem, scheme, self.peaks)
        layers = [team.layer(index) for index in range(turns.sets)]
        calls: list[Call] = [
            partial(layers[i % turns.sets].call, inp.x_TH, inp.routing)
            for i, inp in enumerate(inputs)
        ]
        first = self._finding(_poisoned(calls[0]), cell, team, given, (0, 0))
        row = replace(
            row,
            calls=turns.calls,
            weight_sets=turns.sets,
            touched=work.touched,
            skew=sum(load.skew for load in loads) / len(loads),
            flops=work.flops,
            bytes=work.bytes,
            floor_us=floor.us,
            floor_bound=floor.bound,
            error=first[0].error,
            error_bound=first[1].bound,
        )
        if first[0].wrong:
            return replace(row, status=status.WRONG, note=first[0].wrong)
        timing = time_calls(
            calls,
            self.device,
            graph=self.job.graph and layers[0].graph,
            flush=turns.flush,
            target_ms=self.job.target_ms,
        )
        at = len(inputs) - 1
        last = self._finding(timing.last, cell, team, inputs[at], (at, at % turns.sets))
        if last[0].wrong:
            note = f"after {timing.mode} calls: {last[0].wrong}"
            return replace(row, status=status.WRONG, note=note, error=last[0].error)
        host = host_cost(calls[0], self.device)
        return replace(
            row,
            status=status.OK,
            us=timing.us,
            us_min=timing.us_min,
            spread=timing.spread,
            mode="interpreter" if layers[0].interpreted else timing.mode,
            replays=timing.replays,
            over_floor=timing.us / floor.us,
            host_us=host.us if host else None,
            allocations=host.allocations if host else None,
        )

    def _finding(
        self, out: torch.Tensor, cell: Cell, team: _Team, given: Input, at: tuple[int, int]
    ) -> tuple[Finding, Answer]:
        """`out` judged. at: number of the input and of the weights that it was made of."""
        key = (cell, *at, team.offer.quant)
        if key not in self.answers:
            scheme = QuantScheme.parse(team.offer.quant)
            self.answers[key] = answer_to(cell, given, team.stock.weights(at[1]), scheme)
        answer = self.answers[key]
        return judge_output(out, answer, cell.problem), answer

    def _count_launches(self) -> None:
        """Once everything was timed: the profiler slows down what comes after it."""
        for index, (cell, team) in enumerate(self._visits()):
            row = self.rows[index]
            if not row.timed or self._late:
                continue
            given = make_input(cell, self.device, 0)
            call = partial(team.layer(0).call, given.x_TH, given.routing)
            call()
            self.rows[index] = replace(row, launches=count_launches(call, self.device))


def _poisoned(call: Call) -> torch.Tensor:
    """What a second call returns after the first one's output was filled with NaN."""
    call().fill_(float("nan"))
    return call()


def blank_row(cell: Cell, offer: Offer) -> Row:
    """The row before anything was measured."""
    problem, scheme = cell.problem, QuantScheme.parse(offer.quant)
    operands = f"{scheme.weight}/{scheme.activation}" if scheme.quantised else ""
    return Row(
        shape=cell.shape,
        experts=problem.experts,
        top_k=problem.top_k,
        hidden=problem.hidden,
        intermediate=problem.intermediate,
        tokens=problem.tokens,
        dtype=dtype_name(problem.dtype),
        problem=str(problem),
        routing=str(cell.routing),
        layer=offer.name,
        origin=offer.origin,
        quant=offer.quant,
        operands=operands or dtype_name(problem.dtype),
    )
