"""What a call took, stage by stage, out of the events of a Chrome trace. Nothing here runs a call.

Device work belongs to the innermost range that its launch lies in, whenever it ran. Kernels may
overlap on the device (a launch may begin while the one before it ends): time that two share counts
once, for the one that began first, so that stages add up to the time the device was busy.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.replay import stages

Event = dict[str, Any]

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
NOWHERE = ""  # the stage of device work whose launch the trace does not hold


@dataclass(frozen=True)
class StageTime:
    """Time of one call in a stage, or in the rest of a range that holds stages.

    entered: how often. host_us: microseconds of the host in it, without the ranges inside.
    device_us: of the work it launched, and launches: how many kernels, copies and fills; None
    where no GPU was watched.
    """

    stage: str
    entered: int
    host_us: float
    device_us: float | None = None
    launches: int | None = None

    @property
    def is_stage(self) -> bool:
        """Whether this is a stage's time, not the rest of what holds stages."""
        return self.stage not in (*stages.HOLDERS, NOWHERE)

    @property
    def us(self) -> float:
        """Of the device where one was watched; else of the host, which computed."""
        return self.host_us if self.device_us is None else self.device_us


@dataclass(frozen=True)
class Span:
    """Something that took time, in microseconds of the trace's clock. stage: whose it is."""

    stage: str
    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class CallTimes:
    """One call. span_us: from the start of its first device work to the end of its last (on a CPU,
    the call itself). host_us: until the call returned. ranges, work: where they lay."""

    times: tuple[StageTime, ...]
    span_us: float
    host_us: float
    ranges: tuple[Span, ...]
    work: tuple[Span, ...]

    @property
    def busy_us(self) -> float:
        """The time of all stages and of what is in none."""
        return sum(time.us for time in self.times)

    @property
    def staged_us(self) -> float:
        """The time of stages alone."""
        return sum(time.us for time in self.times if time.is_stage)

    @property
    def coverage(self) -> float:
        """Share of the call's time that lies in stages, 0 to 1."""
        return self.staged_us / self.busy_us if self.busy_us else 0.0

    @property
    def launches(self) -> int | None:
        """Kernels, copies and fills of the call; None where no GPU was watched."""
        counts = [time.launches for time in self.times]
        return sum(n or 0 for n in counts) if any(n is not None for n in counts) else None


@dataclass
class _Range:
    """A named range of a thread of the host. own_us: without the ranges inside it."""

    name: str
    thread: tuple[Any, Any]
    start: float
    end: float
    own_us: float
    call: "_Range | None" = None


@dataclass
class _Work:
    """A kernel, copy or fill. own_us: without what it shares with work that began before it."""

    name: str
    start: float
    end: float
    own_us: float
    launched_in: _Range | None


def calls_of(events: Sequence[Event], *, on_gpu: bool) -> list[CallTimes]:
    """Every call in a trace: the ranges `stages.CALL`, in their order."""
    ranges = _ranges(events)
    work = _work(events, ranges) if on_gpu else []
    calls = [each for each in ranges if each.name == stages.CALL]
    return [_times(call, ranges, work, on_gpu=on_gpu) for call in calls]


