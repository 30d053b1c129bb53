"""Makes plans record and replay interpreted launches, as they do with launches on a GPU.

Rank processes import this module.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

from modular_kernel.replay.launch import record
from modular_kernel.replay.recording import (
    Recorder,
    Replay,
    get_active_recorder,
    ignore_torch_operations,
)


def _tensor_at(address: int, like: torch.Tensor) -> torch.Tensor:
    """Return the memory at `address` as a tensor with the layout of `like`."""
    last_offset = sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    nbytes = (last_offset + 1) * like.itemsize
    memory = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
    return memory.view(like.dtype).as_strided(like.shape, like.stride())


def _record_interpreted(
    recording: Recorder, kernel: Any, _: Any, grid: tuple[int, ...], arguments: dict[str, Any]
) -> None:
    """Record an interpreted launch, in place of `record.record_launch`."""
    places = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.numel():
            place = recording.locate(value)
            if place is not None:
                places[name] = place

    def relaunch(pointers: Sequence[int]) -> None:
        tensors = {
            name: _tensor_at(pointers[index] + offset, arguments[name])
            for name, (index, offset) in places.items()
        }
        kernel[grid](**(arguments | tensors))

    recording.add_launch(relaunch, _make_replay, _has_hooks)


def _make_replay(launches: Sequence[Any], inputs: int) -> Replay:
    def replay(stream: int, pointers: Sequence[int]) -> None:
        for relaunch in launches:
            relaunch(pointers)

    return replay


def _has_hooks() -> bool:
    return False


@contextmanager
def interpreted_replays() -> Iterator[None]:
    """Let plans record and replay interpreted launches while the context is active."""
    record_launch, run = record.record_launch, InterpretedFunction.run

    def run_without_recording_torch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if get_active_recorder() is None:
            return run(self, *args, **kwargs)
        with ignore_torch_operations():  # the interpreter uses torch operations itself
            return run(self, *args, **kwargs)

    record.record_launch, InterpretedFunction.run = _record_interpreted, run_without_recording_torch
    try:
        yield
    finally:
        record.record_launch, InterpretedFunction.run = record_launch, run
