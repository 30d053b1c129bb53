"""Named ranges around the stages of a layer; free of charge while nothing is profiled."""

from contextlib import AbstractContextManager, nullcontext

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


def stage(name: str) -> AbstractContextManager[object]:
    """A profiler range called `name`; a shared no-op unless torch's profiler is running."""
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(name)
    return _NOTHING
