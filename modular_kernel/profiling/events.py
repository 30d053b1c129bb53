"""Stage times of calls, computed from the events of a Chrome trace.

The host marks a call, its scopes (such as `mk::experts`) and the stages in them as named ranges
(`modular_kernel.replay.stages`). Device work (kernels, copies and fills) belongs to the innermost
range that contains its launch, even if it runs later. A kernel can start before its predecessor
ends. Overlapping time counts only for the kernel that started first, so that stage times add up to
the busy time of the device.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.replay import stages

Event = dict[str, Any]

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
_MIN_SCOPE_FRACTION = 0.01  # minimum fraction of a call's time, see `_rename_scopes_without_stages`
UNATTRIBUTED = ""  # the stage of device work whose launch is not in the trace


@dataclass(frozen=True)
class StageTime:
    """Time of one call in all ranges of one name, without the ranges nested in them.

    stage: name of the ranges, which is the name of a stage or a scope.
    entered: number of the ranges.
    host_us: microseconds on the host.
    device_us: microseconds of the device work launched in the ranges; None if no GPU was traced.
    launches: number of kernels, copies and fills; None if no GPU was traced.
    """

    stage: str
    entered: int
    host_us: float
    device_us: float | None = None
    launches: int | None = None

    @property
    def is_stage(self) -> bool:
        """Whether `stage` names a stage. It may also name a scope, or be UNATTRIBUTED."""
        return self.stage not in (*stages.SCOPES, UNATTRIBUTED)

    @property
    def us(self) -> float:
        """Device time if a GPU was traced, and otherwise host time."""
        return self.host_us if self.device_us is None else self.device_us


@dataclass(frozen=True)
class Span:
    """An interval in microseconds of the trace's clock.

    stage: name of its stage or scope.
    name: name of the range or of the kernel.
    """

    stage: str
    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class CallTimes:
    """Times of one call.

    times: one entry per stage and scope.
    span_us: microseconds from the start of the first device work to the end of the last. On a CPU,
        the duration of the call.
    host_us: host time until the call returns.
    ranges, work: intervals of the host ranges and of the device work.
    """

    times: tuple[StageTime, ...]
    span_us: float
    host_us: float
    ranges: tuple[Span, ...]
    work: tuple[Span, ...]

    @property
    def busy_us(self) -> float:
        """Total time in stages and outside of them."""
        return sum(time.us for time in self.times)

    @property
    def staged_us(self) -> float:
        """Total time in stages."""
        return sum(time.us for time in self.times if time.is_stage)

    @property
    def coverage(self) -> float:
        """Fraction of the call's time that is in stages, 0 to 1."""
        return self.staged_us / self.busy_us if self.busy_us else 0.0

    @property
    def launches(self) -> int | None:
        """Number of kernels, copies and fills of the call; None if no GPU was traced."""
        counts = [time.launches for time in self.times]
        return sum(n or 0 for n in counts) if any(n is not None for n in counts) else None


@dataclass(eq=False)
class _Range:
    """A named range of a host thread.

    thread: process id and thread id.
    start, end: microseconds.
    self_us: duration without nested ranges.
    call: the range `stages.CALL` that contains this range, or None.
    """

    name: str
    thread: tuple[Any, Any]
    start: float
    end: float
    self_us: float
    call: "_Range | None" = None


@dataclass
class _Work:
    """A kernel, copy or fill on the device.

    start, end: microseconds.
    self_us: duration without the overlap with earlier work.
    launch_range: the innermost range around its launch; None if the launch is not in the trace.
    """

    name: str
    start: float
    end: float
    self_us: float
    launch_range: _Range | None


def find_calls(events: Sequence[Event], *, on_gpu: bool) -> list[CallTimes]:
    """Return the times of all calls in a trace, in order of their start."""
    ranges = _find_ranges(events)
    work = _find_work(events, ranges) if on_gpu else []
    calls = [range_ for range_ in ranges if range_.name == stages.CALL]
    return [_make_call_times(call, ranges, work, on_gpu=on_gpu) for call in calls]


