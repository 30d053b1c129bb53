"""Replay of the launches of a single operation, such as the router.

Plans (`modular_kernel.plan`) replay the launches of a whole layer, with the same recorder
(`replay.recording`).
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from modular_kernel.replay import stages
from modular_kernel.replay.recording import (
    RecordedCall,
    get_active_recorder,
    get_layout_and_pointers,
    record_launches,
)

_MAX_SIGNATURES = 256
_UNSEEN, _SEEN_ONCE, _NOT_REPLAYABLE = "unseen", "seen once", "not replayable"
_C: Any = torch._C
_get_device = torch.Tensor.get_device


class ReplayedOperation:
    """Records an operation's launches in the second call of a signature, and replays them later.

    A signature consists of a key, and of the shape, strides, dtype, device and alignment of each
    tensor. The first call is not recorded, because many numbers of tokens occur only once. At most
    256 signatures are kept. The oldest signature is dropped first.
    """

    def __init__(self) -> None:
        self._calls: dict[Hashable, RecordedCall | str] = {}

    def run(
        self, key: Hashable, tensors: Sequence[torch.Tensor], launch: Callable[[], None]
    ) -> None:
        """Call `launch`, or replay the kernels that it launched in an earlier call.

        key: everything except the layouts of `tensors` that determines the launches.
        tensors: all tensors that the launches use and whose addresses may differ between calls.
        launch: launches the kernels on the current stream.
        """
        index = _get_device(tensors[0])
        if index < 0 or index != _C._cuda_getDevice() or get_active_recorder() is not None:
            launch()
            return
        layout, pointers = get_layout_and_pointers(tensors)
        signature, calls = (key, layout), self._calls
        call = calls.get(signature, _UNSEEN)
        if isinstance(call, RecordedCall):
            if 0 in pointers or stages.is_profiling() or call.is_bypassed():
                launch()
            else:
                call.replay(_C._cuda_getCurrentRawStream(index), pointers)
        elif call is _SEEN_ONCE:
            with record_launches(tensors) as recorder:
                launch()
            calls[signature] = recorder.make_recorded_call() or _NOT_REPLAYABLE
        else:
            launch()
            if call is _UNSEEN:
                while len(calls) >= _MAX_SIGNATURES:
                    calls.pop(next(iter(calls)), None)
                calls[signature] = _SEEN_ONCE
