"""Timing of the stages of a call with device events, without a CUDA graph.

The host queues the calls while the GPU sleeps, so that they run back to back and host time is not
measured. Events add about one microsecond to every stage of every choice, which does not affect the
comparison. Whole calls are timed with graphs (`measure.timing`).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import Any

import torch

from modular_kernel.contracts import StageTimes
from modular_kernel.measure.timing import Clock, L2Flush, clock_of
from modular_kernel.replay import stages

_MAX_CYCLES_PER_SECOND = 2.0e9  # upper bound of GPU clocks
_FIRST_PAUSE = 3e-4  # seconds that the GPU sleeps per queued call, in the first attempt
_PAUSE_MARGIN = 1.5  # sleep of the GPU over the time that the host needs to queue the calls
_MAX_ATTEMPTS = 4
_NO_SPAN: AbstractContextManager[object] = nullcontext()

Call = Callable[[], object]
Spans = dict[str, list[tuple[Any, Any]]]  # by stage: pairs of events, or of host times on a CPU


class StageClock:
    """Timer of the stages in `names`. It remembers how long the host takes to queue a call."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names, self._device = names, device
        self._clock: Clock = clock_of(device)
        self._pause = _FIRST_PAUSE

    def times(self, calls: Sequence[Call], flush_l2: L2Flush = None) -> list[StageTimes]:
        """Run each of `calls` once, and return their times.

        flush_l2: called before each call, and not timed.
        """
        for _ in range(_MAX_ATTEMPTS):
            pause = self._pause * len(calls)
            start = time.perf_counter()
            if self._device.type == "cuda":
                torch.cuda._sleep(int(pause * _MAX_CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
            spans_of_calls = [self._record_spans(call, flush_l2) for call in calls]
            host_seconds = time.perf_counter() - start
            self._clock.wait()
            if self._device.type != "cuda" or host_seconds < pause:
                break
            # The GPU may have waited for the host, so try again with a longer sleep.
            self._pause = _PAUSE_MARGIN * host_seconds / len(calls)
        return [self._stage_times(*call_spans) for call_spans in spans_of_calls]

    def _record_spans(self, call: Call, flush_l2: L2Flush) -> tuple[Any, Any, Spans]:
        spans: Spans = {}
        clock = self._clock

        @contextmanager
        def span(name: str) -> Iterator[None]:
            start = clock.mark()
            yield
            spans.setdefault(name, []).append((start, clock.mark()))

        if flush_l2 is not None:
            flush_l2()

        def watch(name: str) -> AbstractContextManager[object]:
            stage = stages.matching_stage(name, self._names)
            return _NO_SPAN if stage is None else span(stage)

        with stages.watch_stages(watch):
            start = clock.mark()
            call()
            end = clock.mark()
        return start, end, spans

    def _stage_times(self, start: Any, end: Any, spans: Spans) -> StageTimes:
        ms = self._clock.ms
        stage_seconds = {
            name: sum(ms(*pair) for pair in pairs) / 1e3 for name, pairs in spans.items()
        }
        return StageTimes(ms(start, end) / 1e3, stage_seconds)


def median_times(samples: Sequence[StageTimes]) -> StageTimes:
    """Return the median times of the whole call and of every stage."""
    names = samples[0].stages
    return StageTimes(
        median(sample.seconds for sample in samples),
        {name: median(sample.stages.get(name, 0.0) for sample in samples) for name in names},
    )
