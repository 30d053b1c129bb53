"""Device function for programmatic dependent launch (PDL)."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def pdl_wait(OVERLAP: tl.constexpr):
    """Wait until the previous launch's writes are visible, and allow the next launch to start.

    Call it before the first memory access. Each launch then has waited for all earlier ones,
    because its predecessor cannot finish before having waited itself.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
