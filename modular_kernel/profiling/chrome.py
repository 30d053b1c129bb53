"""Read, validate and merge Chrome traces, the JSON format that torch's profiler writes.

Time stamps are microseconds after the trace's `baseTimeNanoseconds` on the host's wall clock. CUPTI
converts GPU time stamps to this clock. The ranks of one machine share the clock, so shifting their
traces to a common base aligns them. To check the alignment, every rank marks common barriers as
ranges, and `barrier_spread_us` compares their ends.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.profiling.events import Event, find_range_ends

BARRIER = "mk::barrier"
# Valid values of "ph", the type of an event, such as X (complete event) and M (metadata).
_PHASES = frozenset("XBEiIMsftCbneNODPvRcS(),a")
_FLOW_PHASES = ("s", "t", "f")
Trace = dict[str, Any]


def read_trace(path: Path) -> Trace:
    """Read a trace file. Raises ConfigurationError if it is not a valid Chrome trace."""
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"trace {path.name}", got=str(error), need="JSON") from error
    violations = find_violations(trace)
    if violations:
        need = "events in the Chrome trace format"
        raise ConfigurationError(f"trace {path.name}", got="; ".join(violations[:3]), need=need)
    valid_trace: Trace = trace
    return valid_trace


def find_violations(trace: object) -> list[str]:
    """Return descriptions of the format violations in a parsed trace, or [] if it is valid."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["no object with a list of traceEvents"]
    violations = []
    for number, event in enumerate(trace["traceEvents"]):
        violation = _find_event_violation(event)
        if violation:
            violations.append(f"event {number}: {violation}")
    return violations


def _find_event_violation(event: object) -> str:
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
    if phase in _FLOW_PHASES and "id" not in event:
        return "a flow without an id"
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def merge_traces(traces: Sequence[Trace], names: Sequence[str]) -> Trace:
    """Merge the traces of all ranks, with a common time base.

    Each rank becomes one process of the merged trace. The rank's own processes (the host and each
    GPU) become threads.

    names: name of each rank's process.
    """
    bases_ns = [_get_base_ns(trace) for trace in traces]
    events: list[Event] = []
    for rank, (trace, base_ns, name) in enumerate(zip(traces, bases_ns, names, strict=True)):
        events += _shift_events(trace["traceEvents"], rank, name, (base_ns - min(bases_ns)) / 1e3)
    return {"displayTimeUnit": "ns", "baseTimeNanoseconds": min(bases_ns), "traceEvents": events}


def _shift_events(events: Sequence[Event], rank: int, name: str, offset_us: float) -> list[Event]:
    threads: dict[tuple[str, str], int] = {}
    thread_names: dict[int, str] = {}
    labels = _find_labels(events)
    shifted = []
    for event in events:
        if event["ph"] == "M":
            continue
        thread_key = str(event["pid"]), str(event["tid"])
        thread = threads.setdefault(thread_key, len(threads))
        thread_name = labels.get(thread_key, f"thread {thread_key[1]}")
        thread_names[thread] = f"{labels.get((thread_key[0], ''), thread_key[0])}: {thread_name}"
        shifted_event = {**event, "pid": rank, "tid": thread, "ts": event["ts"] + offset_us}
        if "id" in event:  # flow ids must be unique in the merged trace
            shifted_event["id"] = f"{rank}-{event['id']}"
        shifted.append(shifted_event)
    return [
        _make_metadata_event("process_name", rank, 0, name=name),
        _make_metadata_event("process_sort_index", rank, 0, sort_index=rank),
        *(
            _make_metadata_event("thread_name", rank, index, name=thread_name)
            for index, thread_name in thread_names.items()
        ),
        *(
            _make_metadata_event("thread_sort_index", rank, index, sort_index=index)
            for index in thread_names
        ),
        *shifted,
    ]


def _find_labels(events: Sequence[Event]) -> dict[tuple[str, str], str]:
    """Return the names of threads by (process, thread), and of processes by (process, "")."""
    labels = {}
    for event in events:
        if event["ph"] != "M":
            continue
        process, arguments = str(event["pid"]), event["args"]
        if event["name"] == "process_labels":
            labels[process, ""] = str(arguments.get("labels", process))
        elif event["name"] == "thread_name":
            labels[process, str(event["tid"])] = str(arguments.get("name", ""))
    return labels


def _make_metadata_event(kind: str, process: int, thread: int, **arguments: object) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": arguments}


def barrier_spread_us(traces: Sequence[Trace]) -> float | None:
    """Return the microseconds between the first and the last rank's end of a barrier.

    The result is the minimum over all barriers that every rank marked, and includes differences
    between the ranks' clocks. It is None for a single rank, or if no barrier was marked.
    """
    first_base_ns = min(_get_base_ns(trace) for trace in traces)
    # Subtract bases as integers, because floats around 1e18 ns have a spacing of 128 ns.
    barrier_ends_by_rank = [
        [
            (_get_base_ns(trace) - first_base_ns) / 1e3 + end
            for end in find_range_ends(trace["traceEvents"], BARRIER)
        ]
        for trace in traces
    ]
    if len(traces) < 2:
        return None
    spreads = [max(ends) - min(ends) for ends in zip(*barrier_ends_by_rank, strict=False)]
    return min(spreads, default=None)


def _get_base_ns(trace: Trace) -> int:
    return int(trace.get("baseTimeNanoseconds", 0))
