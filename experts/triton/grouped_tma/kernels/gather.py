"""Device functions: a tile's rows copied from where their tokens are into a ring of shared memory.

TMA fetches no rows that lie apart. So the warpgroup that multiplies the rows copies them itself, by
cp.async, LEAD = STAGES - 1 steps before it needs them; behind a tile's end it goes on with the
next tile's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from modular_kernel.replay.launch.triton_versions import copy_rows

_COPY = gl.constexpr(16)  # bytes


@gluon.jit
def tokens_of(tokens_ptr, row, end, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the tokens of sorted rows `row` and on, in the rows of LAYOUT; -1 from `end` on."""
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return gl.load(tokens_ptr + rows, mask=rows < end, other=-1)


@gluon.jit
def first_step(x_ptr, stride_x, tokens, BLOCK_K: gl.constexpr, COPIES: gl.constexpr):
    """Pointers to the first step of the tokens' rows, and which of the rows there are.

    stride_x: from token to token, in copies, so that the compiler knows every row to begin on one.
    """
    WIDTH: gl.constexpr = _COPY * 8 // x_ptr.dtype.element_ty.primitive_bitwidth
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, COPIES))
    offsets = tokens.to(gl.int64) * stride_x * WIDTH
    return x_ptr + offsets[:, None] + columns[None, :], (tokens >= 0)[:, None]


@gluon.jit
def copy_step(ptrs, mask, step, depth, place, COPIES: gl.constexpr, EVEN_K: gl.constexpr):
    """Begin to copy step `step` of a tile's rows to `place`; zeros for what there is not.

    EVEN_K: the depth is whole steps. It is whole copies anyway.
    """
    if not EVEN_K:
        BLOCK_K: gl.constexpr = place.shape[1]
        WIDTH: gl.constexpr = _COPY * 8 // place.dtype.primitive_bitwidth
        columns = step * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, COPIES))
        # Rounded, so that the compiler sees that no copy is cut.
        mask = mask & (columns < depth // WIDTH * WIDTH)[None, :]
    copy_rows(place, ptrs, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _step(
    a_ring, b_ring, full, empty, turn, acc, ptrs, mask, ahead, depth, goes_on,
    COPIES: gl.constexpr, EVEN_K: gl.constexpr,
):  # fmt: skip
    """Multiply turn `turn`, and give its predecessor's places to those that come."""
    STAGES: gl.constexpr = a_ring.shape[0]
    place = turn % STAGES
    # No proxy fence: CUTLASS's cp.async main loop for sm_90 and Triton's have none either, and an
    # earlier form of this one gave the same outputs in the same time with one.
    async_copy.wait_group(STAGES - 2)
    mbarrier.wait(full.index(place), (turn // STAGES) & 1)
    b = b_ring.index(place).permute((1, 0))
    acc = warpgroup_mma(a_ring.index(place), b, acc, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
    before = (turn + STAGES - 1) % STAGES
    copy_step(ptrs, mask, ahead, depth, a_ring.index(before), COPIES, EVEN_K)
    mbarrier.arrive(empty.index(before), pred=goes_on)
    return acc


@gluon.jit
def multiply_gathered(
    a_ring, b_ring, full, empty, turn, depth, ptrs, mask, x_ptr, stride_x, next_tokens, acc,
    COPIES: gl.constexpr, EVEN_K: gl.constexpr,
):  # fmt: skip
    """Add a tile's product to acc; return it, the next turn, pointers and mask of the next rows.

    ptrs: LEAD steps into this tile; those returned are LEAD steps into the next. A tile has LEAD
    steps or more. The tokens are looked at late: by then they have come.
    """
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    LEAD: gl.constexpr = STAGES - 1
    steps = gl.cdiv(depth, BLOCK_K)
    for step in range(steps - LEAD):
        acc = _step(
            a_ring, b_ring, full, empty, turn, acc, ptrs, mask, step + LEAD, depth, step > 0,
            COPIES, EVEN_K,
        )  # fmt: skip
        ptrs += BLOCK_K
        turn += 1
    ptrs, mask = first_step(x_ptr, stride_x, next_tokens, BLOCK_K, COPIES)
    for step in range(LEAD):
        goes_on = step + steps > LEAD
        acc = _step(
            a_ring, b_ring, full, empty, turn, acc, ptrs, mask, step, depth, goes_on,
            COPIES, EVEN_K,
        )  # fmt: skip
        ptrs += BLOCK_K
        turn += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES))
    return acc, turn, ptrs, mask
