"""`grouped_gemm_w4_tma_kernel`: a persistent grouped GEMM for sm_90 with 4-bit weights.

The kernel computes W x^T. The weights are the left operand of the MMA instruction (wgmma), which
can be read from registers, so unpacked weights are never written back to shared memory. The
activations x are the right operand, which wgmma reads from shared memory.

There is one program per SM, which loops over tiles. A tile is up to block_m activation rows of one
expert by 256 weight rows. A producer warp loads the operands into a ring in shared memory. Two
consumer warpgroups multiply 128 weight rows each, in two blocks of 64 rows, by the same
activations. Unpacking a block overlaps with the MMAs of the previous block and of the other
warpgroup.

`grouped_w4.layout` describes the memory layout of the weights, and `unpack` has the device
functions that unpack them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from experts.triton.grouped_tma.kernels.gemm import load_tile_info
from experts.triton.grouped_w4.kernels.unpack import BLOCK, load_block_scales, unpack
from experts.triton.kernels.gluon_epilogue import activate, store_masked, store_rows
from experts.triton.kernels.gluon_ring import allocate_barriers
from modular_kernel.replay.launch.triton_versions import tma_async_load


@gluon.jit
def _run_producer(
    x_desc, w_desc, scale_desc, x_ring, w_ring, scale_ring, full, empty, tiles_ptr, max_tiles,
    num_n_tiles, num_k_steps, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Run the producer warp: load every K step of every tile of this program into the ring.

    The arguments are those of the kernel.
    """
    STAGES: gl.constexpr = w_ring.shape[0]
    WORD_LINES: gl.constexpr = w_ring.shape[1]
    SCALE_LINES: gl.constexpr = scale_ring.shape[1]
    X_BYTES: gl.constexpr = x_desc.block_type.nbytes
    BYTES: gl.constexpr = X_BYTES + w_desc.block_type.nbytes + scale_desc.block_type.nbytes
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
        box = (expert * num_n_tiles + n_tile) * num_k_steps
        for step in range(num_k_steps):
            stage = iteration % STAGES
            mbarrier.wait(empty.index(stage), ((iteration // STAGES) & 1) ^ 1)
            full_barrier = full.index(stage)
            mbarrier.expect(full_barrier, BYTES)
            tma_async_load(x_desc, [row, step * BLOCK], full_barrier, x_ring.index(stage))
            tma_async_load(
                w_desc, [(box + step) * WORD_LINES, 0], full_barrier, w_ring.index(stage)
            )
            tma_async_load(
                scale_desc, [(box + step) * SCALE_LINES, 0], full_barrier, scale_ring.index(stage)
            )
            iteration += 1
        expert, row, n_tile = next_expert, next_row, next_n_tile


@gluon.jit
def _multiply_tile(
    x_ring, w_ring, scale_ring, full, empty, iteration, num_k_steps, WARPGROUP: gl.constexpr,
    TOKENS: gl.constexpr, MMA_LAYOUT: gl.constexpr, PACKED_FORMAT: gl.constexpr,
):  # fmt: skip
    """Multiply the two weight blocks of a warpgroup by the first TOKENS activation rows of a tile.

    Return the accumulators of both blocks, float32 (64, TOKENS).

    iteration: number of K steps that this warpgroup has multiplied since the start of the kernel.
    MMA_LAYOUT: the layout of the accumulators.
    """
    STAGES: gl.constexpr = x_ring.shape[0]
    WORD_LINES: gl.constexpr = w_ring.shape[1] // 4
    OPERAND_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, MMA_LAYOUT, 2)
    acc0 = gl.zeros((BLOCK, TOKENS), gl.float32, MMA_LAYOUT)
    acc1 = gl.zeros((BLOCK, TOKENS), gl.float32, MMA_LAYOUT)
    for _ in range(num_k_steps):
        stage = iteration % STAGES
        mbarrier.wait(full.index(stage), (iteration // STAGES) & 1)
        scales0, scales1 = load_block_scales(scale_ring.index(stage), WARPGROUP, PACKED_FORMAT)
        words = w_ring.index(stage)
        x = x_ring.index(stage).slice(0, TOKENS, 0).permute((1, 0))
        w0 = unpack(
            words.slice(2 * WARPGROUP * WORD_LINES, WORD_LINES, 0),
            scales0,
            OPERAND_LAYOUT,
            PACKED_FORMAT,
        )
        acc0 = warpgroup_mma(w0, x, acc0, is_async=True)
        w1 = unpack(
            words.slice((2 * WARPGROUP + 1) * WORD_LINES, WORD_LINES, 0),
            scales1,
            OPERAND_LAYOUT,
            PACKED_FORMAT,
        )
        acc1 = warpgroup_mma(w1, x, acc1, is_async=True)
        # No wgmma stays in flight across iterations, because ptxas would serialize all wgmmas.
        acc0, acc1, w0, w1 = warpgroup_mma_wait(num_outstanding=0, deps=(acc0, acc1, w0, w1))
        mbarrier.arrive(empty.index(stage))
        iteration += 1
    return acc0, acc1


@gluon.jit
def _scale_and_add_bias(
    acc, factor, bias_ptr, column, size_n, GATE_STRIDE: gl.constexpr, MMA_LAYOUT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Return acc * factor plus the bias. Row i of acc is output column `column` + i."""
    values = acc * factor
    if HAS_BIAS:
        rows = column + gl.arange(0, BLOCK, gl.SliceLayout(1, MMA_LAYOUT))
        bias = gl.load(bias_ptr + rows * GATE_STRIDE, mask=rows < size_n, other=0.0)
        values = values + bias.to(gl.float32)[:, None]
    return values


@gluon.jit
def _store_transposed(
    values, row, end, column, out_ptr, out_desc, staging, staging_index: gl.constexpr, size_n,
):  # fmt: skip
    """Round, transpose and store values (64, TOKENS). Columns from size_n on are not stored."""
    if column < size_n:
        transposed = values.to(out_desc.dtype).permute((1, 0))
        if transposed.shape[0] == out_desc.block_type.shape[0]:
            store_rows(
                transposed, row, end, column, out_ptr, out_desc, staging, staging_index, size_n
            )
        else:
            LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            if staging_index == 0:
                tma.store_wait(0)
            buffer = staging.index(staging_index).slice(0, transposed.shape[0], 0)
            buffer.store(transposed)
            store_masked(buffer, row, end, column, out_ptr, size_n, LAYOUT)


@gluon.jit
def _compute_tile(
    x_ring, w_ring, scale_ring, full, empty, iteration, num_k_steps, row, end, n_tile, factor0,
    factor1,
    bias_ptr, up_row_offset, out_ptr, out_desc, staging, size_n, WARPGROUP: gl.constexpr,
    TOKENS: gl.constexpr, PACKED_FORMAT: gl.constexpr, GATE_STRIDE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, ACTIVATION_ALPHA: gl.constexpr,
    ACTIVATION_LIMIT: gl.constexpr,
):  # fmt: skip
    """Multiply the first TOKENS activation rows of a tile, apply the epilogue, and store the tile.

    row: the first row of the tile.
    end: the row after the last row of the expert.
    n_tile: the index of the tile of weights.
    factor0, factor1: the factors by which the accumulators of the two weight blocks are multiplied.
    """
    MMA_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    acc0, acc1 = _multiply_tile(
        x_ring,
        w_ring,
        scale_ring,
        full,
        empty,
        iteration,
        num_k_steps,
        WARPGROUP,
        TOKENS,
        MMA_LAYOUT,
        PACKED_FORMAT,
    )
    if GATED:
        column = (2 * n_tile + WARPGROUP) * BLOCK
        gate = _scale_and_add_bias(
            acc0, factor0, bias_ptr, column, size_n, GATE_STRIDE, MMA_LAYOUT, HAS_BIAS
        )
        up = _scale_and_add_bias(
            acc1,
            factor1,
            bias_ptr + up_row_offset,
            column,
            size_n,
            GATE_STRIDE,
            MMA_LAYOUT,
            HAS_BIAS,
        )
        value = activate(gate, up, ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT)
        _store_transposed(value, row, end, column, out_ptr, out_desc, staging, 0, size_n)
    else:
        column = (4 * n_tile + 2 * WARPGROUP) * BLOCK
        right_column = column + BLOCK
        LAST_BUFFER: gl.constexpr = staging.shape[0] - 1
        left = _scale_and_add_bias(
            acc0, factor0, bias_ptr, column, size_n, GATE_STRIDE, MMA_LAYOUT, HAS_BIAS
        )
        right = _scale_and_add_bias(
            acc1, factor1, bias_ptr, right_column, size_n, GATE_STRIDE, MMA_LAYOUT, HAS_BIAS
        )
        if ACTIVATION != "identity":
            left = activate(left, left, ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT)
            right = activate(right, right, ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT)
        _store_transposed(left, row, end, column, out_ptr, out_desc, staging, 0, size_n)
        _store_transposed(
            right, row, end, right_column, out_ptr, out_desc, staging, LAST_BUFFER, size_n
        )


@gluon.jit
def _run_consumer(
    x_ring, w_ring, scale_ring, full, empty, tiles_ptr, max_tiles, num_n_tiles, num_k_steps,
    global_scale_ptr, bias_ptr, stride_bias, up_row_offset, out_ptr, out_desc, staging, size_n,
    WARPGROUP: gl.constexpr, GROUP_M: gl.constexpr, SHORT_TILE_ROWS: gl.constexpr,
    PACKED_FORMAT: gl.constexpr,
    ACC_FACTOR: gl.constexpr, NUM_GLOBAL_SCALES: gl.constexpr, GATE_STRIDE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, ACTIVATION_ALPHA: gl.constexpr,
    ACTIVATION_LIMIT: gl.constexpr,
):  # fmt: skip
    """Run one consumer warpgroup: compute two of the four weight blocks of every tile.

    Warpgroup WARPGROUP computes blocks 2 * WARPGROUP and 2 * WARPGROUP + 1. The other arguments are
    those of the kernel.
    """
    TOKENS: gl.constexpr = x_ring.shape[1]
    num_m_tiles = gl.load(tiles_ptr + 3 * max_tiles)
    num_programs = gl.num_programs(0)
    first_tile_index = gl.program_id(0)
    expert, row, end, n_tile = load_tile_info(
        first_tile_index, num_m_tiles, num_n_tiles, tiles_ptr, max_tiles, GROUP_M
    )
    iteration = 0
    for index in range(first_tile_index, num_m_tiles * num_n_tiles, num_programs):
        next_expert, next_row, next_end, next_n_tile = load_tile_info(
            index + num_programs, num_m_tiles, num_n_tiles, tiles_ptr, max_tiles, GROUP_M
        )
        expert_bias_ptr = bias_ptr + expert.to(gl.int64) * stride_bias
        factor0 = ACC_FACTOR
        factor1 = ACC_FACTOR
        if NUM_GLOBAL_SCALES > 0:
            global_scales = global_scale_ptr + expert * NUM_GLOBAL_SCALES
            factor0 = gl.load(global_scales) * ACC_FACTOR
            factor1 = gl.load(global_scales + NUM_GLOBAL_SCALES - 1) * ACC_FACTOR
        if end - row > SHORT_TILE_ROWS:
            _compute_tile(
                x_ring, w_ring, scale_ring, full, empty, iteration, num_k_steps, row, end, n_tile,
                factor0,
                factor1, expert_bias_ptr, up_row_offset, out_ptr, out_desc, staging, size_n,
                WARPGROUP, TOKENS,
                PACKED_FORMAT,
                GATE_STRIDE, GATED, HAS_BIAS, ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT,
            )  # fmt: skip
        elif SHORT_TILE_ROWS > 0:
            _compute_tile(
                x_ring, w_ring, scale_ring, full, empty, iteration, num_k_steps, row, end, n_tile,
                factor0,
                factor1, expert_bias_ptr, up_row_offset, out_ptr, out_desc, staging, size_n,
                WARPGROUP,
                SHORT_TILE_ROWS, PACKED_FORMAT,
                GATE_STRIDE, GATED, HAS_BIAS, ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT,
            )  # fmt: skip
        iteration += num_k_steps
        expert, row, end, n_tile = next_expert, next_row, next_end, next_n_tile
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["max_tiles", "num_n_tiles", "num_k_steps", "up_row_offset"])
def grouped_gemm_w4_tma_kernel(
    x_desc, w_desc, scale_desc, out_desc, global_scale_ptr, bias_ptr, out_ptr, tiles_ptr,
    max_tiles, size_n, num_n_tiles, num_k_steps, stride_bias, up_row_offset,
    PACKED_FORMAT: gl.constexpr,
    ACC_FACTOR: gl.constexpr, NUM_GLOBAL_SCALES: gl.constexpr, GATE_STRIDE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, ACTIVATION_ALPHA: gl.constexpr, ACTIVATION_LIMIT: gl.constexpr,
    SHORT_TILE_ROWS: gl.constexpr,
    STAGES: gl.constexpr, STAGING_BUFFERS: gl.constexpr, GROUP_M: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """out[r, n] = act(x[r] @ w[expert of r, rows of n]^T) for every row r of every tile.

    Grid: (number of SMs,).

    x_desc: TMA descriptor of the activations (rows, K) bf16, sorted by expert, with boxes of
        block_m rows and 64 columns.
    w_desc: TMA descriptor of the int32 words of the tiled weights, with boxes of (64, 32), which
        are one K step of a tile.
    scale_desc: TMA descriptor of the int32 words of the tiled scales, with boxes of (lines, 16),
        which are one K step of a tile.
    out_desc: TMA descriptor of the output (rows, N), with boxes of block_m rows and 64 columns.
    global_scale_ptr: float32 (num_experts, NUM_GLOBAL_SCALES), the global scales of NVFP4: one for
        gate and one for up, or one for all columns. Not used if NUM_GLOBAL_SCALES is 0.
    bias_ptr: the biases of each expert, stride_bias apart. The bias of column n is at n *
        GATE_STRIDE, and the bias of its up value is at n * GATE_STRIDE + up_row_offset.
    out_ptr: the output, as in out_desc.
    tiles_ptr: `modular_kernel.ops.sort.SortedPairs.tiles`. Three int32 arrays of max_tiles values
        have, for each row tile, the expert, the first row, and the end of the expert's rows. The
        number of row tiles follows.
    size_n: N, the number of output columns.
    num_n_tiles: number of tiles of weights per expert.
    num_k_steps: number of steps of 64 elements along K.
    PACKED_FORMAT: str of the `layout.PackedFormat` of the weights.
    ACC_FACTOR: the power of two by which the accumulators are multiplied, because unpacked weights
        are too small by this factor.
    GATED: whether blocks of gate rows and blocks of up rows alternate in a tile of weights.
    GATE_STRIDE: 2 if gate and up biases alternate, otherwise 1.
    ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT: the activation function
        (`modular_kernel.ops.kernels.activation`); "identity" for none.
    SHORT_TILE_ROWS: tiles with at most this many rows are multiplied as tiles of this size, which
        takes less time. If it is 0, all tiles have the full size.
    STAGES: stages of the ring.
    STAGING_BUFFERS: buffers for output boxes per consumer warpgroup.
    GROUP_M: number of row tiles per group; see `tile_at`.
    """
    TOKENS: gl.constexpr = x_desc.block_type.shape[0]
    WORD_LINES: gl.constexpr = w_desc.block_type.shape[0]
    SCALE_LINES: gl.constexpr = scale_desc.block_type.shape[0]
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, BLOCK], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, WORD_LINES, 32], w_desc.layout)
    scale_ring = gl.allocate_shared_memory(
        scale_desc.dtype, [STAGES, SCALE_LINES, 16], scale_desc.layout
    )
    staging = gl.allocate_shared_memory(
        out_desc.dtype, [STAGING_BUFFERS, TOKENS, BLOCK], out_desc.layout
    )
    second_staging = gl.allocate_shared_memory(
        out_desc.dtype, [STAGING_BUFFERS, TOKENS, BLOCK], out_desc.layout
    )
    full, empty = allocate_barriers(STAGES, 2)
    FIRST_WARPGROUP: gl.constexpr = 0
    SECOND_WARPGROUP: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_run_consumer, (
                x_ring, w_ring, scale_ring, full, empty, tiles_ptr, max_tiles, num_n_tiles,
                num_k_steps,
                global_scale_ptr, bias_ptr, stride_bias, up_row_offset, out_ptr, out_desc, staging,
                size_n,
                FIRST_WARPGROUP, GROUP_M, SHORT_TILE_ROWS, PACKED_FORMAT, ACC_FACTOR,
                NUM_GLOBAL_SCALES, GATE_STRIDE, GATED,
                HAS_BIAS, ACTIVATION, ACTIVATION_ALPHA,
                ACTIVATION_LIMIT,
            )),
            (_run_consumer, (
                x_ring, w_ring, scale_ring, full, empty, tiles_ptr, max_tiles, num_n_tiles,
                num_k_steps,
                global_scale_ptr, bias_ptr, stride_bias, up_row_offset, out_ptr, out_desc,
                second_staging, size_n,
                SECOND_WARPGROUP, GROUP_M, SHORT_TILE_ROWS, PACKED_FORMAT, ACC_FACTOR,
                NUM_GLOBAL_SCALES, GATE_STRIDE, GATED,
                HAS_BIAS, ACTIVATION, ACTIVATION_ALPHA,
                ACTIVATION_LIMIT,
            )),
            (_run_producer, (
                x_desc, w_desc, scale_desc, x_ring, w_ring, scale_ring, full, empty, tiles_ptr,
                max_tiles, num_n_tiles, num_k_steps, GROUP_M,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
