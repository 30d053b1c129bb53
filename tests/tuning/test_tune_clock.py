"""Timing of stages. The GPU sleeps while the host queues all calls."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from modular_kernel.contracts import StageTimes
from modular_kernel.measure import timing as timing_module
from modular_kernel.measure.timing import WallClock
from modular_kernel.replay import stages
from modular_kernel.tuning import stage_timer
from modular_kernel.tuning.stage_timer import StageTimer, compute_median_stage_times

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Time:
    """Replacement of the module `time`, whose clock the tests advance."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake_time = Time()
    for module in (stage_timer, timing_module):
        monkeypatch.setattr(module, "time", fake_time)
    return fake_time


def call_layer(time: Time) -> None:
    with stages.stage(stages.GEMM1):
        time.sleep(0.004)
    for _ in range(2):
        with stages.stage(stages.GEMM2):
            time.sleep(0.001)
    with stages.stage(stages.REDUCE):
        time.sleep(0.002)


def test_stage_times_are_summed_by_stage(time: Time) -> None:
    flushes: list[int] = []
    timer = StageTimer((stages.GEMM1, stages.GEMM2), CPU)
    times = timer.time_calls([lambda: call_layer(time)] * 3, lambda: flushes.append(1))
    assert len(times) == len(flushes) == 3
    medians = compute_median_stage_times(times)
    assert medians.stages == pytest.approx({stages.GEMM1: 0.004, stages.GEMM2: 0.002})
    assert medians.seconds == pytest.approx(0.008)


def test_watching_ends_after_the_call(time: Time) -> None:
    watched: list[str] = []

    @contextmanager
    def watch(name: str) -> Iterator[None]:
        watched.append(name)
        yield

    with stages.watch_stages(watch):
        call_layer(time)
    call_layer(time)
    assert watched == [stages.GEMM1, stages.GEMM2, stages.GEMM2, stages.REDUCE]
    with pytest.raises(ValueError, match="inside"), stages.watch_stages(watch):
        raise ValueError("inside")
    assert stages.stage(stages.GEMM1) is stages.stage(stages.GEMM2)


def test_pause_grows_until_the_host_is_ahead(monkeypatch: pytest.MonkeyPatch, time: Time) -> None:
    sleeps: list[float] = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: sleeps.append(cycles / 2.0e9))
    monkeypatch.setattr(stage_timer, "make_clock", lambda device: WallClock())
    timer = StageTimer((), GPU)
    timer.time_calls([lambda: time.sleep(0.002)])
    assert len(sleeps) == 2, "the first sleep was too short"
    assert sleeps[0] < 0.002 < sleeps[1]
    timer.time_calls([lambda: time.sleep(0.002)])
    assert len(sleeps) == 3, "the second sleep is reused"


def test_medians_are_by_stage() -> None:
    medians = compute_median_stage_times(
        [StageTimes(3.0, {"a": 1.0}), StageTimes(1.0, {"a": 9.0}), StageTimes(2.0, {"a": 2.0})]
    )
    assert medians == StageTimes(2.0, {"a": 2.0})
