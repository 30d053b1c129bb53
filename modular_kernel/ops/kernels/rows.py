"""Kernels that move hidden rows: tokens to rows, rows to pairs, and sums of rows to tokens."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.ids import load_local_ids
from modular_kernel.ops.kernels.pdl import pdl_wait


@triton.jit
def permute_tokens_kernel(
    x_ptr, scale_ptr, row_of_pair_ptr, weights_ptr, rows_ptr, scale_rows_ptr,
    hidden, groups, stride_x, stride_row, stride_group,
    TOP_K: tl.constexpr, HAS_WEIGHTS: tl.constexpr, HAS_SCALE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """rows[row_of_pair[t, k]] = x[t], times the weight of (t, k) if HAS_WEIGHTS.

    Grid: (tokens * ceil(hidden / BLOCK_H),). A program reads BLOCK_H columns of a token once and
    writes them to the rows of all its pairs; -1 skips a pair.

    If HAS_SCALE, the program of a token's first columns also copies its `groups` scales to
    scale_rows, which has the strides stride_row and stride_group. BLOCK_G is a power of two >=
    groups.
    """
    column_blocks = tl.cdiv(hidden, BLOCK_H)
    token = (tl.program_id(0) // column_blocks).to(tl.int64)
    column_block = tl.program_id(0) % column_blocks
    columns = column_block * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = columns < hidden
    value = tl.load(x_ptr + token * stride_x + columns, mask=mask, other=0.0)
    if HAS_SCALE:
        group = tl.arange(0, BLOCK_G)
        group_mask = (group < groups) & (column_block == 0)
        scale = tl.load(scale_ptr + token * groups + group, mask=group_mask, other=0.0)
    for slot in range(TOP_K):
        pair = token * TOP_K + slot
        row = tl.load(row_of_pair_ptr + pair).to(tl.int64)
        row_value = value
        if HAS_WEIGHTS:
            row_value = (value.to(tl.float32) * tl.load(weights_ptr + pair)).to(value.dtype)
        tl.store(rows_ptr + row * hidden + columns, row_value, mask=mask & (row >= 0))
        if HAS_SCALE:
            scale_ptrs = scale_rows_ptr + row * stride_row + group.to(tl.int64) * stride_group
            tl.store(scale_ptrs, scale, mask=group_mask & (row >= 0))


@triton.jit
def _row_of_pair(
    pair, rows_index_ptr, map_ptr, num_experts, num_local,
    SOURCE: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    """Return the row of a pair, -1 if it is skipped.

    SOURCE "all": the row is the pair. "ids": it is the pair, if the pair's id is local. "rows": it
    is in the table at rows_index_ptr.
    """
    if SOURCE == "rows":
        row = tl.load(rows_index_ptr + pair).to(tl.int64)
    elif SOURCE == "ids":
        local, _ = load_local_ids(
            rows_index_ptr, pair, pair >= 0, map_ptr, num_experts, num_local, HAS_MAP
        )
        row = tl.where(local >= 0, pair, -1)
    else:
        row = pair
    return row


@triton.jit
def weight_and_sum_kernel(
    rows_ptr, index_ptr, map_ptr, weights_ptr, out_ptr,
    hidden, num_experts, num_local, scale,
    TOP_K: tl.constexpr, SOURCE: tl.constexpr, HAS_MAP: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, BLOCK_H: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """out[t] = scale * sum over k of weight[t, k] * rows[row of (t, k)], summed in float32.

    Grid: (tokens * ceil(hidden / BLOCK_H),), with programs of one token adjacent, so that rows are
    read contiguously. Rows of skipped pairs are not read. The loop over k is unrolled, so that all
    rows of a token are loaded concurrently.

    SOURCE: see `_row_of_pair`.
    """
    pdl_wait(OVERLAP)
    column_blocks = tl.cdiv(hidden, BLOCK_H)
    token = (tl.program_id(0) // column_blocks).to(tl.int64)
    columns = tl.program_id(0) % column_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = columns < hidden
    total = tl.zeros((BLOCK_H,), tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        row = _row_of_pair(pair, index_ptr, map_ptr, num_experts, num_local, SOURCE, HAS_MAP)
        value = tl.load(rows_ptr + row * hidden + columns, mask=mask & (row >= 0), other=0.0)
        value = value.to(tl.float32)
        if HAS_WEIGHTS:
            # A skipped pair's weight is arbitrary and may be NaN too.
            value = value * tl.load(weights_ptr + pair, mask=row >= 0, other=0.0)
        total += value
    result = (total * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * hidden + columns, result, mask=mask)


@triton.jit
def gather_rows_kernel(
    rows_ptr, index_ptr, map_ptr, weights_ptr, out_ptr,
    hidden, num_experts, num_local, scale,
    SOURCE: tl.constexpr, HAS_MAP: tl.constexpr, HAS_WEIGHTS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[p] = scale * weight[p] * rows[row of p]; zero if the pair is skipped.

    Grid: (pairs, ceil(hidden / BLOCK_H)).

    SOURCE: see `_row_of_pair`.
    """
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = columns < hidden
    row = _row_of_pair(pair, index_ptr, map_ptr, num_experts, num_local, SOURCE, HAS_MAP)
    value = tl.load(rows_ptr + row * hidden + columns, mask=mask & (row >= 0), other=0.0)
    value = value.to(tl.float32) * scale
    if HAS_WEIGHTS:
        # A skipped pair's weight is arbitrary and may be NaN too.
        value = value * tl.load(weights_ptr + pair, mask=row >= 0, other=0.0)
    tl.store(out_ptr + pair * hidden + columns, value.to(out_ptr.dtype.element_ty), mask=mask)
