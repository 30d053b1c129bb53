"""Chrome traces, the JSON that Perfetto opens: read, checked, and those of all ranks in one.

Time stamps of torch's traces are microseconds after `baseTimeNanoseconds`, on the host's clock of
wall time; the GPU's are converted to that by CUPTI. Ranks of one machine share this clock, so that
one base for all of them aligns them; nothing is shifted besides. How far that is right shows in a
range that every rank ends as it leaves one barrier (`barrier_spread_us`).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.profiling.events import Event, ends_of

BARRIER = "mk::barrier"
_PHASES = frozenset("XBEiIMsftCbneNODPvRcS(),a")  # of the format's description
_FLOWS = ("s", "t", "f")
Trace = dict[str, Any]


def read_trace(path: Path) -> Trace:
    """Read the trace in a file; raise ConfigurationError if it is no Chrome trace."""
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"trace {path.name}", got=str(error), need="JSON") from error
    found = faults(trace)
    if found:
        need = "events as the Chrome trace format has them"
        raise ConfigurationError(f"trace {path.name}", got="; ".join(found[:3]), need=need)
    checked: Trace = trace
    return checked


def faults(trace: object) -> list[str]:
    """List what of a parsed trace is not as the format says; nothing if all is."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["no object with a list of traceEvents"]
    found = []
    for number, event in enumerate(trace["traceEvents"]):
        fault = _fault(event)
        if fault:
            found.append(f"event {number}: {fault}")
    return found


def _fault(event: object) -> str:
    if not isinstance(event, dict) or event.get("ph") not in _PHASES:
        return "no object with a phase"
    phase = event["ph"]
    if not isinstance(event.get("name"), str):
        return "no name"
    if "pid" not in event or "tid" not in event:
        return "no pid, or no tid"
    if phase == "M":
        return "" if isinstance(event.get("args"), dict) else "metadata without args"
    if not _is_number(event.get("ts")):
        return "no time stamp"
    if phase == "X" and not (_is_number(event.get("dur")) and event["dur"] >= 0):
        return "no duration of 0 or more"
    if phase in _FLOWS and "id" not in event:
        return "a flow without an id"
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def merged(traces: Sequence[Trace], names: Sequence[str]) -> Trace:
    """One trace of all ranks: a process for each, called as `names` says, on one clock.

    What torch's profiler shows as processes of a rank (the host, each GPU) become its threads.
    """
    bases = [_base(trace) for trace in traces]
    events: list[Event] = []
    for rank, (trace, base, name) in enumerate(zip(traces, bases, names, strict=True)):
        events += _of_rank(trace["traceEvents"], rank, name, (base - min(bases)) / 1e3)
    return {"displayTimeUnit": "ns", "baseTimeNanoseconds": min(bases), "traceEvents": events}


def _of_rank(events: Sequence[Event], rank: int, name: str, later_us: float) -> list[Event]:
    threads: dict[tuple[str, str], int] = {}
    titles: dict[int, str] = {}
    labels = _labels(events)
    moved = []
    for event in events:
        if event["ph"] == "M":
            continue
        place = str(event["pid"]), str(event["tid"])
        thread = threads.setdefault(place, len(threads))
        title = labels.get(place, f"thread {place[1]}")
        titles[thread] = f"{labels.get((place[0], ''), place[0])}: {title}"
        copy = {**event, "pid": rank, "tid": thread, "ts": event["ts"] + later_us}
        if "id" in event:  # flows of two ranks must not meet
            copy["id"] = f"{rank}-{event['id']}"
        moved.append(copy)
    return [
        _metadata("process_name", rank, 0, name=name),
        _metadata("process_sort_index", rank, 0, sort_index=rank),
        *(_metadata("thread_name", rank, each, name=title) for each, title in titles.items()),
        *(_metadata("thread_sort_index", rank, each, sort_index=each) for each in titles),
        *moved,
    ]


def _labels(events: Sequence[Event]) -> dict[tuple[str, str], str]:
    """Return what threads, and under "" as a thread processes, are called."""
    found = {}
    for event in events:
        if event["ph"] != "M":
            continue
        process, arguments = str(event["pid"]), event["args"]
        if event["name"] == "process_labels":
            found[process, ""] = str(arguments.get("labels", process))
        elif event["name"] == "thread_name":
            found[process, str(event["tid"])] = str(arguments.get("name", ""))
    return found


def _metadata(kind: str, process: int, thread: int, **arguments: object) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": arguments}


def barrier_spread_us(traces: Sequence[Trace]) -> float | None:
    """Microseconds between the first and the last rank that left one barrier, on the one clock.

    The least of all barriers that every rank marked: it bounds what ranks' clocks differ by,
    together with how unequally that barrier let them go. None for one rank, or without marks.
    """
    first = min(_base(trace) for trace in traces)
    # Whole nanoseconds apart first: beside 1e18 ns a float keeps no microseconds.
    ends_WB = [
        [(_base(trace) - first) / 1e3 + end for end in ends_of(trace["traceEvents"], BARRIER)]
        for trace in traces
    ]
    if len(traces) < 2:
        return None
    spreads = [max(ends) - min(ends) for ends in zip(*ends_WB, strict=False)]
    return min(spreads, default=None)


def _base(trace: Trace) -> int:
    return int(trace.get("baseTimeNanoseconds", 0))
