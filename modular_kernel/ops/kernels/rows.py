"""Kernels that move hidden rows: tokens to rows, rows to pairs, and sums of rows to tokens."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.ids import load_local_ids
from modular_kernel.ops.kernels.pdl import pdl_wait


@triton.jit
def permute_tokens_kernel(
    x_ptr, scale_ptr, row_of_pair_ptr, router_weights_ptr, rows_ptr, scale_rows_ptr,
    hidden_size, num_groups, stride_x, stride_row, stride_group,
    TOP_K: tl.constexpr, HAS_ROUTER_WEIGHTS: tl.constexpr, HAS_SCALE: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """rows[row_of_pair[t, k]] = x[t], times the weight of (t, k) if HAS_ROUTER_WEIGHTS.

    Grid: (tokens * ceil(hidden / BLOCK_HIDDEN),). A program reads BLOCK_HIDDEN columns of a token
        once and
    writes them to the rows of all its pairs; -1 skips a pair.

    If HAS_SCALE, the program of a token's first columns also copies its `groups` scales to
    scale_rows, which has the strides stride_row and stride_group. BLOCK_GROUPS is a power of two >=
    groups.
    """
    column_blocks = tl.cdiv(hidden_size, BLOCK_HIDDEN)
    token = (tl.program_id(0) // column_blocks).to(tl.int64)
    column_block = tl.program_id(0) % column_blocks
    columns = column_block * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)
    mask = columns < hidden_size
    value = tl.load(x_ptr + token * stride_x + columns, mask=mask, other=0.0)
    if HAS_SCALE:
        group = tl.arange(0, BLOCK_GROUPS)
        group_mask = (group < num_groups) & (column_block == 0)
        scale = tl.load(scale_ptr + token * num_groups + group, mask=group_mask, other=0.0)
    for k_index in range(TOP_K):
        pair = token * TOP_K + k_index
        row = tl.load(row_of_pair_ptr + pair).to(tl.int64)
        row_value = value
        if HAS_ROUTER_WEIGHTS:
            row_value = (value.to(tl.float32) * tl.load(router_weights_ptr + pair)).to(value.dtype)
        tl.store(rows_ptr + row * hidden_size + columns, row_value, mask=mask & (row >= 0))
        if HAS_SCALE:
            scale_ptrs = scale_rows_ptr + row * stride_row + group.to(tl.int64) * stride_group
            tl.store(scale_ptrs, scale, mask=group_mask & (row >= 0))


@triton.jit
def _row_of_pair(
    pair, row_index_ptr, expert_map_ptr, num_experts, num_local_experts,
    ROW_SOURCE: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr,
):  # fmt: skip
    """Return the row of a pair, -1 if it is skipped.

    SOURCE "all": the row is the pair. "ids": it is the pair, if the pair's id is local. "rows": it
    is in the table at row_index_ptr.
    """
    if ROW_SOURCE == "rows":
        row = tl.load(row_index_ptr + pair).to(tl.int64)
    elif ROW_SOURCE == "ids":
        local_expert, _ = load_local_ids(
            row_index_ptr,
            pair,
            pair >= 0,
            expert_map_ptr,
            num_experts,
            num_local_experts,
            HAS_EXPERT_MAP,
        )
        row = tl.where(local_expert >= 0, pair, -1)
    else:
        row = pair
    return row


@triton.jit
def weight_and_sum_kernel(
    rows_ptr, row_index_ptr, expert_map_ptr, router_weights_ptr, out_ptr,
    hidden_size, num_experts, num_local_experts, scale,
    TOP_K: tl.constexpr, ROW_SOURCE: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr,
    HAS_ROUTER_WEIGHTS: tl.constexpr, BLOCK_HIDDEN: tl.constexpr, USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """out[t] = scale * sum over k of weight[t, k] * rows[row of (t, k)], summed in float32.

    Grid: (tokens * ceil(hidden / BLOCK_HIDDEN),), with programs of one token adjacent, so that
        rows are
    read contiguously. Rows of skipped pairs are not read. The loop over k is unrolled, so that all
    rows of a token are loaded concurrently.

    SOURCE: see `_row_of_pair`.
    """
    pdl_wait(USE_PDL)
    column_blocks = tl.cdiv(hidden_size, BLOCK_HIDDEN)
    token = (tl.program_id(0) // column_blocks).to(tl.int64)
    columns = tl.program_id(0) % column_blocks * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)
    mask = columns < hidden_size
    total = tl.zeros((BLOCK_HIDDEN,), tl.float32)
    for k_index in tl.static_range(TOP_K):
        pair = token * TOP_K + k_index
        row = _row_of_pair(
            pair,
            row_index_ptr,
            expert_map_ptr,
            num_experts,
            num_local_experts,
            ROW_SOURCE,
            HAS_EXPERT_MAP,
        )
        value = tl.load(rows_ptr + row * hidden_size + columns, mask=mask & (row >= 0), other=0.0)
        value = value.to(tl.float32)
        if HAS_ROUTER_WEIGHTS:
            # A skipped pair's weight is arbitrary and may be NaN too.
            value = value * tl.load(router_weights_ptr + pair, mask=row >= 0, other=0.0)
        total += value
    result = (total * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * hidden_size + columns, result, mask=mask)


@triton.jit
def gather_rows_kernel(
    rows_ptr, row_index_ptr, expert_map_ptr, router_weights_ptr, out_ptr,
    hidden_size, num_experts, num_local_experts, scale,
    ROW_SOURCE: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr, HAS_ROUTER_WEIGHTS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
):  # fmt: skip
    """out[p] = scale * weight[p] * rows[row of p]; zero if the pair is skipped.

    Grid: (pairs, ceil(hidden / BLOCK_HIDDEN)).

    SOURCE: see `_row_of_pair`.
    """
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)
    mask = columns < hidden_size
    row = _row_of_pair(
        pair,
        row_index_ptr,
        expert_map_ptr,
        num_experts,
        num_local_experts,
        ROW_SOURCE,
        HAS_EXPERT_MAP,
    )
    value = tl.load(rows_ptr + row * hidden_size + columns, mask=mask & (row >= 0), other=0.0)
    value = value.to(tl.float32) * scale
    if HAS_ROUTER_WEIGHTS:
        # A skipped pair's weight is arbitrary and may be NaN too.
        value = value * tl.load(router_weights_ptr + pair, mask=row >= 0, other=0.0)
    tl.store(out_ptr + pair * hidden_size + columns, value.to(out_ptr.dtype.element_ty), mask=mask)
