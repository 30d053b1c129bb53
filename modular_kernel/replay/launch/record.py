"""Recording of the kernel and the arguments of a launch, so that `cuda_replay` can repeat it.

`launch` calls `record_launch` for every launch of a recorded call.
"""

import logging
from functools import cache
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from modular_kernel.replay.launch import cuda_replay, triton_versions
from modular_kernel.replay.recording import Recorder

# Triton has no type annotations.
TritonObject = Any

_LOG = logging.getLogger("modular_kernel.replay")


def record_launch(
    recorder: Recorder,
    kernel: TritonObject,
    compiled: TritonObject,
    grid: tuple[int, ...],
    arguments: dict[str, TritonObject],
) -> None:
    """Record a launch of `kernel`, or the reason why it cannot be replayed.

    Pointers into the inputs of the call become slots. A replay writes the addresses of its own
    inputs to the slots.
    """
    reason = _find_refusal_reason(kernel, compiled)
    if reason:
        recorder.refuse(reason)
        return
    values: list[TritonObject] = []
    slots: dict[int, tuple[int, int]] = {}
    for parameter in kernel.params:
        value = arguments.get(parameter.name, parameter.default)
        tensor = value.base if isinstance(value, TensorDescriptor) else value
        if isinstance(tensor, torch.Tensor):
            slot = recorder.locate(tensor)
            if slot is not None:
                slots[len(values)] = slot
            value = value.data_ptr() if value is tensor else value
        elif not parameter.is_constexpr and not isinstance(value, int | float | None):
            recorder.refuse(f"{parameter.name} is a {type(value).__name__}")
            return
        values.append(value)
    packed = cuda_replay.pack_launch(compiled, grid, values, slots)
    if packed is None:
        recorder.refuse(f"{kernel} has a parameter of unknown type")
    elif 0 not in packed.grid:  # an empty grid launches nothing
        recorder.add_launch(packed, cuda_replay.make_replay, _has_launch_hooks)


def _find_refusal_reason(kernel: TritonObject, compiled: TritonObject) -> str:
    """Return why a launch cannot be replayed without triton's launcher; "" if it can."""
    if not isinstance(kernel, JITFunction) or not isinstance(compiled, CompiledKernel):
        return f"{kernel} is interpreted or not a plain @triton.jit function"
    if kernel.pre_run_hooks:
        return f"{kernel} has pre-run hooks"
    reason = triton_versions.why_not_replayed(compiled.metadata)
    if triton_versions.RELEASE not in triton_versions.REPLAYABLE_RELEASES:
        _warn_once(reason)
    if reason:
        return f"{kernel}: {reason}"
    return cuda_replay.why_no_module()


@cache
def _warn_once(reason: str) -> None:
    """Log a reason that applies to every launch of this process."""
    _LOG.warning("launches are not replayed: %s", reason)


def _has_launch_hooks() -> bool:
    """Return whether a profiler has set triton's launch hooks, which a replay does not call."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # A hook is a HookChain, whose `calls` may be empty, or a function, or None.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
