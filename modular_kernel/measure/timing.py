"""Times calls with events around CUDA graph replays on a GPU, or with the host's clock on a CPU.

In a real model, the data of a call is not in the L2 cache, because other layers have run since its
last use. A benchmark that repeats one call would find its inputs and weights in the cache. A graph
therefore contains several calls with different inputs, and with different sets of weights if the
weights are small (`Rotation`). The data of a call is then evicted before it is read again. If
several sets of weights do not fit into memory, the cache is overwritten before every call.

The result is the median time of a replay, divided by its number of calls. The first replays are not
timed (see `EventClock`).
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
_HOST_REPEATS = 16  # number of calls that measure the cost on the host
_MAX_WEIGHT_SETS = 8  # if more sets of weights would be needed, the cache is overwritten instead
# To evict data from the L2 cache, this multiple of the size of the cache is accessed.
_EVICTION_FACTOR = 2


@dataclass(frozen=True)
class Rotation:
    """A schedule of calls in which no call finds its data in the L2 cache.

    calls: number of calls per replay, each with its own input.
    weight_sets: number of sets of weights. Call i uses set i % weight_sets.
    flush: whether to overwrite the cache before each call, and to time each call alone.
    """

    calls: int
    weight_sets: int = 1
    flush: bool = False


def choose_rotation(
    call_bytes: float, weight_bytes: float, tokens: int, *, l2: int, memory: int
) -> Rotation:
    """Choose the schedule for calls of a layer.

    call_bytes: bytes that one call reads and writes.
    weight_bytes: bytes of one set of weights.
    tokens: number of tokens per call.
    l2: bytes of the L2 cache; 0 for a CPU, where caches are not considered.
    memory: bytes of device memory, of which all sets of weights may take a fifth.
    """
    if not l2:
        return Rotation(1)
    calls = 8 if tokens <= 128 else 4 if tokens <= 1024 else 2
    weight_sets = math.ceil(_EVICTION_FACTOR * l2 / max(call_bytes, 1))
    if weight_sets <= 1:
        return Rotation(calls)
    if weight_sets <= _MAX_WEIGHT_SETS and weight_sets * weight_bytes <= memory / 5:
        return Rotation(max(calls, weight_sets), weight_sets)
    return Rotation(calls, flush=True)


@dataclass(frozen=True)
class Timing:
    """The time of one call.

    us: median over replays, in microseconds.
    us_min: minimum over replays, in microseconds.
    spread: interquartile range divided by the median.
    mode: "graph", "eager" or "cpu", followed by "+flush" if the L2 cache was overwritten.
    replays: number of timed replays.
    last_output: output of the last call. With a graph, it is computed by an additional replay,
        before which the output was filled with NaN.
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
    """Time replays of `calls`. A replay runs every call once.

    Each call first runs once eagerly. A GPU then runs untimed replays (see `EventClock`).

    graph: whether to replay CUDA graphs. On a CPU, and if the capture fails, the calls run eagerly;
        see Timing.mode.
    flush: whether to overwrite the L2 cache before each call. Each call then has its own graph.
    target_ms: milliseconds of device time for all replays.
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
    replay_ms = sum(_time_replays(runs, clock, flush_l2, 1)) or 1e-3
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
    """Run the calls in order, and return the output of the last one."""
    last_output = calls[0]()
    for call in calls[1:]:
        last_output = call()
    return last_output


def capture_graphs(groups: Sequence[Sequence[Call]]) -> list[Call] | None:
    """Capture a CUDA graph for each group of calls. Returns None if a capture fails.

    Each returned function replays one graph, and returns the output of the last call of the graph.
    The function holds references to the calls, which keeps the buffers of the graph alive.
    """
    runs: list[Call] = []
    stream = torch.cuda.current_stream()
    generator = _get_default_generator()
    state = generator.clone_state()
    try:
        for group in groups:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                last_output = call_all(group)
            runs.append(partial(_replay, graph, last_output, group))
    except RuntimeError:
        # A failed capture can leave its stream current, and the random generator in capture mode,
        # in which drawing raises an error.
        torch.cuda.synchronize()
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(state)
        return None
    return runs


def _get_default_generator() -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _replay(
    graph: torch.cuda.CUDAGraph, last_output: torch.Tensor, _references: Sequence[Call]
) -> torch.Tensor:
    graph.replay()
    return last_output


def make_l2_flush(device: torch.device) -> Callable[[], object] | None:
    """Return a function that overwrites the L2 cache, or None for a CPU."""
    size = _EVICTION_FACTOR * l2_bytes(device)
    return torch.empty(size, dtype=torch.uint8, device=device).zero_ if size else None


def l2_bytes(device: torch.device) -> int:
    """Return the size of the GPU's L2 cache, or 0 for a CPU, whose caches are not considered."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


class EventClock:
    """Measures time on the GPU, with events in the current stream.

    settle_ms: milliseconds of untimed replays before timing. At the start of a capture, torch
        returns cached memory to the driver, which slows down later kernels. After gigabytes had
        been returned, fp8 layers of Mixtral with one token were 10 % slower during the first 13 ms
        on an H200 (2026-11-22).
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
    """Measures time on the host, for calls that return when they are complete."""

    settle_ms = 0.0

    def mark(self) -> Any:
        return time.perf_counter()

    def ms(self, start: Any, end: Any) -> float:
        return float(end - start) * 1e3

    def wait(self) -> None:
        pass


Clock = EventClock | WallClock


def make_clock(device: torch.device) -> Clock:
    """Return an EventClock for a GPU, and a WallClock for a CPU."""
    return EventClock() if device.type == "cuda" else WallClock()


L2Flush = Callable[[], object] | None


def time_runs_ms(
    runs: Iterable[Callable[[], object]], clock: Clock, flush_l2: L2Flush
) -> list[float]:
    """Return the milliseconds of each run. The host does not synchronize between runs.

    flush_l2: function that overwrites the L2 cache, called before each run and not timed; or None.
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
    """Run untimed replays for about clock.settle_ms of device time."""
    if clock.settle_ms:
        replay_ms = sum(_time_replays(runs, clock, flush_l2, 1)) or 1e-3
        replays = min(math.ceil(clock.settle_ms / replay_ms), _MAX_SETTLING_REPLAYS)
        _time_replays(runs, clock, flush_l2, replays)


@dataclass(frozen=True)
class HostCost:
    """Cost of one eager call on the host.

    us: microseconds until the call returns.
    allocations: number of device memory allocations.
    """

    us: float
    allocations: float


def measure_host_cost(call: Call, device: torch.device) -> HostCost | None:
    """Measure the cost of an eager call on the host, while the GPU is idle.

    Returns None for a CPU, on which the host also runs the kernels.
    """
    if device.type != "cuda":
        return None
    call()
    before, times = _count_allocations(device), []
    for _ in range(_HOST_REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    allocations = (_count_allocations(device) - before) / _HOST_REPEATS
    return HostCost(median(times) * 1e6, allocations)


def _count_allocations(device: torch.device) -> int:
    """Return the number of allocations by torch's caching allocator so far."""
    return int(torch.cuda.memory_stats(device).get("allocation.all.allocated", 0))
