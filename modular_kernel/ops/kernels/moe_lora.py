"""The parallel branch of adapters, in four kernels: its own small MLP beside the experts.

A key is what a pair's matrices are found by: slot * E + expert, of two that are there and have a
rank above 0. A tile goes through the keys that occur in it, each once and in order: matrices of
the others are not read, nor any value beyond a key's rank.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.activation import activate

NO_KEY = tl.constexpr(9223372036854775807)


@triton.jit
def _keys(
    ids, slots, ranks_ptr, row_mask, num_slots, num_experts, stride_rank_l, stride_rank_e
):  # fmt: skip
    """Int64 key of each row; NO_KEY for one masked off, and without an adapter or an expert."""
    there = row_mask & (slots >= 0) & (slots < num_slots) & (ids >= 0) & (ids < num_experts)
    slot, expert = slots.to(tl.int64), ids.to(tl.int64)
    ranks = tl.load(ranks_ptr + slot * stride_rank_l + expert * stride_rank_e, mask=there, other=0)
    return tl.where(there & (ranks > 0), slot * num_experts + expert, NO_KEY)


@triton.jit
def _pairs(
    order_ptr, ids_ptr, slots_ptr, ranks_ptr, num_pairs, num_slots, num_experts,
    stride_rank_l, stride_rank_e,
    TOP_K: tl.constexpr, GROUPED: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """(pairs, mask, keys) of this program's rows, in the order of `order` if GROUPED."""
    at = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = at < num_pairs
    pairs = at.to(tl.int64)
    if GROUPED:
        pairs = tl.load(order_ptr + at, mask=mask, other=0).to(tl.int64)
    ids = tl.load(ids_ptr + pairs, mask=mask)
    slots = tl.load(slots_ptr + pairs // TOP_K, mask=mask)
    keys = _keys(ids, slots, ranks_ptr, mask, num_slots, num_experts, stride_rank_l, stride_rank_e)
    return pairs, mask, keys


@triton.jit
def _next(keys, key):
    """Find the smallest key above `key`."""
    return tl.min(tl.where(keys > key, keys, NO_KEY), axis=0)  # NaN-free: integers


@triton.jit(do_not_specialize=["num_pairs"])
def moe_lora_a_kernel(
    x_ptr, order_ptr, ids_ptr, slots_ptr, ranks_ptr, a_ptr, out_ptr,
    num_pairs, num_slots, num_experts, max_rank, depth,
    stride_x, stride_al, stride_ae, stride_ar, stride_rank_l, stride_rank_e,
    TOP_K: tl.constexpr, X_TOP_K: tl.constexpr, GROUPED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[p, :rank] = A[key of p, :rank] @ x[p // X_TOP_K], 0 beyond the rank and without a key.

    out is (num_pairs, max_rank) contiguous. Grid (blocks of pairs, parts of max_rank).
    """
    pairs, mask, keys = _pairs(
        order_ptr, ids_ptr, slots_ptr, ranks_ptr, num_pairs, num_slots, num_experts,
        stride_rank_l, stride_rank_e, TOP_K, GROUPED, BLOCK_T,
    )  # fmt: skip
    rank_row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (pairs // X_TOP_K)[:, None] * stride_x
    total = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    key = tl.min(keys, axis=0)  # NaN-free: integers
    while key < NO_KEY:
        mine = (keys == key)[:, None]
        slot, expert = key // num_experts, key % num_experts
        rank = tl.load(ranks_ptr + slot * stride_rank_l + expert * stride_rank_e)
        rank_mask = (rank_row < rank) & (rank_row < max_rank)
        a_ptrs = a_ptr + slot * stride_al + expert * stride_ae
        a_ptrs = a_ptrs + rank_row.to(tl.int64)[None, :] * stride_ar
        for start in range(0, depth, BLOCK_K):
            inside = start + k < depth
            x = tl.load(x_ptrs + (start + k)[None, :], mask=mine & inside[None, :], other=0.0)
            a = tl.load(
                a_ptrs + (start + k)[:, None], mask=rank_mask[None, :] & inside[:, None], other=0.0
            )
            # Rows of others are 0, but 0 times what is not finite is NaN.
            total = tl.where(mine, tl.dot(x, a, total, input_precision=PRECISION), total)
        key = _next(keys, key)
    out_ptrs = out_ptr + pairs[:, None] * max_rank + rank_row[None, :]
    out_mask = mask[:, None] & (rank_row < max_rank)[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["num_pairs"])
def moe_lora_gate_up_b_kernel(
    u_ptr, order_ptr, ids_ptr, slots_ptr, ranks_ptr, b_ptr, out_ptr,
    num_pairs, num_slots, num_experts, max_rank, intermediate,
    stride_bl, stride_be, stride_bn, stride_rank_l, stride_rank_e,
    TOP_K: tl.constexpr, GROUPED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out[p] = silu(B[key, :I] @ u[p]) * (B[key, I:] @ u[p]), 0 for pairs without a key.

    u (num_pairs, max_rank) and out (num_pairs, I) are contiguous. Grid (blocks of pairs, of I).
    """
    pairs, mask, keys = _pairs(
        order_ptr, ids_ptr, slots_ptr, ranks_ptr, num_pairs, num_slots, num_experts,
        stride_rank_l, stride_rank_e, TOP_K, GROUPED, BLOCK_T,
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
        mine = (keys == key)[:, None]
        slot, expert = key // num_experts, key % num_experts
        rank = tl.load(ranks_ptr + slot * stride_rank_l + expert * stride_rank_e)
        where = slot * stride_bl + expert * stride_be
        for start in range(0, max_rank, BLOCK_R):
            at = start + r
            inside = (at < rank) & (at < max_rank)
            b_mask = inside[:, None] & column_mask[None, :]
            u_ptrs = u_ptr + pairs[:, None] * max_rank + at[None, :]
            u = tl.load(u_ptrs, mask=mine & inside[None, :], other=0.0)
            b = tl.load(gate_rows + where + at[:, None], mask=b_mask, other=0.0)
            gate = tl.where(mine, tl.dot(u, b, gate, input_precision=PRECISION), gate)
            b = tl.load(up_rows + where + at[:, None], mask=b_mask, other=0.0)
            up = tl.where(mine, tl.dot(u, b, up, input_precision=PRECISION), up)
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

    v is (num_tokens * TOP_K, max_rank) contiguous: A of the second product times what the second
    kernel made, once for each pair. A token without a key is neither read nor written. Summed in
    float32 and added to out in float32, rounded once. Grid (blocks of tokens, of H).
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask = token < num_tokens
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column_mask = column < hidden
    slots = tl.load(slots_ptr + token, mask=token_mask)
    r = tl.arange(0, BLOCK_R)
    b_rows = b_ptr + column.to(tl.int64)[None, :] * stride_bn
    total = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    least = tl.full((BLOCK_T,), NO_KEY, tl.int64)
    for k in range(TOP_K):
        pairs = token.to(tl.int64) * TOP_K + k
        ids = tl.load(ids_ptr + pairs, mask=token_mask)
        keys = _keys(
            ids, slots, ranks_ptr, token_mask, num_slots, num_experts, stride_rank_l, stride_rank_e
        )
        weights = tl.load(weights_ptr + pairs, mask=keys < NO_KEY, other=0.0)
        least = tl.minimum(least, keys)  # NaN-free: integers
        key = tl.min(keys, axis=0)  # NaN-free: integers
        while key < NO_KEY:
            mine = keys == key
            slot, expert = key // num_experts, key % num_experts
            rank = tl.load(ranks_ptr + slot * stride_rank_l + expert * stride_rank_e)
            where = slot * stride_bl + expert * stride_be
            part = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
            for start in range(0, max_rank, BLOCK_R):
                at = start + r
                inside = (at < rank) & (at < max_rank)
                v_ptrs = v_ptr + pairs[:, None] * max_rank + at[None, :]
                v = tl.load(v_ptrs, mask=mine[:, None] & inside[None, :], other=0.0)
                b_mask = inside[:, None] & column_mask[None, :]
                b = tl.load(b_rows + where + at[:, None], mask=b_mask, other=0.0)
                part = tl.dot(v, b, part, input_precision=PRECISION)
            factors = tl.where(mine, weights * tl.load(scalings_ptr + slot), 0.0)
            total += tl.where(mine[:, None], part * factors[:, None], 0.0)
            key = _next(keys, key)
    out_ptrs = out_ptr + token.to(tl.int64)[:, None] * stride_out + column[None, :]
    out_mask = (least < NO_KEY)[:, None] & column_mask[None, :]
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
    """All four steps of a token, for BLOCK_H of its columns: each block of H does the first three.

    BLOCK_R is at least max_rank; BLOCK_K: values of H, then of I, of a step. What the other kernels
    store between them is rounded here too. Grid (tokens, blocks of H).
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
    for choice in range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + choice).to(tl.int64)
        there = (expert >= 0) & (expert < num_experts)
        rank = tl.load(
            ranks_ptr + slot * stride_rank_l + expert * stride_rank_e, mask=there, other=0
        )
        if rank > 0:
            rank_mask = (r < rank) & (r < max_rank)
            rank_rows = r.to(tl.int64)[:, None]
            a_ptrs = a13_ptr + slot * stride_a13l + expert * stride_a13e + rank_rows * stride_a13r
            u = tl.zeros((BLOCK_R,), tl.float32)
            for start in range(0, hidden, BLOCK_K):
                inside = start + k < hidden
                x = tl.load(x_ptr + token * stride_x + start + k, mask=inside, other=0.0)
                mask = rank_mask[:, None] & inside[None, :]
                a = tl.load(a_ptrs + (start + k)[None, :], mask=mask, other=0.0)
                u += tl.sum(a.to(tl.float32) * x[None, :], axis=1)
            u = u.to(dtype).to(tl.float32)
            b_ptrs = b13_ptr + slot * stride_b13l + expert * stride_b13e + r[None, :]
            a_ptrs = a2_ptr + slot * stride_a2l + expert * stride_a2e + rank_rows * stride_a2r
            v = tl.zeros((BLOCK_R,), tl.float32)
            for start in range(0, intermediate, BLOCK_K):
                inside = start + k < intermediate
                rows = (start + k).to(tl.int64)[:, None]
                mask = inside[:, None] & rank_mask[None, :]
                b = tl.load(b_ptrs + rows * stride_b13n, mask=mask, other=0.0)
                gate = tl.sum(b.to(tl.float32) * u[None, :], axis=1)
                b = tl.load(b_ptrs + (rows + intermediate) * stride_b13n, mask=mask, other=0.0)
                up = tl.sum(b.to(tl.float32) * u[None, :], axis=1)
                h = activate(gate, up, "silu", 0.0, 0.0).to(dtype).to(tl.float32)
                mask = rank_mask[:, None] & inside[None, :]
                a = tl.load(a_ptrs + (start + k)[None, :], mask=mask, other=0.0)
                v += tl.sum(a.to(tl.float32) * h[None, :], axis=1)
            v = v.to(dtype).to(tl.float32)
            b_ptrs = b2_ptr + slot * stride_b2l + expert * stride_b2e + r[None, :]
            b_ptrs = b_ptrs + column.to(tl.int64)[:, None] * stride_b2n
            mask = column_mask[:, None] & rank_mask[None, :]
            b = tl.load(b_ptrs, mask=mask, other=0.0).to(tl.float32)
            weight = tl.load(weights_ptr + token * TOP_K + choice)
            total += tl.sum(b * v[None, :], axis=1) * (weight * scaling)
            pairs_added += 1
    if pairs_added > 0:
        out_ptrs = out_ptr + token * stride_out + column
        total += tl.load(out_ptrs, mask=column_mask, other=0.0)
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=column_mask)
