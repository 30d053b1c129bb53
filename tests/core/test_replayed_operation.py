"""Operations outside plans are recorded in their second call, then replayed with new addresses."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modular_kernel.replay import operation
from modular_kernel.replay.operation import ReplayedOperation
from modular_kernel.replay.recording import RecordedCall

STREAM = 7


class StandInGPU:
    """A stand-in for a GPU.

    replayable: whether its recordings can be replayed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, replayable: bool = True) -> None:
        self.launches, self.replays = 0, list[tuple[int, list[int]]]()
        self.recorded_calls, self.replayable, self.watched = 0, replayable, False
        driver = SimpleNamespace(
            _cuda_getDevice=lambda: 0, _cuda_getCurrentRawStream=lambda _: STREAM
        )
        monkeypatch.setattr(operation, "_C", driver)
        monkeypatch.setattr(operation, "_get_device", lambda _: 0)
        monkeypatch.setattr(operation, "record_launches", self.record)

    @contextmanager
    def record(self, _tensors: Any) -> Iterator[Any]:
        self.recorded_calls += 1
        recorded_call = RecordedCall((self.replay,), (lambda: self.watched,), ())
        yield SimpleNamespace(make_recorded_call=lambda: recorded_call if self.replayable else None)

    def replay(self, stream: int, pointers: Any) -> None:
        self.replays.append((stream, [*pointers]))

    def launch(self) -> None:
        self.launches += 1


def test_third_calls_are_replayed_with_their_own_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, replayed_operation = StandInGPU(monkeypatch), ReplayedOperation()
    for _ in range(2):
        replayed_operation.run("key", [torch.zeros(4)], gpu.launch)
    assert (gpu.launches, gpu.recorded_calls, gpu.replays) == (2, 1, [])
    tensor = torch.zeros(4)
    replayed_operation.run("key", [tensor], gpu.launch)
    assert (gpu.launches, gpu.replays) == (2, [(STREAM, [tensor.data_ptr()])])


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        ("other", torch.zeros(4)),
        ("key", torch.zeros(5)),
        ("key", torch.zeros(4, dtype=torch.float64)),
        ("key", torch.zeros(8)[::2]),
        ("key", torch.zeros(5)[1:]),
    ],
    ids=["key", "shape", "dtype", "strides", "alignment"],
)
def test_a_call_with_another_signature_is_launched(
    monkeypatch: pytest.MonkeyPatch, key: str, tensor: torch.Tensor
) -> None:
    gpu, replayed_operation = StandInGPU(monkeypatch), ReplayedOperation()
    for _ in range(3):
        replayed_operation.run("key", [torch.zeros(4)], gpu.launch)
    replayed_operation.run(key, [tensor], gpu.launch)
    assert (gpu.launches, len(gpu.replays)) == (3, 1)


def test_a_call_that_cannot_be_replayed_is_recorded_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, replayed_operation = StandInGPU(monkeypatch, replayable=False), ReplayedOperation()
    for _ in range(5):
        replayed_operation.run("key", [torch.zeros(4)], gpu.launch)
    assert (gpu.launches, gpu.recorded_calls) == (5, 1)


def test_watched_launches_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, replayed_operation = StandInGPU(monkeypatch), ReplayedOperation()
    for _ in range(2):
        replayed_operation.run("key", [torch.zeros(4)], gpu.launch)
    gpu.watched = True
    replayed_operation.run("key", [torch.zeros(4)], gpu.launch)
    assert (gpu.launches, gpu.replays) == (3, [])


def test_the_number_of_signatures_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, replayed_operation = StandInGPU(monkeypatch), ReplayedOperation()
    for number in range(600):
        replayed_operation.run(number, [torch.zeros(4)], gpu.launch)
    assert len(replayed_operation._calls) == 256
    assert gpu.launches == 600


def test_a_cpu_launches_directly() -> None:
    launches, replayed_operation = list[int](), ReplayedOperation()
    for _ in range(3):
        replayed_operation.run("key", [torch.zeros(4)], lambda: launches.append(1))
    assert launches == [1, 1, 1]
    assert not replayed_operation._calls
