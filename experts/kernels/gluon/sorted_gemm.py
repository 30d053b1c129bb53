"""Grouped GEMM over rows sorted by expert, for sm_90: TMA, wgmma, specialised warps, one wave.

One warp loads: tiles of rows and of weights arrive in a ring of shared memory by TMA. Two
warpgroups multiply 64 rows each by the same weights. Of a tile with at most 64 rows they take the
same rows and half of the weights each, so that the last tile of an expert costs half. A program
serves tile after tile, as many programs as multiprocessors.

A tile's weight rows are two halves, left and right: gate and up rows, or neighbours. In the ring
they lie by quarters, left, right, left, right, so that half the ring has as much of either.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from experts.kernels.gluon.finish import finish

ROWS = gl.constexpr(64)  # of a warpgroup


@gluon.jit
def tile_at(index, num_m, num_n, GROUP_M: gl.constexpr):
    """(m, n) of a tile: GROUP_M row tiles walk the columns together and share weights."""
    per_group = GROUP_M * num_n
    first_m = (index // per_group) * GROUP_M
    group_m = gl.minimum(num_m - first_m, GROUP_M)
    within = index % per_group
    return first_m + within % group_m, within // group_m


@gluon.jit
def _load(
    a_desc, b_desc, a_ring, b_ring, full, empty, tiles_ptr, max_tiles, num_n, depth,
    rows_b, right_rows, STRIDE_N: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The loading warp: fills ring places as they become empty."""
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    QUARTER: gl.constexpr = b_desc.block_type.shape[0]
    BYTES: gl.constexpr = a_desc.block_type.nbytes + 4 * b_desc.block_type.nbytes
    num_m = gl.load(tiles_ptr + 3 * max_tiles)
    step = 0
    for index in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m, n = tile_at(index, num_m, num_n, GROUP_M)
        expert = gl.load(tiles_ptr + m)
        row = gl.load(tiles_ptr + max_tiles + m)
        first = expert * rows_b + n * STRIDE_N
        for start in range(0, depth, BLOCK_K):
            place = step % STAGES
            mbarrier.wait(empty.index(place), ((step // STAGES) & 1) ^ 1)
            ready = full.index(place)
            mbarrier.expect(ready, BYTES)
            tma.async_copy_global_to_shared(a_desc, [row, start], ready, a_ring.index(place))
            b = b_ring.index(place)
            for quarter in gl.static_range(4):
                b_row = first + (quarter % 2) * right_rows + (quarter // 2) * QUARTER
                part = b.slice(quarter * QUARTER, QUARTER, 0)
                tma.async_copy_global_to_shared(b_desc, [b_row, start], ready, part)
            step += 1


@gluon.jit
def _operands(a_ring, b_ring, place, PART: gl.constexpr, SPLIT: gl.constexpr):
    """This warpgroup's rows and, transposed, its weights: half of them if SPLIT."""
    WIDTH: gl.constexpr = b_ring.shape[1] // 2 if SPLIT else b_ring.shape[1]
    a_row: gl.constexpr = 0 if SPLIT else PART * ROWS
    b_row: gl.constexpr = PART * WIDTH if SPLIT else 0
    a = a_ring.index(place).slice(a_row, ROWS, 0)
    b = b_ring.index(place).slice(b_row, WIDTH, 0)
    return a, b.permute((1, 0))


@gluon.jit
def _halves(values, LAYOUT: gl.constexpr, SPLIT: gl.constexpr):
    """The left and the right columns in their order; they lie in the same threads."""
    PAIRS: gl.constexpr = 1 if SPLIT else 2
    QUARTER: gl.constexpr = values.shape[1] // (2 * PAIRS)
    quarters = values.reshape((ROWS, PAIRS, 2, QUARTER)).permute((0, 1, 3, 2))
    left, right = quarters.split()
    left = left.reshape((ROWS, PAIRS * QUARTER))
    right = right.reshape((ROWS, PAIRS * QUARTER))
    left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
    return left, gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def _multiply_plain(
    a_ring, b_ring, full, empty, step, depth,
    PART: gl.constexpr, SPLIT: gl.constexpr, ACC: gl.constexpr, LAYOUT: gl.constexpr,
    WIDE: gl.constexpr,
):  # fmt: skip
    """Left and right columns, unscaled, and the next step."""
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    WIDTH: gl.constexpr = b_ring.shape[1] // 2 if SPLIT else b_ring.shape[1]
    acc = gl.zeros((ROWS, WIDTH), ACC, WIDE)
    last = 0
    for start in range(0, depth, BLOCK_K):
        place = step % STAGES
        mbarrier.wait(full.index(place), (step // STAGES) & 1)
        a, b = _operands(a_ring, b_ring, place, PART, SPLIT)
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(empty.index(last), pred=start > 0)
        last = place
        step += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index(last))
    left, right = _halves(acc, LAYOUT, SPLIT)
    return left, right, step


@gluon.jit
def _multiply_scaled(
    a_ring, b_ring, full, empty, step, depth, a_scale_ptrs, b_scale_ptr, right_groups, row_mask,
    PART: gl.constexpr, SPLIT: gl.constexpr, LAYOUT: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """As _multiply_plain, each step's product scaled on its way into float32 sums.

    One scale for each row and 128 of the depth, at a_scale_ptrs (64,); one for the left and one
    for the right weight rows and 128 of the depth. A step is 128 deep.
    """
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    WIDTH: gl.constexpr = b_ring.shape[1] // 2 if SPLIT else b_ring.shape[1]
    left = gl.zeros((ROWS, WIDTH // 2), gl.float32, LAYOUT)
    right = gl.zeros((ROWS, WIDTH // 2), gl.float32, LAYOUT)
    zero = gl.zeros((ROWS, WIDTH), gl.float32, WIDE)
    for _ in range(0, depth, BLOCK_K):
        a_scale = gl.load(a_scale_ptrs, mask=row_mask, other=0.0)
        left_scale = gl.load(b_scale_ptr)
        right_scale = gl.load(b_scale_ptr + right_groups)
        place = step % STAGES
        mbarrier.wait(full.index(place), (step // STAGES) & 1)
        a, b = _operands(a_ring, b_ring, place, PART, SPLIT)
        part = warpgroup_mma(a, b, zero, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
        mbarrier.arrive(empty.index(place))
        one, two = _halves(part, LAYOUT, SPLIT)
        left = left + one * (a_scale * left_scale)[:, None]
        right = right + two * (a_scale * right_scale)[:, None]
        a_scale_ptrs += 1
        b_scale_ptr += 1
        step += 1
    return left, right, step


@gluon.jit
def _serve(
    a_ring, b_ring, full, empty, step, depth, expert, row, end, first, right_rows, rows_b,
    out_ptr, columns, a_scale_ptr, b_scale_ptr, bias_ptr, a_groups, b_scale_rows, b_groups,
    PART: gl.constexpr, SPLIT: gl.constexpr, MODE: gl.constexpr, STEP: gl.constexpr,
    GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
    KIND: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """This warpgroup's share of one tile, to the end. Returns the next step."""
    BITS: gl.constexpr = a_ring.dtype.primitive_bitwidth
    ACC: gl.constexpr = gl.int32 if a_ring.dtype == gl.int8 else gl.float32
    WIDTH: gl.constexpr = b_ring.shape[1] // 2 if SPLIT else b_ring.shape[1]
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 256 // BITS])
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH // 2, 256 // BITS])
    if SPLIT:
        first += PART * (WIDTH // 2)
    else:
        row += PART * ROWS
    if MODE == "block":
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        group = first // 128
        left, right, step = _multiply_scaled(
            a_ring, b_ring, full, empty, step, depth,
            a_scale_ptr + rows.to(gl.int64) * a_groups,
            b_scale_ptr + (expert * b_scale_rows + group).to(gl.int64) * b_groups,
            ((first + right_rows) // 128 - group) * b_groups, rows < end,
            PART, SPLIT, LAYOUT, WIDE,
        )  # fmt: skip
    else:
        left, right, step = _multiply_plain(
            a_ring, b_ring, full, empty, step, depth, PART, SPLIT, ACC, LAYOUT, WIDE
        )
    finish(
        left, right, row, end, out_ptr, columns, expert, rows_b, right_rows, first,
        a_scale_ptr, b_scale_ptr, bias_ptr, MODE, LAYOUT, STEP, GATED, HAS_BIAS,
        KIND, ALPHA, LIMIT,
    )  # fmt: skip
    return step


@gluon.jit
def _compute(
    a_ring, b_ring, full, empty, tiles_ptr, max_tiles, num_n, depth, rows_b, right_rows,
    out_ptr, columns, a_scale_ptr, b_scale_ptr, bias_ptr, a_groups, b_scale_rows, b_groups,
    PART: gl.constexpr, MODE: gl.constexpr, STRIDE_N: gl.constexpr, GROUP_M: gl.constexpr,
    STEP: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
    KIND: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup, the first or the second as PART says: its share of every tile."""
    num_m = gl.load(tiles_ptr + 3 * max_tiles)
    step = 0
    for index in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m, n = tile_at(index, num_m, num_n, GROUP_M)
        expert = gl.load(tiles_ptr + m)
        row = gl.load(tiles_ptr + max_tiles + m)
        end = gl.load(tiles_ptr + 2 * max_tiles + m)
        if end - row > ROWS:
            step = _serve(
                a_ring, b_ring, full, empty, step, depth, expert, row, end, n * STRIDE_N,
                right_rows, rows_b, out_ptr, columns, a_scale_ptr, b_scale_ptr, bias_ptr,
                a_groups, b_scale_rows, b_groups, PART, False, MODE, STEP, GATED, HAS_BIAS,
                KIND, ALPHA, LIMIT,
            )  # fmt: skip
        else:
            step = _serve(
                a_ring, b_ring, full, empty, step, depth, expert, row, end, n * STRIDE_N,
                right_rows, rows_b, out_ptr, columns, a_scale_ptr, b_scale_ptr, bias_ptr,
                a_groups, b_scale_rows, b_groups, PART, True, MODE, STEP, GATED, HAS_BIAS,
                KIND, ALPHA, LIMIT,
            )  # fmt: skip


@gluon.jit
def sorted_gemm_kernel(
    a_desc, b_desc, out_ptr, tiles_ptr, a_scale_ptr, b_scale_ptr, bias_ptr,
    max_tiles, columns, depth, rows_b, up_rows, a_groups, b_scale_rows, b_groups,
    MODE: gl.constexpr, STEP: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
    KIND: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out[r, n] = act(a[r] @ b[expert of r, rows of n]^T) for every row r of every tile.

    a_desc: (rows, depth) in boxes of 128 rows and 128 bytes; b_desc: (experts * rows_b, depth) in
    boxes of a quarter of a tile's rows. tiles_ptr: int32, max_tiles experts, first rows and rows
    past the expert's last, then the number of tiles. A tile's halves are gate and up rows, up_rows
    apart, if GATED, otherwise columns side by side. STEP 2: gate and up rows alternate, so the
    halves lie side by side too, and columns are 2 rows apart.
    MODE "plain": no scales; "channel": a_scale (rows,), b_scale (experts, rows_b); "block":
    a_scale (rows, a_groups) and b_scale (experts, b_scale_rows, b_groups), 128 by 128.
    """
    HALF: gl.constexpr = 2 * b_desc.block_type.shape[0]
    STRIDE_N: gl.constexpr = HALF if GATED and STEP == 1 else 2 * HALF
    right_rows = up_rows if GATED and STEP == 1 else HALF
    num_n = gl.cdiv(columns * STEP, STRIDE_N)
    a_ring = gl.allocate_shared_memory(
        a_desc.dtype,
        [STAGES, a_desc.block_type.shape[0], a_desc.block_type.shape[1]],
        a_desc.layout,
    )
    b_ring = gl.allocate_shared_memory(
        b_desc.dtype, [STAGES, 2 * HALF, b_desc.block_type.shape[1]], b_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=2)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_compute, (
                a_ring, b_ring, full, empty, tiles_ptr, max_tiles, num_n, depth, rows_b,
                right_rows, out_ptr, columns, a_scale_ptr, b_scale_ptr, bias_ptr, a_groups,
                b_scale_rows, b_groups, first, MODE, STRIDE_N, GROUP_M, STEP, GATED, HAS_BIAS,
                KIND, ALPHA, LIMIT,
            )),
            (_compute, (
                a_ring, b_ring, full, empty, tiles_ptr, max_tiles, num_n, depth, rows_b,
                right_rows, out_ptr, columns, a_scale_ptr, b_scale_ptr, bias_ptr, a_groups,
                b_scale_rows, b_groups, second, MODE, STRIDE_N, GROUP_M, STEP, GATED, HAS_BIAS,
                KIND, ALPHA, LIMIT,
            )),
            (_load, (
                a_desc, b_desc, a_ring, b_ring, full, empty, tiles_ptr, max_tiles, num_n, depth,
                rows_b, right_rows, STRIDE_N, GROUP_M,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
