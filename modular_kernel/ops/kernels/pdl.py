"""Device function for programmatic dependent launch (PDL)."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def pdl_wait(OVERLAP: tl.constexpr):
    """Wait until the writes of the previous launch are visible, and allow the next launch to start.

    Call it before the first memory access. Then every launch has waited for all earlier ones,
    because its predecessor cannot end before it has waited itself.

    OVERLAP: the launch uses PDL; otherwise nothing is done.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
