"""launch: how operations and parts launch a Triton kernel, so that a plan can do it again.

    launch(kernel, (programs,), x_ptr=x, num_rows=rows, BLOCK=128, num_warps=4)

is `kernel[grid](...)`. While a plan records (see modular_kernel.replay) the launch is noted as
well: the compiled kernel and its arguments, with pointers to the call's inputs left open. What
replays then calls is the launcher that triton generated for the kernel, some 50 arguments in one
C call, instead of triton's specialisation of each of them and its look-up of the kernel.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from modular_kernel.ops.runtime import HAS_TRITON
from modular_kernel.replay import Play, Recorder, recorder

if HAS_TRITON:
    import triton
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

# The releases whose launchers are known to take their arguments as `_play` gives them.
_KNOWN = ("3.6",)

# Triton ships no annotations.
Foreign = Any


def launch(kernel: Foreign, grid: tuple[int, ...], **arguments: Foreign) -> None:
    """Launch `kernel`, a @triton.jit function, over `grid`.

    arguments: by name; tensors, numbers, None, constexprs, and options such as num_warps.
    """
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
    slots: list[tuple[int, int, int]] = []
    for parameter in kernel.params:
        value = arguments.get(parameter.name, parameter.default)
        if parameter.is_constexpr:
            value = None  # compiled in; its place is not read
        elif isinstance(value, torch.Tensor):
            place = recording.place(value)
            if place is not None:
                slots.append((len(values), *place))
            value = value.data_ptr()  # a number is taken as it is, a tensor asked about itself
        elif not isinstance(value, int | float | None):
            recording.refuse(f"{parameter.name} is a {type(value).__name__}")
        values.append(value)
    recording.note(_play(compiled, (*grid, 1, 1)[:3], values, slots), _watched)


@cache
def _release() -> str:
    return ".".join(triton.__version__.split(".")[:2])


def _unknown(kernel: Foreign, compiled: Foreign) -> str:
    """Why a launch cannot be done again without triton's own code; "" if it can."""
    if not isinstance(kernel, JITFunction) or not isinstance(compiled, CompiledKernel):
        return f"{kernel} is interpreted, or no plain @triton.jit function"
    if kernel.pre_run_hooks:
        return f"{kernel} has pre-run hooks"
    if _release() not in _KNOWN:
        return f"launchers of triton {triton.__version__} are unknown"
    if compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size:
        return f"{kernel} takes scratch memory"
    return ""


def _play(
    compiled: Foreign,
    grid: tuple[int, ...],
    values: list[Foreign],
    slots: Sequence[tuple[int, int, int]],
) -> Play:
    """slots: (which of values, input, bytes into it)."""
    run: Callable[..., None] = compiled.run
    # Behind the kernel's packed metadata: no launch metadata, and no hooks.
    head = (*grid, 0, compiled.function, compiled.packed_metadata, None, None, None)
    stream_at = len(grid)
    places = [(len(head) + at, index, offset) for at, index, offset in slots]
    template = [*head, *values]

    def play(stream: int, pointers: Sequence[int]) -> None:
        arguments = template.copy()
        arguments[stream_at] = stream
        for at, index, offset in places:
            arguments[at] = pointers[index] + offset
        run(*arguments)

    return play


def _watched() -> bool:
    """Whether a profiler has hooked itself to triton's launches."""
    runtime = triton.knobs.runtime
    return any(
        hook is not None and getattr(hook, "calls", True)
        for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook)
    )
