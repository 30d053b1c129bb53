"""Named ranges around the stages of a layer; free of charge while nothing is profiled.

A launch belongs to the innermost range around it. A kernel that does several stages' work has a
range named for all of them, as `fused` joins them: "mk::gemm2+unpermute".
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

PREFIX = "mk::"

# What holds stages. Time in it but in no stage inside is the rest of it.
CALL = "mk::call"  # set by who calls the kernel
PREPARE = "mk::prepare"
RECEIVE = "mk::receive"  # of an asynchronous dispatch
EXPERTS = "mk::experts"
FINALIZE = "mk::finalize"
HOLDERS = (CALL, PREPARE, RECEIVE, EXPERTS, FINALIZE)

QUANTIZE_INPUT = "mk::quantize_input"  # x, for GEMM 1
DISPATCH = "mk::dispatch"  # rows to the ranks that need them
SORT = "mk::sort"  # where each pair goes; no row moves
PERMUTE = "mk::permute"  # rows into the order of experts
SHRINK = "mk::shrink"  # A x of adapters, before each product
GEMM1 = "mk::gemm1_activation"  # no part has the activation apart
QUANTIZE = "mk::quantize"  # h, for GEMM 2
GEMM2 = "mk::gemm2"
UNPERMUTE = "mk::unpermute"  # rows back into the order of pairs
REDUCE = "mk::weight_and_reduce"  # over top-k
COMBINE = "mk::combine"  # sums back to the ranks whose tokens they are
STAGES = (
    *(QUANTIZE_INPUT, DISPATCH, SORT, PERMUTE, SHRINK, GEMM1),
    *(QUANTIZE, GEMM2, UNPERMUTE, REDUCE, COMBINE),
)

_NOTHING: AbstractContextManager[object] = nullcontext()
Watcher = Callable[[str], AbstractContextManager[object]]
_watcher: ContextVar[Watcher | None] = ContextVar("watcher of stages", default=None)


def fused(*names: str) -> str:
    """Name one kernel that does the work of all these stages, in their order."""
    return "+".join((names[0], *(name.removeprefix(PREFIX) for name in names[1:])))


def parts(name: str) -> tuple[str, ...]:
    """Return the stages that `name` joins; itself alone if it joins none."""
    return tuple(PREFIX + part for part in name.removeprefix(PREFIX).split("+"))


def among(name: str, wanted: Sequence[str]) -> str | None:
    """Say which of the stages `wanted` this one is, alone or fused with others; None if none."""
    return next((part for part in parts(name) if part in wanted), None)


GATHER_GEMM1 = fused(PERMUTE, GEMM1)
GEMM2_SCATTER = fused(GEMM2, UNPERMUTE)
GATHER_REDUCE = fused(UNPERMUTE, REDUCE)
PERMUTE_QUANTIZED = fused(PERMUTE, QUANTIZE_INPUT)
QUANTIZE_DISPATCH = fused(QUANTIZE_INPUT, DISPATCH)


def profiling() -> bool:
    """Tell whether torch's profiler is running."""
    return torch.autograd.profiler._is_profiler_enabled


def stage(name: str) -> AbstractContextManager[object]:
    """Return a profiler range called `name`; a shared no-op unless torch's profiler is running.

    While this thread has a watcher, what that gives takes the place of the no-op.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(name)
    watcher = _watcher.get()
    return _NOTHING if watcher is None else watcher(name)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Have a stage entered as `watcher(name)` inside the block, in this thread.

    For calls that run their stages: a plan's replay does not, a kernel's own call does.
    """
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)
