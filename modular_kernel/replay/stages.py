"""Named profiler ranges around the stages of a layer, without overhead while no profiler runs.

The parts of a layer open these ranges around their launches. `mk profile` assigns each launch to
the innermost range. The range of a kernel that covers several stages has the joined names of the
stages, for example "mk::gemm2+unpermute". Scopes are the ranges of whole parts, which contain
stages.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

PREFIX = "mk::"

# The scopes. Reports list the time in a scope, but outside of stages, separately.
CALL = "mk::call"  # the range around a call of the kernel, which the profiler opens
PREPARE = "mk::prepare"
RECEIVE = "mk::receive"  # end of an asynchronous dispatch
EXPERTS = "mk::experts"
FINALIZE = "mk::finalize"
SCOPES = (CALL, PREPARE, RECEIVE, EXPERTS, FINALIZE)

# The stages of a layer, in order.
QUANTIZE_INPUT = "mk::quantize_input"  # quantize x for GEMM 1
DISPATCH = "mk::dispatch"  # send rows to the ranks that need them
SORT = "mk::sort"  # assign a row to each pair of token and expert; no row is moved
PERMUTE = "mk::permute"  # move rows into the order of their experts
SHRINK = "mk::shrink"  # LoRA: the product A x of adapters, before each GEMM
GEMM1 = "mk::gemm1_activation"  # GEMM 1 and the activation
QUANTIZE = "mk::quantize"  # quantize the activations h for GEMM 2
GEMM2 = "mk::gemm2"
UNPERMUTE = "mk::unpermute"  # move rows back into the order of the pairs
REDUCE = "mk::weight_and_reduce"  # multiply by router weights and sum over top-k
COMBINE = "mk::combine"  # sum on the ranks that own the tokens
STAGES = (
    *(QUANTIZE_INPUT, DISPATCH, SORT, PERMUTE, SHRINK, GEMM1),
    *(QUANTIZE, GEMM2, UNPERMUTE, REDUCE, COMBINE),
)

_NO_RANGE: AbstractContextManager[object] = nullcontext()
Watcher = Callable[[str], AbstractContextManager[object]]
_watcher: ContextVar[Watcher | None] = ContextVar("watcher of stages", default=None)


def fuse(*names: str) -> str:
    """Return the range name of a kernel that covers these stages.

    fuse(GEMM2, UNPERMUTE) is "mk::gemm2+unpermute".
    """
    return "+".join((names[0], *(name.removeprefix(PREFIX) for name in names[1:])))


def split_stages(name: str) -> tuple[str, ...]:
    """Return the stages of a range, in order. This is the inverse of `fuse`."""
    return tuple(PREFIX + stage for stage in name.removeprefix(PREFIX).split("+"))


def find_stage(name: str, names: Sequence[str]) -> str | None:
    """Return the first stage of the range `name` that is one of `names`; None if there is none."""
    return next((stage for stage in split_stages(name) if stage in names), None)


# The stage of all launches in a scope, for a part that opens no ranges for stages.
DEFAULT_STAGES = {
    PREPARE: "mk::all_of_prepare",
    RECEIVE: "mk::all_of_receive",
    EXPERTS: fuse(GEMM1, GEMM2),  # with the roofline of both GEMMs
    FINALIZE: "mk::all_of_finalize",
}

GATHER_GEMM1 = fuse(PERMUTE, GEMM1)
GEMM2_SCATTER = fuse(GEMM2, UNPERMUTE)
GATHER_REDUCE = fuse(UNPERMUTE, REDUCE)
PERMUTE_QUANTIZED = fuse(PERMUTE, QUANTIZE_INPUT)
QUANTIZE_DISPATCH = fuse(QUANTIZE_INPUT, DISPATCH)


def is_profiling() -> bool:
    """Return whether torch's profiler is running."""
    return torch.autograd.profiler._is_profiler_enabled


def stage(name: str) -> AbstractContextManager[object]:
    """Return a context manager for the range `name`.

    It is a profiler range while torch's profiler runs. Otherwise, it is the range of this thread's
    watcher (`watch_stages`), or a no-op if there is no watcher.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(name)
    watcher = _watcher.get()
    return _NO_RANGE if watcher is None else watcher(name)


@contextmanager
def watch_stages(watcher: Watcher) -> Iterator[None]:
    """Enter `watcher(name)` for each stage that this thread runs inside the block.

    A replay enters no stages.
    """
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)
