"""Programmatic dependent launch (PDL): a kernel starts while its predecessor finishes.

Between two launches of a CUDA graph, the GPU idles for one or two microseconds. With PDL, a kernel
is set up in that time. It calls `pdl_wait` before it reads the results of its predecessor. In a
normal launch, `pdl_wait` does nothing.
"""

from modular_kernel.replay.launch.runtime import HAS_TRITON


def pdl_arguments() -> dict[str, object]:
    """Return the launch arguments that enable PDL.

    They are {} in the interpreter and on GPUs before sm_90.
    """
    if not HAS_TRITON:
        return {}
    import triton

    if triton.knobs.runtime.interpret:
        return {}
    target = triton.runtime.driver.active.get_current_target()
    if target.backend != "cuda" or target.arch < 90:
        return {}
    return {"OVERLAP": True, "launch_pdl": True}
