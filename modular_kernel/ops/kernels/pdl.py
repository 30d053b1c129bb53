"""Device function: a launch that begins while the one before it in its stream still ends."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def after_predecessor(OVERLAP: tl.constexpr):
    """Wait until everything that the launch before wrote is there; let the next launch begin.

    Called before a kernel's first access to memory, so that every launch has waited for all before
    it: the one before has not ended until it has waited itself.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
