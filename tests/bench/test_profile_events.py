"""Stage times from traces. Device time counts once, in the innermost range around its launch."""

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
from trace_events import make_call_events, make_device_event, make_launch_event, make_range_event

from modular_kernel.errors import ConfigurationError
from modular_kernel.profiling import chrome
from modular_kernel.profiling.events import (
    UNATTRIBUTED,
    CallTimes,
    StageTime,
    find_calls,
    select_median_call,
)
from modular_kernel.profiling.record import suppress_profiler_lines
from modular_kernel.replay import stages


def find_call(events: list[dict[str, object]], *, on_gpu: bool = True) -> CallTimes:
    (call,) = find_calls(events, on_gpu=on_gpu)
    return call


def test_device_time_of_a_stage_is_that_of_its_launches() -> None:
    call = find_call(make_call_events())
    assert {time.stage: time for time in call.times} == {
        stages.CALL: StageTime(stages.CALL, 1, 25.0, 0.0, 0),
        stages.PREPARE: StageTime(stages.PREPARE, 1, 5.0, 0.0, 0),
        # 5 us of the kernel overlap with work that was launched before the call.
        stages.SORT: StageTime(stages.SORT, 1, 10.0, 5.0, 1),
        stages.EXPERTS: StageTime(stages.EXPERTS, 1, 30.0, 30.0, 1),
        stages.GATHER_GEMM1: StageTime(stages.GATHER_GEMM1, 1, 20.0, 1100.0, 2),
        stages.GEMM2: StageTime(stages.GEMM2, 1, 10.0, 400.0, 1),  # the overlap belongs to the copy
    }
    assert call.span_us == 1750 - 200
    assert call.host_us == 100
    assert call.launches == 5


def test_stages_and_remaining_times_add_up() -> None:
    call = find_call(make_call_events())
    assert call.busy_us == 5 + 1100 + 400 + 30
    assert call.staged_us == 5 + 1100 + 400
    assert call.coverage == pytest.approx(1505 / 1535)
    remaining = [time.stage for time in call.times if not time.is_stage]
    assert remaining == [stages.CALL, stages.PREPARE, stages.EXPERTS]


def test_host_times_are_used_without_a_gpu() -> None:
    call = find_call(make_call_events(), on_gpu=False)
    assert {time.device_us for time in call.times} == {None}
    assert call.launches is None
    assert (call.busy_us, call.staged_us, call.span_us) == (100.0, 40.0, 100.0)


def test_work_of_an_unknown_launch_lowers_the_coverage() -> None:
    events = [
        *make_call_events(),
        make_device_event("whose", 1710, 5, 77),
        make_device_event("later", 1800, 5, 78),
    ]
    call = find_call(events)
    assert StageTime(UNATTRIBUTED, 0, 0.0, 5.0, 1) in call.times
    assert call.coverage == pytest.approx(1505 / 1540)


def test_launches_of_other_threads_belong_to_the_open_stage() -> None:
    """Launches of a thread that has its own ranges are not attributed to another thread."""
    events = [
        *make_call_events(),
        make_launch_event(53, 6, thread=99),
        make_device_event("helper", 1760, 40, 6),
    ]
    events += [
        make_range_event(stages.SORT, 51, 58, thread=8),
        make_launch_event(54, 7),
        make_device_event("own", 1800, 20, 7),
    ]
    events += [make_launch_event(55, 8, thread=8), make_device_event("of no call", 1820, 7, 8)]
    times = {time.stage: time.device_us for time in find_call(events).times}
    assert times[stages.GEMM2] == 400 + 40 + 20
    assert UNATTRIBUTED not in times


def test_median_call_is_selected() -> None:
    events = []
    for number, dur in enumerate((50, 10, 30)):
        start = number * 1000
        events += [
            make_range_event(stages.CALL, start, start + 100),
            make_range_event(stages.GEMM1, start, start + 9),
        ]
        events += [
            make_launch_event(start + 1, number),
            make_device_event("k", start + 5, dur, number),
        ]
    calls = find_calls(events, on_gpu=True)
    assert [call.span_us for call in calls] == [50, 10, 30]
    assert select_median_call(calls).span_us == 30
    with pytest.raises(ConfigurationError, match="no call"):
        select_median_call(find_calls([make_range_event(stages.GEMM1, 0, 1)], on_gpu=True))


