"""Device functions of the gemv_tma path: a ring of fp8 weights, vectors in shared memory, and MMAs.

With a few tokens, almost all of the time is spent reading weights. A producer warp issues TMA loads
until all stages of the ring are in use. A consumer warpgroup runs the MMAs. M of the MMAs is 64
weight rows, and N is eight vectors: rows of x in GEMM 1, or the rows of h of one token's pairs in
GEMM 2.

    panel  64 weight rows by 128 bytes (values) along K. A stage of the ring has one or more panels.
    piece  1024 values of each vector along K, which are 8 panels.

The vectors stay in shared memory for all of K, in pieces, with one scale per 128 values. The
functions are for sm_90.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from experts.triton.kernels.gluon_ring import allocate_barriers
from modular_kernel.ops.kernels.extrema import max_nan, maximum_nan
from modular_kernel.ops.kernels.quantize import quantized_values, scale_of
from modular_kernel.replay.launch.triton_versions import reinterpret

ROWS = gl.constexpr(64)  # weight rows per tile
VECTORS = gl.constexpr(8)  # vectors in shared memory
PANEL = gl.constexpr(128)  # values along K per panel
PANELS_PER_PIECE = gl.constexpr(8)  # panels per piece
PIECE = gl.constexpr(1024)  # values per piece
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
UNSWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
# The layout of the accumulator (ROWS, VECTORS).
ACC_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32]))
_LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
# `load_pieces` keeps at most this many pieces of single rows in registers. A thread has 8 values of
# each of these pieces, which take at most 112 registers with 16-bit values.
_MAX_PIECES_IN_REGISTERS = gl.constexpr(28)


@gluon.constexpr_function
def vector_layout(rows):
    """Return the layout (rows, K) in which a thread has 8 adjacent values of every row."""
    return gl.BlockedLayout([rows, 8], [1, 32], [1, 4], [1, 0])


@gluon.constexpr_function
def vector_row_layout(rows):
    """Return the layout of one value per row of `vector_layout(rows)`."""
    return gl.SliceLayout(1, vector_layout(rows))


@gluon.jit
def _load_piece(row_ptrs, stride, row_mask, size_k, piece):
    """Load piece number `piece` of each row, (rows, 1024). Values from size_k on are 0.

    row_ptrs: (rows,), pointers to the rows.
    stride: the stride of the values of a row.
    """
    NUM_ROWS: gl.constexpr = row_ptrs.shape[0]
    k = gl.arange(0, PIECE, gl.SliceLayout(0, vector_layout(NUM_ROWS)))[None, :]
    k_offset = piece * PIECE + k
    mask = row_mask[:, None] & (k_offset < size_k)
    return gl.load(row_ptrs[:, None] + k_offset * stride, mask=mask, other=0.0)


@gluon.jit
def load_pieces(row_ptrs, stride, row_mask, size_k, PIECES: gl.constexpr):
    """Load all pieces of the rows, so that all loads are in flight at the same time.

    Return a tuple of pieces, or () if they do not fit in registers. With (), `row_amax` and
    `store_vectors` load each piece when they need it.
    """
    FITS_IN_REGISTERS: gl.constexpr = row_ptrs.shape[0] * PIECES <= _MAX_PIECES_IN_REGISTERS
    pieces = ()
    if FITS_IN_REGISTERS:
        for piece in gl.static_range(PIECES):
            pieces += (_load_piece(row_ptrs, stride, row_mask, size_k, piece),)
    return pieces


@gluon.jit
def row_amax(pieces, row_ptrs, stride, row_mask, size_k, PIECES: gl.constexpr):
    """Return the largest magnitude in each row, (rows,).

    pieces: the result of `load_pieces`.
    """
    NUM_ROWS: gl.constexpr = row_ptrs.shape[0]
    amax = gl.zeros((NUM_ROWS, PIECE), gl.float32, vector_layout(NUM_ROWS))
    if len(pieces) > 0:
        for piece in gl.static_range(PIECES):
            amax = maximum_nan(amax, gl.abs(pieces[piece].to(gl.float32)))
    else:
        for piece in range(PIECES):
            values = _load_piece(row_ptrs, stride, row_mask, size_k, piece)
            amax = maximum_nan(amax, gl.abs(values.to(gl.float32)))
    return max_nan(amax, 1)


@gluon.jit
def repeat_rows(values):
    """Repeat each row of `values` (rows, K) 8 / rows times; return (8, K)."""
    for _ in gl.static_range(3):
        if values.shape[0] < VECTORS:
            doubled = gl.join(values, values).permute((0, 2, 1))
            values = doubled.reshape((2 * values.shape[0], values.shape[1]))
    return values


@gluon.jit
def repeat_scales(values):
    """Repeat `values` (rows,) to (8,) like `repeat_rows`, in the layout of accumulator columns."""
    NUM_ROWS: gl.constexpr = values.shape[0]
    LAYOUT: gl.constexpr = vector_layout(NUM_ROWS)
    column = gl.arange(0, VECTORS, gl.SliceLayout(0, LAYOUT))[None, :]
    row = gl.arange(0, NUM_ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    values = gl.convert_layout(values, gl.SliceLayout(1, LAYOUT))[:, None]
    repeated = gl.sum(gl.where(column // (VECTORS // NUM_ROWS) == row, values, 0.0), axis=0)
    return gl.convert_layout(repeated, gl.SliceLayout(0, ACC_LAYOUT))


@gluon.jit
def _store_piece(
    vectors, scales, piece, values, inverse_scale,
    INPUT_QUANT: gl.constexpr, QMAX: gl.constexpr, MIN_SCALE: gl.constexpr,
):  # fmt: skip
    """Quantize and store the values (rows, 1024) of one piece. See `store_vectors`."""
    NUM_ROWS: gl.constexpr = values.shape[0]
    if INPUT_QUANT == "group":
        groups = values.to(gl.float32).reshape((NUM_ROWS, PANELS_PER_PIECE, PANEL))
        scale = scale_of(max_nan(gl.abs(groups), 2), QMAX, MIN_SCALE)
        inverse_group_scales = gl.expand_dims(tl.div_rn(1.0, scale), 2)
        groups = quantized_values(groups, inverse_group_scales, QMAX, False)
        values = groups.reshape((NUM_ROWS, PIECE))
        scales.index(piece).store(repeat_rows(scale).permute((1, 0)))
    elif INPUT_QUANT == "token":
        values = quantized_values(values.to(gl.float32), inverse_scale[:, None], QMAX, False)
    vectors.index(piece).store(repeat_rows(values.to(vectors.dtype)))


@gluon.jit
def store_vectors(
    vectors, scales, pieces, row_ptrs, stride, row_mask, size_k, inverse_scale, scale_ptrs,
    stride_scale,
    INPUT_QUANT: gl.constexpr, BLOCK_SCALES: gl.constexpr, QMAX: gl.constexpr,
    MIN_SCALE: gl.constexpr,
):  # fmt: skip
    """Quantize rows and write them to `vectors` in shared memory, for the right operand of the MMA.

    Rows are repeated as by `repeat_rows`. Values from size_k on are 0.

    vectors: (pieces, 8, 1024) in shared memory.
    scales: (pieces, 8 panels, 8) in shared memory, the scales of the values. Written if INPUT_QUANT
        is "group", or "prequantized" with BLOCK_SCALES.
    pieces: the result of `load_pieces`.
    row_ptrs: (rows,), pointers to the rows, whose values are `stride` apart.
    inverse_scale: (rows,), the reciprocal of each row's scale. Used if INPUT_QUANT is "token".
    scale_ptrs: (rows,), pointers to the scales of each row's groups, which are stride_scale apart.
        Used if INPUT_QUANT is "prequantized" with BLOCK_SCALES.
    INPUT_QUANT: "prequantized": the rows are already quantized. "token": quantize with one scale
        per row. "group": quantize with one scale per 128 values.
    """
    PIECES: gl.constexpr = vectors.shape[0]
    if len(pieces) > 0:
        for piece in gl.static_range(PIECES):
            _store_piece(
                vectors, scales, piece, pieces[piece], inverse_scale, INPUT_QUANT, QMAX, MIN_SCALE
            )  # fmt: skip
    else:
        for piece in range(PIECES):
            values = _load_piece(row_ptrs, stride, row_mask, size_k, piece)
            _store_piece(
                vectors, scales, piece, values, inverse_scale, INPUT_QUANT, QMAX, MIN_SCALE
            )
    if INPUT_QUANT == "prequantized" and BLOCK_SCALES:
        for piece in range(PIECES):
            group = gl.arange(
                0, PANELS_PER_PIECE, gl.SliceLayout(0, vector_layout(row_ptrs.shape[0]))
            )[None, :]
            group += piece * PANELS_PER_PIECE
            mask = row_mask[:, None] & (group * PANEL < size_k)
            scale = gl.load(scale_ptrs[:, None] + group * stride_scale, mask=mask, other=0.0)
            scales.index(piece).store(repeat_rows(scale).permute((1, 0)))
    fence_async_shared()


@gluon.jit
def _get_vector_panel(vectors, index):
    """Return panel number `index` of the vectors, (128, 8), as the right operand of wgmma."""
    piece = vectors.index(index // PANELS_PER_PIECE)
    panels = reinterpret(piece, vectors.dtype, [PANELS_PER_PIECE, VECTORS, PANEL], SWIZZLED)
    return panels.index(index % PANELS_PER_PIECE).permute((1, 0))


@gluon.jit
def _multiply_unscaled(ring, vectors, full, empty, step, size_k):
    """Multiply a tile of weights by the vectors; return (accumulators (64, 8), next step).

    step: the number of stages that this program has consumed since the start of the kernel.
    """
    STAGES: gl.constexpr = full.shape[0]
    PANELS_PER_STAGE: gl.constexpr = ring.shape[0] // STAGES
    acc = gl.zeros((ROWS, VECTORS), gl.float32, ACC_LAYOUT)
    previous_stage = 0
    for start in range(0, size_k, PANELS_PER_STAGE * PANEL):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        for panel_index in gl.static_range(PANELS_PER_STAGE):
            vector_panel = _get_vector_panel(vectors, start // PANEL + panel_index)
            acc = warpgroup_mma(
                ring.index(stage * PANELS_PER_STAGE + panel_index), vector_panel, acc, is_async=True
            )
        acc = warpgroup_mma_wait(num_outstanding=PANELS_PER_STAGE, deps=(acc,))
        mbarrier.arrive(empty.index(previous_stage), pred=start > 0)
        previous_stage = stage
        step += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index(previous_stage))
    return acc, step


@gluon.jit
def _load_weight_scales(ptrs, start, size_k, mask, PANELS_PER_STAGE: gl.constexpr):
    """Load the weight scales (64,) of each panel of a stage. Scales past the end of K are 0.

    ptrs: (64,), pointers to the first scale of each weight row.
    start: the first K element of the stage.
    """
    scales = ()
    for panel_index in gl.static_range(PANELS_PER_STAGE):
        in_bounds = start + panel_index * PANEL < size_k
        scales += (gl.load(ptrs + start // PANEL + panel_index, mask=mask & in_bounds, other=0.0),)
    return scales


@gluon.jit
def _multiply_scaled(ring, vectors, scales, full, empty, step, size_k, weight_scale_ptrs, mask):
    """Like `_multiply_unscaled`, but multiply the partial sums of each panel by the scales.

    scales: the scales of the vectors, in shared memory.
    weight_scale_ptrs: (64,), pointers to the first weight scale of each weight row.
    mask: (64,), False for weight rows that do not exist.
    """
    STAGES: gl.constexpr = full.shape[0]
    PANELS_PER_STAGE: gl.constexpr = ring.shape[0] // STAGES
    sums = gl.zeros((ROWS, VECTORS), gl.float32, ACC_LAYOUT)
    zero = gl.zeros((ROWS, VECTORS), gl.float32, ACC_LAYOUT)
    weight_scales = _load_weight_scales(weight_scale_ptrs, 0, size_k, mask, PANELS_PER_STAGE)
    for start in range(0, size_k, PANELS_PER_STAGE * PANEL):
        # The loads are issued before the wait for the weights of this stage.
        next_scales = _load_weight_scales(
            weight_scale_ptrs, start + PANELS_PER_STAGE * PANEL, size_k, mask, PANELS_PER_STAGE
        )
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        parts = ()
        for panel_index in gl.static_range(PANELS_PER_STAGE):
            vector_panel = _get_vector_panel(vectors, start // PANEL + panel_index)
            weights = ring.index(stage * PANELS_PER_STAGE + panel_index)
            parts += (warpgroup_mma(weights, vector_panel, zero, use_acc=False, is_async=True),)
        finished = warpgroup_mma_wait(num_outstanding=0, deps=parts)
        if PANELS_PER_STAGE == 1:  # a single dep is returned without a tuple
            parts = (finished,)
        else:
            parts = finished
        mbarrier.arrive(empty.index(stage))
        for panel_index in gl.static_range(PANELS_PER_STAGE):
            index = start // PANEL + panel_index
            piece_scales = reinterpret(
                scales.index(index // PANELS_PER_PIECE),
                gl.float32,
                [PANELS_PER_PIECE, 1, VECTORS],
                UNSWIZZLED,
            )
            scale = piece_scales.index(index % PANELS_PER_PIECE).load(ACC_LAYOUT)
            sums += parts[panel_index] * (scale * weight_scales[panel_index][:, None])
        weight_scales = next_scales
        step += 1
    return sums, step


@gluon.jit
def prefetch_scales(ptr, count):
    """Prefetch `count` scales, which start at `ptr`, to the L1 cache.

    The producer warp calls this function, so that the consumer warpgroup does not wait for memory.
    Each lane of the warp prefetches 8 scales.
    """
    offset = gl.arange(0, 32, _LANES) * 8
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L1 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [(ptr + offset).to(gl.int64), (offset < count).to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def multiply(
    ring, vectors, scales, full, empty, step, size_k, weight_scale_ptrs, mask,
    BLOCK_SCALES: gl.constexpr,
):  # fmt: skip
    """Multiply a tile of weights by the vectors; return (accumulators (64, 8), next step).

    scales, weight_scale_ptrs, mask: as in `_multiply_scaled`. Used if BLOCK_SCALES.
    BLOCK_SCALES: whether weights have one scale per 128 x 128 block.
    """
    if BLOCK_SCALES:
        sums, step = _multiply_scaled(
            ring, vectors, scales, full, empty, step, size_k, weight_scale_ptrs, mask
        )  # fmt: skip
    else:
        sums, step = _multiply_unscaled(ring, vectors, full, empty, step, size_k)
    return sums, step


@gluon.jit
def make_ring(dtype: gl.constexpr, STAGES: gl.constexpr, PANELS_PER_STAGE: gl.constexpr):
    """Allocate a ring of STAGES stages of PANELS_PER_STAGE panels; return (ring, full, empty).

    full, empty: the barriers of the stages (`gluon_ring`).
    """
    ring = gl.allocate_shared_memory(dtype, [STAGES * PANELS_PER_STAGE, ROWS, PANEL], SWIZZLED)
    full, empty = allocate_barriers(STAGES, 1)
    return ring, full, empty


@gluon.jit
def wait_empty_stage(step, full, empty):
    """Wait until the next stage of the ring is empty; return (its index, its `full` barrier).

    step: the number of stages that the producer has filled since the start of the kernel.
    """
    STAGES: gl.constexpr = full.shape[0]
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    return stage, full.index(stage)
