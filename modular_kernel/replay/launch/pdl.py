"""Programmatic dependent launch (PDL): a kernel starts while its predecessor finishes.

Between two kernels of a CUDA graph, the GPU is idle for one or two microseconds. With PDL, the
second kernel is set up before the first kernel has finished. The second kernel calls `pdl_wait`
(modular_kernel/ops/kernels) before it reads results of the first kernel. In a launch without PDL,
`pdl_wait` does nothing.
"""

from modular_kernel.replay.launch.runtime import HAS_TRITON


def pdl_arguments() -> dict[str, object]:
    """Return the launch arguments that enable PDL; {} in the interpreter and before sm_90.

    Kernels of this project call `pdl_wait` if the constexpr USE_PDL is True.
    """
    if not HAS_TRITON:
        return {}
    import triton

    if triton.knobs.runtime.interpret:
        return {}
    target = triton.runtime.driver.active.get_current_target()
    if target.backend != "cuda" or target.arch < 90:
        return {}
    return {"USE_PDL": True, "launch_pdl": True}
