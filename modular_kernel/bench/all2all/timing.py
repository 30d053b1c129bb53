"""How an exchange is timed, on one rank among others.

Where both halves can be captured: a CUDA graph of each, replayed in turn with an event in between,
behind a kernel that spins until the host is ahead; and four pairs in one graph for the pair's own
time, which has no launch of a graph inside. Otherwise: eager calls, ranks waiting for each other
before each, which times the host as well. Inputs are in the L2 cache, as after the layer before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from modular_kernel.bench.all2all.cases import ExchangeInputs, Place, Transport, distance
from modular_kernel.measure.records import INTERPRETER
from modular_kernel.measure.timing import Call, capture, clock_of

_PAIRS = 4  # of one graph
_SPIN_CYCLES = 2_000_000  # about 1 ms: the host queues what is timed behind it


@dataclass(frozen=True)
class Repeats:
    """replays of one round, whose median counts; rounds, of whose figures the median counts."""

    replays: int = 20
    rounds: int = 5


@dataclass(frozen=True)
class ExchangeTimes:
    """Microseconds of one call on one rank. spread: of the rounds' pairs, over their median.

    mode: graph, eager or cpu. error: the distance from x after a replay, where there are graphs.
    """

    dispatch_us: float
    combine_us: float
    pair_us: float
    spread: float
    mode: str
    error: float = 0.0


def time_transport(
    transport: Transport,
    given: ExchangeInputs,
    place: Place,
    repeats: Repeats,
    agreed: Callable[[bool], bool],
) -> ExchangeTimes:
    """Time calls that were checked; all ranks do so at once.

    agreed: whether all ranks say yes; a capture that failed on one is not replayed on any.
    """
    graphs = None
    if place.device.type == "cuda" and transport.capturable:
        graphs = _capture(transport, given)
        if not agreed(graphs is not None):
            graphs = None
    if graphs is None:
        return _eager(transport, place, repeats)
    error = _replayed(transport, given, graphs)
    return _graph(graphs, place, repeats, error)


@dataclass(frozen=True)
class _Graphs:
    """Replays; `arrived` is what the dispatch's graph leaves."""

    dispatch: Call
    combine: Call
    pairs: Call
    arrived: Any


def _capture(transport: Transport, given: ExchangeInputs) -> _Graphs | None:
    def dispatch() -> torch.Tensor:
        transport.dispatch()
        return given.x_TH

    first = capture([[dispatch]])
    arrived = transport.arrived
    others = first and capture([[transport.combine], [dispatch, transport.combine] * _PAIRS])
    if not first or not others:
        return None
    combine, pairs = others
    return _Graphs(first[0], combine, pairs, arrived)


def _replayed(transport: Transport, given: ExchangeInputs, graphs: _Graphs) -> float:
    """Return the distance from x after a replay of each half, with the identity in between."""
    transport.arrived = graphs.arrived
    graphs.dispatch()
    transport.identity()
    out = graphs.combine()
    torch.cuda.synchronize()
    return distance(out, transport.expected(given))


def _graph(graphs: _Graphs, place: Place, repeats: Repeats, error: float) -> ExchangeTimes:
    halves, pairs = [], []
    for _ in range(repeats.rounds):
        parts = _queued([graphs.dispatch, graphs.combine], place, repeats.replays)
        halves.append([median(times) for times in parts])
        pairs.append(median(_queued([graphs.pairs], place, repeats.replays)[0]) / _PAIRS)
    dispatch, combine = (median(times) for times in zip(*halves, strict=True))
    spread = (max(pairs) - min(pairs)) / median(pairs)
    return ExchangeTimes(dispatch, combine, median(pairs), spread, "graph", error)


def _queued(runs: list[Call], place: Place, replays: int) -> list[list[float]]:
    """Microseconds of each run in each turn. The first turn, in which ranks meet, is left out."""
    clock = clock_of(place.device)
    dist.barrier(place.group)
    torch.cuda._sleep(_SPIN_CYCLES)  # type: ignore[no-untyped-call]
    marks = [clock.mark()]
    for _ in range(replays + 1):
        for run in runs:
            run()
            marks.append(clock.mark())
    clock.wait()
    times = [clock.ms(a, b) * 1e3 for a, b in pairwise(marks)]
    return [times[len(runs) + index :: len(runs)] for index in range(len(runs))]


def _eager(transport: Transport, place: Place, repeats: Repeats) -> ExchangeTimes:
    clock = clock_of(place.device)
    rounds = []
    for _ in range(repeats.rounds):
        times = []
        for _ in range(repeats.replays):
            dist.barrier(place.group)
            clock.wait()
            start = clock.mark()
            transport.dispatch()
            middle = clock.mark()
            transport.combine()
            end = clock.mark()
            clock.wait()
            marks = (start, middle), (middle, end), (start, end)
            times.append([clock.ms(a, b) * 1e3 for a, b in marks])
        rounds.append([median(column) for column in zip(*times, strict=True)])
    dispatch, combine, pair = (median(column) for column in zip(*rounds, strict=True))
    pairs = [figures[2] for figures in rounds]
    mode = "eager" if place.device.type == "cuda" else "cpu"
    mode = INTERPRETER if transport.interpreted else mode
    return ExchangeTimes(dispatch, combine, pair, (max(pairs) - min(pairs)) / pair, mode)


def event_gap_us(device: torch.device) -> float | None:
    """Return the time in us of a graph of one trivial kernel between two events.

    Return None without graphs.

    Every half's time holds about as much that is not the exchange's.
    """
    if device.type != "cuda":
        return None
    value = torch.zeros(1, device=device)
    value.add_(1)
    runs = capture([[lambda: value.add_(1)]])
    if runs is None:
        return None
    clock = clock_of(device)
    torch.cuda._sleep(_SPIN_CYCLES)  # type: ignore[no-untyped-call]
    marks = [clock.mark()]
    for _ in range(50):
        runs[0]()
        marks.append(clock.mark())
    clock.wait()
    return median(clock.ms(a, b) * 1e3 for a, b in pairwise(marks))
