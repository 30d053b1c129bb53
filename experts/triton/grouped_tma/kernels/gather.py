"""Device functions of `grouped_gemm_tma_kernel` that gather activation rows into shared memory.

The rows of a tile belong to tokens that are anywhere in x, and TMA cannot gather rows. Each
consumer warpgroup therefore copies its 64 rows with cp.async into a ring, STAGES - 1 steps along K
ahead of the MMAs. At the end of a tile, it copies the first steps of the next tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from modular_kernel.replay.launch.triton_versions import async_load_rows

_COPY_BYTES = gl.constexpr(16)  # bytes that one cp.async copies


@gluon.jit
def load_tokens(tokens_ptr, row, end, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the token of each sorted row in [row, row + ROWS). The result is -1 for rows >= end.

    tokens_ptr: int32, the token of each sorted row.
    LAYOUT: the layout of the tile. Tokens are distributed over threads like the rows of the tile.
    """
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return gl.load(tokens_ptr + rows, mask=rows < end, other=-1)


@gluon.jit
def gather_pointers(
    x_ptr, stride_x_in_copies, tokens, BLOCK_K: gl.constexpr, COPY_LAYOUT: gl.constexpr
):
    """Return pointers to the first K step of the tokens' rows, and the mask (rows, 1) of the rows.

    x_ptr: activations (num_tokens, K).
    stride_x_in_copies: the stride of the rows of x in units of 16 bytes, from which the compiler
        infers the alignment.
    tokens: (rows,), from `load_tokens`.
    COPY_LAYOUT: the layout of the copies.
    """
    VALUES_PER_COPY: gl.constexpr = _COPY_BYTES * 8 // x_ptr.dtype.element_ty.primitive_bitwidth
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, COPY_LAYOUT))
    offsets = tokens.to(gl.int64) * stride_x_in_copies * VALUES_PER_COPY
    return x_ptr + offsets[:, None] + columns[None, :], (tokens >= 0)[:, None]


@gluon.jit
def copy_step(ptrs, mask, step, size_k, buffer, COPY_LAYOUT: gl.constexpr, EVEN_K: gl.constexpr):
    """Start copying one K step of a tile's rows to `buffer`. Masked elements become zero.

    ptrs: pointers to the K step.
    mask: the mask of the rows.
    step: the index of the K step in the tile.
    buffer: (rows, BLOCK_K) in shared memory.
    EVEN_K: whether BLOCK_K divides K. If not, K is a multiple of 16 bytes.
    """
    if not EVEN_K:
        BLOCK_K: gl.constexpr = buffer.shape[1]
        VALUES_PER_COPY: gl.constexpr = _COPY_BYTES * 8 // buffer.dtype.primitive_bitwidth
        columns = step * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, COPY_LAYOUT))
        # The limit is rounded so that the compiler knows that no 16-byte copy is partial.
        mask = mask & (columns < size_k // VALUES_PER_COPY * VALUES_PER_COPY)[None, :]
    async_load_rows(buffer, ptrs, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _multiply_step(
    a_ring, b_ring, full, empty, iteration, acc, ptrs, mask, copied_step, size_k, has_previous,
    COPY_LAYOUT: gl.constexpr, EVEN_K: gl.constexpr,
):  # fmt: skip
    """Multiply one stage of the ring; then refill and release the stage of the previous iteration.

    Return the accumulator.

    iteration: number of K steps that this warpgroup has multiplied.
    ptrs, mask, copied_step: the K step to copy into the released stage (`copy_step`).
    has_previous: whether there was a previous iteration whose weights must be released.
    """
    STAGES: gl.constexpr = a_ring.shape[0]
    stage = iteration % STAGES
    # There is no proxy fence between cp.async and wgmma, as in the main loops of CUTLASS (sm_90)
    # and Triton. With a fence, this loop had the same outputs and the same speed.
    async_copy.wait_group(STAGES - 2)
    mbarrier.wait(full.index(stage), (iteration // STAGES) & 1)
    b = b_ring.index(stage).permute((1, 0))
    acc = warpgroup_mma(a_ring.index(stage), b, acc, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
    previous_stage = (iteration + STAGES - 1) % STAGES
    copy_step(ptrs, mask, copied_step, size_k, a_ring.index(previous_stage), COPY_LAYOUT, EVEN_K)
    mbarrier.arrive(empty.index(previous_stage), pred=has_previous)
    return acc


@gluon.jit
def multiply_gathered(
    a_ring, b_ring, full, empty, iteration, size_k, ptrs, mask, x_ptr, stride_x_in_copies,
    next_tokens, acc,
    COPY_LAYOUT: gl.constexpr, EVEN_K: gl.constexpr,
):  # fmt: skip
    """Multiply gathered rows (64, K) by the weights of a tile, and add the products to acc.

    Return (acc, the next iteration, pointers and mask of the next tile). A tile has at least STAGES
    - 1 K steps. next_tokens is used as late as possible, so that its load does not stall.

    a_ring: (STAGES, 64, BLOCK_K), the ring of activation rows of this warpgroup.
    b_ring: (STAGES, weight rows, BLOCK_K), the ring of weights.
    full, empty: the barriers of the ring (`gluon_ring`).
    ptrs: pointers to the rows of this tile, STAGES - 1 steps ahead.
    mask: the mask of the rows of this tile.
    next_tokens: the tokens of the rows of the next tile.
    """
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    PREFETCH: gl.constexpr = STAGES - 1
    steps = gl.cdiv(size_k, BLOCK_K)
    for step in range(steps - PREFETCH):
        acc = _multiply_step(
            a_ring, b_ring, full, empty, iteration, acc, ptrs, mask, step + PREFETCH, size_k,
            step > 0,
            COPY_LAYOUT, EVEN_K,
        )  # fmt: skip
        ptrs += BLOCK_K
        iteration += 1
    ptrs, mask = gather_pointers(x_ptr, stride_x_in_copies, next_tokens, BLOCK_K, COPY_LAYOUT)
    for step in range(PREFETCH):
        has_previous = step + steps > PREFETCH
        acc = _multiply_step(
            a_ring, b_ring, full, empty, iteration, acc, ptrs, mask, step, size_k, has_previous,
            COPY_LAYOUT, EVEN_K,
        )  # fmt: skip
        ptrs += BLOCK_K
        iteration += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index((iteration + STAGES - 1) % STAGES))
    return acc, iteration, ptrs, mask