def middle(calls: Sequence[CallTimes]) -> CallTimes:
    """Return the call with the median span.

    Stages of one call add up; medians of stages need not.
    """
    if not calls:
        need = f"a range {stages.CALL} around each call"
        raise ConfigurationError("trace", got="no call in it", need=need)
    return sorted(calls, key=lambda call: call.span_us)[(len(calls) - 1) // 2]


def ends_of(events: Iterable[Event], name: str) -> list[float]:
    """When the ranges called `name` ended, in their order."""
    return sorted(e["ts"] + e["dur"] for e in events if _is_range(e) and e["name"] == name)


def _is_range(event: Event) -> bool:
    return event.get("ph") == "X" and event.get("cat") == "user_annotation"


def _ranges(events: Iterable[Event]) -> list[_Range]:
    """Every range of ours, by its start, each with the call it is part of."""
    found = [
        _Range(e["name"], (e["pid"], e["tid"]), e["ts"], e["ts"] + e["dur"], e["dur"])
        for e in events
        if _is_range(e) and e["name"].startswith(stages.PREFIX)
    ]
    found.sort(key=lambda each: (each.start, -each.end))
    around: list[_Range] = []
    for each in found:
        around = [o for o in around if o.thread != each.thread or o.end >= each.end]
        own = [outer for outer in around if outer.thread == each.thread]
        if own:
            own[-1].own_us -= each.end - each.start
        each.call = each if each.name == stages.CALL else own[-1].call if own else None
        around.append(each)
    return found


def _work(events: Iterable[Event], ranges: Sequence[_Range]) -> list[_Work]:
    """Everything that ran on the device, by its start."""
    launches: dict[Any, tuple[float, tuple[Any, Any]]] = {}
    ran = []
    for event in events:
        if event.get("cat") in _LAUNCHES:
            place = event["ts"], (event["pid"], event["tid"])
            launches[event.get("args", {}).get("correlation")] = place
        elif event.get("cat") in DEVICE_WORK:
            ran.append(event)
    found, reached = [], float("-inf")
    for event in sorted(ran, key=lambda e: e["ts"]):
        start, end = event["ts"], event["ts"] + event["dur"]
        launch = launches.get(event.get("args", {}).get("correlation"))
        inside = None if launch is None else _innermost(ranges, *launch)
        own = max(0.0, end - max(start, reached))
        # Work that nobody here launched has no range, but launches outside of calls are known.
        if launch is None or (inside is not None and inside.call is not None):
            found.append(_Work(event["name"], start, end, own, inside))
        reached = max(reached, end)
    return found


def _innermost(ranges: Sequence[_Range], moment: float, thread: tuple[Any, Any]) -> _Range | None:
    """Return the last range entered and not left.

    One of another thread is taken only if none of its own is open.
    """
    holding = [each for each in ranges if each.start <= moment <= each.end]
    own = [each for each in holding if each.thread == thread]
    in_calls = own or [each for each in holding if each.call is not None]
    return max(in_calls, key=lambda each: (each.start, -each.end), default=None)


def _times(
    call: _Range, ranges: Sequence[_Range], work: Sequence[_Work], *, on_gpu: bool
) -> CallTimes:
    mine = [each for each in ranges if each.call is call]
    ran = [w for w in work if w.launched_in is not None and w.launched_in.call is call]
    start = min((w.start for w in ran), default=call.start)
    end = max((w.end for w in ran), default=call.end if not on_gpu else start)
    strays = [w for w in work if w.launched_in is None and start <= w.start <= end]
    names = list(dict.fromkeys(each.name for each in mine))
    times = [_time(name, mine, ran, on_gpu=on_gpu) for name in names]
    if strays:
        lost = sum(w.own_us for w in strays)
        times.append(StageTime(NOWHERE, 0, 0.0, lost, len(strays)))
    return CallTimes(
        tuple(times),
        end - start,
        call.end - call.start,
        tuple(Span(each.name, each.name, each.start, each.end) for each in mine),
        tuple(Span(_stage_of(w), w.name, w.start, w.end) for w in (*ran, *strays)),
    )


def _stage_of(work: _Work) -> str:
    return NOWHERE if work.launched_in is None else work.launched_in.name


def _time(name: str, ranges: Sequence[_Range], ran: Sequence[_Work], *, on_gpu: bool) -> StageTime:
    own = [each for each in ranges if each.name == name]
    launched = [w for w in ran if _stage_of(w) == name]
    host_us = sum(each.own_us for each in own)
    if not on_gpu:
        return StageTime(name, len(own), host_us)
    device_us = sum(w.own_us for w in launched)
    return StageTime(name, len(own), host_us, device_us, len(launched))
