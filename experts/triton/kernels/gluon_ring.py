"""Device function that allocates the mbarriers of a ring of stages in shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def allocate_barriers(STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Return the barriers (full, empty) of a ring with STAGES stages.

    A stage has one producer and CONSUMERS consumers.
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    return full, empty
