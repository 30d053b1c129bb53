"""Device function for programmatic dependent launch (PDL).

With PDL, a kernel may start while the previous kernel of the stream is still running.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def pdl_wait(USE_PDL: tl.constexpr):
    """Wait until the writes of the previous launch are visible, and allow the next launch to start.

    Call this function before the first memory access. If every kernel does so, a kernel waits for
    all earlier launches, because the previous launch cannot end before its own wait has ended.

    USE_PDL: whether the launch uses PDL. Otherwise, the function does nothing.
    """
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
