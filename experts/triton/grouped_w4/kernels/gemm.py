"""Grouped GEMM of 4-bit weights that are unpacked in registers, for sm_90: TMA, wgmma, one wave.

The product is W x^T: weights are the left operand, which wgmma takes from registers, so that none
goes back to shared memory; tokens are the right one, in shared memory as TMA brings them. One warp
loads, two warpgroups multiply 128 weight rows each, in two blocks of 64, by the same tokens. While
one block is multiplied the next one is unpacked, and so is the other warpgroup's.

How weights lie: experts.triton.grouped_w4.layout; how they are unpacked: unpack.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from experts.triton.grouped_tma.kernels.gemm import look_up
from experts.triton.grouped_w4.kernels.unpack import BLOCK, scales_of_blocks, unpack
from experts.triton.kernels.gluon_epilogue import activate, store_by_threads, store_rows
from experts.triton.kernels.gluon_ring import barriers
from modular_kernel.replay.launch.triton_versions import load_box


@gluon.jit
def _load(
    x_desc, w_desc, scale_desc, x_ring, w_ring, scale_ring, full, empty, tiles_ptr, max_tiles,
    num_n, steps, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Be the loading warp: fill ring places as they become empty."""
    STAGES: gl.constexpr = w_ring.shape[0]
    LINES: gl.constexpr = w_ring.shape[1]
    SCALE_LINES: gl.constexpr = scale_ring.shape[1]
    X_BYTES: gl.constexpr = x_desc.block_type.nbytes
    BYTES: gl.constexpr = X_BYTES + w_desc.block_type.nbytes + scale_desc.block_type.nbytes
    num_m = gl.load(tiles_ptr + 3 * max_tiles)
    programs = gl.num_programs(0)
    first = gl.program_id(0)
    expert, row, _, n = look_up(first, num_m, num_n, tiles_ptr, max_tiles, GROUP_M)
    turn = 0
    for index in range(first, num_m * num_n, programs):
        next_expert, next_row, _, next_n = look_up(
            index + programs, num_m, num_n, tiles_ptr, max_tiles, GROUP_M
        )
        box = (expert * num_n + n) * steps
        for step in range(steps):
            place = turn % STAGES
            mbarrier.wait(empty.index(place), ((turn // STAGES) & 1) ^ 1)
            ready = full.index(place)
            mbarrier.expect(ready, BYTES)
            load_box(x_desc, [row, step * BLOCK], ready, x_ring.index(place))
            load_box(w_desc, [(box + step) * LINES, 0], ready, w_ring.index(place))
            load_box(scale_desc, [(box + step) * SCALE_LINES, 0], ready, scale_ring.index(place))
            turn += 1
        expert, row, n = next_expert, next_row, next_n


@gluon.jit
def _multiply(
    x_ring, w_ring, scale_ring, full, empty, turn, steps, PART: gl.constexpr,
    TOKENS: gl.constexpr, MMA: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Products of a tile's two blocks with its first TOKENS rows."""
    STAGES: gl.constexpr = x_ring.shape[0]
    LINES: gl.constexpr = w_ring.shape[1] // 4
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    acc0 = gl.zeros((BLOCK, TOKENS), gl.float32, MMA)
    acc1 = gl.zeros((BLOCK, TOKENS), gl.float32, MMA)
    for _ in range(steps):
        place = turn % STAGES
        mbarrier.wait(full.index(place), (turn // STAGES) & 1)
        scales0, scales1 = scales_of_blocks(scale_ring.index(place), PART, FORM)
        words = w_ring.index(place)
        x = x_ring.index(place).slice(0, TOKENS, 0).permute((1, 0))
        w0 = unpack(words.slice(2 * PART * LINES, LINES, 0), scales0, OPERAND, FORM)
        acc0 = warpgroup_mma(w0, x, acc0, is_async=True)
        w1 = unpack(words.slice((2 * PART + 1) * LINES, LINES, 0), scales1, OPERAND, FORM)
        acc1 = warpgroup_mma(w1, x, acc1, is_async=True)
        # Nothing in flight goes to the next iteration: the assembler would serialize all products.
        acc0, acc1, w0, w1 = warpgroup_mma_wait(num_outstanding=0, deps=(acc0, acc1, w0, w1))
        mbarrier.arrive(empty.index(place))
        turn += 1
    return acc0, acc1


@gluon.jit
def _finished(
    acc, factor, bias_ptr, column, columns, STEP: gl.constexpr, MMA: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """acc times factor, and the bias of its rows, of columns `column` and on."""
    values = acc * factor
    if HAS_BIAS:
        rows = column + gl.arange(0, BLOCK, gl.SliceLayout(1, MMA))
        bias = gl.load(bias_ptr + rows * STEP, mask=rows < columns, other=0.0)
        values = values + bias.to(gl.float32)[:, None]
    return values


@gluon.jit
def _store_columns(
    values, row, end, column, out_ptr, out_desc, staging, slot: gl.constexpr, columns,
):  # fmt: skip
    """Round, turn and store (64, TOKENS) as rows of TOKENS, of which columns there are."""
    if column < columns:
        turned = values.to(out_desc.dtype).permute((1, 0))
        if turned.shape[0] == out_desc.block_type.shape[0]:
            store_rows(turned, row, end, column, out_ptr, out_desc, staging, slot, columns)
        else:
            LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            if slot == 0:
                tma.store_wait(0)
            place = staging.index(slot).slice(0, turned.shape[0], 0)
            place.store(turned)
            store_by_threads(place, row, end, column, out_ptr, columns, LAYOUT)


@gluon.jit
def _tile(
    x_ring, w_ring, scale_ring, full, empty, turn, steps, row, end, n, factor0, factor1,
    bias_ptr, up_row, out_ptr, out_desc, staging, columns, PART: gl.constexpr,
    TOKENS: gl.constexpr, FORM: gl.constexpr, STEP: gl.constexpr, GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr, KIND: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Multiply and store the first TOKENS rows of a tile."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    acc0, acc1 = _multiply(
        x_ring, w_ring, scale_ring, full, empty, turn, steps, PART, TOKENS, MMA, FORM
    )
    if GATED:
        column = (2 * n + PART) * BLOCK
        gate = _finished(acc0, factor0, bias_ptr, column, columns, STEP, MMA, HAS_BIAS)
        up = _finished(acc1, factor1, bias_ptr + up_row, column, columns, STEP, MMA, HAS_BIAS)
        value = activate(gate, up, KIND, ALPHA, LIMIT)
        _store_columns(value, row, end, column, out_ptr, out_desc, staging, 0, columns)
    else:
        column = (4 * n + 2 * PART) * BLOCK
        other = column + BLOCK
        LAST: gl.constexpr = staging.shape[0] - 1
        one = _finished(acc0, factor0, bias_ptr, column, columns, STEP, MMA, HAS_BIAS)
        two = _finished(acc1, factor1, bias_ptr, other, columns, STEP, MMA, HAS_BIAS)
        if KIND != "identity":
            one = activate(one, one, KIND, ALPHA, LIMIT)
            two = activate(two, two, KIND, ALPHA, LIMIT)
        _store_columns(one, row, end, column, out_ptr, out_desc, staging, 0, columns)
        _store_columns(two, row, end, other, out_ptr, out_desc, staging, LAST, columns)


@gluon.jit
def _compute(
    x_ring, w_ring, scale_ring, full, empty, tiles_ptr, max_tiles, num_n, steps,
    factor_ptr, bias_ptr, stride_bias, up_row, out_ptr, out_desc, staging, columns,
    PART: gl.constexpr, GROUP_M: gl.constexpr, SHORT: gl.constexpr, FORM: gl.constexpr,
    FACTOR: gl.constexpr, MATRICES: gl.constexpr, STEP: gl.constexpr, GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr, KIND: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Be a multiplying warpgroup: blocks 2 * PART and 2 * PART + 1 of every tile."""
    TOKENS: gl.constexpr = x_ring.shape[1]
    num_m = gl.load(tiles_ptr + 3 * max_tiles)
    programs = gl.num_programs(0)
    first = gl.program_id(0)
    expert, row, end, n = look_up(first, num_m, num_n, tiles_ptr, max_tiles, GROUP_M)
    turn = 0
    for index in range(first, num_m * num_n, programs):
        next_expert, next_row, next_end, next_n = look_up(
            index + programs, num_m, num_n, tiles_ptr, max_tiles, GROUP_M
        )
        bias = bias_ptr + expert.to(gl.int64) * stride_bias
        factor0 = FACTOR
        factor1 = FACTOR
        if MATRICES > 0:
            factors = factor_ptr + expert * MATRICES
            factor0 = gl.load(factors) * FACTOR
            factor1 = gl.load(factors + MATRICES - 1) * FACTOR
        if end - row > SHORT:
            _tile(
                x_ring, w_ring, scale_ring, full, empty, turn, steps, row, end, n, factor0,
                factor1, bias, up_row, out_ptr, out_desc, staging, columns, PART, TOKENS, FORM,
                STEP, GATED, HAS_BIAS, KIND, ALPHA, LIMIT,
            )  # fmt: skip
        elif SHORT > 0:
            _tile(
                x_ring, w_ring, scale_ring, full, empty, turn, steps, row, end, n, factor0,
                factor1, bias, up_row, out_ptr, out_desc, staging, columns, PART, SHORT, FORM,
                STEP, GATED, HAS_BIAS, KIND, ALPHA, LIMIT,
            )  # fmt: skip
        turn += steps
        expert, row, end, n = next_expert, next_row, next_end, next_n
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["max_tiles", "num_n", "steps", "up_row"])
def grouped_gemm_w4_tma_kernel(
    x_desc, w_desc, scale_desc, out_desc, factor_ptr, bias_ptr, out_ptr, tiles_ptr,
    max_tiles, columns, num_n, steps, stride_bias, up_row, FORM: gl.constexpr,
    FACTOR: gl.constexpr, MATRICES: gl.constexpr, STEP: gl.constexpr, GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    KIND: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, SHORT: gl.constexpr,
    STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP_M: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out[r, n] = act(x[r] @ w[expert of r, rows of n]^T) for every row r of every tile.

    x_desc: (rows, depth) bf16 in boxes of a tile's rows and 64 of the depth. w_desc, scale_desc:
    int32 words and scales in boxes of (64, 32) and (form.lines, 16): a step of a tile of four
    blocks each. FORM: the text of a layout.Form, whose weights are less by FACTOR. factor_ptr:
    float32 (experts, MATRICES), of gate and up results or of all, unless MATRICES is 0. out_desc:
    (rows, columns) of out in boxes of a tile's rows and 64 columns. tiles_ptr: as ops.sort has
    them. num_n: tiles of an expert's weights, whose blocks are gate and up rows by turns if GATED;
    steps: of the depth. STEP, up_row: where a column's bias is, and up's behind it. SHORT: 0, or
    tiles of as many rows and fewer are multiplied by so many. SLOTS: boxes of results that a
    warpgroup keeps until they are stored.
    """
    TOKENS: gl.constexpr = x_desc.block_type.shape[0]
    LINES: gl.constexpr = w_desc.block_type.shape[0]
    SCALE_LINES: gl.constexpr = scale_desc.block_type.shape[0]
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, BLOCK], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, LINES, 32], w_desc.layout)
    scale_ring = gl.allocate_shared_memory(
        scale_desc.dtype, [STAGES, SCALE_LINES, 16], scale_desc.layout
    )
    staging = gl.allocate_shared_memory(out_desc.dtype, [SLOTS, TOKENS, BLOCK], out_desc.layout)
    other = gl.allocate_shared_memory(out_desc.dtype, [SLOTS, TOKENS, BLOCK], out_desc.layout)
    full, empty = barriers(STAGES, 2)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_compute, (
                x_ring, w_ring, scale_ring, full, empty, tiles_ptr, max_tiles, num_n, steps,
                factor_ptr, bias_ptr, stride_bias, up_row, out_ptr, out_desc, staging, columns,
                first, GROUP_M, SHORT, FORM, FACTOR, MATRICES, STEP, GATED, HAS_BIAS, KIND, ALPHA,
                LIMIT,
            )),
            (_compute, (
                x_ring, w_ring, scale_ring, full, empty, tiles_ptr, max_tiles, num_n, steps,
                factor_ptr, bias_ptr, stride_bias, up_row, out_ptr, out_desc, other, columns,
                second, GROUP_M, SHORT, FORM, FACTOR, MATRICES, STEP, GATED, HAS_BIAS, KIND, ALPHA,
                LIMIT,
            )),
            (_load, (
                x_desc, w_desc, scale_desc, x_ring, w_ring, scale_ring, full, empty, tiles_ptr,
                max_tiles, num_n, steps, GROUP_M,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