def test_parts_without_stages_have_default_stages() -> None:
    """Only experts become a stage: prepare launches nothing, and finalize has a stage already."""
    ranges = [
        make_range_event(stages.CALL, 0, 100),
        make_range_event(stages.PREPARE, 0, 10),
        make_range_event(stages.EXPERTS, 10, 60),
        make_range_event(stages.FINALIZE, 60, 90),
        make_range_event(stages.REDUCE, 70, 80),
    ]
    work = [
        make_launch_event(20, 1),
        make_device_event("gemm", 100, 50, 1),
        make_launch_event(75, 2),
        make_device_event("sum", 160, 10, 2),
    ]
    call = find_call([*ranges, *work])
    experts = stages.fuse(stages.GEMM1, stages.GEMM2)
    staged = {time.stage: time.device_us for time in call.times if time.is_stage}
    assert staged == {experts: 50.0, stages.REDUCE: 10.0}
    assert call.coverage == 1.0
    assert [span.stage for span in call.work] == [experts, stages.REDUCE]
    assert stages.PREPARE in {time.stage for time in call.times}


def test_short_scopes_on_a_cpu_are_not_stages() -> None:
    """A scope is not a stage if it takes no longer than the overhead of a range."""
    ranges = [
        make_range_event(stages.CALL, 0, 1000),
        make_range_event(stages.PREPARE, 0, 9),
        make_range_event(stages.EXPERTS, 10, 900),
        make_range_event(stages.FINALIZE, 900, 950),
    ]
    times = find_call(ranges, on_gpu=False).times
    staged = {time.stage: time.host_us for time in times if time.is_stage}
    experts = stages.fuse(stages.GEMM1, stages.GEMM2)
    assert staged == {experts: 890.0, "mk::all_of_finalize": 50.0}


INVALID_TRACES = {
    "no object": 3,
    "no events": {"traceEvents": None},
    "an invalid event": {"traceEvents": ["x"]},
    "an unknown phase": {"traceEvents": [make_range_event("a", 0, 1) | {"ph": "Y"}]},
    "no name": {"traceEvents": [make_range_event("a", 0, 1) | {"name": None}]},
    "no duration": {"traceEvents": [make_range_event("a", 2, 1)]},
    "a time that is text": {"traceEvents": [make_range_event("a", 0, 1) | {"ts": "0"}]},
    "no process": {"traceEvents": [{"ph": "X", "name": "a", "ts": 0, "dur": 1, "tid": 1}]},
    "an incomplete flow": {"traceEvents": [make_range_event("a", 0, 1) | {"ph": "s"}]},
    "bare metadata": {"traceEvents": [{"ph": "M", "name": "a", "pid": 1, "tid": 1}]},
}


@pytest.mark.parametrize("trace", INVALID_TRACES.values(), ids=INVALID_TRACES)
def test_invalid_chrome_traces_are_refused(trace: object, tmp_path: Path) -> None:
    assert len(chrome.find_violations(trace)) == 1
    path = tmp_path / "x.json"
    path.write_text(json.dumps(trace))
    with pytest.raises(ConfigurationError, match=r"trace x\.json"):
        chrome.read_trace(path)


def test_invalid_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"traceEvents": [')
    with pytest.raises(ConfigurationError, match="need JSON"):
        chrome.read_trace(path)


def test_ranks_become_processes_on_one_clock() -> None:
    base = 1_790_857_026_000_000_000
    traces = [
        {"baseTimeNanoseconds": base + rank * 3_000, "traceEvents": make_call_events()}
        for rank in (0, 1)
    ]
    merged = chrome.merge_traces(traces, ["rank 0: a", "rank 1: b"])
    assert chrome.find_violations(merged) == []
    events = merged["traceEvents"]
    assert merged["baseTimeNanoseconds"] == base
    assert {event["pid"] for event in events} == {0, 1}
    starts = {e["pid"]: e["ts"] for e in events if e["name"] == stages.CALL}
    assert starts == {0: 0.0, 1: 3.0}
    names = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"]
    assert names == [(0, "rank 0: a"), (1, "rank 1: b")]
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    assert set(threads.values()) == {"CPU: thread 7", "GPU 0: thread stream 7"}
    for event in events:
        if event.get("cat") == "kernel":
            assert threads[event["pid"], event["tid"]].startswith("GPU 0")
    flows = [event["id"] for event in events if "id" in event]
    assert sorted(flows) == ["0-2", "0-2", "1-2", "1-2"]


def test_barrier_spread_is_the_minimum() -> None:
    def trace(base: int, *ends: float) -> chrome.Trace:
        marks = [make_range_event(chrome.BARRIER, end - 50, end) for end in ends]
        return {"baseTimeNanoseconds": base, "traceEvents": marks}

    base = 1_790_857_026_000_000_000
    assert chrome.barrier_spread_us([trace(base, 100, 200), trace(base + 4_000, 99, 197)]) == 1.0
    assert chrome.barrier_spread_us([trace(base, 100)]) is None
    assert chrome.barrier_spread_us([trace(base, 100), trace(base)]) is None


def test_only_lines_of_the_profiler_are_suppressed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with suppress(ValueError), suppress_profiler_lines():
        os.write(2, b"USDT:2026 profiler_start\na warning\n")
        raise ValueError
    os.write(2, b"later\n")
    assert capfd.readouterr().err == "a warning\nlater\n"
