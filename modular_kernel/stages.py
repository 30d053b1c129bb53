"""Named ranges around the stages of a layer; free of charge while nothing is profiled."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

PREPARE = "mk::prepare"
PERMUTE = "mk::permute"
GEMM1 = "mk::gemm1_activation"
QUANTISE = "mk::quantise"
GEMM2 = "mk::gemm2"
REDUCE = "mk::weight_and_reduce"
EXPERTS = "mk::experts"
FINALIZE = "mk::finalize"
STAGES = (PREPARE, PERMUTE, GEMM1, QUANTISE, GEMM2, REDUCE, EXPERTS, FINALIZE)

_NOTHING: AbstractContextManager[object] = nullcontext()
Watcher = Callable[[str], AbstractContextManager[object]]
_watcher: ContextVar[Watcher | None] = ContextVar("watcher of stages", default=None)


def profiling() -> bool:
    """Whether torch's profiler is running."""
    return torch.autograd.profiler._is_profiler_enabled


def stage(name: str) -> AbstractContextManager[object]:
    """A profiler range called `name`; a shared no-op unless torch's profiler is running.

    What a watcher gives instead, in this thread, while there is one.
    """
    if profiling():
        return torch.profiler.record_function(name)
    watcher = _watcher.get()
    return _NOTHING if watcher is None else watcher(name)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Inside the block, in this thread, a stage is entered as `watcher(name)`.

    For calls that run their stages: a plan's replay does not, a kernel's own call does.
    """
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)
