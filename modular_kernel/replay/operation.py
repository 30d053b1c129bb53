"""Replay of an operation's launches outside a plan, such as the router's."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from modular_kernel.replay import stages
from modular_kernel.replay.recording import RecordedCall, layout_and_pointers, recorder, recording

_MAX_SIGNATURES = 256
_UNSEEN, _SEEN_ONCE, _NOT_REPLAYABLE = "unseen", "seen once", "not replayable"
_C: Any = torch._C
_get_device = torch.Tensor.get_device


class ReplayedOperation:
    """Records an operation's launches in the second call with a signature, and replays them later.

    A signature consists of a key, and of the shape, strides, dtype, device and alignment of each
    tensor. Because the first call is not recorded, a number of tokens that occurs only once costs
    nothing. At most 256 signatures are kept; the oldest is dropped first.
    """

    def __init__(self) -> None:
        self._calls: dict[Hashable, RecordedCall | str] = {}

    def run(
        self, key: Hashable, tensors: Sequence[torch.Tensor], launch: Callable[[], None]
    ) -> None:
        """Call `launch`, or replay its kernels, which use `tensors`, on the current stream.

        key: everything besides the tensors that determines the launches.
        """
        index = _get_device(tensors[0])
        if index < 0 or index != _C._cuda_getDevice() or recorder() is not None:
            launch()
            return
        layout, pointers = layout_and_pointers(tensors)
        signature, calls = (key, layout), self._calls
        call = calls.get(signature, _UNSEEN)
        if isinstance(call, RecordedCall):
            if 0 in pointers or stages.profiling() or call.hooks_active():
                launch()
            else:
                call.replay(_C._cuda_getCurrentRawStream(index), pointers)
        elif call is _SEEN_ONCE:
            with recording(tensors) as recorded:
                launch()
            calls[signature] = recorded.recorded() or _NOT_REPLAYABLE
        else:
            launch()
            if call is _UNSEEN:
                while len(calls) >= _MAX_SIGNATURES:
                    calls.pop(next(iter(calls)), None)
                calls[signature] = _SEEN_ONCE
