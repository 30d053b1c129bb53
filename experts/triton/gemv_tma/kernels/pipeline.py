"""Device functions of the TMA-pipelined gemv: fp8 weights through a ring in shared memory (sm_90).

What takes time with a few tokens is reading weights. So one warp of a program does nothing else:
it asks for tile after tile by TMA, as far ahead as the ring has places, whatever the others do. A
warpgroup multiplies: 64 rows of weights are the tall side of its products, up to eight vectors
(tokens, or the pairs of one token) the narrow one.

Vectors lie in shared memory from one end of the depth to the other, in pieces of 1024 values, and
their scales by groups of 128 beside them. A panel is 64 rows and 128 bytes of the depth.
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

from experts.triton.kernels.gluon_ring import barriers
from modular_kernel.ops.kernels.extrema import max_nan, maximum_nan
from modular_kernel.ops.kernels.quantize import quantized_values, scale_of
from modular_kernel.replay.launch.triton_versions import reinterpret

ROWS = gl.constexpr(64)  # of weights in a tile
VECTORS = gl.constexpr(8)
PANEL = gl.constexpr(128)
PANELS = gl.constexpr(8)  # of a piece
PIECE = gl.constexpr(1024)
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32]))  # of products
_LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
_MOST_HELD = gl.constexpr(28)  # pieces in registers: a thread has 8 values of each


@gluon.constexpr_function
def wide(rows):
    """Give a thread 8 values beside each other of each of `rows` vectors."""
    return gl.BlockedLayout([rows, 8], [1, 32], [1, 4], [1, 0])


@gluon.constexpr_function
def rows_of(rows):
    """Of one value for each of `rows` vectors."""
    return gl.SliceLayout(1, wide(rows))


@gluon.jit
def _load_piece(row_ptrs, stride, live, depth, piece):
    """Values (R, 1024) of piece `piece` of the rows at row_ptrs (R,)."""
    ROWS_HELD: gl.constexpr = row_ptrs.shape[0]
    k = gl.arange(0, PIECE, gl.SliceLayout(0, wide(ROWS_HELD)))[None, :]
    at = piece * PIECE + k
    mask = live[:, None] & (at < depth)
    return gl.load(row_ptrs[:, None] + at * stride, mask=mask, other=0.0)


@gluon.jit
def load_pieces(row_ptrs, stride, live, depth, PIECES: gl.constexpr):
    """Every piece of the rows, all on their way at once: none where they do not fit in registers
    and are loaded one by one, as they are needed."""
    HELD: gl.constexpr = row_ptrs.shape[0] * PIECES <= _MOST_HELD
    pieces = ()
    if HELD:
        for piece in gl.static_range(PIECES):
            pieces += (_load_piece(row_ptrs, stride, live, depth, piece),)
    return pieces


@gluon.jit
def largest_of(pieces, row_ptrs, stride, live, depth, PIECES: gl.constexpr):
    """(R,) largest magnitudes of the rows, whose `pieces` load_pieces gave."""
    ROWS_HELD: gl.constexpr = row_ptrs.shape[0]
    largest = gl.zeros((ROWS_HELD, PIECE), gl.float32, wide(ROWS_HELD))
    if len(pieces) > 0:
        for piece in gl.static_range(PIECES):
            largest = maximum_nan(largest, gl.abs(pieces[piece].to(gl.float32)))
    else:
        for piece in range(PIECES):
            values = _load_piece(row_ptrs, stride, live, depth, piece)
            largest = maximum_nan(largest, gl.abs(values.to(gl.float32)))
    return max_nan(largest, 1)


@gluon.jit
def spread(values):
    """(R, K) to (8, K): row r is in the rows from r * 8 / R on, up to the next."""
    for _ in gl.static_range(3):
        if values.shape[0] < VECTORS:
            both = gl.join(values, values).permute((0, 2, 1))
            values = both.reshape((2 * values.shape[0], values.shape[1]))
    return values


@gluon.jit
def spread_scales(values):
    """(R,) to (8,) as `spread`, as products have their columns."""
    ROWS_HELD: gl.constexpr = values.shape[0]
    LAYOUT: gl.constexpr = wide(ROWS_HELD)
    column = gl.arange(0, VECTORS, gl.SliceLayout(0, LAYOUT))[None, :]
    row = gl.arange(0, ROWS_HELD, gl.SliceLayout(1, LAYOUT))[:, None]
    values = gl.convert_layout(values, gl.SliceLayout(1, LAYOUT))[:, None]
    found = gl.sum(gl.where(column // (VECTORS // ROWS_HELD) == row, values, 0.0), axis=0)
    return gl.convert_layout(found, gl.SliceLayout(0, ACC))


@gluon.jit
def _hold_piece(
    vectors, scales, piece, values, inverse,
    QUANT: gl.constexpr, LARGEST: gl.constexpr, MIN_SCALE: gl.constexpr,
):  # fmt: skip
    """Quantize values (R, 1024) as hold_vectors says and write them."""
    ROWS_HELD: gl.constexpr = values.shape[0]
    if QUANT == "group":
        groups = values.to(gl.float32).reshape((ROWS_HELD, PANELS, PANEL))
        scale = scale_of(max_nan(gl.abs(groups), 2), LARGEST, MIN_SCALE)
        inverse_of_groups = gl.expand_dims(tl.div_rn(1.0, scale), 2)
        groups = quantized_values(groups, inverse_of_groups, LARGEST, False)
        values = groups.reshape((ROWS_HELD, PIECE))
        scales.index(piece).store(spread(scale).permute((1, 0)))
    elif QUANT == "token":
        values = quantized_values(values.to(gl.float32), inverse[:, None], LARGEST, False)
    vectors.index(piece).store(spread(values.to(vectors.dtype)))


@gluon.jit
def hold_vectors(
    vectors, scales, pieces, row_ptrs, stride, live, depth, inverse, scale_ptrs, stride_scale,
    QUANT: gl.constexpr, GROUPED: gl.constexpr, LARGEST: gl.constexpr, MIN_SCALE: gl.constexpr,
):  # fmt: skip
    """Fill `vectors` (pieces, 8, 1024) with the rows at row_ptrs (R,), values `stride` apart, as
    `spread` does, 0 past `depth`; if GROUPED `scales` (pieces, 8 groups, 8) too.

    pieces: as load_pieces gave them. QUANT: "given" as they are, scales of groups at scale_ptrs
    (R,), stride_scale apart; "token" times `inverse` (R,); "group" with the scales that each 128
    values ask for.
    """
    PIECES: gl.constexpr = vectors.shape[0]
    if len(pieces) > 0:
        for piece in gl.static_range(PIECES):
            _hold_piece(
                vectors, scales, piece, pieces[piece], inverse, QUANT, LARGEST, MIN_SCALE
            )  # fmt: skip
    else:
        for piece in range(PIECES):
            values = _load_piece(row_ptrs, stride, live, depth, piece)
            _hold_piece(vectors, scales, piece, values, inverse, QUANT, LARGEST, MIN_SCALE)
    if QUANT == "given" and GROUPED:
        for piece in range(PIECES):
            group = gl.arange(0, PANELS, gl.SliceLayout(0, wide(row_ptrs.shape[0])))[None, :]
            group += piece * PANELS
            mask = live[:, None] & (group * PANEL < depth)
            scale = gl.load(scale_ptrs[:, None] + group * stride_scale, mask=mask, other=0.0)
            scales.index(piece).store(spread(scale).permute((1, 0)))
    fence_async_shared()


@gluon.jit
def _panel(vectors, index):
    """Panel `index` of the vectors, (128, 8)."""
    piece = vectors.index(index // PANELS)
    panels = reinterpret(piece, vectors.dtype, [PANELS, VECTORS, PANEL], SWIZZLED)
    return panels.index(index % PANELS).permute((1, 0))


@gluon.jit
def _multiply_plain(ring, vectors, full, empty, step, depth):
    """Products (64, 8) of a tile's rows and the vectors, and the next step."""
    STAGES: gl.constexpr = full.shape[0]
    EACH: gl.constexpr = ring.shape[0] // STAGES
    acc = gl.zeros((ROWS, VECTORS), gl.float32, ACC)
    last = 0
    for start in range(0, depth, EACH * PANEL):
        place = step % STAGES
        mbarrier.wait(full.index(place), (step // STAGES) & 1)
        for p in gl.static_range(EACH):
            vector = _panel(vectors, start // PANEL + p)
            acc = warpgroup_mma(ring.index(place * EACH + p), vector, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=EACH, deps=(acc,))
        mbarrier.arrive(empty.index(last), pred=start > 0)
        last = place
        step += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index(last))
    return acc, step


@gluon.jit
def _weight_scales(ptrs, start, depth, mask, EACH: gl.constexpr):
    """Return the scales (64,) of a stage's panels, 0 past the depth."""
    found = ()
    for p in gl.static_range(EACH):
        inside = start + p * PANEL < depth
        found += (gl.load(ptrs + start // PANEL + p, mask=mask & inside, other=0.0),)
    return found


@gluon.jit
def _multiply_scaled(ring, vectors, scales, full, empty, step, depth, ptrs, mask):
    """As _multiply_plain, each panel's products times the scales of its weights, at ptrs (64,), and
    of its vectors, on their way into the sums."""
    STAGES: gl.constexpr = full.shape[0]
    EACH: gl.constexpr = ring.shape[0] // STAGES
    sums = gl.zeros((ROWS, VECTORS), gl.float32, ACC)
    zero = gl.zeros((ROWS, VECTORS), gl.float32, ACC)
    weight_scales = _weight_scales(ptrs, 0, depth, mask, EACH)
    for start in range(0, depth, EACH * PANEL):
        # On their way while this stage's weights are waited for.
        following = _weight_scales(ptrs, start + EACH * PANEL, depth, mask, EACH)
        place = step % STAGES
        mbarrier.wait(full.index(place), (step // STAGES) & 1)
        parts = ()
        for p in gl.static_range(EACH):
            vector = _panel(vectors, start // PANEL + p)
            weights = ring.index(place * EACH + p)
            parts += (warpgroup_mma(weights, vector, zero, use_acc=False, is_async=True),)
        done = warpgroup_mma_wait(num_outstanding=0, deps=parts)
        if EACH == 1:  # of one, no tuple comes back
            parts = (done,)
        else:
            parts = done
        mbarrier.arrive(empty.index(place))
        for p in gl.static_range(EACH):
            index = start // PANEL + p
            of_piece = reinterpret(
                scales.index(index // PANELS), gl.float32, [PANELS, 1, VECTORS], PLAIN
            )
            scale = of_piece.index(index % PANELS).load(ACC)
            sums += parts[p] * (scale * weight_scales[p][:, None])
        weight_scales = following
        step += 1
    return sums, step


@gluon.jit
def fetch_scales(ptr, count):
    """Have `count` scales from `ptr` on near when they are loaded: else a step waits for memory.

    For the loading warp, whose 32 lanes ask for 8 scales each.
    """
    at = gl.arange(0, 32, _LANES) * 8
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L1 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [(ptr + at).to(gl.int64), (at < count).to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def multiply(
    ring, vectors, scales, full, empty, step, depth, ptrs, mask, GROUPED: gl.constexpr
):  # fmt: skip
    """Return sums (64, 8), scaled if GROUPED, and the next step."""
    if GROUPED:
        sums, step = _multiply_scaled(
            ring, vectors, scales, full, empty, step, depth, ptrs, mask
        )  # fmt: skip
    else:
        sums, step = _multiply_plain(ring, vectors, full, empty, step, depth)
    return sums, step


@gluon.jit
def make_ring(dtype: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr):
    """Make a ring of STAGES places of EACH panels, and barriers of its full and empty places."""
    ring = gl.allocate_shared_memory(dtype, [STAGES * EACH, ROWS, PANEL], SWIZZLED)
    full, empty = barriers(STAGES, 1)
    return ring, full, empty


@gluon.jit
def empty_place(step, full, empty):
    """Wait for a place of the ring; it and the barrier that says when it is full."""
    STAGES: gl.constexpr = full.shape[0]
    place = step % STAGES
    mbarrier.wait(empty.index(place), ((step // STAGES) & 1) ^ 1)
    return place, full.index(place)
