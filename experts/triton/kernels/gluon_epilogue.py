"""Gluon device functions for the epilogue of a tile: scales, bias, activation and store."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from modular_kernel.ops.kernels.extrema import clamp_nan, maximum_nan, minimum_nan
from modular_kernel.replay.launch.triton_versions import tma_async_store


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def _gelu(value):
    return 0.5 * value * (1.0 + gl.erf(value * 0.7071067811865476))


@gluon.jit
def _gelu_tanh(value):
    inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
    return value * _sigmoid(2.0 * inner)


@gluon.jit
def _tanh(value):
    is_small = gl.abs(value) < 0.25
    small = gl.where(is_small, value, 0.0)
    square = small * small
    series = 0.13333333333333333 + square * (-0.05396825396825397 + square * 0.021869488536155203)
    series = small + small * square * (-0.3333333333333333 + square * series)
    return gl.where(is_small, series, 2.0 * _sigmoid(2.0 * value) - 1.0)


@gluon.jit
def activate(gate, up, KIND: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr):
    """Apply activation KIND with the same operations as `modular_kernel.ops.kernels.activation`."""
    if LIMIT > 0 and KIND != "situ":
        up = clamp_nan(up, -LIMIT, LIMIT)
        if KIND != "swiglu_clamp_after":
            gate = minimum_nan(gate, LIMIT)
    if KIND == "relu2":
        positive = maximum_nan(gate, 0.0)
        result = positive * positive
    elif KIND == "silu_no_mul":
        result = gate * _sigmoid(gate)
    elif KIND == "gelu_no_mul":
        result = _gelu(gate)
    elif KIND == "gelu_tanh_no_mul":
        result = _gelu_tanh(gate)
    elif KIND == "gelu":
        result = _gelu(gate) * up
    elif KIND == "gelu_tanh":
        result = _gelu_tanh(gate) * up
    elif KIND == "swiglu_oai":
        result = gate * _sigmoid(ALPHA * gate) * (up + 1.0)
    elif KIND == "swiglu_clamp_after":
        result = minimum_nan(gate * _sigmoid(gate), LIMIT) * up
    elif KIND == "situ":
        if LIMIT > 0:
            up = LIMIT * _tanh(up / LIMIT)
        result = ALPHA * _tanh(gate / ALPHA) * _sigmoid(gate) * up
    else:
        gl.static_assert(KIND == "silu" or KIND == "swiglu_clamp_before")
        result = gate * _sigmoid(gate) * up
    return result


@gluon.jit
def _scale_and_bias(
    values, a_scale, expert, rows_b, row_b, b_scale_ptr, bias_ptr,
    MODE: gl.constexpr, LAYOUT: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Return `values` in float32 with channel scales and bias applied.

    Column i of values is weight row row_b + i of `expert`. An expert has rows_b weight rows.
    """
    values = values.to(gl.float32)
    rows = row_b + gl.arange(0, values.shape[1], gl.SliceLayout(0, LAYOUT))
    offsets = expert.to(gl.int64) * rows_b + rows
    if MODE == "channel":
        b_scale = gl.load(b_scale_ptr + offsets, mask=rows < rows_b, other=0.0)
        values = values * (a_scale[:, None] * b_scale[None, :])
    if HAS_BIAS:
        bias = gl.load(bias_ptr + offsets, mask=rows < rows_b, other=0.0).to(gl.float32)
        values = values + bias[None, :]
    return values


@gluon.jit
def store_masked(buffer, row, end, first_column, out_ptr, columns, LAYOUT: gl.constexpr):
    """Store a tile from shared memory. Rows >= end and columns >= columns are not stored."""
    rows = row + gl.arange(0, buffer.shape[0], gl.SliceLayout(1, LAYOUT))
    column = first_column + gl.arange(0, buffer.shape[1], gl.SliceLayout(0, LAYOUT))
    out_ptrs = out_ptr + rows.to(gl.int64)[:, None] * columns + column[None, :]
    mask = (rows < end)[:, None] & (column < columns)[None, :]
    gl.store(out_ptrs, buffer.load(LAYOUT), mask=mask)


@gluon.jit
def store_rows(
    values, row, end, first_column, out_ptr, out_desc, staging, slot: gl.constexpr, columns,
):  # fmt: skip
    """Round and store a tile to consecutive rows of an output with `columns` columns.

    The tile is written to buffer `slot` of `staging`, from which TMA stores it while the next tile
    is multiplied. If the tile has rows from `end` on, which belong to another expert, the threads
    store only the rows before `end`, without TMA.
    """
    ROWS: gl.constexpr = values.shape[0]
    WIDTH: gl.constexpr = values.shape[1]
    buffer = staging.index(slot)
    # Wait for all TMA stores of the last tile. store_wait(1) would be wrong: the threads store a
    # partial tile without TMA, so the number of pending stores is not a number of tiles.
    if slot == 0:
        tma.store_wait(0)
    buffer.store(values.to(out_desc.dtype))
    if row + ROWS <= end:
        fence_async_shared()
        tma_async_store(out_desc, [row, first_column], buffer)
    else:
        LANES: gl.constexpr = WIDTH // 8 if WIDTH < 256 else 32
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
        store_masked(buffer, row, end, first_column, out_ptr, columns, LAYOUT)


