"""Gluon device functions for the epilogue of a GEMM: scales, bias, activation function and store.

The kernels of the grouped_tma and grouped_w4 paths multiply a tile in two halves, left and right.
The weight rows of the halves are gate rows and up rows, or adjacent rows. `finish_tile` applies
the epilogue to both halves. A tile is stored with TMA from a staging buffer in shared memory.
"""

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
    small_value = gl.where(is_small, value, 0.0)
    square = small_value * small_value
    series = 0.13333333333333333 + square * (-0.05396825396825397 + square * 0.021869488536155203)
    series = small_value + small_value * square * (-0.3333333333333333 + square * series)
    return gl.where(is_small, series, 2.0 * _sigmoid(2.0 * value) - 1.0)


@gluon.jit
def activate(
    gate,
    up,
    ACTIVATION: gl.constexpr,
    ACTIVATION_ALPHA: gl.constexpr,
    ACTIVATION_LIMIT: gl.constexpr,
):
    """Apply the activation function ACTIVATION to float32 values.

    `modular_kernel.ops.kernels.activation` documents the arguments and has the same operations.
    """
    if ACTIVATION_LIMIT > 0 and ACTIVATION != "situ":
        up = clamp_nan(up, -ACTIVATION_LIMIT, ACTIVATION_LIMIT)
        if ACTIVATION != "swiglu_clamp_after":
            gate = minimum_nan(gate, ACTIVATION_LIMIT)
    if ACTIVATION == "relu2":
        positive = maximum_nan(gate, 0.0)
        result = positive * positive
    elif ACTIVATION == "silu_no_mul":
        result = gate * _sigmoid(gate)
    elif ACTIVATION == "gelu_no_mul":
        result = _gelu(gate)
    elif ACTIVATION == "gelu_tanh_no_mul":
        result = _gelu_tanh(gate)
    elif ACTIVATION == "gelu":
        result = _gelu(gate) * up
    elif ACTIVATION == "gelu_tanh":
        result = _gelu_tanh(gate) * up
    elif ACTIVATION == "swiglu_oai":
        result = gate * _sigmoid(ACTIVATION_ALPHA * gate) * (up + 1.0)
    elif ACTIVATION == "swiglu_clamp_after":
        result = minimum_nan(gate * _sigmoid(gate), ACTIVATION_LIMIT) * up
    elif ACTIVATION == "situ":
        if ACTIVATION_LIMIT > 0:
            up = ACTIVATION_LIMIT * _tanh(up / ACTIVATION_LIMIT)
        result = ACTIVATION_ALPHA * _tanh(gate / ACTIVATION_ALPHA) * _sigmoid(gate) * up
    else:
        gl.static_assert(ACTIVATION == "silu" or ACTIVATION == "swiglu_clamp_before")
        result = gate * _sigmoid(gate) * up
    return result


