"""Kernels that copy the row of each token to its pairs, or sum the rows of each token's pairs.

A pair is a token together with one of its top_k experts: pair p belongs to token p // top_k.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.ids import load_local_ids
from modular_kernel.ops.kernels.pdl import pdl_wait


@triton.jit
def permute_tokens_kernel(
    x_ptr, scale_ptr, row_of_pair_ptr, router_weights_ptr, rows_ptr, scale_rows_ptr,
    hidden_size, num_groups, stride_x, stride_scale_row, stride_scale_group,
    TOP_K: tl.constexpr, HAS_ROUTER_WEIGHTS: tl.constexpr, HAS_SCALE: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """rows[row_of_pair[t, k]] = x[t], times the router weight of (t, k) if HAS_ROUTER_WEIGHTS.

    Grid: (num_tokens * ceil(hidden_size / BLOCK_HIDDEN),). A program reads BLOCK_HIDDEN columns of
        a token once and writes them to the rows of all pairs of the token. If HAS_SCALE, the
        program of a token's first columns also copies the scales of the token.

    x_ptr: (num_tokens, hidden_size); rows are stride_x apart.
    scale_ptr: (num_tokens, num_groups), the scales of x. Used if HAS_SCALE.
    row_of_pair_ptr: (num_tokens, TOP_K) int32, the row of each pair; -1 skips it.
    router_weights_ptr: (num_tokens, TOP_K) float32.
    rows_ptr: output (rows, hidden_size), contiguous.
    scale_rows_ptr: output (rows, num_groups), with the strides stride_scale_row and
        stride_scale_group.
    BLOCK_GROUPS: a power of two >= num_groups.
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
            scale_ptrs = (
                scale_rows_ptr + row * stride_scale_row + group.to(tl.int64) * stride_scale_group
            )
            tl.store(scale_ptrs, scale, mask=group_mask & (row >= 0))


@triton.jit
def _find_row(
    pair, row_source_ptr, expert_map_ptr, num_experts, num_local_experts,
    ROW_SOURCE: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr,
):  # fmt: skip
    """Return the row of a pair, or -1 if the pair is skipped.

    row_source_ptr: int32 or int64, one value per pair; see ROW_SOURCE.
    ROW_SOURCE: how the row of pair p is found:
        "all": the row is p. row_source_ptr is not read.
        "ids": the row is p if the pair's expert is on this rank. Otherwise, the pair is skipped.
            row_source_ptr has the expert ids.
        "rows": row_source_ptr has the rows, and -1 for skipped pairs.
    """
    if ROW_SOURCE == "rows":
        row = tl.load(row_source_ptr + pair).to(tl.int64)
    elif ROW_SOURCE == "ids":
        local_expert, _ = load_local_ids(
            row_source_ptr,
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
    rows_ptr, row_source_ptr, expert_map_ptr, router_weights_ptr, out_ptr,
    hidden_size, num_experts, num_local_experts, scale,
    TOP_K: tl.constexpr, ROW_SOURCE: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr,
    HAS_ROUTER_WEIGHTS: tl.constexpr, BLOCK_HIDDEN: tl.constexpr, USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """out[t] = scale * sum over k of weight[t, k] * rows[row of (t, k)], summed in float32.

    Skipped pairs are omitted from the sum.

    Grid: (num_tokens * ceil(hidden_size / BLOCK_HIDDEN),). The programs of a token are adjacent, so
        that rows are read contiguously.

    rows_ptr: (rows, hidden_size), contiguous.
    row_source_ptr, ROW_SOURCE: how the row of a pair is found; see `_find_row`.
    expert_map_ptr, num_experts, num_local_experts, HAS_EXPERT_MAP: see `load_local_ids`.
    router_weights_ptr: (num_tokens, TOP_K) float32. Used if HAS_ROUTER_WEIGHTS; otherwise weights
        are 1.
    out_ptr: output (num_tokens, hidden_size), contiguous.
    USE_PDL: whether the launch uses programmatic dependent launch (`pdl_wait`).
    """
    pdl_wait(USE_PDL)
    column_blocks = tl.cdiv(hidden_size, BLOCK_HIDDEN)
    token = (tl.program_id(0) // column_blocks).to(tl.int64)
    columns = tl.program_id(0) % column_blocks * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)
    mask = columns < hidden_size
    total = tl.zeros((BLOCK_HIDDEN,), tl.float32)
    # The loop is unrolled, so that all rows of a token are loaded concurrently.
    for k_index in tl.static_range(TOP_K):
        pair = token * TOP_K + k_index
        row = _find_row(
            pair,
            row_source_ptr,
            expert_map_ptr,
            num_experts,
            num_local_experts,
            ROW_SOURCE,
            HAS_EXPERT_MAP,
        )
        value = tl.load(rows_ptr + row * hidden_size + columns, mask=mask & (row >= 0), other=0.0)
        value = value.to(tl.float32)
        if HAS_ROUTER_WEIGHTS:
            # The weight of a skipped pair may have any value, including NaN, and is not read.
            value = value * tl.load(router_weights_ptr + pair, mask=row >= 0, other=0.0)
        total += value
    result = (total * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * hidden_size + columns, result, mask=mask)


@triton.jit
def gather_rows_kernel(
    rows_ptr, row_source_ptr, expert_map_ptr, router_weights_ptr, out_ptr,
    hidden_size, num_experts, num_local_experts, scale,
    ROW_SOURCE: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr, HAS_ROUTER_WEIGHTS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
):  # fmt: skip
    """out[p] = scale * weight[p] * rows[row of p] for every pair p, or 0 if the pair is skipped.

    Grid: (pairs, ceil(hidden_size / BLOCK_HIDDEN)).

    rows_ptr: (rows, hidden_size), contiguous.
    row_source_ptr, ROW_SOURCE: how the row of a pair is found; see `_find_row`.
    expert_map_ptr, num_experts, num_local_experts, HAS_EXPERT_MAP: see `load_local_ids`.
    router_weights_ptr: (pairs,) float32. Used if HAS_ROUTER_WEIGHTS; otherwise weights are 1.
    out_ptr: output (pairs, hidden_size), contiguous.
    """
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)
    mask = columns < hidden_size
    row = _find_row(
        pair,
        row_source_ptr,
        expert_map_ptr,
        num_experts,
        num_local_experts,
        ROW_SOURCE,
        HAS_EXPERT_MAP,
    )
    value = tl.load(rows_ptr + row * hidden_size + columns, mask=mask & (row >= 0), other=0.0)
    value = value.to(tl.float32) * scale
    if HAS_ROUTER_WEIGHTS:
        # The weight of a skipped pair may have any value, including NaN, and is not read.
        value = value * tl.load(router_weights_ptr + pair, mask=row >= 0, other=0.0)
    tl.store(out_ptr + pair * hidden_size + columns, value.to(out_ptr.dtype.element_ty), mask=mask)