def select_median_call(calls: Sequence[CallTimes]) -> CallTimes:
    """Return the call with the median span.

    A single call is used because medians of each stage over all calls would not add up to a total.
    Raises ConfigurationError if there is no call.
    """
    if not calls:
        need = f"a range {stages.CALL} around each call"
        raise ConfigurationError("trace", got="no call in it", need=need)
    return sorted(calls, key=lambda call: call.span_us)[(len(calls) - 1) // 2]


def find_range_ends(events: Iterable[Event], name: str) -> list[float]:
    """Return the sorted end times, in microseconds, of the ranges named `name`."""
    return sorted(e["ts"] + e["dur"] for e in events if _is_range(e) and e["name"] == name)


def _is_range(event: Event) -> bool:
    return event.get("ph") == "X" and event.get("cat") == "user_annotation"


def _find_ranges(events: Iterable[Event]) -> list[_Range]:
    """Return all ranges of this package, sorted by start."""
    ranges = [
        _Range(e["name"], (e["pid"], e["tid"]), e["ts"], e["ts"] + e["dur"], e["dur"])
        for e in events
        if _is_range(e) and e["name"].startswith(stages.PREFIX)
    ]
    ranges.sort(key=lambda range_: (range_.start, -range_.end))
    open_ranges: list[_Range] = []
    for range_ in ranges:
        open_ranges = [
            outer
            for outer in open_ranges
            if outer.thread != range_.thread or outer.end >= range_.end
        ]
        enclosing = [outer for outer in open_ranges if outer.thread == range_.thread]
        if enclosing:
            enclosing[-1].self_us -= range_.end - range_.start
        if range_.name == stages.CALL:
            range_.call = range_
        elif enclosing:
            range_.call = enclosing[-1].call
        open_ranges.append(range_)
    return ranges


def _find_work(events: Iterable[Event], ranges: Sequence[_Range]) -> list[_Work]:
    """Return the device work, sorted by start, except for work launched outside of calls."""
    launches: dict[Any, tuple[float, tuple[Any, Any]]] = {}
    device_events = []
    for event in events:
        if event.get("cat") in _LAUNCH_CATEGORIES:
            launch_site = event["ts"], (event["pid"], event["tid"])
            launches[event.get("args", {}).get("correlation")] = launch_site
        elif event.get("cat") in DEVICE_CATEGORIES:
            device_events.append(event)
    work, busy_until = [], float("-inf")
    for event in sorted(device_events, key=lambda e: e["ts"]):
        start, end = event["ts"], event["ts"] + event["dur"]
        launch = launches.get(event.get("args", {}).get("correlation"))
        launch_range = None if launch is None else _find_innermost_range(ranges, *launch)
        self_us = max(0.0, end - max(start, busy_until))
        # Work whose launch is not in the trace may belong to a call.
        if launch is None or (launch_range is not None and launch_range.call is not None):
            work.append(_Work(event["name"], start, end, self_us, launch_range))
        busy_until = max(busy_until, end)
    return work


def _find_innermost_range(
    ranges: Sequence[_Range], ts: float, thread: tuple[Any, Any]
) -> _Range | None:
    """Return the innermost range that is open at time stamp `ts` on `thread`.

    If there is no such range, return the innermost open range of another thread that is part of a
    call, or None.
    """
    open_ranges = [range_ for range_ in ranges if range_.start <= ts <= range_.end]
    same_thread = [range_ for range_ in open_ranges if range_.thread == thread]
    candidates = same_thread or [range_ for range_ in open_ranges if range_.call is not None]
    return max(candidates, key=lambda range_: (range_.start, -range_.end), default=None)


def _make_call_times(
    call: _Range, ranges: Sequence[_Range], work: Sequence[_Work], *, on_gpu: bool
) -> CallTimes:
    call_ranges = [range_ for range_ in ranges if range_.call is call]
    call_work = [w for w in work if w.launch_range is not None and w.launch_range.call is call]
    _rename_scopes_without_stages(call, call_ranges, call_work, on_gpu=on_gpu)
    start = min((w.start for w in call_work), default=call.start)
    end = max((w.end for w in call_work), default=call.end if not on_gpu else start)
    unattributed = [w for w in work if w.launch_range is None and start <= w.start <= end]
    names = list(dict.fromkeys(range_.name for range_ in call_ranges))
    times = [_make_stage_time(name, call_ranges, call_work, on_gpu=on_gpu) for name in names]
    if unattributed:
        unattributed_us = sum(w.self_us for w in unattributed)
        times.append(StageTime(UNATTRIBUTED, 0, 0.0, unattributed_us, len(unattributed)))
    return CallTimes(
        tuple(times),
        end - start,
        call.end - call.start,
        tuple(Span(range_.name, range_.name, range_.start, range_.end) for range_ in call_ranges),
        tuple(
            Span(_get_stage_of_work(w), w.name, w.start, w.end) for w in (*call_work, *unattributed)
        ),
    )


def _rename_scopes_without_stages(
    call: _Range, call_ranges: Sequence[_Range], call_work: Sequence[_Work], *, on_gpu: bool
) -> None:
    """Rename each scope to its default stage if it has work and no stage.

    On a GPU, a scope has work if it launches any. On a CPU, a scope has work if it takes at least
    _MIN_SCOPE_FRACTION of the call. A shorter time may be the overhead of the ranges themselves.
    """
    for scope, default_stage in stages.DEFAULT_STAGES.items():
        scopes = [range_ for range_ in call_ranges if range_.name == scope]
        if on_gpu:
            has_work = any(w.launch_range in scopes for w in call_work)
        else:
            self_us = sum(range_.self_us for range_ in scopes)
            has_work = self_us >= _MIN_SCOPE_FRACTION * (call.end - call.start)
        if has_work and not any(_contains_stage(outer, call_ranges) for outer in scopes):
            for range_ in scopes:
                range_.name = default_stage


def _contains_stage(outer: _Range, call_ranges: Sequence[_Range]) -> bool:
    return any(
        inner.thread == outer.thread
        and outer.start <= inner.start <= inner.end <= outer.end
        and inner.name not in stages.SCOPES
        for inner in call_ranges
    )


def _get_stage_of_work(work: _Work) -> str:
    return UNATTRIBUTED if work.launch_range is None else work.launch_range.name


def _make_stage_time(
    name: str, ranges: Sequence[_Range], call_work: Sequence[_Work], *, on_gpu: bool
) -> StageTime:
    matching = [range_ for range_ in ranges if range_.name == name]
    launched = [w for w in call_work if _get_stage_of_work(w) == name]
    host_us = sum(range_.self_us for range_ in matching)
    if not on_gpu:
        return StageTime(name, len(matching), host_us)
    device_us = sum(w.self_us for w in launched)
    return StageTime(name, len(matching), host_us, device_us, len(launched))
