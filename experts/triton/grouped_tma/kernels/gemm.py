"""`grouped_gemm_tma_kernel`: a persistent, warp-specialized grouped GEMM for sm_90.

The activation rows are sorted by expert. There is one program per SM, which loops over tiles of 128
rows of one expert. A producer warp loads weights and activations with TMA into a ring in shared
memory. If rows must be gathered, the consumer warpgroups copy the activations instead (`gather`).
Two consumer warpgroups multiply 64 rows each by the same weights. They apply the epilogue to a tile
while the next tile is being loaded, and store the results with TMA.

The weight rows of a tile form a left half and a right half: gate rows and up rows, or adjacent
rows.
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
    gather_pointers,
    load_tokens,
    multiply_gathered,
)
from experts.triton.kernels.gluon_epilogue import finish_tile
from experts.triton.kernels.gluon_ring import allocate_barriers
from modular_kernel.replay.launch.triton_versions import tma_async_load

ROWS = gl.constexpr(64)  # activation rows per consumer warpgroup


@gluon.jit
def tile_at(index, num_m_tiles, num_n_tiles, GROUP_M: gl.constexpr):
    """Return (row tile, column tile) of the tile with number `index`.

    A group of GROUP_M row tiles is computed for one column tile, then for the next, so that the row
    tiles share weight tiles in the L2 cache. Past the last tile, the result is arbitrary, but there
    is no division by zero.
    """
    tiles_per_group = GROUP_M * num_n_tiles
    first_m = (index // tiles_per_group) * GROUP_M
    # NaN-free: integer operands
    group_m = gl.maximum(gl.minimum(num_m_tiles - first_m, GROUP_M), 1)
    index_in_group = index % tiles_per_group
    return first_m + index_in_group % group_m, index_in_group // group_m


@gluon.jit
def load_tile_info(index, num_m_tiles, num_n_tiles, tiles_ptr, max_tiles, GROUP_M: gl.constexpr):
    """Return (expert, first row, end of the expert's rows, column tile) of tile number `index`.

    Past the last tile, the first row and the end are 0. The function is called one or two tiles
    ahead to hide the latency of its loads.
    """
    in_bounds = index < num_m_tiles * num_n_tiles
    m_tile, n_tile = tile_at(index, num_m_tiles, num_n_tiles, GROUP_M)
    tile_ptr = tiles_ptr + gl.where(in_bounds, m_tile, 0)
    expert = gl.load(tile_ptr, mask=in_bounds, other=0)
    row = gl.load(tile_ptr + max_tiles, mask=in_bounds, other=0)
    end = gl.load(tile_ptr + 2 * max_tiles, mask=in_bounds, other=0)
    return expert, row, end, n_tile


@gluon.jit
def _load_tile_adapter_slots(
    index, num_m_tiles, num_n_tiles, tile_slots_ptr, stride_tile_slots, GROUP_M: gl.constexpr
):
    """Return the number of adapter slots in a tile, 0 past the last tile, and a pointer to them."""
    in_bounds = index < num_m_tiles * num_n_tiles
    m_tile, _ = tile_at(index, num_m_tiles, num_n_tiles, GROUP_M)
    tile_ptr = tile_slots_ptr + gl.where(in_bounds, m_tile, 0) * stride_tile_slots
    return gl.load(tile_ptr, mask=in_bounds, other=0), tile_ptr + 1


@gluon.jit
def _run_producer(
    a_desc, b_desc, a_ring, b_ring, full, empty, tiles_ptr, max_tiles, num_n_tiles, size_k,
    weight_rows, right_row_offset, lora_u_desc, lora_b_desc, tile_slots_ptr, stride_tile_slots,
    lora_b_slot_rows,
    lora_b_expert_rows, lora_up_offset,
    TILE_STRIDE_N: gl.constexpr, GROUP_M: gl.constexpr, GATHER_TOKENS: gl.constexpr,
    LORA_STEPS: gl.constexpr,
):  # fmt: skip
    """Run the producer warp: load every K step of every tile of this program into the ring.

    The arguments are those of the kernel.
    """
    STAGES: gl.constexpr = b_ring.shape[0]
    BLOCK_K: gl.constexpr = b_ring.shape[2]
    HALF_ROWS: gl.constexpr = b_desc.block_type.shape[0]
    A_BYTES: gl.constexpr = 0 if GATHER_TOKENS else a_desc.block_type.nbytes
    BYTES: gl.constexpr = A_BYTES + 2 * b_desc.block_type.nbytes
    num_m_tiles = gl.load(tiles_ptr + 3 * max_tiles)
    num_programs = gl.num_programs(0)
    first_tile_index = gl.program_id(0)
    expert, row, _, n_tile = load_tile_info(
        first_tile_index, num_m_tiles, num_n_tiles, tiles_ptr, max_tiles, GROUP_M
    )
    iteration = 0
    for index in range(first_tile_index, num_m_tiles * num_n_tiles, num_programs):
        next_expert, next_row, _, next_n_tile = load_tile_info(
            index + num_programs, num_m_tiles, num_n_tiles, tiles_ptr, max_tiles, GROUP_M
        )
        weight_row = expert * weight_rows + n_tile * TILE_STRIDE_N
        for start in range(0, size_k, BLOCK_K):
            stage = iteration % STAGES
            mbarrier.wait(empty.index(stage), ((iteration // STAGES) & 1) ^ 1)
            full_barrier = full.index(stage)
            mbarrier.expect(full_barrier, BYTES)
            if not GATHER_TOKENS:
                tma_async_load(a_desc, [row, start], full_barrier, a_ring.index(stage))
            b = b_ring.index(stage)
            tma_async_load(b_desc, [weight_row, start], full_barrier, b.slice(0, HALF_ROWS, 0))
            tma_async_load(
                b_desc,
                [weight_row + right_row_offset, start],
                full_barrier,
                b.slice(HALF_ROWS, HALF_ROWS, 0),
            )
            iteration += 1
        if LORA_STEPS > 0:
            # Extra K steps add u times B of each slot. Within a slot, the columns of u for up start
            # at lora_up_offset. Elements of a box outside B are zero, so the columns for gate are
            # multiplied only by B of gate, and the columns for up only by B of up.
            num_slots, adapter_slots_ptr = _load_tile_adapter_slots(
                index, num_m_tiles, num_n_tiles, tile_slots_ptr, stride_tile_slots, GROUP_M
            )
            for step in range(num_slots * LORA_STEPS):
                slot = gl.load(adapter_slots_ptr + step // LORA_STEPS)
                column = step % LORA_STEPS * BLOCK_K
                stage = iteration % STAGES
                mbarrier.wait(empty.index(stage), ((iteration // STAGES) & 1) ^ 1)
                full_barrier = full.index(stage)
                mbarrier.expect(full_barrier, BYTES)
                tma_async_load(
                    lora_u_desc, [row, step * BLOCK_K], full_barrier, a_ring.index(stage)
                )
                b = b_ring.index(stage)
                weight_row = (
                    slot * lora_b_slot_rows + expert * lora_b_expert_rows + n_tile * TILE_STRIDE_N
                )
                tma_async_load(
                    lora_b_desc, [weight_row, column], full_barrier, b.slice(0, HALF_ROWS, 0)
                )
                tma_async_load(
                    lora_b_desc, [weight_row + right_row_offset, column - lora_up_offset],
                    full_barrier,
                    b.slice(HALF_ROWS, HALF_ROWS, 0),
                )  # fmt: skip
                iteration += 1
        expert, row, n_tile = next_expert, next_row, next_n_tile


@gluon.jit
def _multiply_plain(a_ring, b_ring, full, empty, iteration, size_k, acc, WARPGROUP: gl.constexpr):
    """Multiply a tile of size_k elements along K into acc; return (acc, the next iteration).

    iteration: number of K steps that this warpgroup has multiplied since the start of the kernel.
    WARPGROUP: the consumer warpgroup, 0 or 1, which multiplies 64 rows from row WARPGROUP * 64 on.
    """
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    previous_stage = 0
    for start in range(0, size_k, BLOCK_K):
        stage = iteration % STAGES
        mbarrier.wait(full.index(stage), (iteration // STAGES) & 1)
        a = a_ring.index(stage).slice(WARPGROUP * ROWS, ROWS, 0)
        b = b_ring.index(stage).permute((1, 0))
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(empty.index(previous_stage), pred=start > 0)
        previous_stage = stage
        iteration += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index(previous_stage))
    return acc, iteration


@gluon.jit
def _split_halves(values):
    """Split the columns of `values` into the left and the right half."""
    HALF_ROWS: gl.constexpr = values.shape[1] // 2
    return values.reshape((values.shape[0], 2, HALF_ROWS)).permute((0, 2, 1)).split()


@gluon.jit
def _start_wgmma(a_ring, b_ring, full, iteration, zero, WARPGROUP: gl.constexpr):
    """Start the wgmma of one K step with a new accumulator; return the accumulator.

    zero: a tensor of zeros with the layout of the accumulator.
    """
    STAGES: gl.constexpr = a_ring.shape[0]
    stage = iteration % STAGES
    mbarrier.wait(full.index(stage), (iteration // STAGES) & 1)
    a = a_ring.index(stage).slice(WARPGROUP * ROWS, ROWS, 0)
    b = b_ring.index(stage).permute((1, 0))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def _load_scales(a_scale_ptrs, b_scale_ptr, right_groups, row_mask):
    """Load the scales of one K step: activation rows, left weight rows, right weight rows."""
    a_scale = gl.load(a_scale_ptrs, mask=row_mask, other=0.0)
    return a_scale, gl.load(b_scale_ptr), gl.load(b_scale_ptr + right_groups)


@gluon.jit
def _add_scaled(left, right, part, a_scale, left_scale, right_scale, HALF_LAYOUT: gl.constexpr):
    """Multiply both halves of a partial sum by their scales and add them to left and right.

    a_scale: (64,), the scales of the activation rows.
    left_scale, right_scale: the scale of the weight rows of each half.
    """
    left_part, right_part = _split_halves(part)
    left_part = gl.convert_layout(left_part, HALF_LAYOUT, assert_trivial=True)
    right_part = gl.convert_layout(right_part, HALF_LAYOUT, assert_trivial=True)
    left = left + left_part * (a_scale * left_scale)[:, None]
    right = right + right_part * (a_scale * right_scale)[:, None]
    return left, right


@gluon.jit
def _multiply_scaled(
    a_ring, b_ring, full, empty, iteration, size_k, a_scale_ptrs, b_scale_ptr, right_groups,
    row_mask,
    WARPGROUP: gl.constexpr, HALF_LAYOUT: gl.constexpr, ACC_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Multiply a tile whose weights have one scale per 128 x 128 block.

    Return (left half, right half, next iteration). The halves are float32 (64, weight rows per
    half). A K step is 128 elements. In each step, every activation row has one scale, and the left
    and the right weight rows have one scale each. The loop is unrolled by two, so that the partial
    sum of the first step is scaled while the second step is multiplied. Scales are loaded one
    iteration ahead. No wgmma stays in flight across iterations, because ptxas would otherwise
    serialize all wgmmas.

    a_scale_ptrs: (64,), pointers to the scales of the activation rows in the first step.
    b_scale_ptr: pointer to the scale of the left weight rows in the first step.
    right_groups: offset from b_scale_ptr to the scale of the right weight rows.
    row_mask: (64,), False for rows that do not exist.
    HALF_LAYOUT, ACC_LAYOUT: layouts of a half, and of the accumulator of both halves.
    """
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    HALF_ROWS: gl.constexpr = b_ring.shape[1] // 2
    left = gl.zeros((ROWS, HALF_ROWS), gl.float32, HALF_LAYOUT)
    right = gl.zeros((ROWS, HALF_ROWS), gl.float32, HALF_LAYOUT)
    zero = gl.zeros((ROWS, 2 * HALF_ROWS), gl.float32, ACC_LAYOUT)
    steps = gl.cdiv(size_k, BLOCK_K)
    remainder = steps % 2
    if remainder == 1:
        a_scale, left_scale, right_scale = _load_scales(
            a_scale_ptrs, b_scale_ptr, right_groups, row_mask
        )
        part = _start_wgmma(a_ring, b_ring, full, iteration, zero, WARPGROUP)
        part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
        mbarrier.arrive(empty.index(iteration % STAGES))
        left, right = _add_scaled(left, right, part, a_scale, left_scale, right_scale, HALF_LAYOUT)
        iteration += 1
    if steps > 1:
        a_scale_ptrs += remainder
        b_scale_ptr += remainder
        a0, left0, right0 = _load_scales(a_scale_ptrs, b_scale_ptr, right_groups, row_mask)
        a1, left1, right1 = _load_scales(a_scale_ptrs + 1, b_scale_ptr + 1, right_groups, row_mask)
        for remaining_pairs in range(steps // 2, 0, -1):
            first_part = _start_wgmma(a_ring, b_ring, full, iteration, zero, WARPGROUP)
            second_part = _start_wgmma(a_ring, b_ring, full, iteration + 1, zero, WARPGROUP)
            advance = gl.where(remaining_pairs > 1, 2, 0)  # do not read past the last scales
            a_scale_ptrs += advance
            b_scale_ptr += advance
            a2, left2, right2 = _load_scales(a_scale_ptrs, b_scale_ptr, right_groups, row_mask)
            a3, left3, right3 = _load_scales(
                a_scale_ptrs + 1, b_scale_ptr + 1, right_groups, row_mask
            )
            part = warpgroup_mma_wait(num_outstanding=1, deps=(first_part,))
            mbarrier.arrive(empty.index(iteration % STAGES))
            left, right = _add_scaled(left, right, part, a0, left0, right0, HALF_LAYOUT)
            part = warpgroup_mma_wait(num_outstanding=0, deps=(second_part,))
            mbarrier.arrive(empty.index((iteration + 1) % STAGES))
            left, right = _add_scaled(left, right, part, a1, left1, right1, HALF_LAYOUT)
            a0, left0, right0 = a2, left2, right2
            a1, left1, right1 = a3, left3, right3
            iteration += 2
    return left, right, iteration


@gluon.jit
def _run_consumer(
    a_ring, b_ring, full, empty, tiles_ptr, max_tiles, num_n_tiles, size_k, weight_rows,
    right_row_offset,
    x_ptr, stride_x_in_copies, tokens_ptr,
    out_ptr, out_desc, staging, size_n, a_scale_ptr, b_scale_ptr, bias_ptr, a_groups,
    b_scale_rows, b_groups, tile_slots_ptr, stride_tile_slots, LORA_STEPS: gl.constexpr,
    WARPGROUP: gl.constexpr, SCALE_MODE: gl.constexpr, TILE_STRIDE_N: gl.constexpr,
    GROUP_M: gl.constexpr,
    GATHER_TOKENS: gl.constexpr, EVEN_K: gl.constexpr,
    GATE_STRIDE: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, ACTIVATION_ALPHA: gl.constexpr, ACTIVATION_LIMIT: gl.constexpr,
):  # fmt: skip
    """Run one consumer warpgroup: multiply, finish and store 64 rows of every tile of this program.

    The rows of warpgroup WARPGROUP start at row WARPGROUP * 64 of the tile. The other arguments are
    those of the kernel.
    """
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    HALF_ROWS: gl.constexpr = b_ring.shape[1] // 2
    MMA_K: gl.constexpr = 256 // b_ring.dtype.primitive_bitwidth
    HALF_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_ROWS, MMA_K])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * HALF_ROWS, MMA_K])
    ACC_DTYPE: gl.constexpr = gl.int32 if b_ring.dtype == gl.int8 else gl.float32
    COPY_LAYOUT: gl.constexpr = gl.BlockedLayout([1, BLOCK_K // 8], [4, 8], [4, 1], [1, 0])
    num_m_tiles = gl.load(tiles_ptr + 3 * max_tiles)
    num_programs = gl.num_programs(0)
    first_tile_index = gl.program_id(0)
    expert, row, end, n_tile = load_tile_info(
        first_tile_index, num_m_tiles, num_n_tiles, tiles_ptr, max_tiles, GROUP_M
    )
    next_expert, next_row, next_end, next_n_tile = load_tile_info(
        first_tile_index + num_programs, num_m_tiles, num_n_tiles, tiles_ptr, max_tiles, GROUP_M
    )
    if GATHER_TOKENS:
        tokens = load_tokens(tokens_ptr, row + WARPGROUP * ROWS, end, ROWS, COPY_LAYOUT)
        ptrs, ptr_mask = gather_pointers(x_ptr, stride_x_in_copies, tokens, BLOCK_K, COPY_LAYOUT)
        for step in gl.static_range(STAGES - 1):
            copy_step(ptrs, ptr_mask, step, size_k, a_ring.index(step), COPY_LAYOUT, EVEN_K)
            ptrs += BLOCK_K
    iteration = 0
    for index in range(first_tile_index, num_m_tiles * num_n_tiles, num_programs):
        row += WARPGROUP * ROWS
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, HALF_LAYOUT))
        row_mask = rows < end
        scale_rows = rows
        if SCALE_MODE == "block":
            group = (n_tile * TILE_STRIDE_N) // 128
            b_scales = b_scale_ptr + (expert * b_scale_rows + group).to(gl.int64) * b_groups
            # The right half of the last tile may be past the end of the weights. It is masked
            # later.
            # NaN-free: integer operands
            right_group = gl.minimum(
                (n_tile * TILE_STRIDE_N + right_row_offset) // 128, b_scale_rows - 1
            )
            left, right, iteration = _multiply_scaled(
                a_ring, b_ring, full, empty, iteration, size_k,
                a_scale_ptr + rows.to(gl.int64) * a_groups, b_scales,
                (right_group - group) * b_groups, row_mask, WARPGROUP, HALF_LAYOUT, ACC_LAYOUT,
            )  # fmt: skip
        else:
            acc = gl.zeros((ROWS, 2 * HALF_ROWS), ACC_DTYPE, ACC_LAYOUT)
            if GATHER_TOKENS:
                tokens = load_tokens(
                    tokens_ptr, next_row + WARPGROUP * ROWS, next_end, ROWS, COPY_LAYOUT
                )
                scale_rows = load_tokens(tokens_ptr, row, end, ROWS, HALF_LAYOUT)
                acc, iteration, ptrs, ptr_mask = multiply_gathered(
                    a_ring, b_ring, full, empty, iteration, size_k, ptrs, ptr_mask, x_ptr,
                    stride_x_in_copies,
                    tokens, acc, COPY_LAYOUT, EVEN_K,
                )  # fmt: skip
            else:
                total_depth = size_k
                if LORA_STEPS > 0:
                    num_slots, _ = _load_tile_adapter_slots(
                        index, num_m_tiles, num_n_tiles, tile_slots_ptr, stride_tile_slots, GROUP_M
                    )
                    total_depth = (gl.cdiv(size_k, BLOCK_K) + num_slots * LORA_STEPS) * BLOCK_K
                acc, iteration = _multiply_plain(
                    a_ring, b_ring, full, empty, iteration, total_depth, acc, WARPGROUP
                )
            left, right = _split_halves(acc)
            left = gl.convert_layout(left, HALF_LAYOUT, assert_trivial=True)
            right = gl.convert_layout(right, HALF_LAYOUT, assert_trivial=True)
        after_next_expert, after_next_row, after_next_end, after_next_n_tile = load_tile_info(
            index + 2 * num_programs, num_m_tiles, num_n_tiles, tiles_ptr, max_tiles, GROUP_M
        )
        finish_tile(
            left, right, row, end, out_ptr, out_desc, staging, size_n, expert, weight_rows,
            right_row_offset,
            n_tile * TILE_STRIDE_N, a_scale_ptr, scale_rows, b_scale_ptr, bias_ptr,
            SCALE_MODE, HALF_LAYOUT, GATE_STRIDE, GATED, HAS_BIAS, ACTIVATION, ACTIVATION_ALPHA,
            ACTIVATION_LIMIT,
        )  # fmt: skip
        expert, row, end, n_tile = next_expert, next_row, next_end, next_n_tile
        next_expert, next_row, next_end, next_n_tile = (
            after_next_expert,
            after_next_row,
            after_next_end,
            after_next_n_tile,
        )
    tma.store_wait(0)
    if GATHER_TOKENS:
        async_copy.wait_group(0)


