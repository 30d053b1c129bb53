"""Grouped GEMM over rows sorted by expert, for sm_90: TMA, wgmma, specialized warps, one wave.

One warp loads: tiles of weights, and of rows that lie in order, arrive in a ring of shared memory
by TMA. Two warpgroups multiply 64 rows each by the same weights, and finish their tile while the
next one is being loaded; rows that lie apart they copy themselves. Results leave by TMA too. A
program serves tile after tile, as many programs as multiprocessors.

A tile's weight rows are two halves, left and right: gate and up rows, or adjacent ones.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from experts.triton.grouped_tma.kernels.gather import (
    copy_step,
    first_step,
    multiply_gathered,
    tokens_of,
)
from experts.triton.kernels.gluon_epilogue import finish
from experts.triton.kernels.gluon_ring import barriers
from modular_kernel.replay.launch.triton_versions import load_box

ROWS = gl.constexpr(64)  # of a warpgroup


@gluon.jit
def tile_at(index, num_m, num_n, GROUP_M: gl.constexpr):
    """(m, n) of a tile: GROUP_M row tiles walk the columns together and share weights.

    Anything past the last tile, but no division by zero.
    """
    per_group = GROUP_M * num_n
    first_m = (index // per_group) * GROUP_M
    group_m = gl.maximum(gl.minimum(num_m - first_m, GROUP_M), 1)  # NaN-free: integers
    within = index % per_group
    return first_m + within % group_m, within // group_m


@gluon.jit
def look_up(index, num_m, num_n, tiles_ptr, max_tiles, GROUP_M: gl.constexpr):
    """Return a tile's expert, first row, the row past the expert's last, and column; no row past
    the last tile. Asked for a tile or two before it is needed, so that nothing waits for it."""
    inside = index < num_m * num_n
    m, n = tile_at(index, num_m, num_n, GROUP_M)
    tile_ptr = tiles_ptr + gl.where(inside, m, 0)
    expert = gl.load(tile_ptr, mask=inside, other=0)
    row = gl.load(tile_ptr + max_tiles, mask=inside, other=0)
    end = gl.load(tile_ptr + 2 * max_tiles, mask=inside, other=0)
    return expert, row, end, n


@gluon.jit
def _named(index, num_m, num_n, named_ptr, stride_named, GROUP_M: gl.constexpr):
    """Return how many slots of adapters a tile's rows name, and where they are; none past the last
    tile."""
    inside = index < num_m * num_n
    m, _ = tile_at(index, num_m, num_n, GROUP_M)
    tile_ptr = named_ptr + gl.where(inside, m, 0) * stride_named
    return gl.load(tile_ptr, mask=inside, other=0), tile_ptr + 1


@gluon.jit
def _load(
    a_desc, b_desc, a_ring, b_ring, full, empty, tiles_ptr, max_tiles, num_n, depth,
    rows_b, right_rows, u_desc, lora_b_desc, named_ptr, stride_named, slot_rows, expert_rows, u_up,
    STRIDE_N: gl.constexpr, GROUP_M: gl.constexpr, GATHERED: gl.constexpr,
    LORA_STEPS: gl.constexpr,
):  # fmt: skip
    """Be the loading warp: fill ring places as they become empty."""
    STAGES: gl.constexpr = b_ring.shape[0]
    BLOCK_K: gl.constexpr = b_ring.shape[2]
    HALF: gl.constexpr = b_desc.block_type.shape[0]
    A_BYTES: gl.constexpr = 0 if GATHERED else a_desc.block_type.nbytes
    BYTES: gl.constexpr = A_BYTES + 2 * b_desc.block_type.nbytes
    num_m = gl.load(tiles_ptr + 3 * max_tiles)
    programs = gl.num_programs(0)
    first = gl.program_id(0)
    expert, row, _, n = look_up(first, num_m, num_n, tiles_ptr, max_tiles, GROUP_M)
    turn = 0
    for index in range(first, num_m * num_n, programs):
        next_expert, next_row, _, next_n = look_up(
            index + programs, num_m, num_n, tiles_ptr, max_tiles, GROUP_M
        )
        row_b = expert * rows_b + n * STRIDE_N
        for start in range(0, depth, BLOCK_K):
            place = turn % STAGES
            mbarrier.wait(empty.index(place), ((turn // STAGES) & 1) ^ 1)
            ready = full.index(place)
            mbarrier.expect(ready, BYTES)
            if not GATHERED:
                load_box(a_desc, [row, start], ready, a_ring.index(place))
            b = b_ring.index(place)
            load_box(b_desc, [row_b, start], ready, b.slice(0, HALF, 0))
            load_box(b_desc, [row_b + right_rows, start], ready, b.slice(HALF, HALF, 0))
            turn += 1
        if LORA_STEPS > 0:
            # More depth: u, times B of each slot in turn. What a box has outside of B is zero: so
            # gate's u meets gate's B alone, and up's, u_up further, up's.
            count, slots_ptr = _named(index, num_m, num_n, named_ptr, stride_named, GROUP_M)
            for step in range(count * LORA_STEPS):
                slot = gl.load(slots_ptr + step // LORA_STEPS)
                column = step % LORA_STEPS * BLOCK_K
                place = turn % STAGES
                mbarrier.wait(empty.index(place), ((turn // STAGES) & 1) ^ 1)
                ready = full.index(place)
                mbarrier.expect(ready, BYTES)
                load_box(u_desc, [row, step * BLOCK_K], ready, a_ring.index(place))
                b = b_ring.index(place)
                row_b = slot * slot_rows + expert * expert_rows + n * STRIDE_N
                load_box(lora_b_desc, [row_b, column], ready, b.slice(0, HALF, 0))
                load_box(
                    lora_b_desc, [row_b + right_rows, column - u_up], ready,
                    b.slice(HALF, HALF, 0),
                )  # fmt: skip
                turn += 1
        expert, row, n = next_expert, next_row, next_n


@gluon.jit
def _multiply_plain(a_ring, b_ring, full, empty, turn, depth, acc, PART: gl.constexpr):
    """Add a tile's product to acc; return it and the next turn."""
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    last = 0
    for start in range(0, depth, BLOCK_K):
        place = turn % STAGES
        mbarrier.wait(full.index(place), (turn // STAGES) & 1)
        a = a_ring.index(place).slice(PART * ROWS, ROWS, 0)
        b = b_ring.index(place).permute((1, 0))
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(empty.index(last), pred=start > 0)
        last = place
        turn += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index(last))
    return acc, turn


@gluon.jit
def _halves(values):
    """Split the left and the right half of the columns; they lie in the same threads."""
    HALF: gl.constexpr = values.shape[1] // 2
    return values.reshape((values.shape[0], 2, HALF)).permute((0, 2, 1)).split()


@gluon.jit
def _begin(a_ring, b_ring, full, turn, zero, PART: gl.constexpr):
    """Begin the product of a turn's step, into accumulators of its own."""
    STAGES: gl.constexpr = a_ring.shape[0]
    place = turn % STAGES
    mbarrier.wait(full.index(place), (turn // STAGES) & 1)
    a = a_ring.index(place).slice(PART * ROWS, ROWS, 0)
    b = b_ring.index(place).permute((1, 0))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def _scales(a_scale_ptrs, b_scale_ptr, right_groups, row_mask):
    """Scales of a step: of the rows, and of the left and the right half's weights."""
    a_scale = gl.load(a_scale_ptrs, mask=row_mask, other=0.0)
    return a_scale, gl.load(b_scale_ptr), gl.load(b_scale_ptr + right_groups)


@gluon.jit
def _add_scaled(left, right, part, a_scale, left_scale, right_scale, LAYOUT: gl.constexpr):
    """Both halves of a step's product, scaled and added to the sums."""
    one, two = _halves(part)
    one = gl.convert_layout(one, LAYOUT, assert_trivial=True)
    two = gl.convert_layout(two, LAYOUT, assert_trivial=True)
    left = left + one * (a_scale * left_scale)[:, None]
    right = right + two * (a_scale * right_scale)[:, None]
    return left, right


@gluon.jit
def _multiply_scaled(
    a_ring, b_ring, full, empty, turn, depth, a_scale_ptrs, b_scale_ptr, right_groups, row_mask,
    PART: gl.constexpr, LAYOUT: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Both halves of a tile's product, scaled step by step into float32 sums, and the next turn.

    One scale for each row and 128 of the depth, at a_scale_ptrs (64,); one for each half's weight
    rows and 128 of the depth. A step is 128 deep. Two steps an iteration: the first one's product
    is added while the second is multiplied, and scales were loaded an iteration before. None is on
    its way from one iteration to the next: the assembler would let every product end at once.
    """
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    HALF: gl.constexpr = b_ring.shape[1] // 2
    left = gl.zeros((ROWS, HALF), gl.float32, LAYOUT)
    right = gl.zeros((ROWS, HALF), gl.float32, LAYOUT)
    zero = gl.zeros((ROWS, 2 * HALF), gl.float32, WIDE)
    steps = gl.cdiv(depth, BLOCK_K)
    odd = steps % 2
    if odd == 1:
        a_scale, left_scale, right_scale = _scales(
            a_scale_ptrs, b_scale_ptr, right_groups, row_mask
        )
        part = _begin(a_ring, b_ring, full, turn, zero, PART)
        part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
        mbarrier.arrive(empty.index(turn % STAGES))
        left, right = _add_scaled(left, right, part, a_scale, left_scale, right_scale, LAYOUT)
        turn += 1
    if steps > 1:
        a_scale_ptrs += odd
        b_scale_ptr += odd
        a0, left0, right0 = _scales(a_scale_ptrs, b_scale_ptr, right_groups, row_mask)
        a1, left1, right1 = _scales(a_scale_ptrs + 1, b_scale_ptr + 1, right_groups, row_mask)
        for pairs in range(steps // 2, 0, -1):
            first = _begin(a_ring, b_ring, full, turn, zero, PART)
            second = _begin(a_ring, b_ring, full, turn + 1, zero, PART)
            ahead = gl.where(pairs > 1, 2, 0)  # no scales lie behind the last ones
            a_scale_ptrs += ahead
            b_scale_ptr += ahead
            a2, left2, right2 = _scales(a_scale_ptrs, b_scale_ptr, right_groups, row_mask)
            a3, left3, right3 = _scales(a_scale_ptrs + 1, b_scale_ptr + 1, right_groups, row_mask)
            part = warpgroup_mma_wait(num_outstanding=1, deps=(first,))
            mbarrier.arrive(empty.index(turn % STAGES))
            left, right = _add_scaled(left, right, part, a0, left0, right0, LAYOUT)
            part = warpgroup_mma_wait(num_outstanding=0, deps=(second,))
            mbarrier.arrive(empty.index((turn + 1) % STAGES))
            left, right = _add_scaled(left, right, part, a1, left1, right1, LAYOUT)
            a0, left0, right0 = a2, left2, right2
            a1, left1, right1 = a3, left3, right3
            turn += 2
    return left, right, turn


@gluon.jit
def _compute(
    a_ring, b_ring, full, empty, tiles_ptr, max_tiles, num_n, depth, rows_b, right_rows,
    x_ptr, stride_x, tokens_ptr,
    out_ptr, out_desc, staging, columns, a_scale_ptr, b_scale_ptr, bias_ptr, a_groups,
    b_scale_rows, b_groups, named_ptr, stride_named, LORA_STEPS: gl.constexpr,
    PART: gl.constexpr, MODE: gl.constexpr, STRIDE_N: gl.constexpr, GROUP_M: gl.constexpr,
    GATHERED: gl.constexpr, EVEN_K: gl.constexpr,
    STEP: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
    KIND: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Be a multiplying warpgroup: rows PART * 64 and on of every tile of this program."""
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    HALF: gl.constexpr = b_ring.shape[1] // 2
    WIDTH: gl.constexpr = 256 // b_ring.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, WIDTH])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * HALF, WIDTH])
    ACC: gl.constexpr = gl.int32 if b_ring.dtype == gl.int8 else gl.float32
    COPIES: gl.constexpr = gl.BlockedLayout([1, BLOCK_K // 8], [4, 8], [4, 1], [1, 0])
    num_m = gl.load(tiles_ptr + 3 * max_tiles)
    programs = gl.num_programs(0)
    first = gl.program_id(0)
    expert, row, end, n = look_up(first, num_m, num_n, tiles_ptr, max_tiles, GROUP_M)
    next_expert, next_row, next_end, next_n = look_up(
        first + programs, num_m, num_n, tiles_ptr, max_tiles, GROUP_M
    )
    if GATHERED:
        tokens = tokens_of(tokens_ptr, row + PART * ROWS, end, ROWS, COPIES)
        ptrs, ptr_mask = first_step(x_ptr, stride_x, tokens, BLOCK_K, COPIES)
        for step in gl.static_range(STAGES - 1):
            copy_step(ptrs, ptr_mask, step, depth, a_ring.index(step), COPIES, EVEN_K)
            ptrs += BLOCK_K
    turn = 0
    for index in range(first, num_m * num_n, programs):
        row += PART * ROWS
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        row_mask = rows < end
        scale_rows = rows
        if MODE == "block":
            group = (n * STRIDE_N) // 128
            b_scales = b_scale_ptr + (expert * b_scale_rows + group).to(gl.int64) * b_groups
            # A last tile's right half may lie past the expert's weights; what it gives is masked.
            # NaN-free: integers
            right_group = gl.minimum((n * STRIDE_N + right_rows) // 128, b_scale_rows - 1)
            left, right, turn = _multiply_scaled(
                a_ring, b_ring, full, empty, turn, depth,
                a_scale_ptr + rows.to(gl.int64) * a_groups, b_scales,
                (right_group - group) * b_groups, row_mask, PART, LAYOUT, WIDE,
            )  # fmt: skip
        else:
            acc = gl.zeros((ROWS, 2 * HALF), ACC, WIDE)
            if GATHERED:
                tokens = tokens_of(tokens_ptr, next_row + PART * ROWS, next_end, ROWS, COPIES)
                scale_rows = tokens_of(tokens_ptr, row, end, ROWS, LAYOUT)
                acc, turn, ptrs, ptr_mask = multiply_gathered(
                    a_ring, b_ring, full, empty, turn, depth, ptrs, ptr_mask, x_ptr, stride_x,
                    tokens, acc, COPIES, EVEN_K,
                )  # fmt: skip
            else:
                deep = depth
                if LORA_STEPS > 0:
                    count, _ = _named(index, num_m, num_n, named_ptr, stride_named, GROUP_M)
                    deep = (gl.cdiv(depth, BLOCK_K) + count * LORA_STEPS) * BLOCK_K
                acc, turn = _multiply_plain(a_ring, b_ring, full, empty, turn, deep, acc, PART)
            left, right = _halves(acc)
            left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
            right = gl.convert_layout(right, LAYOUT, assert_trivial=True)
        later_expert, later_row, later_end, later_n = look_up(
            index + 2 * programs, num_m, num_n, tiles_ptr, max_tiles, GROUP_M
        )
        finish(
            left, right, row, end, out_ptr, out_desc, staging, columns, expert, rows_b, right_rows,
            n * STRIDE_N, a_scale_ptr, scale_rows, b_scale_ptr, bias_ptr,
            MODE, LAYOUT, STEP, GATED, HAS_BIAS, KIND, ALPHA, LIMIT,
        )  # fmt: skip
        expert, row, end, n = next_expert, next_row, next_end, next_n
        next_expert, next_row, next_end, next_n = later_expert, later_row, later_end, later_n
    tma.store_wait(0)
    if GATHERED:
        async_copy.wait_group(0)


@gluon.jit
def grouped_gemm_tma_kernel(
    a_desc, b_desc, out_desc, x_ptr, tokens_ptr, out_ptr, tiles_ptr, a_scale_ptr, b_scale_ptr,
    bias_ptr, max_tiles, columns, depth, rows_b, up_rows, stride_x, a_groups, b_scale_rows,
    b_groups, u_desc, lora_b_desc, named_ptr, stride_named, slot_rows, expert_rows, u_up,
    LORA_STEPS: gl.constexpr,
    MODE: gl.constexpr, STEP: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
    KIND: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    GATHERED: gl.constexpr, EVEN_K: gl.constexpr,
    STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP_M: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out[r, n] = act(a[r] @ b[expert of r, rows of n]^T) for every row r of every tile.

    a_desc: (rows, depth) in boxes of 128 rows and 128 bytes; b_desc: (experts * rows_b, depth) in
    boxes of half a tile's rows; out_desc: (rows, columns) of out, in boxes of 64 rows and as many
    columns as half a tile gives. tiles_ptr: int32, max_tiles experts, first rows and rows past the
    expert's last, then the number of tiles. A tile's halves are gate and up rows, up_rows apart,
    if GATED, otherwise columns side by side. STEP 2: gate and up rows alternate, so the halves
    lie side by side too, and columns are 2 rows apart.
    GATHERED: row r of a is row tokens[r] of x, stride_x times 16 bytes from its predecessor; a_desc
    is not used. Not in MODE "block". EVEN_K: the depth is whole steps of 128 bytes.
    SLOTS: boxes of results that a warpgroup keeps until they are stored, 1 or 2.
    LORA_STEPS: 0, or how many boxes of a slot's B its u needs; in MODE "plain", not GATHERED.
    Then u_desc: (rows, slots * LORA_STEPS boxes) of u of the slots that a tile's rows name, in the
    order of named_ptr: int32, stride_named a tile, how many and which. lora_b_desc: B of all slots,
    slot_rows rows each, of which expert i's begin at i * expert_rows, in boxes as b_desc's. u_up:
    how far up's u lies behind gate's.
    MODE "plain": no scales; "channel": a_scale (rows of a or x,), b_scale (experts, rows_b);
    "block": a_scale (rows, a_groups) and b_scale (experts, b_scale_rows, b_groups), 128 by 128.
    """
    HALF: gl.constexpr = b_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = b_desc.block_type.shape[1]
    STRIDE_N: gl.constexpr = HALF if GATED and STEP == 1 else 2 * HALF
    right_rows = up_rows if GATED and STEP == 1 else HALF
    num_n = gl.cdiv(columns * STEP, STRIDE_N)
    A_ROWS: gl.constexpr = ROWS if GATHERED else 2 * ROWS
    a_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES, A_ROWS, BLOCK_K], b_desc.layout)
    other_ring = a_ring
    if GATHERED:  # one for each warpgroup
        other_ring = gl.allocate_shared_memory(
            b_desc.dtype, [STAGES, A_ROWS, BLOCK_K], b_desc.layout
        )
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 2 * HALF, BLOCK_K], b_desc.layout)
    COLUMNS: gl.constexpr = out_desc.block_type.shape[1]
    staging = gl.allocate_shared_memory(out_desc.dtype, [SLOTS, ROWS, COLUMNS], out_desc.layout)
    other_staging = gl.allocate_shared_memory(
        out_desc.dtype, [SLOTS, ROWS, COLUMNS], out_desc.layout
    )
    full, empty = barriers(STAGES, 2)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_compute, (
                a_ring, b_ring, full, empty, tiles_ptr, max_tiles, num_n, depth, rows_b,
                right_rows, x_ptr, stride_x, tokens_ptr, out_ptr, out_desc, staging, columns,
                a_scale_ptr, b_scale_ptr, bias_ptr, a_groups, b_scale_rows, b_groups, named_ptr,
                stride_named, LORA_STEPS, first, MODE, STRIDE_N, GROUP_M, GATHERED, EVEN_K, STEP,
                GATED, HAS_BIAS, KIND, ALPHA, LIMIT,
            )),
            (_compute, (
                other_ring, b_ring, full, empty, tiles_ptr, max_tiles, num_n, depth, rows_b,
                right_rows, x_ptr, stride_x, tokens_ptr, out_ptr, out_desc, other_staging, columns,
                a_scale_ptr, b_scale_ptr, bias_ptr, a_groups, b_scale_rows, b_groups, named_ptr,
                stride_named, LORA_STEPS, second, MODE, STRIDE_N, GROUP_M, GATHERED, EVEN_K, STEP,
                GATED, HAS_BIAS, KIND, ALPHA, LIMIT,
            )),
            (_load, (
                a_desc, b_desc, a_ring, b_ring, full, empty, tiles_ptr, max_tiles, num_n, depth,
                rows_b, right_rows, u_desc, lora_b_desc, named_ptr, stride_named, slot_rows,
                expert_rows, u_up, STRIDE_N, GROUP_M, GATHERED, LORA_STEPS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
