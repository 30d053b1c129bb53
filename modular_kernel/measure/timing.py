"""How a call is timed: on a GPU by events around replays of a CUDA graph, on a CPU by the clock.

One graph holds several calls, each on an input of its own (and, where the weights of one call are
small, on weights of its own), so that what a call reads has left the L2 cache since it was last
read. Where even that would not do, the cache is overwritten before every call. The figure is the
median over replays, divided by the calls of one replay. Some replays before are not timed: see
`EventClock`.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from statistics import median, quantiles
from typing import Any

import torch

Call = Callable[[], torch.Tensor]

_FEWEST, _MOST = 5, 100  # replays
_FEWEST_ON_CPU = 3
_MOST_SETTLING = 1000  # replays before any is timed
_HOST_REPEATS = 16
_MOST_SETS = 8  # of weights, before the cache is overwritten instead
_COLD = 2  # times the cache: bytes that are read between two uses of the same


@dataclass(frozen=True)
class Rotation:
    """calls: in one replay, each with its own input. sets: of weights, used in turn.

    flush: every call is timed alone, after the cache was overwritten.
    """

    calls: int
    sets: int = 1
    flush: bool = False


def rotation(
    call_bytes: float, weight_bytes: float, tokens: int, *, l2: int, memory: int
) -> Rotation:
    """How to keep the cache cold for calls that touch `call_bytes` each.

    weight_bytes: of one whole set.  l2, memory: the device's; l2 = 0 stands for a CPU.
    """
    if not l2:
        return Rotation(1)
    calls = 8 if tokens <= 128 else 4 if tokens <= 1024 else 2
    sets = math.ceil(_COLD * l2 / max(call_bytes, 1))
    if sets <= 1:
        return Rotation(calls)
    if sets <= _MOST_SETS and sets * weight_bytes <= memory / 5:
        return Rotation(max(calls, sets), sets)
    return Rotation(calls, flush=True)


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median, the least, and the middle half over the median.

    mode: graph, eager or cpu, with "+flush" where the cache was overwritten. last: the output of
    the last call, and in a graph of a replay into poisoned memory.
    """

    us: float
    us_min: float
    spread: float
    mode: str
    replays: int
    last: torch.Tensor


def time_calls(
    calls: Sequence[Call],
    device: torch.device,
    *,
    graph: bool = True,
    flush: bool = False,
    target_ms: float = 20.0,
) -> Timing:
    """Time `calls`, all of them in turn, for about `target_ms` of the device.

    Each is called once before, eagerly, and a GPU then settles. graph: replay a CUDA graph; where
    capture fails (and on a CPU) calls are eager, and `mode` says so.
    """
    for call in calls:
        call()
    clock = clock_of(device)
    clock.wait()
    groups = [[call] for call in calls] if flush else [list(calls)]
    mode = "eager" if device.type == "cuda" else "cpu"
    runs: list[Call] = [partial(_all, group) for group in groups]
    captured = capture(groups) if graph and device.type == "cuda" else None
    if captured is not None:
        runs, mode = captured, "graph"
    wipe = wiper_of(device) if flush else None
    per_run = len(groups[0])
    _settle(runs, clock, wipe)
    once = sum(_sample(runs, clock, wipe)) or 1e-3
    fewest = _FEWEST if device.type == "cuda" else _FEWEST_ON_CPU
    replays = int(min(max(target_ms / once, fewest), _MOST))
    times = [ms / per_run * 1e3 for ms in _samples(runs, clock, wipe, replays)]
    last = runs[-1]()
    if mode == "graph":
        last.fill_(math.nan)
        last = runs[-1]()
    clock.wait()
    quarters = quantiles(times, n=4)
    middle = median(times)
    spread = (quarters[2] - quarters[0]) / middle if middle else 0.0
    suffix = "+flush" if flush else ""
    return Timing(middle, min(times), spread, mode + suffix, replays, last.clone())


def _all(calls: Sequence[Call]) -> torch.Tensor:
    last = calls[0]()
    for call in calls[1:]:
        last = call()
    return last