@gluon.jit
def grouped_gemm_tma_kernel(
    a_desc, b_desc, out_desc, x_ptr, tokens_ptr, out_ptr, tiles_ptr, a_scale_ptr, b_scale_ptr,
    bias_ptr, max_tiles, size_n, size_k, weight_rows, up_row_offset, stride_x_in_copies, a_groups,
    b_scale_rows,
    b_groups, lora_u_desc, lora_b_desc, tile_slots_ptr, stride_tile_slots, lora_b_slot_rows,
    lora_b_expert_rows, lora_up_offset,
    LORA_STEPS: gl.constexpr,
    SCALE_MODE: gl.constexpr, GATE_STRIDE: gl.constexpr, GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, ACTIVATION_ALPHA: gl.constexpr, ACTIVATION_LIMIT: gl.constexpr,
    GATHER_TOKENS: gl.constexpr, EVEN_K: gl.constexpr,
    STAGES: gl.constexpr, STAGING_BUFFERS: gl.constexpr, GROUP_M: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """out[r, n] = act(a[r] @ b[expert of r, rows of n]^T) for every row r of every tile.

    Grid: (number of SMs,). A tile is 128 rows of one expert by two halves of weight rows.

    a_desc: TMA descriptor of the activations (rows, K), with boxes of 128 rows and 128 bytes. Not
        used if GATHER_TOKENS.
    b_desc: TMA descriptor of the weights (num_experts * weight_rows, K), with boxes of half the
        weight rows of a tile and 128 bytes. Output column n uses weight row n * GATE_STRIDE of its
        expert and, if GATED, also row n * GATE_STRIDE + up_row_offset for up.
    out_desc: TMA descriptor of the output (rows, N), with boxes of 64 rows and the output columns
        of half a tile.
    x_ptr: activations (num_tokens, K), used if GATHER_TOKENS.
    tokens_ptr: (rows,) int32, the token of each row, used if GATHER_TOKENS.
    out_ptr: the output, as in out_desc.
    tiles_ptr: `modular_kernel.ops.sort.SortedPairs.tiles`. Three int32 arrays of max_tiles values
        have, for each row tile, the expert, the first row, and the end of the expert's rows. The
        number of row tiles follows.
    a_scale_ptr, b_scale_ptr: scales of activations and weights; see SCALE_MODE.
    bias_ptr: (num_experts, weight_rows), used if HAS_BIAS.
    size_n: N, the number of output columns.
    size_k: K.
    weight_rows: number of weight rows of each expert.
    up_row_offset: offset in weight rows from the gate row to the up row of a column.
    stride_x_in_copies: stride of the rows of x, in units of 16 bytes.
    a_groups, b_groups: scale groups along K of activations and weights.
    b_scale_rows: number of rows of weight scales of each expert.
    lora_u_desc: TMA descriptor of the shrink output u (rows, num slots * LORA_STEPS boxes), with
        columns for every adapter slot of a row's tile (`shrink`).
    lora_b_desc: TMA descriptor of the LoRA matrices B of all slots, with boxes as in b_desc. A slot
        has lora_b_slot_rows rows. The rows of expert i start at row i * lora_b_expert_rows of the
        slot.
    tile_slots_ptr: int32, stride_tile_slots values per tile: the number of adapter slots in the
        tile, then the slots.
    lora_up_offset: the first column for up among the columns of a slot.
    LORA_STEPS: K steps of u per adapter slot; 0 without LoRA. LoRA requires SCALE_MODE "plain" and
        not GATHER_TOKENS.
    SCALE_MODE: the scales:
        "plain": there are no scales.
        "channel": a_scale has one scale per row of a or x, and b_scale is (num_experts,
            weight_rows).
        "block": a_scale is (rows, a_groups), and b_scale is (num_experts, b_scale_rows, b_groups),
            with one scale per 128 x 128 weights.
    GATE_STRIDE: 2 if gate and up rows alternate, otherwise 1.
    GATED: whether the activation function combines gate and up. If GATED and GATE_STRIDE is 1, the
        halves of a tile are gate rows and up rows. Otherwise, they are adjacent weight rows.
    ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT: the activation function
        (`modular_kernel.ops.kernels.activation`); "identity" for none.
    GATHER_TOKENS: whether activation row r is row tokens[r] of x. If so, SCALE_MODE must not be
        "block".
    EVEN_K: whether K is a multiple of 128 bytes.
    STAGES: stages of the ring.
    STAGING_BUFFERS: buffers for output boxes per consumer warpgroup, 1 or 2.
    GROUP_M: number of row tiles per group; see `tile_at`.
    """
    HALF_ROWS: gl.constexpr = b_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = b_desc.block_type.shape[1]
    TILE_STRIDE_N: gl.constexpr = HALF_ROWS if GATED and GATE_STRIDE == 1 else 2 * HALF_ROWS
    right_row_offset = up_row_offset if GATED and GATE_STRIDE == 1 else HALF_ROWS
    num_n_tiles = gl.cdiv(size_n * GATE_STRIDE, TILE_STRIDE_N)
    A_ROWS: gl.constexpr = ROWS if GATHER_TOKENS else 2 * ROWS
    a_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES, A_ROWS, BLOCK_K], b_desc.layout)
    second_a_ring = a_ring
    if GATHER_TOKENS:  # one ring per warpgroup
        second_a_ring = gl.allocate_shared_memory(
            b_desc.dtype, [STAGES, A_ROWS, BLOCK_K], b_desc.layout
        )
    b_ring = gl.allocate_shared_memory(
        b_desc.dtype, [STAGES, 2 * HALF_ROWS, BLOCK_K], b_desc.layout
    )
    COLUMNS: gl.constexpr = out_desc.block_type.shape[1]
    staging = gl.allocate_shared_memory(
        out_desc.dtype, [STAGING_BUFFERS, ROWS, COLUMNS], out_desc.layout
    )
    second_staging = gl.allocate_shared_memory(
        out_desc.dtype, [STAGING_BUFFERS, ROWS, COLUMNS], out_desc.layout
    )
    full, empty = allocate_barriers(STAGES, 2)
    FIRST_WARPGROUP: gl.constexpr = 0
    SECOND_WARPGROUP: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_run_consumer, (
                a_ring, b_ring, full, empty, tiles_ptr, max_tiles, num_n_tiles, size_k, weight_rows,
                right_row_offset, x_ptr, stride_x_in_copies, tokens_ptr, out_ptr, out_desc,
                staging, size_n,
                a_scale_ptr, b_scale_ptr, bias_ptr, a_groups, b_scale_rows, b_groups,
                tile_slots_ptr,
                stride_tile_slots, LORA_STEPS, FIRST_WARPGROUP, SCALE_MODE, TILE_STRIDE_N,
                GROUP_M, GATHER_TOKENS, EVEN_K,
                GATE_STRIDE,
                GATED, HAS_BIAS, ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT,
            )),
            (_run_consumer, (
                second_a_ring, b_ring, full, empty, tiles_ptr, max_tiles, num_n_tiles, size_k,
                weight_rows,
                right_row_offset, x_ptr, stride_x_in_copies, tokens_ptr, out_ptr, out_desc,
                second_staging, size_n,
                a_scale_ptr, b_scale_ptr, bias_ptr, a_groups, b_scale_rows, b_groups,
                tile_slots_ptr,
                stride_tile_slots, LORA_STEPS, SECOND_WARPGROUP, SCALE_MODE, TILE_STRIDE_N, GROUP_M,
                GATHER_TOKENS, EVEN_K,
                GATE_STRIDE,
                GATED, HAS_BIAS, ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT,
            )),
            (_run_producer, (
                a_desc, b_desc, a_ring, b_ring, full, empty, tiles_ptr, max_tiles, num_n_tiles,
                size_k,
                weight_rows, right_row_offset, lora_u_desc, lora_b_desc, tile_slots_ptr,
                stride_tile_slots,
                lora_b_slot_rows,
                lora_b_expert_rows, lora_up_offset, TILE_STRIDE_N, GROUP_M, GATHER_TOKENS,
                LORA_STEPS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
