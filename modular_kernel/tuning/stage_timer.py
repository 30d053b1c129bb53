"""Time the stages of eager calls, such as the GEMMs, with device events.

The host queues all calls while a sleep kernel keeps the GPU busy. The calls then run back to back,
so host time is not measured. The events add about one microsecond to every stage, which does not
affect comparisons of calls with the same stages.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import Any

import torch

from modular_kernel.contracts import StageTimes
from modular_kernel.measure.timing import Clock, L2Flush, make_clock
from modular_kernel.replay import stages

_MAX_CYCLES_PER_SECOND = 2.0e9  # upper bound of GPU clocks
_FIRST_SLEEP_SECONDS = 3e-4  # per call, in the first attempt
_SLEEP_MARGIN = 1.5  # sleep of the GPU, relative to the time in which the host queues the calls
_MAX_ATTEMPTS = 4
_NO_SPAN: AbstractContextManager[object] = nullcontext()

Call = Callable[[], object]
# Start and end of every run of a stage, by name of the stage. They are events on a GPU, and host
# times on a CPU (`measure.timing.Clock.mark`).
Spans = dict[str, list[tuple[Any, Any]]]


class StageTimer:
    """Times calls and their stages.

    names: the stages to time, from `replay.stages`.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names, self._device = names, device
        self._clock: Clock = make_clock(device)
        # Seconds that the GPU sleeps per queued call. Later calls of `time_calls` reuse the value.
        self._sleep_seconds = _FIRST_SLEEP_SECONDS

    def time_calls(self, calls: Sequence[Call], flush_l2: L2Flush = None) -> list[StageTimes]:
        """Run each of `calls` once. Return the times of the calls and of their stages.

        flush_l2: function that is called before each call, and not timed.
        """
        for _ in range(_MAX_ATTEMPTS):
            sleep_seconds = self._sleep_seconds * len(calls)
            start = time.perf_counter()
            if self._device.type == "cuda":
                torch.cuda._sleep(int(sleep_seconds * _MAX_CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
            spans_of_calls = [self._record_spans(call, flush_l2) for call in calls]
            host_seconds = time.perf_counter() - start
            self._clock.wait()
            if self._device.type != "cuda" or host_seconds < sleep_seconds:
                break
            # The GPU may have waited for the host, so try again with a longer sleep.
            self._sleep_seconds = _SLEEP_MARGIN * host_seconds / len(calls)
        return [self._compute_stage_times(*call_spans) for call_spans in spans_of_calls]

    def _record_spans(self, call: Call, flush_l2: L2Flush) -> tuple[Any, Any, Spans]:
        """Run a call. Return (start of the call, end of the call, spans of its stages)."""
        spans: Spans = {}
        clock = self._clock

        @contextmanager
        def record_span(name: str) -> Iterator[None]:
            start = clock.mark()
            yield
            spans.setdefault(name, []).append((start, clock.mark()))

        if flush_l2 is not None:
            flush_l2()

        def enter_stage(name: str) -> AbstractContextManager[object]:
            stage = stages.find_stage(name, self._names)
            return _NO_SPAN if stage is None else record_span(stage)

        with stages.watch_stages(enter_stage):
            start = clock.mark()
            call()
            end = clock.mark()
        return start, end, spans

    def _compute_stage_times(self, start: Any, end: Any, spans: Spans) -> StageTimes:
        ms = self._clock.ms
        stage_seconds = {
            name: sum(ms(*pair) for pair in pairs) / 1e3 for name, pairs in spans.items()
        }
        return StageTimes(ms(start, end) / 1e3, stage_seconds)


def compute_median_stage_times(samples: Sequence[StageTimes]) -> StageTimes:
    """Return the median time of the calls, and the median time of every stage."""
    names = samples[0].stages
    return StageTimes(
        median(sample.seconds for sample in samples),
        {name: median(sample.stages.get(name, 0.0) for sample in samples) for name in names},
    )
