"""overlap: programmatic dependent launch, where a kernel starts while its predecessor finishes.

Between two launches of a CUDA graph the GPU idles for a microsecond or two. A kernel that begins
with `after_predecessor` can be set up in that time; in a normal launch the function does nothing.
"""

from modular_kernel.replay.launch.runtime import HAS_TRITON


def pdl_arguments() -> dict[str, object]:
    """Return the launch arguments that enable it; none in the interpreter and before sm_90."""
    if not HAS_TRITON:
        return {}
    import triton

    if triton.knobs.runtime.interpret:
        return {}
    target = triton.runtime.driver.active.get_current_target()
    if target.backend != "cuda" or target.arch < 90:
        return {}
    return {"OVERLAP": True, "launch_pdl": True}
