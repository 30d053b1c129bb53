"""Named profiler ranges around the stages of a layer, without overhead while nothing is profiled.

A launch belongs to the innermost range around it. A kernel that covers several stages has a range
with their joined names, made by `fused`: "mk::gemm2+unpermute".
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

PREFIX = "mk::"

# Ranges that contain stages. Reports show the time in them outside any stage separately.
CALL = "mk::call"  # set by the caller of the kernel
PREPARE = "mk::prepare"
RECEIVE = "mk::receive"  # end of an asynchronous dispatch
EXPERTS = "mk::experts"
FINALIZE = "mk::finalize"
SCOPES = (CALL, PREPARE, RECEIVE, EXPERTS, FINALIZE)

# The stages of a layer, in order.
QUANTIZE_INPUT = "mk::quantize_input"  # of x, for GEMM 1
DISPATCH = "mk::dispatch"  # of rows to the ranks that need them
SORT = "mk::sort"  # assignment of rows to pairs; no row is moved
PERMUTE = "mk::permute"  # of rows into the order of their experts
SHRINK = "mk::shrink"  # product A x of adapters, before each GEMM
GEMM1 = "mk::gemm1_activation"  # every part runs the activation with GEMM 1
QUANTIZE = "mk::quantize"  # of h, for GEMM 2
GEMM2 = "mk::gemm2"
UNPERMUTE = "mk::unpermute"  # of rows back into the order of the pairs
REDUCE = "mk::weight_and_reduce"  # of a token's rows, over top-k
COMBINE = "mk::combine"  # of sums on the ranks that own the tokens
STAGES = (
    *(QUANTIZE_INPUT, DISPATCH, SORT, PERMUTE, SHRINK, GEMM1),
    *(QUANTIZE, GEMM2, UNPERMUTE, REDUCE, COMBINE),
)

_NO_RANGE: AbstractContextManager[object] = nullcontext()
Watcher = Callable[[str], AbstractContextManager[object]]
_watcher: ContextVar[Watcher | None] = ContextVar("watcher of stages", default=None)


def fused(*names: str) -> str:
    """Return the range name of a kernel that covers these stages, given in their order."""
    return "+".join((names[0], *(name.removeprefix(PREFIX) for name in names[1:])))


def parts(name: str) -> tuple[str, ...]:
    """Return the stages that `name` joins, or `name` alone."""
    return tuple(PREFIX + part for part in name.removeprefix(PREFIX).split("+"))


def matching_stage(name: str, names: Sequence[str]) -> str | None:
    """Return the first of `names` that `name` contains, alone or fused; None if none."""
    return next((part for part in parts(name) if part in names), None)


# For ranges in which a part names no stage: the stage that stands for the whole range.
DEFAULT_STAGES = {
    PREPARE: "mk::all_of_prepare",
    RECEIVE: "mk::all_of_receive",
    EXPERTS: fused(GEMM1, GEMM2),  # with the roofline of both GEMMs
    FINALIZE: "mk::all_of_finalize",
}

GATHER_GEMM1 = fused(PERMUTE, GEMM1)
GEMM2_SCATTER = fused(GEMM2, UNPERMUTE)
GATHER_REDUCE = fused(UNPERMUTE, REDUCE)
PERMUTE_QUANTIZED = fused(PERMUTE, QUANTIZE_INPUT)
QUANTIZE_DISPATCH = fused(QUANTIZE_INPUT, DISPATCH)


def profiling() -> bool:
    """Return whether torch's profiler is running."""
    return torch.autograd.profiler._is_profiler_enabled


def stage(name: str) -> AbstractContextManager[object]:
    """Return a profiler range called `name`; a shared no-op unless torch's profiler is running.

    If this thread has a watcher, its context manager is used instead of the no-op.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(name)
    watcher = _watcher.get()
    return _NO_RANGE if watcher is None else watcher(name)


@contextmanager
def watch_stages(watcher: Watcher) -> Iterator[None]:
    """Inside the block, in this thread, enter each stage as `watcher(name)`.

    A replayed plan runs no stages, so this is for a kernel's own calls.
    """
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)