def capture(groups: Sequence[Sequence[Call]]) -> list[Call] | None:
    """Capture a CUDA graph for each group of calls; return None if one cannot be captured.

    A graph keeps its calls: what they hold, such as a plan's buffers, is where it reads and writes.
    """
    runs: list[Call] = []
    stream = torch.cuda.current_stream()
    generator = _generator()
    state = generator.clone_state()
    try:
        for group in groups:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                last = _all(group)
            runs.append(partial(_replay, graph, last, group))
    except RuntimeError:
        # A capture that fails may leave its stream behind, and the generator waiting for its end:
        # whatever draws next would be refused.
        torch.cuda.synchronize()
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(state)
        return None
    return runs


def _generator() -> torch.Generator:
    """Return what `torch.rand` draws from on the current GPU; a capture takes hold of it."""
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _replay(graph: torch.cuda.CUDAGraph, last: torch.Tensor, _kept: Sequence[Call]) -> torch.Tensor:
    graph.replay()
    return last


def wiper_of(device: torch.device) -> Callable[[], object] | None:
    """Return what overwrites the L2 cache; None where there is none to overwrite."""
    size = _COLD * l2_bytes(device)
    return torch.empty(size, dtype=torch.uint8, device=device).zero_ if size else None


def l2_bytes(device: torch.device) -> int:
    """Of the GPU's L2 cache; 0 for a CPU, whose caches are left alone."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


class EventClock:
    """The GPU's own clock; a mark is an event in its stream.

    settle_ms: work of the device before anything is timed. After gigabytes went back to the driver,
    as what torch's cache holds does at the start of a capture, an H200 took 10 % longer for the
    first 13 ms of fp8 layers of one token on Mixtral, and then no more (2026-11-22).
    """

    settle_ms = 25.0

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def ms(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end))

    def wait(self) -> None:
        torch.cuda.synchronize()


class WallClock:
    """The host's clock, for calls that are done when they return."""

    settle_ms = 0.0

    def mark(self) -> Any:
        return time.perf_counter()

    def ms(self, start: Any, end: Any) -> float:
        return float(end - start) * 1e3

    def wait(self) -> None:
        pass


Clock = EventClock | WallClock


def clock_of(device: torch.device) -> Clock:
    return EventClock() if device.type == "cuda" else WallClock()


Wiper = Callable[[], object] | None


def samples_ms(runs: Iterable[Callable[[], object]], clock: Clock, wipe: Wiper) -> list[float]:
    """Return the milliseconds of every run, each behind a wipe; the host never waits in between."""
    marks = []
    for run in runs:
        if wipe is not None:
            wipe()
        start = clock.mark()
        run()
        marks.append((start, clock.mark()))
    clock.wait()
    return [clock.ms(start, end) for start, end in marks]


def _samples(runs: Sequence[Call], clock: Clock, wipe: Wiper, replays: int) -> list[float]:
    return samples_ms(chain.from_iterable(repeat(runs, replays)), clock, wipe)


def _settle(runs: Sequence[Call], clock: Clock, wipe: Wiper) -> None:
    """Replay until about clock.settle_ms of the device have gone by."""
    if clock.settle_ms:
        once = sum(_sample(runs, clock, wipe)) or 1e-3
        _samples(runs, clock, wipe, min(math.ceil(clock.settle_ms / once), _MOST_SETTLING))


def _sample(runs: Sequence[Call], clock: Clock, wipe: Wiper) -> list[float]:
    return _samples(runs, clock, wipe, 1)


@dataclass(frozen=True)
class HostCost:
    """Of one eager call: microseconds until it returns, and allocations of device memory."""

    us: float
    allocations: float


def host_cost(call: Call, device: torch.device) -> HostCost | None:
    """Measure what an eager call costs the host, the GPU being idle.

    Return None on a CPU, which computes too.
    """
    if device.type != "cuda":
        return None
    call()
    before, times = _allocations(device), []
    for _ in range(_HOST_REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    allocations = (_allocations(device) - before) / _HOST_REPEATS
    return HostCost(median(times) * 1e6, allocations)


def _allocations(device: torch.device) -> int:
    """How many blocks torch's allocator has handed out so far."""
    return int(torch.cuda.memory_stats(device).get("allocation.all.allocated", 0))