@gluon.jit
def _apply_scale_and_bias(
    values, a_scale, expert, weight_rows, weight_row, b_scale_ptr, bias_ptr,
    SCALE_MODE: gl.constexpr, LAYOUT: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Return `values` in float32, with weight scales (if SCALE_MODE is "channel") and bias applied.

    values: the accumulators (rows, columns). Column i belongs to weight row `weight_row` + i of
        `expert`.
    a_scale: (rows,), the scale of each activation row.
    weight_rows: number of weight rows of each expert.
    b_scale_ptr, bias_ptr: (num_experts, weight_rows), one value per weight row.
    LAYOUT: the layout of `values`.
    """
    values = values.to(gl.float32)
    rows = weight_row + gl.arange(0, values.shape[1], gl.SliceLayout(0, LAYOUT))
    offsets = expert.to(gl.int64) * weight_rows + rows
    if SCALE_MODE == "channel":
        b_scale = gl.load(b_scale_ptr + offsets, mask=rows < weight_rows, other=0.0)
        values = values * (a_scale[:, None] * b_scale[None, :])
    if HAS_BIAS:
        bias = gl.load(bias_ptr + offsets, mask=rows < weight_rows, other=0.0).to(gl.float32)
        values = values + bias[None, :]
    return values


@gluon.jit
def store_masked(buffer, row, end, first_column, out_ptr, size_n, LAYOUT: gl.constexpr):
    """Store a tile from shared memory without TMA, only rows < end and columns < size_n.

    buffer: the tile in shared memory.
    row, first_column: the position of the tile in the output.
    out_ptr: the output (rows, size_n), contiguous.
    """
    rows = row + gl.arange(0, buffer.shape[0], gl.SliceLayout(1, LAYOUT))
    column = first_column + gl.arange(0, buffer.shape[1], gl.SliceLayout(0, LAYOUT))
    out_ptrs = out_ptr + rows.to(gl.int64)[:, None] * size_n + column[None, :]
    mask = (rows < end)[:, None] & (column < size_n)[None, :]
    gl.store(out_ptrs, buffer.load(LAYOUT), mask=mask)


@gluon.jit
def store_rows(
    values, row, end, first_column, out_ptr, out_desc, staging, staging_index: gl.constexpr, size_n,
):  # fmt: skip
    """Round and store a tile to consecutive rows of an output with size_n columns.

    The tile is written to buffer `staging_index` of `staging`, from which TMA stores it while the
    next tile is multiplied. Rows from `end` on belong to another expert. If the tile has such rows,
    the threads store only the rows before `end`, without TMA.

    values: the tile (rows, columns).
    row, first_column: the position of the tile in the output.
    out_desc: TMA descriptor of the output.
    """
    ROWS: gl.constexpr = values.shape[0]
    WIDTH: gl.constexpr = values.shape[1]
    buffer = staging.index(staging_index)
    # Wait for all TMA stores of the last tile. Partial tiles are stored without TMA, so the number
    # of pending stores is not known, and store_wait(1) would be wrong.
    if staging_index == 0:
        tma.store_wait(0)
    buffer.store(values.to(out_desc.dtype))
    if row + ROWS <= end:
        fence_async_shared()
        tma_async_store(out_desc, [row, first_column], buffer)
    else:
        LANES_PER_ROW: gl.constexpr = WIDTH // 8 if WIDTH < 256 else 32
        LAYOUT: gl.constexpr = gl.BlockedLayout(
            [1, 8], [32 // LANES_PER_ROW, LANES_PER_ROW], [4, 1], [1, 0]
        )
        store_masked(buffer, row, end, first_column, out_ptr, size_n, LAYOUT)


@gluon.jit
def _finish_one_half(
    values, a_scale, row, end, out_ptr, out_desc, staging, staging_index: gl.constexpr, size_n,
    expert, weight_rows, weight_row, b_scale_ptr, bias_ptr,
    SCALE_MODE: gl.constexpr, LAYOUT: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr,
    ACTIVATION: gl.constexpr, ACTIVATION_ALPHA: gl.constexpr, ACTIVATION_LIMIT: gl.constexpr,
):  # fmt: skip
    """Apply the epilogue to one half of a tile and store it.

    values: the accumulators of the half, with one column per weight row from `weight_row` on. If
        GATED, gate rows and up rows alternate.

    For the other arguments, see `finish_tile`.
    """
    values = _apply_scale_and_bias(
        values,
        a_scale,
        expert,
        weight_rows,
        weight_row,
        b_scale_ptr,
        bias_ptr,
        SCALE_MODE,
        LAYOUT,
        HAS_BIAS,
    )
    if GATED:
        gate, up = values.reshape((values.shape[0], values.shape[1] // 2, 2)).split()
        out_values = activate(gate, up, ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT).to(
            out_desc.dtype
        )
        # A thread has every fourth column. With pairs of adjacent columns, it can store whole 8 x 8
        # matrices to shared memory.
        PAIRS: gl.constexpr = gl.NVMMADistributedLayout(
            [3, 0], [4, 1], [16, out_values.shape[1], 16]
        )
        out_values = gl.convert_layout(out_values, PAIRS)
        store_rows(
            out_values, row, end, weight_row // 2, out_ptr, out_desc, staging, staging_index, size_n
        )
    elif ACTIVATION != "identity":
        out_values = activate(values, values, ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT)
        store_rows(
            out_values, row, end, weight_row, out_ptr, out_desc, staging, staging_index, size_n
        )
    else:
        store_rows(values, row, end, weight_row, out_ptr, out_desc, staging, staging_index, size_n)


@gluon.jit
def finish_tile(
    left, right, row, end, out_ptr, out_desc, staging, size_n, expert, weight_rows,
    right_row_offset,
    first_weight_row,
    a_scale_ptr, a_scale_rows, b_scale_ptr, bias_ptr,
    SCALE_MODE: gl.constexpr, LAYOUT: gl.constexpr, GATE_STRIDE: gl.constexpr, GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, ACTIVATION_ALPHA: gl.constexpr,
    ACTIVATION_LIMIT: gl.constexpr,
):  # fmt: skip
    """Apply scales, bias and activation function to both halves of a tile, and store the results.

    TMA stores may still be pending on return. The kernel must wait for them before it ends.

    left, right: the accumulators of both halves, (rows, weight rows per half).
    row: the first row of the tile.
    end: the row after the last row of the expert.
    out_ptr: the output (rows, size_n), contiguous.
    out_desc: TMA descriptor of the output, with boxes as wide as the output of a half.
    staging: one or two buffers in shared memory for boxes of the output.
    expert: the expert of the tile.
    weight_rows: number of weight rows of each expert.
    right_row_offset: offset in weight rows from the left half to the right half.
    first_weight_row: the first weight row of the left half.
    a_scale_ptr: one scale per activation row; used if SCALE_MODE is "channel".
    a_scale_rows: (rows,), the index of the scale of each row of the tile.
    b_scale_ptr, bias_ptr: (num_experts, weight_rows).
    SCALE_MODE: "channel" to apply scales; other modes apply none here.
    LAYOUT: the layout of the accumulators.
    GATE_STRIDE: weight rows per output column: 2 if gate and up rows alternate, otherwise 1.
    GATED: whether the activation function combines gate and up.
    """
    tile_rows = row + gl.arange(0, left.shape[0], gl.SliceLayout(1, LAYOUT))
    a_scale = gl.full(tile_rows.shape, 1.0, gl.float32, tile_rows.type.layout)
    if SCALE_MODE == "channel":
        a_scale = gl.load(a_scale_ptr + a_scale_rows, mask=tile_rows < end, other=0.0)
    if GATED and GATE_STRIDE == 1:
        gate = _apply_scale_and_bias(
            left,
            a_scale,
            expert,
            weight_rows,
            first_weight_row,
            b_scale_ptr,
            bias_ptr,
            SCALE_MODE,
            LAYOUT,
            HAS_BIAS,
        )
        up = _apply_scale_and_bias(
            right, a_scale, expert, weight_rows, first_weight_row + right_row_offset, b_scale_ptr,
            bias_ptr,
            SCALE_MODE, LAYOUT, HAS_BIAS,
        )  # fmt: skip
        out_values = activate(gate, up, ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT)
        store_rows(out_values, row, end, first_weight_row, out_ptr, out_desc, staging, 0, size_n)
    else:
        _finish_one_half(
            left, a_scale, row, end, out_ptr, out_desc, staging, 0, size_n, expert, weight_rows,
            first_weight_row,
            b_scale_ptr, bias_ptr, SCALE_MODE, LAYOUT, HAS_BIAS, GATED, ACTIVATION,
            ACTIVATION_ALPHA, ACTIVATION_LIMIT,
        )  # fmt: skip
        _finish_one_half(
            right, a_scale, row, end, out_ptr, out_desc, staging, staging.shape[0] - 1, size_n,
            expert, weight_rows, first_weight_row + right_row_offset,
            b_scale_ptr, bias_ptr, SCALE_MODE, LAYOUT, HAS_BIAS, GATED, ACTIVATION,
            ACTIVATION_ALPHA, ACTIVATION_LIMIT,
        )  # fmt: skip
