"""Recording of a launch's kernel and arguments, so that `cuda_replay` can repeat it."""

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
    recording: Recorder,
    kernel: TritonObject,
    compiled: TritonObject,
    grid: tuple[int, ...],
    arguments: dict[str, TritonObject],
) -> None:
    """Record a launch of `kernel`, or the reason why it cannot be replayed.

    Pointers to the call's inputs become slots that each replay fills.
    """
    reason = _why_not_replayable(kernel, compiled)
    if reason:
        recording.refuse(reason)
        return
    values: list[TritonObject] = []
    slots: dict[int, tuple[int, int]] = {}
    for parameter in kernel.params:
        value = arguments.get(parameter.name, parameter.default)
        tensor = value.base if isinstance(value, TensorDescriptor) else value
        if isinstance(tensor, torch.Tensor):
            slot = recording.locate(tensor)
            if slot is not None:
                slots[len(values)] = slot
            value = value.data_ptr() if value is tensor else value
        elif not parameter.is_constexpr and not isinstance(value, int | float | None):
            recording.refuse(f"{parameter.name} is a {type(value).__name__}")
            return
        values.append(value)
    packed = cuda_replay.pack(compiled, grid, values, slots)
    if packed is None:
        recording.refuse(f"{kernel} has a parameter of unknown type")
    elif 0 not in packed.grid:
        recording.note(packed, cuda_replay.replayer, _hooks_active)


def _why_not_replayable(kernel: TritonObject, compiled: TritonObject) -> str:
    """Return why a launch cannot be replayed without triton's own code; "" if it can."""
    if not isinstance(kernel, JITFunction) or not isinstance(compiled, CompiledKernel):
        return f"{kernel} is interpreted or not a plain @triton.jit function"
    if kernel.pre_run_hooks:
        return f"{kernel} has pre-run hooks"
    reason = triton_versions.why_not_replayed(compiled.metadata)
    if triton_versions.RELEASE not in triton_versions.REPLAYED:
        _warn_once(reason)
    if reason:
        return f"{kernel}: {reason}"
    return cuda_replay.why_no_module()


@cache
def _warn_once(reason: str) -> None:
    """Log a reason once; it applies to every launch of this process."""
    _LOG.warning("launches are not replayed: %s", reason)


def _hooks_active() -> bool:
    """Return whether a profiler has hooked into triton's launches."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
