"""Kernels that prepare NVFP4 operands for block-scaled GEMMs.

NVFP4 values are e2m1 (4-bit floating point), with one e4m3 scale per group of 16 adjacent values
and a float32 global scale per expert. The GEMMs read scales in a tiled layout: the scales of 128
rows and 16 groups are contiguous in memory.

A tile is up to 128 rows of one expert. The list of tiles is an int32 tensor in the format of
`modular_kernel.ops.sort.SortedPairs.tiles`: three arrays of max_tiles values, with the expert of
each tile, its first row, and the end of the expert's rows, followed by the number of tiles.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.activation import activate
from modular_kernel.ops.kernels.extrema import max_nan, minimum_nan


@triton.jit
def _encode_e4m3(value):
    """Return the e4m3 codes of float32 values in [0, 448], rounded to nearest even; 127 for NaN."""
    # Integer operations are used, because not every supported GPU has e4m3 instructions.
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Below 2**-6, codes are multiples of 2**-9. Adding 1.5 * 2**23 rounds to an integer.
    small = ((value * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    code = tl.where(value < 0.015625, small, normal)
    return tl.where(value == value, code, 127)


@triton.jit
def _decode_e4m3(code):
    """Return the float32 values of e4m3 codes >= 0."""
    normal = ((code + 960) << 20).to(tl.float32, bitcast=True)
    value = tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)
    return tl.where(code == 127, float("nan"), value)


@triton.jit
def _encode_e2m1(value):
    """Return the e2m1 codes of float32 values, rounded to nearest even.

    NaN gets the code of the largest magnitude.
    """
    magnitude = tl.abs(value)
    code = 7 - (magnitude <= 0.25).to(tl.int32) - (magnitude < 0.75).to(tl.int32)
    code = code - (magnitude <= 1.25).to(tl.int32) - (magnitude < 1.75).to(tl.int32)
    code = code - (magnitude <= 2.5).to(tl.int32) - (magnitude < 3.5).to(tl.int32)
    code = code - (magnitude <= 5.0).to(tl.int32)
    return tl.where(value < 0, code + 8, code)


@triton.jit
def quantize_tiles_kernel(
    x_ptr, source_row_ptr, tiles_ptr, global_scale_ptr, q_ptr, scale_ptr,
    num_columns, max_tiles, stride_x, stride_q, stride_scale, up_offset,
    HAS_SOURCE_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, ACTIVATION_ALPHA: tl.constexpr,
    ACTIVATION_LIMIT: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
):  # fmt: skip
    """q[r, k] = e2m1(v[r, k] / scale of its group of 16 values).

    v is x, or act(x) rounded to the dtype of x.

    Grid: (4 * max_tiles, ceil(num_columns / 256)). A program quantizes 32 rows of a tile and 256
        columns.

    x_ptr: values (rows of x, columns); rows are stride_x apart. Gate column k is column
        k * GATE_STRIDE of x, and its up column is up_offset columns further.
    source_row_ptr: (rows,) int32, the row of x for each row of q. Used if HAS_SOURCE_ROWS;
        otherwise row r of q is row r of x.
    tiles_ptr: the list of tiles; see the docstring of the module.
    global_scale_ptr: (num_experts,) float32, the global scale of each expert.
    q_ptr: output, two e2m1 values per byte; rows are stride_q apart.
    scale_ptr: e4m3 output (max_tiles, bytes), in the tiled layout; tiles are stride_scale apart.
        Scales of rows past the expert's end and of columns past the last one are 0.
    ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT: the activation function (`activate`).
        "identity" means that v is x.
    """
    tile, row_quarter = tl.program_id(0) // 4, tl.program_id(0) % 4
    in_use = tile < tl.load(tiles_ptr + 3 * max_tiles)
    expert = tl.load(tiles_ptr + tile, mask=in_use, other=0)
    first_row = tl.load(tiles_ptr + max_tiles + tile, mask=in_use, other=0)
    end = tl.load(tiles_ptr + 2 * max_tiles + tile, mask=in_use, other=0)
    lane_row = tl.arange(0, 32)
    rows = first_row.to(tl.int64) + row_quarter * 32 + lane_row
    valid = rows < end
    source_rows = rows
    if HAS_SOURCE_ROWS:
        source_rows = tl.load(source_row_ptr + rows, mask=valid, other=0).to(tl.int64)
    columns = tl.program_id(1) * 256 + tl.arange(0, 256)
    mask = valid[:, None] & (columns < num_columns)[None, :]
    x_ptrs = x_ptr + source_rows[:, None] * stride_x + columns[None, :] * GATE_STRIDE
    value = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION != "identity":
        up = tl.load(x_ptrs + up_offset, mask=mask, other=0.0).to(tl.float32)
        value = activate(value, up, ACTIVATION, ACTIVATION_ALPHA, ACTIVATION_LIMIT)
        value = tl.where(mask, value, 0.0).to(x_ptr.dtype.element_ty).to(tl.float32)
    groups = tl.reshape(value, (32, 16, 16))
    inverse = tl.div_rn(1.0, tl.load(global_scale_ptr + expert, mask=in_use, other=1.0))
    amax = max_nan(tl.abs(groups), 2)
    unclamped = tl.div_rn(inverse * amax, 6.0)
    code = _encode_e4m3(minimum_nan(unclamped, 448.0))
    scale = _decode_e4m3(code)
    group_inverse = tl.where(
        scale == 0.0, 0.0, tl.div_rn(inverse, tl.where(scale == 0.0, 1.0, scale))
    )
    codes = tl.reshape(_encode_e2m1(groups * group_inverse[:, :, None]), (32, 128, 2))
    low, high = tl.split(codes)
    byte_columns = tl.program_id(1) * 128 + tl.arange(0, 128)
    q_ptrs = q_ptr + rows[:, None] * stride_q + byte_columns[None, :]
    q_mask = valid[:, None] & (byte_columns * 2 < num_columns)[None, :]
    tl.store(q_ptrs, (low | (high << 4)).to(tl.uint8), mask=q_mask)
    group = tl.arange(0, 16)
    offset = (group // 4 * 512 + group % 4)[None, :] + (lane_row * 16 + row_quarter * 4)[:, None]
    scale_ptrs = scale_ptr + tile.to(tl.int64) * stride_scale + tl.program_id(1) * 2048 + offset
    tl.store(scale_ptrs, code.to(tl.uint8), mask=in_use & (offset >= 0))


@triton.jit
def tile_scales_kernel(scale_ptr, out_ptr, num_rows, num_groups, blocks_per_expert, stride_out):
    """Convert weight scales (num_experts, num_rows, num_groups) to the tiled layout.

    Grid: (num_experts * blocks_per_expert, ceil(num_groups / 16)). A program converts the scales of
        a block of 128 rows and of 16 groups.

    scale_ptr: one-byte scales, contiguous.
    out_ptr: output (num_experts * blocks_per_expert, bytes); blocks are stride_out apart.
    """
    block = tl.program_id(0).to(tl.int64)
    row, group = tl.arange(0, 128), tl.arange(0, 16)
    rows, groups = block % blocks_per_expert * 128 + row, tl.program_id(1) * 16 + group
    mask = (rows < num_rows)[:, None] & (groups < num_groups)[None, :]
    ptrs = (
        scale_ptr
        + (block // blocks_per_expert * num_rows + rows)[:, None] * num_groups
        + groups[None, :]
    )
    value = tl.load(ptrs, mask=mask, other=0)
    offset = (group // 4 * 512 + group % 4)[None, :] + (row % 32 * 16 + row // 32 * 4)[:, None]
    tl.store(out_ptr + block * stride_out + tl.program_id(1) * 2048 + offset, value)


@triton.jit
def make_batched_tiles_kernel(
    counts_ptr, tiles_ptr, num_experts, capacity, max_tiles,
    BLOCK_EXPERTS: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """Write the list of tiles of the batched format (num_experts, capacity, K).

    The tiles cover the first counts[i] rows of each expert i.

    Grid: (num_experts,).

    counts_ptr: (num_experts,) int32, the rows in use of each expert.
    tiles_ptr: output, the list of tiles; see the docstring of the module.
    BLOCK_EXPERTS: a power of two >= num_experts.
    BLOCK_TILES: a power of two >= the maximum number of tiles of one expert.
    """
    this_expert = tl.program_id(0)
    expert = tl.arange(0, BLOCK_EXPERTS)
    count = tl.load(counts_ptr + expert, mask=expert < num_experts, other=0)
    tiles = (count + 127) // 128
    preceding = tl.sum(tl.where(expert < this_expert, tiles, 0), axis=0)
    num_rows = tl.load(counts_ptr + this_expert)
    tile = tl.arange(0, BLOCK_TILES)
    mask = tile < (num_rows + 127) // 128
    start = this_expert * capacity
    zeros = tl.zeros((BLOCK_TILES,), tl.int32)
    tl.store(tiles_ptr + preceding + tile, zeros + this_expert, mask=mask)
    tl.store(tiles_ptr + max_tiles + preceding + tile, start + tile * 128, mask=mask)
    tl.store(tiles_ptr + 2 * max_tiles + preceding + tile, zeros + start + num_rows, mask=mask)
    total = tl.sum(tiles, axis=0)
    tl.store(tiles_ptr + 3 * max_tiles, total, mask=this_expert == 0)
