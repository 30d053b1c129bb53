"""Device function for programmatic dependent launch (PDL).

With PDL, a kernel may start while the previous kernel of the stream is still running.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def pdl_wait(USE_PDL: tl.constexpr):
    """Wait until the writes of the previous launch are visible, and allow the next launch to start.

    Call it before the first memory access. Every launch has then waited for all earlier ones,
    because its predecessor cannot end before it has itself waited.

    USE_PDL: whether the launch uses PDL. If not, nothing is done.
    """
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
