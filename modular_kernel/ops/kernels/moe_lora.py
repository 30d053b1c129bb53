"""Kernels of `ops.moe_lora`: adapters as a small MLP in parallel with the experts.

The matrices of a pair are those of its key, slot * E + expert. A pair has no key if its slot or
expert is invalid, or its rank is 0. A program loops over the keys that occur in its tile, each once
and in ascending order. It reads no other matrices, and nothing beyond the rank of a key.

ranks_ptr has the rank of each (slot, expert). A matrices are (slots, E, R, depth) and B matrices
(slots, E, rows, R), with contiguous last dimensions.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.activation import activate

NO_KEY = tl.constexpr(9223372036854775807)


@triton.jit
def _keys(
    ids, slots, ranks_ptr, row_mask, num_slots, num_experts, stride_rank_l, stride_rank_e
):  # fmt: skip
    """Return the int64 key of each row; NO_KEY for masked rows and for rows without a key."""
    valid = row_mask & (slots >= 0) & (slots < num_slots) & (ids >= 0) & (ids < num_experts)
    slot, expert = slots.to(tl.int64), ids.to(tl.int64)
    ranks = tl.load(ranks_ptr + slot * stride_rank_l + expert * stride_rank_e, mask=valid, other=0)
    return tl.where(valid & (ranks > 0), slot * num_experts + expert, NO_KEY)


@triton.jit
def _pairs(
    order_ptr, ids_ptr, slots_ptr, ranks_ptr, num_pairs, num_slots, num_experts,
    stride_rank_l, stride_rank_e,
    TOP_K: tl.constexpr, HAS_ORDER: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Return (pairs, mask, keys) of this program's rows, in the order at order_ptr if HAS_ORDER."""
    position = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = position < num_pairs
    pairs = position.to(tl.int64)
    if HAS_ORDER:
        pairs = tl.load(order_ptr + position, mask=mask, other=0).to(tl.int64)
    ids = tl.load(ids_ptr + pairs, mask=mask)
    slots = tl.load(slots_ptr + pairs // TOP_K, mask=mask)
    keys = _keys(ids, slots, ranks_ptr, mask, num_slots, num_experts, stride_rank_l, stride_rank_e)
    return pairs, mask, keys


@triton.jit
def _next(keys, key):
    """Return the smallest key above `key`, or NO_KEY."""
    return tl.min(tl.where(keys > key, keys, NO_KEY), axis=0)  # NaN-free: integers


@triton.jit(do_not_specialize=["num_pairs"])
def moe_lora_a_kernel(
    x_ptr, order_ptr, ids_ptr, slots_ptr, ranks_ptr, a_ptr, out_ptr,
    num_pairs, num_slots, num_experts, max_rank, depth,
    stride_x, stride_al, stride_ae, stride_ar, stride_rank_l, stride_rank_e,
    TOP_K: tl.constexpr, X_TOP_K: tl.constexpr, HAS_ORDER: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[p, :rank] = A[key of p, :rank] @ x[p // X_TOP_K]; 0 beyond the rank, and without a key.

    Grid: (blocks of BLOCK_T pairs, blocks of BLOCK_R columns of out). x has one row per token
    (X_TOP_K = TOP_K) or per pair (X_TOP_K = 1). out is (num_pairs, max_rank), contiguous. If
    HAS_ORDER, order_ptr has the order in which programs take pairs.
    """
    pairs, mask, keys = _pairs(
        order_ptr, ids_ptr, slots_ptr, ranks_ptr, num_pairs, num_slots, num_experts,
        stride_rank_l, stride_rank_e, TOP_K, HAS_ORDER, BLOCK_T,
    )  # fmt: skip
    rank_row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (pairs // X_TOP_K)[:, None] * stride_x
    total = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    key = tl.min(keys, axis=0)  # NaN-free: integers
    while key < NO_KEY:
        matches = (keys == key)[:, None]
        slot, expert = key // num_experts, key % num_experts
        rank = tl.load(ranks_ptr + slot * stride_rank_l + expert * stride_rank_e)
        rank_mask = (rank_row < rank) & (rank_row < max_rank)
        a_ptrs = a_ptr + slot * stride_al + expert * stride_ae
        a_ptrs = a_ptrs + rank_row.to(tl.int64)[None, :] * stride_ar
        for start in range(0, depth, BLOCK_K):
            in_bounds = start + k < depth
            x = tl.load(x_ptrs + (start + k)[None, :], mask=matches & in_bounds[None, :], other=0.0)
            a = tl.load(
                a_ptrs + (start + k)[:, None],
                mask=rank_mask[None, :] & in_bounds[:, None],
                other=0.0,
            )
            # Other rows are masked to 0, but 0 times inf or NaN is NaN.
            total = tl.where(matches, tl.dot(x, a, total, input_precision=PRECISION), total)
        key = _next(keys, key)
    out_ptrs = out_ptr + pairs[:, None] * max_rank + rank_row[None, :]
    out_mask = mask[:, None] & (rank_row < max_rank)[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["num_pairs"])
def moe_lora_gate_up_b_kernel(
    u_ptr, order_ptr, ids_ptr, slots_ptr, ranks_ptr, b_ptr, out_ptr,
    num_pairs, num_slots, num_experts, max_rank, intermediate,
    stride_bl, stride_be, stride_bn, stride_rank_l, stride_rank_e,
    TOP_K: tl.constexpr, HAS_ORDER: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out[p] = silu(B[key of p, :I] @ u[p]) * (B[key of p, I:] @ u[p]); 0 for pairs without a key.

    Grid: (blocks of BLOCK_T pairs, blocks of BLOCK_I columns). u (num_pairs, max_rank) and out
    (num_pairs, I) are contiguous. If HAS_ORDER, order_ptr has the order in which programs take
    pairs.
    """
    pairs, mask, keys = _pairs(
        order_ptr, ids_ptr, slots_ptr, ranks_ptr, num_pairs, num_slots, num_experts,
        stride_rank_l, stride_rank_e, TOP_K, HAS_ORDER, BLOCK_T,
    )  # fmt: skip
    column = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    column_mask = column < intermediate
    r = tl.arange(0, BLOCK_R)
    gate_rows = b_ptr + column.to(tl.int64)[None, :] * stride_bn
    up_rows = b_ptr + (column + intermediate).to(tl.int64)[None, :] * stride_bn
    gate = tl.zeros((BLOCK_T, BLOCK_I), tl.float32)
    up = tl.zeros((BLOCK_T, BLOCK_I), tl.float32)
    key = tl.min(keys, axis=0)  # NaN-free: integers
    while key < NO_KEY:
        matches = (keys == key)[:, None]
        slot, expert = key // num_experts, key % num_experts
        rank = tl.load(ranks_ptr + slot * stride_rank_l + expert * stride_rank_e)
        matrix_offset = slot * stride_bl + expert * stride_be
        for start in range(0, max_rank, BLOCK_R):
            rank_index = start + r
            in_bounds = (rank_index < rank) & (rank_index < max_rank)
            b_mask = in_bounds[:, None] & column_mask[None, :]
            u_ptrs = u_ptr + pairs[:, None] * max_rank + rank_index[None, :]
            u = tl.load(u_ptrs, mask=matches & in_bounds[None, :], other=0.0)
            b = tl.load(gate_rows + matrix_offset + rank_index[:, None], mask=b_mask, other=0.0)
            gate = tl.where(matches, tl.dot(u, b, gate, input_precision=PRECISION), gate)
            b = tl.load(up_rows + matrix_offset + rank_index[:, None], mask=b_mask, other=0.0)
            up = tl.where(matches, tl.dot(u, b, up, input_precision=PRECISION), up)
        key = _next(keys, key)
    h = activate(gate, up, "silu", 0.0, 0.0)
    out_ptrs = out_ptr + pairs[:, None] * intermediate + column[None, :]
    out_mask = mask[:, None] & column_mask[None, :]
    tl.store(out_ptrs, h.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["num_tokens"])
def moe_lora_down_combine_kernel(
    v_ptr, ids_ptr, slots_ptr, ranks_ptr, weights_ptr, scalings_ptr, b_ptr, out_ptr,
    num_tokens, num_slots, num_experts, max_rank, hidden,
    stride_bl, stride_be, stride_bn, stride_rank_l, stride_rank_e, stride_out,
    TOP_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out[t] += sum over k of weight[t, k] * scaling of t's slot * (B[key of t, k] @ v[t, k]).

    Grid: (blocks of BLOCK_T tokens, blocks of BLOCK_H columns). v (num_tokens * TOP_K, max_rank) is
    contiguous. The sum is added to out in float32 and rounded once. Tokens without a key are
    neither read nor written.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask = token < num_tokens
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column_mask = column < hidden
    slots = tl.load(slots_ptr + token, mask=token_mask)
    r = tl.arange(0, BLOCK_R)
    b_rows = b_ptr + column.to(tl.int64)[None, :] * stride_bn
    total = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    min_key = tl.full((BLOCK_T,), NO_KEY, tl.int64)
    for k in range(TOP_K):
        pairs = token.to(tl.int64) * TOP_K + k
        ids = tl.load(ids_ptr + pairs, mask=token_mask)
        keys = _keys(
            ids, slots, ranks_ptr, token_mask, num_slots, num_experts, stride_rank_l, stride_rank_e
        )
        weights = tl.load(weights_ptr + pairs, mask=keys < NO_KEY, other=0.0)
        min_key = tl.minimum(min_key, keys)  # NaN-free: integers
        key = tl.min(keys, axis=0)  # NaN-free: integers
        while key < NO_KEY:
            matches = keys == key
            slot, expert = key // num_experts, key % num_experts
            rank = tl.load(ranks_ptr + slot * stride_rank_l + expert * stride_rank_e)
            matrix_offset = slot * stride_bl + expert * stride_be
            part = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
            for start in range(0, max_rank, BLOCK_R):
                rank_index = start + r
                in_bounds = (rank_index < rank) & (rank_index < max_rank)
                v_ptrs = v_ptr + pairs[:, None] * max_rank + rank_index[None, :]
                v = tl.load(v_ptrs, mask=matches[:, None] & in_bounds[None, :], other=0.0)
                b_mask = in_bounds[:, None] & column_mask[None, :]
                b = tl.load(b_rows + matrix_offset + rank_index[:, None], mask=b_mask, other=0.0)
                part = tl.dot(v, b, part, input_precision=PRECISION)
            factors = tl.where(matches, weights * tl.load(scalings_ptr + slot), 0.0)
            total += tl.where(matches[:, None], part * factors[:, None], 0.0)
            key = _next(keys, key)
    out_ptrs = out_ptr + token.to(tl.int64)[:, None] * stride_out + column[None, :]
    out_mask = (min_key < NO_KEY)[:, None] & column_mask[None, :]
    total += tl.load(out_ptrs, mask=out_mask, other=0.0)
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit
def moe_lora_fused_kernel(
    x_ptr, ids_ptr, slots_ptr, ranks_ptr, weights_ptr, scalings_ptr,
    a13_ptr, b13_ptr, a2_ptr, b2_ptr, out_ptr,
    num_slots, num_experts, max_rank, hidden, intermediate, stride_x,
    stride_a13l, stride_a13e, stride_a13r, stride_b13l, stride_b13e, stride_b13n,
    stride_a2l, stride_a2e, stride_a2r, stride_b2l, stride_b2e, stride_b2n,
    stride_rank_l, stride_rank_e, stride_out,
    TOP_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[t] += sum over k of weight[t, k] * scaling of t's slot * (B2 @ A2 @ h), where

        h = silu(gate) * up, (gate, up) = B13 @ A13 @ x[t]

    with the matrices of the key of t, k.

    Grid: (tokens, blocks of BLOCK_H columns of out). Every program of a token repeats all steps but
    the last, B2. Intermediate results are rounded as the other kernels round them.

    BLOCK_R: a power of two >= max_rank.
    BLOCK_K: elements of H, then of I, per step.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    r = tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column_mask = column < hidden
    dtype = x_ptr.dtype.element_ty
    scaling = tl.load(scalings_ptr + slot)
    total = tl.zeros((BLOCK_H,), tl.float32)
    pairs_added = 0
    for k_index in range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + k_index).to(tl.int64)
        valid = (expert >= 0) & (expert < num_experts)
        rank = tl.load(
            ranks_ptr + slot * stride_rank_l + expert * stride_rank_e, mask=valid, other=0
        )
        if rank > 0:
            rank_mask = (r < rank) & (r < max_rank)
            rank_rows = r.to(tl.int64)[:, None]
            a_ptrs = a13_ptr + slot * stride_a13l + expert * stride_a13e + rank_rows * stride_a13r
            u = tl.zeros((BLOCK_R,), tl.float32)
            for start in range(0, hidden, BLOCK_K):
                in_bounds = start + k < hidden
                x = tl.load(x_ptr + token * stride_x + start + k, mask=in_bounds, other=0.0)
                mask = rank_mask[:, None] & in_bounds[None, :]
                a = tl.load(a_ptrs + (start + k)[None, :], mask=mask, other=0.0)
                u += tl.sum(a.to(tl.float32) * x[None, :], axis=1)
            u = u.to(dtype).to(tl.float32)
            b_ptrs = b13_ptr + slot * stride_b13l + expert * stride_b13e + r[None, :]
            a_ptrs = a2_ptr + slot * stride_a2l + expert * stride_a2e + rank_rows * stride_a2r
            v = tl.zeros((BLOCK_R,), tl.float32)
            for start in range(0, intermediate, BLOCK_K):
                in_bounds = start + k < intermediate
                rows = (start + k).to(tl.int64)[:, None]
                mask = in_bounds[:, None] & rank_mask[None, :]
                b = tl.load(b_ptrs + rows * stride_b13n, mask=mask, other=0.0)
                gate = tl.sum(b.to(tl.float32) * u[None, :], axis=1)
                b = tl.load(b_ptrs + (rows + intermediate) * stride_b13n, mask=mask, other=0.0)
                up = tl.sum(b.to(tl.float32) * u[None, :], axis=1)
                h = activate(gate, up, "silu", 0.0, 0.0).to(dtype).to(tl.float32)
                mask = rank_mask[:, None] & in_bounds[None, :]
                a = tl.load(a_ptrs + (start + k)[None, :], mask=mask, other=0.0)
                v += tl.sum(a.to(tl.float32) * h[None, :], axis=1)
            v = v.to(dtype).to(tl.float32)
            b_ptrs = b2_ptr + slot * stride_b2l + expert * stride_b2e + r[None, :]
            b_ptrs = b_ptrs + column.to(tl.int64)[:, None] * stride_b2n
            mask = column_mask[:, None] & rank_mask[None, :]
            b = tl.load(b_ptrs, mask=mask, other=0.0).to(tl.float32)
            weight = tl.load(weights_ptr + token * TOP_K + k_index)
            total += tl.sum(b * v[None, :], axis=1) * (weight * scaling)
            pairs_added += 1
    if pairs_added > 0:
        out_ptrs = out_ptr + token * stride_out + column
        total += tl.load(out_ptrs, mask=column_mask, other=0.0)
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=column_mask)
