"""Device function for a ring buffer in shared memory that one producer warp fills for consumers.

A stage of the ring has two mbarriers. The producer waits until the stage is empty and starts TMA
loads into it, which complete the `full` barrier. Consumers wait for `full`, multiply the data, and
arrive at the `empty` barrier. The Gluon kernels of grouped_tma, grouped_w4 and gemv_tma use
such rings.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def allocate_barriers(STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Return the barriers (full, empty) of a ring. Each is (STAGES, 1) in shared memory.

    CONSUMERS: the number of consumer warpgroups, all of which must release a stage.
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    return full, empty