@gluon.jit
def _finish_one_half(
    values, a_scale, row, end, out_ptr, out_desc, staging, slot: gl.constexpr, columns,
    expert, rows_b, row_b, b_scale_ptr, bias_ptr,
    MODE: gl.constexpr, LAYOUT: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr,
    KIND: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Apply the epilogue to one half of a tile and store it.

    The columns of the half are weight rows. If GATED, gate rows and up rows alternate.
    """
    values = _scale_and_bias(
        values, a_scale, expert, rows_b, row_b, b_scale_ptr, bias_ptr, MODE, LAYOUT, HAS_BIAS
    )
    if GATED:
        gate, up = values.reshape((values.shape[0], values.shape[1] // 2, 2)).split()
        value = activate(gate, up, KIND, ALPHA, LIMIT).to(out_desc.dtype)
        # A thread has every fourth column. With pairs of adjacent columns instead, it can store to
        # shared memory in whole 8 x 8 matrices.
        PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, value.shape[1], 16])
        value = gl.convert_layout(value, PAIRS)
        store_rows(value, row, end, row_b // 2, out_ptr, out_desc, staging, slot, columns)
    elif KIND != "identity":
        value = activate(values, values, KIND, ALPHA, LIMIT)
        store_rows(value, row, end, row_b, out_ptr, out_desc, staging, slot, columns)
    else:
        store_rows(values, row, end, row_b, out_ptr, out_desc, staging, slot, columns)


@gluon.jit
def finish(
    left, right, row, end, out_ptr, out_desc, staging, columns, expert, rows_b, right_rows,
    first_row_b,
    a_scale_ptr, scale_rows, b_scale_ptr, bias_ptr,
    MODE: gl.constexpr, LAYOUT: gl.constexpr, STEP: gl.constexpr, GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr, KIND: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Apply scales, bias and activation to both halves of a tile, round and store the results.

    The caller must wait for pending TMA stores before it returns.

    row: the first row of the tile.
    end: the end of the expert's rows.
    out_desc: the output, in boxes as wide as the output of a half.
    staging: one or two buffers for boxes.
    expert: the expert of the tile.
    rows_b: the number of weight rows of each expert.
    first_row_b: the first weight row of the left half.
    right_rows: the number of weight rows from the left half to the right half.
    scale_rows: the index of each row in a_scale.
    MODE: scales are applied only if MODE is "channel".
    STEP, GATED: as in `grouped_gemm_tma_kernel`.
    """
    tile_rows = row + gl.arange(0, left.shape[0], gl.SliceLayout(1, LAYOUT))
    a_scale = gl.full(tile_rows.shape, 1.0, gl.float32, tile_rows.type.layout)
    if MODE == "channel":
        a_scale = gl.load(a_scale_ptr + scale_rows, mask=tile_rows < end, other=0.0)
    if GATED and STEP == 1:
        gate = _scale_and_bias(
            left,
            a_scale,
            expert,
            rows_b,
            first_row_b,
            b_scale_ptr,
            bias_ptr,
            MODE,
            LAYOUT,
            HAS_BIAS,
        )
        up = _scale_and_bias(
            right, a_scale, expert, rows_b, first_row_b + right_rows, b_scale_ptr, bias_ptr,
            MODE, LAYOUT, HAS_BIAS,
        )  # fmt: skip
        value = activate(gate, up, KIND, ALPHA, LIMIT)
        store_rows(value, row, end, first_row_b, out_ptr, out_desc, staging, 0, columns)
    else:
        _finish_one_half(
            left, a_scale, row, end, out_ptr, out_desc, staging, 0, columns, expert, rows_b,
            first_row_b,
            b_scale_ptr, bias_ptr, MODE, LAYOUT, HAS_BIAS, GATED, KIND, ALPHA, LIMIT,
        )  # fmt: skip
        _finish_one_half(
            right, a_scale, row, end, out_ptr, out_desc, staging, staging.shape[0] - 1, columns,
            expert, rows_b, first_row_b + right_rows,
            b_scale_ptr, bias_ptr, MODE, LAYOUT, HAS_BIAS, GATED, KIND, ALPHA, LIMIT,
        )  # fmt: skip
