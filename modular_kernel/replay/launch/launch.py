"""`launch`: launches a Triton kernel, and records the launch while a call is recorded.

    launch(kernel, (programs,), x_ptr=x, num_rows=rows, BLOCK=128, num_warps=4)

does the same as `kernel[grid](...)`. All kernels of this project are launched by this function, so
that plans can record the launches of a call (modular_kernel.replay.recording). A replay repeats all
recorded launches with one call of C code (modular_kernel.replay.launch.cuda_replay).
"""

from typing import Any

import torch

from modular_kernel.replay.launch import cuda_replay
from modular_kernel.replay.launch.runtime import HAS_TRITON, patch_interpreter_once
from modular_kernel.replay.recording import get_active_recorder

_NO_GPU = "no NVIDIA GPU"
# Triton has no type annotations.
TritonObject = Any


def launch(kernel: TritonObject, grid: tuple[int, ...], **arguments: TritonObject) -> None:
    """Launch `kernel`, a @triton.jit function, over `grid`.

    arguments: the kernel's arguments by name (tensors, numbers, None, constexprs), and options such
        as num_warps.
    """
    from triton.runtime.jit import JITFunction

    if not isinstance(kernel, JITFunction):  # an interpreted kernel
        patch_interpreter_once()
        _check_num_warps(arguments.get("num_warps", 1))
    compiled = kernel[grid](**arguments)
    recorder = get_active_recorder()
    if recorder is not None:
        # Imported late because it imports Gluon, which is slow.
        from modular_kernel.replay.launch.record import record_launch

        record_launch(recorder, kernel, compiled, grid, arguments)


def _check_num_warps(num_warps: int) -> None:
    """Raise ValueError for a number of warps that Triton's compiler refuses.

    The interpreter ignores the number, so that the kernel would fail on a GPU only.
    """
    if num_warps < 1 or num_warps & (num_warps - 1):
        raise ValueError(f"num_warps: got {num_warps}, need a power of 2")


def why_not_replayed() -> str:
    """Return why plans on this machine cannot replay launches; "" if they can."""
    if not HAS_TRITON:
        return "triton is not installed"
    import triton

    if triton.knobs.runtime.interpret:
        # Without a GPU, `mk` sets TRITON_INTERPRET. The missing GPU is then the reason to report.
        has_gpu = torch.cuda.is_available()
        return "TRITON_INTERPRET is 1: nothing is compiled" if has_gpu else _NO_GPU
    from modular_kernel.replay.launch import triton_versions

    if triton_versions.RELEASE not in triton_versions.REPLAYABLE_RELEASES:
        return f"launchers of triton {triton.__version__} are unknown"
    if not torch.cuda.is_available():
        return _NO_GPU
    return cuda_replay.why_no_module()
