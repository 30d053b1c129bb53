"""Timing of dispatch and combine on one rank, for `mk exchange`.

If both can be captured, dispatch and combine are captured in one CUDA graph each. The two graphs
are replayed alternately, with an event after each replay. A spinning kernel runs first, so that the
host can queue all replays. The time of a pair (a dispatch and a combine) is measured with one graph
of four pairs, so that it excludes the time between graphs. If they cannot be captured, eager calls
are timed after a barrier, and times include host time. Inputs are in the L2 cache, as after the
previous layer of a model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from modular_kernel.bench.all2all.cases import ExchangeInputs, RankContext, Transport, max_row_error
from modular_kernel.measure.records import INTERPRETER
from modular_kernel.measure.timing import Call, capture_graphs, make_clock

_PAIRS_PER_GRAPH = 4  # dispatch and combine pairs per graph
_SPIN_CYCLES = 2_000_000  # about 1 ms, in which the host queues the timed work


@dataclass(frozen=True)
class Repeats:
    """Number of replays per round, and of rounds.

    The result is the median over rounds of the median over replays.
    """

    replays: int = 20
    rounds: int = 5


@dataclass(frozen=True)
class ExchangeTimes:
    """Times of one call on one rank, in microseconds.

    spread: (max - min) / median of the pair times of the rounds.
    mode: "graph", "eager", "cpu" or "interpreter".
    error: maximum relative error of a row after a replay; 0 without graphs.
    """

    dispatch_us: float
    combine_us: float
    pair_us: float
    spread: float
    mode: str
    error: float = 0.0


def time_transport(
    transport: Transport,
    inputs: ExchangeInputs,
    context: RankContext,
    repeats: Repeats,
    is_true_on_all_ranks: Callable[[bool], bool],
) -> ExchangeTimes:
    """Time a verified transport. All ranks call this together.

    Graphs are used only if all ranks can capture them.

    is_true_on_all_ranks: a collective that returns whether its argument is true on all ranks.
    """
    graphs = None
    if context.device.type == "cuda" and transport.capturable:
        graphs = _capture(transport, inputs)
        if not is_true_on_all_ranks(graphs is not None):
            graphs = None
    if graphs is None:
        return _time_eager(transport, context, repeats)
    error = _measure_replay_error(transport, inputs, graphs)
    return _time_graphs(graphs, context, repeats, error)


@dataclass(frozen=True)
class _Graphs:
    """Functions that replay the captured graphs.

    dispatched: value of `Transport.dispatched` after dispatch was captured, in the memory of its
        graph.
    """

    dispatch: Call
    combine: Call
    pairs: Call
    dispatched: Any


def _capture(transport: Transport, inputs: ExchangeInputs) -> _Graphs | None:
    def dispatch() -> torch.Tensor:
        transport.dispatch()
        return inputs.x_TH

    dispatch_graphs = capture_graphs([[dispatch]])
    dispatched = transport.dispatched
    graphs = dispatch_graphs and capture_graphs(
        [[transport.combine], [dispatch, transport.combine] * _PAIRS_PER_GRAPH]
    )
    if not dispatch_graphs or not graphs:
        return None
    combine, pairs = graphs
    return _Graphs(dispatch_graphs[0], combine, pairs, dispatched)


def _measure_replay_error(transport: Transport, inputs: ExchangeInputs, graphs: _Graphs) -> float:
    """Return the maximum error of a row after a replay of dispatch, the identity, and combine."""
    transport.dispatched = graphs.dispatched
    graphs.dispatch()
    transport.identity()
    out = graphs.combine()
    torch.cuda.synchronize()
    return max_row_error(out, transport.compute_expected(inputs))


def _time_graphs(
    graphs: _Graphs, context: RankContext, repeats: Repeats, error: float
) -> ExchangeTimes:
    median_times, pair_times = [], []
    for _ in range(repeats.rounds):
        replay_times = _time_replays([graphs.dispatch, graphs.combine], context, repeats.replays)
        median_times.append([median(times) for times in replay_times])
        pair_times.append(
            median(_time_replays([graphs.pairs], context, repeats.replays)[0]) / _PAIRS_PER_GRAPH
        )
    dispatch, combine = (median(times) for times in zip(*median_times, strict=True))
    spread = (max(pair_times) - min(pair_times)) / median(pair_times)
    return ExchangeTimes(dispatch, combine, median(pair_times), spread, "graph", error)


def _time_replays(runs: list[Call], context: RankContext, replays: int) -> list[list[float]]:
    """Return, for each graph, the microseconds of its replays.

    The first replay is omitted, because it includes waiting for other ranks.
    """
    clock = make_clock(context.device)
    dist.barrier(context.group)
    torch.cuda._sleep(_SPIN_CYCLES)  # type: ignore[no-untyped-call]
    marks = [clock.mark()]
    for _ in range(replays + 1):
        for run in runs:
            run()
            marks.append(clock.mark())
    clock.wait()
    times = [clock.ms(a, b) * 1e3 for a, b in pairwise(marks)]
    return [times[len(runs) + index :: len(runs)] for index in range(len(runs))]


def _time_eager(transport: Transport, context: RankContext, repeats: Repeats) -> ExchangeTimes:
    clock = make_clock(context.device)
    round_medians = []
    for _ in range(repeats.rounds):
        call_times = []
        for _ in range(repeats.replays):
            dist.barrier(context.group)
            clock.wait()
            start = clock.mark()
            transport.dispatch()
            middle = clock.mark()
            transport.combine()
            end = clock.mark()
            clock.wait()
            marks = (start, middle), (middle, end), (start, end)
            call_times.append([clock.ms(a, b) * 1e3 for a, b in marks])
        round_medians.append([median(column) for column in zip(*call_times, strict=True)])
    dispatch, combine, pair = (median(column) for column in zip(*round_medians, strict=True))
    pair_times = [call_times[2] for call_times in round_medians]
    mode = "eager" if context.device.type == "cuda" else "cpu"
    mode = INTERPRETER if transport.interpreted else mode
    return ExchangeTimes(dispatch, combine, pair, (max(pair_times) - min(pair_times)) / pair, mode)


def measure_event_gap(device: torch.device) -> float | None:
    """Return the microseconds between two events around a graph with one trivial kernel.

    The times of dispatch and combine include about this much overhead. Returns None on a CPU, or if
    the capture fails.
    """
    if device.type != "cuda":
        return None
    value = torch.zeros(1, device=device)
    value.add_(1)
    runs = capture_graphs([[lambda: value.add_(1)]])
    if runs is None:
        return None
    clock = make_clock(device)
    torch.cuda._sleep(_SPIN_CYCLES)  # type: ignore[no-untyped-call]
    marks = [clock.mark()]
    for _ in range(50):
        runs[0]()
        marks.append(clock.mark())
    clock.wait()
    return median(clock.ms(a, b) * 1e3 for a, b in pairwise(marks))
