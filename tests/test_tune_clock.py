"""Stages timed apart, behind a pause that is longer than the host needs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from modular_kernel import stages
from modular_kernel.bench.method import WallClock
from modular_kernel.tunable import Took
from modular_kernel.tuning import clock
from modular_kernel.tuning.clock import StageClock, middle

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def layer() -> None:
    with stages.stage(stages.GEMM1):
        time.sleep(0.004)
    for _ in range(2):
        with stages.stage(stages.GEMM2):
            time.sleep(0.001)
    with stages.stage(stages.REDUCE):
        time.sleep(0.002)


def test_stages_are_told_apart_and_added_up() -> None:
    wiped: list[int] = []
    made = StageClock((stages.GEMM1, stages.GEMM2), CPU)
    found = made.times([layer, layer, layer], lambda: wiped.append(1))
    assert len(found) == len(wiped) == 3
    took = middle(found)
    assert sorted(took.stages) == sorted((stages.GEMM1, stages.GEMM2))
    assert took.stages[stages.GEMM1] >= 0.004
    assert 0.002 <= took.stages[stages.GEMM2] < took.stages[stages.GEMM1]
    assert took.seconds >= sum(took.stages.values()) + 0.002


def test_nobody_watches_afterwards() -> None:
    seen: list[str] = []

    @contextmanager
    def watch(name: str) -> Iterator[None]:
        seen.append(name)
        yield

    with stages.watched(watch):
        layer()
    layer()
    assert seen == [stages.GEMM1, stages.GEMM2, stages.GEMM2, stages.REDUCE]
    with pytest.raises(ValueError, match="inside"), stages.watched(watch):
        raise ValueError("inside")
    assert stages.stage(stages.GEMM1) is stages.stage(stages.GEMM2)


def test_the_pause_grows_until_the_host_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: pauses.append(cycles / 2.0e9))
    monkeypatch.setattr(clock, "clock_of", lambda device: WallClock())
    made = StageClock((), GPU)
    made.times([lambda: time.sleep(0.002)])
    assert len(pauses) == 2, "the first was too short"
    assert pauses[0] < 0.002 < pauses[1]
    made.times([lambda: time.sleep(0.002)])
    assert len(pauses) == 3, "and the second is kept"


def test_the_middle_is_by_stage() -> None:
    took = middle([Took(3.0, {"a": 1.0}), Took(1.0, {"a": 9.0}), Took(2.0, {"a": 2.0})])
    assert took == Took(2.0, {"a": 2.0})
