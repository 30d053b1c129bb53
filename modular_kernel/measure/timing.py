"""Timing of calls: with events around CUDA graph replays on a GPU, by the host's clock on a CPU.

A graph contains several calls, each with its own input (and its own weights, if those of one call
are small), so that the data of a call is evicted from the L2 cache before it is read again. If that
is not enough, the cache is overwritten before every call. The result is the median time of a replay
divided by its number of calls. The first replays are not timed, see `EventClock`.
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

_MIN_REPLAYS, _MAX_REPLAYS = 5, 100
_MIN_REPLAYS_ON_CPU = 3
_MAX_SETTLING_REPLAYS = 1000  # maximum number of untimed replays
_HOST_REPEATS = 16  # calls over which the host's cost is measured
_MAX_WEIGHT_SETS = 8  # if more sets of weights would be needed, the cache is overwritten instead
_FLUSH_FACTOR = 2  # bytes to access between two uses of the same data, over the size of the cache


@dataclass(frozen=True)
class Rotation:
    """A schedule of calls that keeps the L2 cache cold.

    calls: number of calls per replay, each with its own input. sets: number of sets of weights,
    used in rotation. flush: whether to overwrite the cache before each call, and time each call
    alone.
    """

    calls: int
    weight_sets: int = 1
    flush: bool = False


def choose_rotation(
    call_bytes: float, weight_bytes: float, tokens: int, *, l2: int, memory: int
) -> Rotation:
    """Return the schedule for calls that read and write `call_bytes` each.

    weight_bytes: of one set of weights. l2: bytes of the L2 cache; 0 for a CPU. memory: bytes of
    the device, of which sets of weights may take a fifth.
    """
    if not l2:
        return Rotation(1)
    calls = 8 if tokens <= 128 else 4 if tokens <= 1024 else 2
    sets = math.ceil(_FLUSH_FACTOR * l2 / max(call_bytes, 1))
    if sets <= 1:
        return Rotation(calls)
    if sets <= _MAX_WEIGHT_SETS and sets * weight_bytes <= memory / 5:
        return Rotation(max(calls, sets), sets)
    return Rotation(calls, flush=True)


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, minimum, and interquartile range over the median.

    mode: "graph", "eager" or "cpu", with "+flush" if the L2 cache was overwritten. last_output: of
    the last call; with a graph, of an additional replay into memory filled with NaN.
    """

    us: float
    us_min: float
    spread: float
    mode: str
    replays: int
    last_output: torch.Tensor


def time_calls(
    calls: Sequence[Call],
    device: torch.device,
    *,
    graph: bool = True,
    flush: bool = False,
    target_ms: float = 20.0,
) -> Timing:
    """Time rounds of all `calls`, for about `target_ms` milliseconds on the device.

    Each call first runs once eagerly. A GPU then runs untimed replays, see `EventClock`.

    graph: whether to replay a CUDA graph of the calls. If the capture fails, and on a CPU, calls
    are eager; see Timing.mode. flush: whether to overwrite the L2 cache before each call.
    """
    for call in calls:
        call()
    clock = make_clock(device)
    clock.wait()
    groups = [[call] for call in calls] if flush else [list(calls)]
    mode = "eager" if device.type == "cuda" else "cpu"
    runs: list[Call] = [partial(call_all, group) for group in groups]
    captured = capture_graphs(groups) if graph and device.type == "cuda" else None
    if captured is not None:
        runs, mode = captured, "graph"
    flush_l2 = make_l2_flush(device) if flush else None
    calls_per_run = len(groups[0])
    _settle(runs, clock, flush_l2)
    replay_ms = sum(_time_one_replay(runs, clock, flush_l2)) or 1e-3
    min_replays = _MIN_REPLAYS if device.type == "cuda" else _MIN_REPLAYS_ON_CPU
    replays = int(min(max(target_ms / replay_ms, min_replays), _MAX_REPLAYS))
    times = [ms / calls_per_run * 1e3 for ms in _time_replays(runs, clock, flush_l2, replays)]
    last_output = runs[-1]()
    if mode == "graph":
        last_output.fill_(math.nan)
        last_output = runs[-1]()
    clock.wait()
    quartiles = quantiles(times, n=4)
    median_us = median(times)
    spread = (quartiles[2] - quartiles[0]) / median_us if median_us else 0.0
    suffix = "+flush" if flush else ""
    return Timing(median_us, min(times), spread, mode + suffix, replays, last_output.clone())


