"""overlap: launches that begin while the one before them in the stream still ends.

Between two launches of a CUDA graph the GPU rests for a microsecond or two. A kernel that begins
with `after_predecessor` may be set up in that time; launched otherwise the function does nothing.
"""

from modular_kernel.replay.launch.runtime import HAS_TRITON


def overlap() -> dict[str, object]:
    """Return the arguments of such a kernel's launch: none in the interpreter and before sm_90."""
    if not HAS_TRITON:
        return {}
    import triton

    if triton.knobs.runtime.interpret:
        return {}
    target = triton.runtime.driver.active.get_current_target()
    if target.backend != "cuda" or target.arch < 90:
        return {}
    return {"OVERLAP": True, "launch_pdl": True}
