"""launch: how operations and parts launch a Triton kernel, so that a plan can do it again.

    launch(kernel, (programs,), x_ptr=x, num_rows=rows, BLOCK=128, num_warps=4)

is `kernel[grid](...)`. While a plan records (see modular_kernel.replay.recording) the launch is
noted as well: the compiled kernel and its arguments, with pointers to the call's inputs left open.
What replays then calls is modular_kernel.replay.launch.cuda_replay, once for all launches.
"""

from typing import Any

import torch

from modular_kernel.replay.launch import cuda_replay
from modular_kernel.replay.launch.runtime import HAS_TRITON, make_interpreted_honest
from modular_kernel.replay.recording import recorder

_NO_GPU = "there is no GPU of NVIDIA's"
# Triton ships no annotations.
Foreign = Any


def launch(kernel: Foreign, grid: tuple[int, ...], **arguments: Foreign) -> None:
    """Launch `kernel`, a @triton.jit function, over `grid`.

    arguments: by name; tensors, numbers, None, constexprs, and options such as num_warps.
    """
    from triton.runtime.jit import JITFunction

    if not isinstance(kernel, JITFunction):  # interpreted, maybe before any operation was
        make_interpreted_honest()
    compiled = kernel[grid](**arguments)
    recording = recorder()
    if recording is not None:
        from modular_kernel.replay.launch.record import note  # imports Gluon, which takes its time

        note(recording, kernel, compiled, grid, arguments)


def why_not_replayed() -> str:
    """Say why no plan on this machine can replay its launches; "" where they can."""
    if not HAS_TRITON:
        return "there is no triton"
    import triton

    if triton.knobs.runtime.interpret:
        gpu = torch.cuda.is_available()  # without one `mk` has set the variable, not its user
        return "TRITON_INTERPRET is 1: nothing is compiled" if gpu else _NO_GPU
    from modular_kernel.replay.launch import triton_versions

    if triton_versions.RELEASE not in triton_versions.REPLAYED:
        return f"launchers of triton {triton.__version__} are unknown"
    if not torch.cuda.is_available():
        return _NO_GPU
    return cuda_replay.why_no_module()