def call_all(calls: Sequence[Call]) -> torch.Tensor:
    last_output = calls[0]()
    for call in calls[1:]:
        last_output = call()
    return last_output


def capture_graphs(groups: Sequence[Sequence[Call]]) -> list[Call] | None:
    """Capture a CUDA graph for each group of calls; return None if one cannot be captured.

    A returned function replays one graph, and returns the output of its last call. It keeps
    references to the calls, and so to the buffers that the graph uses.
    """
    runs: list[Call] = []
    stream = torch.cuda.current_stream()
    generator = _generator()
    state = generator.clone_state()
    try:
        for group in groups:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                last_output = call_all(group)
            runs.append(partial(_replay, graph, last_output, group))
    except RuntimeError:
        # A failed capture can leave its stream current, and the generator in capture mode, in which
        # it refuses to draw.
        torch.cuda.synchronize()
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(state)
        return None
    return runs


def _generator() -> torch.Generator:
    """Return the default generator of the current GPU, whose state a capture changes."""
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _replay(
    graph: torch.cuda.CUDAGraph, last_output: torch.Tensor, _references: Sequence[Call]
) -> torch.Tensor:
    graph.replay()
    return last_output


def make_l2_flush(device: torch.device) -> Callable[[], object] | None:
    """Return a function that overwrites the L2 cache, or None for a CPU."""
    size = _FLUSH_FACTOR * l2_bytes(device)
    return torch.empty(size, dtype=torch.uint8, device=device).zero_ if size else None


def l2_bytes(device: torch.device) -> int:
    """Return the size of the GPU's L2 cache, or 0 for a CPU, whose caches are not considered."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


class EventClock:
    """A clock that measures time on the GPU, with events in the current stream.

    settle_ms: device time of untimed work before timing. At the start of a capture, torch returns
    cached memory to the driver. After gigabytes had been returned, one-token fp8 layers of Mixtral
    were 10 % slower for the first 13 ms on an H200, and not afterwards (2026-11-22).
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
    """A clock that measures time on the host, for synchronous calls."""

    settle_ms = 0.0

    def mark(self) -> Any:
        return time.perf_counter()

    def ms(self, start: Any, end: Any) -> float:
        return float(end - start) * 1e3

    def wait(self) -> None:
        pass


Clock = EventClock | WallClock


def make_clock(device: torch.device) -> Clock:
    return EventClock() if device.type == "cuda" else WallClock()


L2Flush = Callable[[], object] | None


def time_runs_ms(
    runs: Iterable[Callable[[], object]], clock: Clock, flush_l2: L2Flush
) -> list[float]:
    """Return the milliseconds of every run. The host does not synchronize between runs.

    flush_l2: overwrites the L2 cache before each run; may be None.
    """
    marks = []
    for run in runs:
        if flush_l2 is not None:
            flush_l2()
        start = clock.mark()
        run()
        marks.append((start, clock.mark()))
    clock.wait()
    return [clock.ms(start, end) for start, end in marks]


def _time_replays(
    runs: Sequence[Call], clock: Clock, flush_l2: L2Flush, replays: int
) -> list[float]:
    return time_runs_ms(chain.from_iterable(repeat(runs, replays)), clock, flush_l2)


def _settle(runs: Sequence[Call], clock: Clock, flush_l2: L2Flush) -> None:
    """Replay for about clock.settle_ms of device time."""
    if clock.settle_ms:
        replay_ms = sum(_time_one_replay(runs, clock, flush_l2)) or 1e-3
        _time_replays(
            runs,
            clock,
            flush_l2,
            min(math.ceil(clock.settle_ms / replay_ms), _MAX_SETTLING_REPLAYS),
        )


def _time_one_replay(runs: Sequence[Call], clock: Clock, flush_l2: L2Flush) -> list[float]:
    return _time_replays(runs, clock, flush_l2, 1)


@dataclass(frozen=True)
class HostCost:
    """Cost of one eager call: microseconds until it returns, and device memory allocations."""

    us: float
    allocations: float


def measure_host_cost(call: Call, device: torch.device) -> HostCost | None:
    """Measure the host's cost of an eager call with an idle GPU.

    Returns None on a CPU, where the call also computes.
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
    """Return the number of blocks that torch's allocator has allocated so far."""
    return int(torch.cuda.memory_stats(device).get("allocation.all.allocated", 0))
