"""Kernels that quantize rows with one scale per row, group or tensor.

They can apply an activation function first. A pair is a token together with one of its top_k
experts: pair p belongs to token p // top_k.

    segment     `capacity` rows: all rows, or the rows of one expert in the batched format.
                `programs_per_segment` programs share the rows of a segment. Each program takes
                BLOCK_ROWS rows at a time.
    group       group_size adjacent columns of a row, which share a scale.
    line        one group of one row, in a tile of a program.
    ROW_SOURCE  which rows hold a token and are quantized:
                "all": all rows.
                "pairs": row p, if the expert of pair p is on this rank; row_filter_ptr has the ids.
                "batched": the first row_filter_ptr[s] rows of segment s.

QMAX is the largest value of the quantized type, and MIN_SCALE is the minimum scale. ROUND_TO_INT
tells whether the quantized type is an integer.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.activation import USE_INLINE_ASM, activate
from modular_kernel.ops.kernels.extrema import clamp_nan, max_nan, maximum_nan
from modular_kernel.ops.kernels.ids import load_local_ids
from modular_kernel.ops.kernels.pdl import pdl_wait


@triton.jit
def scale_of(amax, QMAX: tl.constexpr, MIN_SCALE: tl.constexpr):
    """Return the scale of values whose largest magnitude is `amax`; NaN if `amax` is NaN."""
    # div_rn rounds to nearest, like the torch reference. `/` does not on a GPU.
    return maximum_nan(tl.div_rn(amax, QMAX), MIN_SCALE)


@triton.jit
def quantized_values(
    value, inverse, QMAX: tl.constexpr, ROUND_TO_INT: tl.constexpr, SATURATE: tl.constexpr = True
):
    """Return value * inverse, clamped to [-QMAX, QMAX].

    If ROUND_TO_INT, the result is rounded to the nearest integer, with ties to even.

    inverse: the reciprocal of the scale.
    SATURATE: whether to clamp. It may be False if the scale was computed from the same values with
        `scale_of`. The product then exceeds QMAX by at most three rounding errors, and the
        conversion to the quantized type rounds it to QMAX.
    """
    value = value * inverse
    if SATURATE or ROUND_TO_INT:
        value = clamp_nan(value, -QMAX, QMAX)
    if ROUND_TO_INT:
        # Adding 1.5 * 2**23 to a value below 2**22 leaves no bits for a fraction.
        value = (value + 12582912.0) - 12582912.0
    return value


@triton.jit
def _round_to_dtype(value, dtype: tl.constexpr):
    """Return float32 values rounded to `dtype`, as float32."""
    if USE_INLINE_ASM and dtype == tl.bfloat16:
        # Convert two values at a time. Converting single values would occupy the unit that computes
        # exponentials and reciprocals.
        value = tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; "
            "shl.b32 $0, t, 16; and.b32 $1, t, 0xFFFF0000; }",
            "=r,=r,r,r", [value], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        value = value.to(dtype).to(tl.float32)
    return value


@triton.jit
def _locate_rows(
    segment, positions, count, capacity, row_filter_ptr, expert_map_ptr, num_experts,
    num_local_experts,
    ROW_SOURCE: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr,
):  # fmt: skip
    """Return the indices of rows of a segment, and a mask of the rows that hold a token.

    positions: the positions of the rows in the segment.
    count: the number of rows in use.
    """
    rows = segment * capacity + positions.to(tl.int64)
    valid = positions < count
    if ROW_SOURCE == "pairs":
        local_expert, _ = load_local_ids(
            row_filter_ptr,
            rows,
            valid,
            expert_map_ptr,
            num_experts,
            num_local_experts,
            HAS_EXPERT_MAP,
        )
        valid = valid & (local_expert >= 0)
    return rows, valid


@triton.jit
def _load_values(
    x_ptr, router_weights_ptr, rows, columns, valid, num_columns, stride_x, up_offset,
    HAS_ROUTER_WEIGHTS: tl.constexpr, ACTIVATION: tl.constexpr, ACTIVATION_ALPHA: tl.constexpr,
    ACTIVATION_LIMIT: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
):  # fmt: skip
    """Load the values to quantize as float32, 0 where masked.

    The values are x, or act(x) rounded to the dtype of x. If HAS_ROUTER_WEIGHTS, they are
    multiplied by the router weights.

    rows: (lines,), the row of each line.
    columns: (lines, BLOCK_COLUMNS).
    num_columns: a scalar or one value per line. Columns from num_columns on are masked.
    ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT: the activation function (`activate`).
        "identity" means that x is not changed.
    GATE_STRIDE, up_offset: gate column i is column i * GATE_STRIDE of x, and its up column is
        up_offset columns further.
    """
    mask = valid[:, None] & (columns < num_columns)
    x_ptrs = x_ptr + rows[:, None] * stride_x + columns * GATE_STRIDE
    value = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION != "identity":
        up = tl.load(x_ptrs + up_offset, mask=mask, other=0.0).to(tl.float32)
        value = activate(
            value, up, ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT, FLUSH_SUBNORMALS=True
        )
        value = _round_to_dtype(value, x_ptr.dtype.element_ty)
    if HAS_ROUTER_WEIGHTS:
        value = value * tl.load(router_weights_ptr + rows, mask=valid, other=0.0)[:, None]
    return value


@triton.jit
def amax_kernel(
    x_ptr, router_weights_ptr, row_filter_ptr, expert_map_ptr, partial_amax_ptr,
    num_columns, stride_x, up_offset, capacity, programs_per_segment, num_experts,
    num_local_experts,
    ROW_SOURCE: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr, HAS_ROUTER_WEIGHTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """partial_amax[program] = largest magnitude in the program's rows, or 0 if it has no rows.

    `quantize_program` takes the maximum of all partial results. This requires neither atomics nor
    zeroed memory.

    Grid: (segments * programs_per_segment,).

    x_ptr: (rows, num_columns); rows are stride_x apart.
    router_weights_ptr: (rows,) float32, factors of x. Used if HAS_ROUTER_WEIGHTS.
    row_filter_ptr, expert_map_ptr, num_experts, num_local_experts, ROW_SOURCE, HAS_EXPERT_MAP:
        which rows to read; see the docstring of the module.
    BLOCK_ROWS, BLOCK_COLUMNS: the size of a tile.
    """
    segment = (tl.program_id(0) // programs_per_segment).to(tl.int64)
    count = capacity
    if ROW_SOURCE == "batched":
        count = tl.load(row_filter_ptr + segment)
    amax = tl.zeros((BLOCK_ROWS,), tl.float32)
    for start in range(
        tl.program_id(0) % programs_per_segment * BLOCK_ROWS,
        count,
        programs_per_segment * BLOCK_ROWS,
    ):
        rows, valid = _locate_rows(
            segment, start + tl.arange(0, BLOCK_ROWS), count, capacity,
            row_filter_ptr, expert_map_ptr, num_experts, num_local_experts, ROW_SOURCE,
            HAS_EXPERT_MAP,
        )  # fmt: skip
        for first in range(0, num_columns, BLOCK_COLUMNS):
            columns = (first + tl.arange(0, BLOCK_COLUMNS))[None, :]
            value = _load_values(
                x_ptr, router_weights_ptr, rows, columns, valid, num_columns,
                stride_x, up_offset, HAS_ROUTER_WEIGHTS, "identity", 0.0, 0.0, 1,
            )  # fmt: skip
            amax = maximum_nan(amax, max_nan(tl.abs(value), 1))
    tl.store(partial_amax_ptr + tl.program_id(0), max_nan(amax, 0))


@triton.jit
def quantize_program(
    program, x_ptr, router_weights_ptr, row_filter_ptr, expert_map_ptr, q_ptr, scale_ptr,
    partial_amax_ptr,
    num_columns, group_size, num_groups, stride_x, up_offset, capacity, programs_per_segment,
    num_partial_amax,
    num_experts, num_local_experts,
    SCALE_SOURCE: tl.constexpr, ROW_SOURCE: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr,
    HAS_ROUTER_WEIGHTS: tl.constexpr,
    ACTIVATION: tl.constexpr, ACTIVATION_ALPHA: tl.constexpr, ACTIVATION_LIMIT: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    QMAX: tl.constexpr, ROUND_TO_INT: tl.constexpr, MIN_SCALE: tl.constexpr,
    GROUP_FITS_BLOCK: tl.constexpr, SCALES_GROUP_MAJOR: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_PARTIALS: tl.constexpr,
):  # fmt: skip
    """q[r, c] = x[r, c] / scale, for the rows and groups of the program with index `program`.

    There are segments * programs_per_segment * ceil(num_groups / BLOCK_GROUPS) programs. A program
    handles BLOCK_GROUPS groups of columns of some rows. Programs of the same rows are adjacent, so
    that memory is read in order. Outputs of rows without a token are not written.

    x_ptr, router_weights_ptr, up_offset, HAS_ROUTER_WEIGHTS, ACTIVATION, ACTIVATION_ALPHA,
        ACTIVATION_LIMIT, GATE_STRIDE: the values to quantize; see `_load_values`.
    row_filter_ptr, expert_map_ptr, num_experts, num_local_experts, ROW_SOURCE, HAS_EXPERT_MAP:
        which rows to quantize; see the docstring of the module.
    q_ptr: output (rows, num_columns), contiguous.
    scale_ptr: the scales, or one scale; see SCALE_SOURCE.
    partial_amax_ptr: (num_partial_amax,) float32, from `amax_kernel`.
    num_groups: groups per row.
    SCALE_SOURCE: where scales come from:
        "dynamic": a scale per row and group is computed and stored.
        "static": all values have the scale at scale_ptr.
        "partials": all values have a scale that is computed from partial_amax_ptr. The first
            program stores it.
    QMAX: the largest value of the quantized type.
    ROUND_TO_INT: whether the quantized type is an integer.
    MIN_SCALE: the minimum scale.
    GROUP_FITS_BLOCK: whether BLOCK_COLUMNS covers a group, so that x is read once.
    SCALES_GROUP_MAJOR: whether the scales of a segment are stored as (num_groups, capacity) instead
        of (capacity, num_groups).
    STAGES: stages of the software pipeline over tiles.
    BLOCK_PARTIALS: a power of two >= num_partial_amax.
    """
    group_blocks = tl.cdiv(num_groups, BLOCK_GROUPS)
    row_program = program // group_blocks
    segment = (row_program // programs_per_segment).to(tl.int64)
    line = tl.arange(0, BLOCK_ROWS * BLOCK_GROUPS)
    group_index = program % group_blocks * BLOCK_GROUPS + line % BLOCK_GROUPS
    first_column = group_index * group_size
    end = tl.minimum(first_column + group_size, num_columns)[:, None]  # NaN-free: integer operands
    columns = first_column[:, None] + tl.arange(0, BLOCK_COLUMNS)[None, :]
    count = capacity
    if ROW_SOURCE == "batched":
        count = tl.load(row_filter_ptr + segment)
    scale = tl.zeros((BLOCK_ROWS * BLOCK_GROUPS,), tl.float32)
    if SCALE_SOURCE == "static":
        scale += tl.load(scale_ptr)
    elif SCALE_SOURCE == "partials":
        index = tl.arange(0, BLOCK_PARTIALS)
        amax = tl.load(partial_amax_ptr + index, mask=index < num_partial_amax, other=0.0)
        tensor_scale = scale_of(max_nan(amax, 0), QMAX, MIN_SCALE)
        scale += tensor_scale
        if program == 0:
            tl.store(scale_ptr, tensor_scale)
    for start in tl.range(
        row_program % programs_per_segment * BLOCK_ROWS,
        count,
        programs_per_segment * BLOCK_ROWS,
        num_stages=STAGES,
    ):
        positions = start + line // BLOCK_GROUPS
        rows, valid = _locate_rows(
            segment, positions, count, capacity,
            row_filter_ptr, expert_map_ptr, num_experts, num_local_experts, ROW_SOURCE,
            HAS_EXPERT_MAP,
        )  # fmt: skip
        value = _load_values(
            x_ptr, router_weights_ptr, rows, columns, valid, end,
            stride_x, up_offset, HAS_ROUTER_WEIGHTS, ACTIVATION, ACTIVATION_ALPHA,
            ACTIVATION_LIMIT, GATE_STRIDE,
        )  # fmt: skip
        if SCALE_SOURCE == "dynamic":
            group_amax = max_nan(tl.abs(value), 1)
            if not GROUP_FITS_BLOCK:
                for offset in range(BLOCK_COLUMNS, group_size, BLOCK_COLUMNS):
                    next_value = _load_values(
                        x_ptr, router_weights_ptr, rows, columns + offset, valid, end,
                        stride_x, up_offset, HAS_ROUTER_WEIGHTS, ACTIVATION, ACTIVATION_ALPHA,
                        ACTIVATION_LIMIT, GATE_STRIDE,
                    )  # fmt: skip
                    group_amax = maximum_nan(group_amax, max_nan(tl.abs(next_value), 1))
            scale = scale_of(group_amax, QMAX, MIN_SCALE)
            if SCALES_GROUP_MAJOR:
                scale_ptrs = scale_ptr + (segment * num_groups + group_index) * capacity + positions
            else:
                scale_ptrs = scale_ptr + rows * num_groups + group_index
            tl.store(scale_ptrs, scale, mask=valid & (group_index < num_groups))
        inverse = tl.div_rn(1.0, scale)[:, None]
        q_ptrs = q_ptr + rows[:, None] * num_columns
        q = quantized_values(value, inverse, QMAX, ROUND_TO_INT, SCALE_SOURCE != "dynamic")
        mask = valid[:, None] & (columns < end)
        tl.store(q_ptrs + columns, q.to(q_ptr.dtype.element_ty), mask=mask)
        if not GROUP_FITS_BLOCK:
            for offset in range(BLOCK_COLUMNS, group_size, BLOCK_COLUMNS):
                next_value = _load_values(
                    x_ptr, router_weights_ptr, rows, columns + offset, valid, end,
                    stride_x, up_offset, HAS_ROUTER_WEIGHTS, ACTIVATION, ACTIVATION_ALPHA,
                    ACTIVATION_LIMIT, GATE_STRIDE,
                )  # fmt: skip
                q = quantized_values(
                    next_value, inverse, QMAX, ROUND_TO_INT, SCALE_SOURCE != "dynamic"
                )
                mask = valid[:, None] & (columns + offset < end)
                tl.store(q_ptrs + columns + offset, q.to(q_ptr.dtype.element_ty), mask=mask)


@triton.jit
def quantize_rows_kernel(
    x_ptr, router_weights_ptr, row_filter_ptr, expert_map_ptr, q_ptr, scale_ptr, partial_amax_ptr,
    num_columns, group_size, num_groups, stride_x, up_offset, capacity, programs_per_segment,
    num_partial_amax,
    num_experts, num_local_experts,
    SCALE_SOURCE: tl.constexpr, ROW_SOURCE: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr,
    HAS_ROUTER_WEIGHTS: tl.constexpr,
    ACTIVATION: tl.constexpr, ACTIVATION_ALPHA: tl.constexpr, ACTIVATION_LIMIT: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    QMAX: tl.constexpr, ROUND_TO_INT: tl.constexpr, MIN_SCALE: tl.constexpr,
    GROUP_FITS_BLOCK: tl.constexpr, SCALES_GROUP_MAJOR: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_PARTIALS: tl.constexpr,
    USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """Run `quantize_program` in every program.

    USE_PDL: whether the launch uses programmatic dependent launch (`pdl_wait`).
    """
    pdl_wait(USE_PDL)
    quantize_program(
        tl.program_id(0), x_ptr, router_weights_ptr, row_filter_ptr, expert_map_ptr, q_ptr,
        scale_ptr, partial_amax_ptr,
        num_columns, group_size, num_groups, stride_x, up_offset, capacity, programs_per_segment,
        num_partial_amax,
        num_experts, num_local_experts, SCALE_SOURCE, ROW_SOURCE, HAS_EXPERT_MAP,
        HAS_ROUTER_WEIGHTS, ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT, GATE_STRIDE,
        QMAX, ROUND_TO_INT, MIN_SCALE, GROUP_FITS_BLOCK, SCALES_GROUP_MAJOR, STAGES, BLOCK_ROWS,
        BLOCK_GROUPS, BLOCK_COLUMNS,
        BLOCK_PARTIALS,
    )  # fmt: skip
