"""launch: how operations and parts launch a Triton kernel, so that a plan can do it again.

    launch(kernel, (programs,), x_ptr=x, num_rows=rows, BLOCK=128, num_warps=4)

is `kernel[grid](...)`. While a plan records (see modular_kernel.replay) the launch is noted as
well: the compiled kernel and its arguments, with pointers to the call's inputs left open. What
replays then calls is modular_kernel.ops.launch.cuda_replay, once for all launches.
"""

import logging
from functools import cache
from typing import Any

import torch

from modular_kernel.ops.launch import cuda_replay
from modular_kernel.ops.launch.runtime import HAS_TRITON, make_honest
from modular_kernel.replay import Recorder, recorder

if HAS_TRITON:
    import triton
    from triton.compiler import CompiledKernel
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime.jit import JITFunction

    from modular_kernel.ops.launch import triton_versions

# Triton ships no annotations.
Foreign = Any

_LOG = logging.getLogger("modular_kernel.replay")


def launch(kernel: Foreign, grid: tuple[int, ...], **arguments: Foreign) -> None:
    """Launch `kernel`, a @triton.jit function, over `grid`.

    arguments: by name; tensors, numbers, None, constexprs, and options such as num_warps.
    """
    if not isinstance(kernel, JITFunction):  # interpreted, maybe before any operation was
        make_honest()
    compiled = kernel[grid](**arguments)
    recording = recorder()
    if recording is not None:
        _note(recording, kernel, compiled, grid, arguments)


def _note(
    recording: Recorder,
    kernel: Foreign,
    compiled: Foreign,
    grid: tuple[int, ...],
    arguments: dict[str, Foreign],
) -> None:
    reason = _unknown(kernel, compiled)
    if reason:
        recording.refuse(reason)
        return
    values: list[Foreign] = []
    slots: dict[int, tuple[int, int]] = {}
    for parameter in kernel.params:
        value = arguments.get(parameter.name, parameter.default)
        tensor = value.base if isinstance(value, TensorDescriptor) else value
        if isinstance(tensor, torch.Tensor):
            place = recording.place(tensor)
            if place is not None:
                slots[len(values)] = place
            value = value.data_ptr() if value is tensor else value
        elif not parameter.is_constexpr and not isinstance(value, int | float | None):
            recording.refuse(f"{parameter.name} is a {type(value).__name__}")
            return
        values.append(value)
    packed = cuda_replay.pack(compiled, grid, values, slots)
    if packed is None:
        recording.refuse(f"{kernel} has a parameter of unknown type")
    elif 0 not in packed.grid:
        recording.note(packed, cuda_replay.replayer, _watched)


def _unknown(kernel: Foreign, compiled: Foreign) -> str:
    """Why a launch cannot be done again without triton's own code; "" if it can."""
    if not isinstance(kernel, JITFunction) or not isinstance(compiled, CompiledKernel):
        return f"{kernel} is interpreted, or no plain @triton.jit function"
    if kernel.pre_run_hooks:
        return f"{kernel} has pre-run hooks"
    reason = triton_versions.unreplayed(compiled.metadata)
    if triton_versions.RELEASE not in triton_versions.REPLAYED:
        _say(reason)
    if reason:
        return f"{kernel}: {reason}"
    return cuda_replay.why_no_module()


@cache
def _say(reason: str) -> None:
    """Log what holds for every launch of this process, the first time."""
    _LOG.warning("launches are not replayed: %s", reason)


def why_not_replayed() -> str:
    """Say why no plan on this machine can replay its launches; "" where they can."""
    if not HAS_TRITON:
        return "there is no triton"
    if triton.knobs.runtime.interpret:
        return "triton's interpreter is active (TRITON_INTERPRET=1)"
    if triton_versions.RELEASE not in triton_versions.REPLAYED:
        return f"launchers of triton {triton.__version__} are unknown"
    if not torch.cuda.is_available():
        return "there is no GPU of NVIDIA's"
    return cuda_replay.why_no_module()


def _watched() -> bool:
    """Whether a profiler has hooked itself to triton's launches."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
