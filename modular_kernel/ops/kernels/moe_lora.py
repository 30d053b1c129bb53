"""Kernels for LoRA adapters that are small MLPs in parallel with the experts.

`modular_kernel.ops.moe_lora` describes the adapters. A pair is a token together with one of its
top_k experts: pair p belongs to token p // top_k. An adapter is identified by its slot, which is
its index in the stacked matrices. The key of a pair, slot * num_experts + expert, selects its
matrices. A pair has no key if its slot or expert is invalid, or if the rank of its adapter is 0.
The result for such a pair is zero.

A program loops over the keys of its pairs in ascending order. It reads the matrices of these keys
only, up to the rank of each key.

    lora_ranks_ptr  integers (slots, num_experts), the rank of each adapter for each expert
    A matrices      (slots, num_experts, max_rank, K), with a contiguous last dimension
    B matrices      (slots, num_experts, rows, max_rank), with a contiguous last dimension
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.activation import activate

NO_KEY = tl.constexpr(9223372036854775807)  # larger than any key


@triton.jit
def _load_keys(
    ids, slots, lora_ranks_ptr, row_mask, num_adapter_slots, num_experts, stride_ranks_slot,
    stride_ranks_expert
):  # fmt: skip
    """Return the int64 key of each row, or NO_KEY for masked rows and rows without a key.

    ids, slots: the expert id and the adapter slot of each row.
    stride_ranks_slot, stride_ranks_expert: the strides of lora_ranks_ptr.
    """
    valid = row_mask & (slots >= 0) & (slots < num_adapter_slots) & (ids >= 0) & (ids < num_experts)
    slot, expert = slots.to(tl.int64), ids.to(tl.int64)
    ranks = tl.load(
        lora_ranks_ptr + slot * stride_ranks_slot + expert * stride_ranks_expert,
        mask=valid,
        other=0,
    )
    return tl.where(valid & (ranks > 0), slot * num_experts + expert, NO_KEY)


@triton.jit
def _load_pairs(
    pair_order_ptr, topk_ids_ptr, adapter_slots_ptr, lora_ranks_ptr, num_pairs, num_adapter_slots,
    num_experts,
    stride_ranks_slot, stride_ranks_expert,
    TOP_K: tl.constexpr, HAS_PAIR_ORDER: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return (pairs, mask of existing pairs, keys) of the BLOCK_M pairs of the program."""
    position = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = position < num_pairs
    pairs = position.to(tl.int64)
    if HAS_PAIR_ORDER:
        pairs = tl.load(pair_order_ptr + position, mask=mask, other=0).to(tl.int64)
    ids = tl.load(topk_ids_ptr + pairs, mask=mask)
    slots = tl.load(adapter_slots_ptr + pairs // TOP_K, mask=mask)
    keys = _load_keys(
        ids,
        slots,
        lora_ranks_ptr,
        mask,
        num_adapter_slots,
        num_experts,
        stride_ranks_slot,
        stride_ranks_expert,
    )
    return pairs, mask, keys


@triton.jit
def _find_next_key(keys, key):
    """Return the smallest key above `key`, or NO_KEY."""
    return tl.min(tl.where(keys > key, keys, NO_KEY), axis=0)  # NaN-free: integer operands


@triton.jit(do_not_specialize=["num_pairs"])
def moe_lora_a_kernel(
    x_ptr, pair_order_ptr, topk_ids_ptr, adapter_slots_ptr, lora_ranks_ptr, a_ptr, out_ptr,
    num_pairs, num_adapter_slots, num_experts, max_rank, size_k,
    stride_x, stride_a_slot, stride_a_expert, stride_a_rank, stride_ranks_slot, stride_ranks_expert,
    TOP_K: tl.constexpr, PAIRS_PER_X_ROW: tl.constexpr, HAS_PAIR_ORDER: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[p, :rank] = A[key of p, :rank] @ x[p // PAIRS_PER_X_ROW].

    out is 0 in columns beyond the rank and for pairs without a key.

    Grid: (blocks of BLOCK_M pairs, blocks of BLOCK_RANK columns of out).

    x_ptr: (num_pairs / PAIRS_PER_X_ROW, K); rows are stride_x apart. A row is a token
        (PAIRS_PER_X_ROW = TOP_K) or a pair (PAIRS_PER_X_ROW = 1).
    pair_order_ptr: (num_pairs,), the order in which programs take pairs. Used if HAS_PAIR_ORDER.
    topk_ids_ptr: (num_pairs,), the expert of each pair.
    adapter_slots_ptr: (num_pairs / TOP_K,), the adapter slot of each token.
    a_ptr: the A matrices.
    out_ptr: output (num_pairs, max_rank), contiguous.
    size_k: K.
    """
    pairs, mask, keys = _load_pairs(
        pair_order_ptr, topk_ids_ptr, adapter_slots_ptr, lora_ranks_ptr, num_pairs,
        num_adapter_slots, num_experts,
        stride_ranks_slot, stride_ranks_expert, TOP_K, HAS_PAIR_ORDER, BLOCK_M,
    )  # fmt: skip
    rank_row = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (pairs // PAIRS_PER_X_ROW)[:, None] * stride_x
    total = tl.zeros((BLOCK_M, BLOCK_RANK), tl.float32)
    key = tl.min(keys, axis=0)  # NaN-free: integer operands
    while key < NO_KEY:
        matches = (keys == key)[:, None]
        slot, expert = key // num_experts, key % num_experts
        rank = tl.load(lora_ranks_ptr + slot * stride_ranks_slot + expert * stride_ranks_expert)
        rank_mask = (rank_row < rank) & (rank_row < max_rank)
        a_ptrs = a_ptr + slot * stride_a_slot + expert * stride_a_expert
        a_ptrs = a_ptrs + rank_row.to(tl.int64)[None, :] * stride_a_rank
        for start in range(0, size_k, BLOCK_K):
            in_bounds = start + k < size_k
            x = tl.load(x_ptrs + (start + k)[None, :], mask=matches & in_bounds[None, :], other=0.0)
            a = tl.load(
                a_ptrs + (start + k)[:, None],
                mask=rank_mask[None, :] & in_bounds[:, None],
                other=0.0,
            )
            # x is 0 in rows without this key, but 0 times an infinite or NaN weight is NaN.
            total = tl.where(matches, tl.dot(x, a, total, input_precision=INPUT_PRECISION), total)
        key = _find_next_key(keys, key)
    out_ptrs = out_ptr + pairs[:, None] * max_rank + rank_row[None, :]
    out_mask = mask[:, None] & (rank_row < max_rank)[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["num_pairs"])
def moe_lora_gate_up_b_kernel(
    u_ptr, pair_order_ptr, topk_ids_ptr, adapter_slots_ptr, lora_ranks_ptr, b_ptr, out_ptr,
    num_pairs, num_adapter_slots, num_experts, max_rank, intermediate_size,
    stride_b_slot, stride_b_expert, stride_b_n, stride_ranks_slot, stride_ranks_expert,
    TOP_K: tl.constexpr, HAS_PAIR_ORDER: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_INTERMEDIATE: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """out[p] = silu(B[key of p, :I] @ u[p]) * (B[key of p, I:] @ u[p]).

    I is intermediate_size. out is 0 for pairs without a key.

    Grid: (blocks of BLOCK_M pairs, blocks of BLOCK_INTERMEDIATE columns of out).

    u_ptr: (num_pairs, max_rank), contiguous, the output of `moe_lora_a_kernel`.
    b_ptr: the B matrices. The first I rows are gate rows, and the next I rows are up rows.
    out_ptr: output (num_pairs, I), contiguous.

    The other arguments are those of `moe_lora_a_kernel`.
    """
    pairs, mask, keys = _load_pairs(
        pair_order_ptr, topk_ids_ptr, adapter_slots_ptr, lora_ranks_ptr, num_pairs,
        num_adapter_slots, num_experts,
        stride_ranks_slot, stride_ranks_expert, TOP_K, HAS_PAIR_ORDER, BLOCK_M,
    )  # fmt: skip
    column = tl.program_id(1) * BLOCK_INTERMEDIATE + tl.arange(0, BLOCK_INTERMEDIATE)
    column_mask = column < intermediate_size
    rank_index_in_block = tl.arange(0, BLOCK_RANK)
    gate_rows = b_ptr + column.to(tl.int64)[None, :] * stride_b_n
    up_rows = b_ptr + (column + intermediate_size).to(tl.int64)[None, :] * stride_b_n
    gate = tl.zeros((BLOCK_M, BLOCK_INTERMEDIATE), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_INTERMEDIATE), tl.float32)
    key = tl.min(keys, axis=0)  # NaN-free: integer operands
    while key < NO_KEY:
        matches = (keys == key)[:, None]
        slot, expert = key // num_experts, key % num_experts
        rank = tl.load(lora_ranks_ptr + slot * stride_ranks_slot + expert * stride_ranks_expert)
        matrix_offset = slot * stride_b_slot + expert * stride_b_expert
        for start in range(0, max_rank, BLOCK_RANK):
            rank_index = start + rank_index_in_block
            in_bounds = (rank_index < rank) & (rank_index < max_rank)
            b_mask = in_bounds[:, None] & column_mask[None, :]
            u_ptrs = u_ptr + pairs[:, None] * max_rank + rank_index[None, :]
            u = tl.load(u_ptrs, mask=matches & in_bounds[None, :], other=0.0)
            b = tl.load(gate_rows + matrix_offset + rank_index[:, None], mask=b_mask, other=0.0)
            gate = tl.where(matches, tl.dot(u, b, gate, input_precision=INPUT_PRECISION), gate)
            b = tl.load(up_rows + matrix_offset + rank_index[:, None], mask=b_mask, other=0.0)
            up = tl.where(matches, tl.dot(u, b, up, input_precision=INPUT_PRECISION), up)
        key = _find_next_key(keys, key)
    h = activate(gate, up, "silu", 0.0, 0.0)
    out_ptrs = out_ptr + pairs[:, None] * intermediate_size + column[None, :]
    out_mask = mask[:, None] & column_mask[None, :]
    tl.store(out_ptrs, h.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["num_tokens"])
def moe_lora_down_combine_kernel(
    v_ptr, topk_ids_ptr, adapter_slots_ptr, lora_ranks_ptr, topk_weights_ptr, scalings_ptr, b_ptr,
    out_ptr,
    num_tokens, num_adapter_slots, num_experts, max_rank, hidden_size,
    stride_b_slot, stride_b_expert, stride_b_n, stride_ranks_slot, stride_ranks_expert, stride_out,
    TOP_K: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_HIDDEN: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """out[t] += scaling[slot of t] * sum over k of weight[t, k] * (B[key of (t, k)] @ v[t, k]).

    The sum is added to out in float32 and rounded once. The kernel does not read or write rows of
    out whose tokens have no key.

    Grid: (blocks of BLOCK_M tokens, blocks of BLOCK_HIDDEN columns of out).

    v_ptr: (num_tokens * TOP_K, max_rank), contiguous, the output of `moe_lora_a_kernel`.
    topk_ids_ptr, topk_weights_ptr: (num_tokens, TOP_K), experts and router weights.
    adapter_slots_ptr: (num_tokens,), the adapter slot of each token.
    scalings_ptr: (slots,) float32, the factor of each adapter.
    b_ptr: the B matrices, with hidden_size rows.
    out_ptr: (num_tokens, hidden_size); rows are stride_out apart.
    """
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_mask = token < num_tokens
    column = tl.program_id(1) * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)
    column_mask = column < hidden_size
    slots = tl.load(adapter_slots_ptr + token, mask=token_mask)
    rank_index_in_block = tl.arange(0, BLOCK_RANK)
    b_rows = b_ptr + column.to(tl.int64)[None, :] * stride_b_n
    total = tl.zeros((BLOCK_M, BLOCK_HIDDEN), tl.float32)
    min_key = tl.full((BLOCK_M,), NO_KEY, tl.int64)
    for k in range(TOP_K):
        pairs = token.to(tl.int64) * TOP_K + k
        ids = tl.load(topk_ids_ptr + pairs, mask=token_mask)
        keys = _load_keys(
            ids,
            slots,
            lora_ranks_ptr,
            token_mask,
            num_adapter_slots,
            num_experts,
            stride_ranks_slot,
            stride_ranks_expert,
        )
        weights = tl.load(topk_weights_ptr + pairs, mask=keys < NO_KEY, other=0.0)
        min_key = tl.minimum(min_key, keys)  # NaN-free: integer operands
        key = tl.min(keys, axis=0)  # NaN-free: integer operands
        while key < NO_KEY:
            matches = keys == key
            slot, expert = key // num_experts, key % num_experts
            rank = tl.load(lora_ranks_ptr + slot * stride_ranks_slot + expert * stride_ranks_expert)
            matrix_offset = slot * stride_b_slot + expert * stride_b_expert
            part = tl.zeros((BLOCK_M, BLOCK_HIDDEN), tl.float32)
            for start in range(0, max_rank, BLOCK_RANK):
                rank_index = start + rank_index_in_block
                in_bounds = (rank_index < rank) & (rank_index < max_rank)
                v_ptrs = v_ptr + pairs[:, None] * max_rank + rank_index[None, :]
                v = tl.load(v_ptrs, mask=matches[:, None] & in_bounds[None, :], other=0.0)
                b_mask = in_bounds[:, None] & column_mask[None, :]
                b = tl.load(b_rows + matrix_offset + rank_index[:, None], mask=b_mask, other=0.0)
                part = tl.dot(v, b, part, input_precision=INPUT_PRECISION)
            factors = tl.where(matches, weights * tl.load(scalings_ptr + slot), 0.0)
            total += tl.where(matches[:, None], part * factors[:, None], 0.0)
            key = _find_next_key(keys, key)
    out_ptrs = out_ptr + token.to(tl.int64)[:, None] * stride_out + column[None, :]
    out_mask = (min_key < NO_KEY)[:, None] & column_mask[None, :]
    total += tl.load(out_ptrs, mask=out_mask, other=0.0)
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit
def moe_lora_fused_kernel(
    x_ptr, topk_ids_ptr, adapter_slots_ptr, lora_ranks_ptr, topk_weights_ptr, scalings_ptr,
    gate_up_a_ptr, gate_up_b_ptr, down_a_ptr, down_b_ptr, out_ptr,
    num_adapter_slots, num_experts, max_rank, hidden_size, intermediate_size, stride_x,
    stride_gate_up_a_slot, stride_gate_up_a_expert, stride_gate_up_a_rank, stride_gate_up_b_slot,
    stride_gate_up_b_expert, stride_gate_up_b_n,
    stride_down_a_slot, stride_down_a_expert, stride_down_a_rank, stride_down_b_slot,
    stride_down_b_expert, stride_down_b_n,
    stride_ranks_slot, stride_ranks_expert, stride_out,
    TOP_K: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
):  # fmt: skip
    """out[t] += scaling[slot of t] * sum over k of weight[t, k] * (down_B @ down_A @ h[t, k]).

    h is silu(gate) * up, where (gate, up) = gate_up_B @ gate_up_A @ x[t]. All matrices are those of
    the key of (t, k). Intermediate results are rounded as in the other kernels.

    Grid: (tokens, blocks of BLOCK_HIDDEN columns of out). Every program of a token repeats all
        steps except the product with down_B.

    x_ptr: (tokens, hidden_size); rows are stride_x apart.
    gate_up_a_ptr, gate_up_b_ptr, down_a_ptr, down_b_ptr: the A and B matrices, with the strides
        stride_gate_up_a_*, stride_gate_up_b_*, stride_down_a_* and stride_down_b_*.
    BLOCK_RANK: a power of two >= max_rank.
    BLOCK_K: columns of an A matrix per step.

    The other arguments are those of `moe_lora_down_combine_kernel`.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(adapter_slots_ptr + token).to(tl.int64)
    if (slot < 0) | (slot >= num_adapter_slots):
        return
    rank_index_in_block = tl.arange(0, BLOCK_RANK)
    k = tl.arange(0, BLOCK_K)
    column = tl.program_id(1) * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)
    column_mask = column < hidden_size
    dtype = x_ptr.dtype.element_ty
    scaling = tl.load(scalings_ptr + slot)
    total = tl.zeros((BLOCK_HIDDEN,), tl.float32)
    pairs_added = 0
    for k_index in range(TOP_K):
        expert = tl.load(topk_ids_ptr + token * TOP_K + k_index).to(tl.int64)
        valid = (expert >= 0) & (expert < num_experts)
        rank = tl.load(
            lora_ranks_ptr + slot * stride_ranks_slot + expert * stride_ranks_expert,
            mask=valid,
            other=0,
        )
        if rank > 0:
            rank_mask = (rank_index_in_block < rank) & (rank_index_in_block < max_rank)
            rank_rows = rank_index_in_block.to(tl.int64)[:, None]
            a_ptrs = (
                gate_up_a_ptr
                + slot * stride_gate_up_a_slot
                + expert * stride_gate_up_a_expert
                + rank_rows * stride_gate_up_a_rank
            )
            u = tl.zeros((BLOCK_RANK,), tl.float32)
            for start in range(0, hidden_size, BLOCK_K):
                in_bounds = start + k < hidden_size
                x = tl.load(x_ptr + token * stride_x + start + k, mask=in_bounds, other=0.0)
                mask = rank_mask[:, None] & in_bounds[None, :]
                a = tl.load(a_ptrs + (start + k)[None, :], mask=mask, other=0.0)
                u += tl.sum(a.to(tl.float32) * x[None, :], axis=1)
            u = u.to(dtype).to(tl.float32)
            b_ptrs = (
                gate_up_b_ptr
                + slot * stride_gate_up_b_slot
                + expert * stride_gate_up_b_expert
                + rank_index_in_block[None, :]
            )
            a_ptrs = (
                down_a_ptr
                + slot * stride_down_a_slot
                + expert * stride_down_a_expert
                + rank_rows * stride_down_a_rank
            )
            v = tl.zeros((BLOCK_RANK,), tl.float32)
            for start in range(0, intermediate_size, BLOCK_K):
                in_bounds = start + k < intermediate_size
                rows = (start + k).to(tl.int64)[:, None]
                mask = in_bounds[:, None] & rank_mask[None, :]
                b = tl.load(b_ptrs + rows * stride_gate_up_b_n, mask=mask, other=0.0)
                gate = tl.sum(b.to(tl.float32) * u[None, :], axis=1)
                b = tl.load(
                    b_ptrs + (rows + intermediate_size) * stride_gate_up_b_n, mask=mask, other=0.0
                )
                up = tl.sum(b.to(tl.float32) * u[None, :], axis=1)
                h = activate(gate, up, "silu", 0.0, 0.0).to(dtype).to(tl.float32)
                mask = rank_mask[:, None] & in_bounds[None, :]
                a = tl.load(a_ptrs + (start + k)[None, :], mask=mask, other=0.0)
                v += tl.sum(a.to(tl.float32) * h[None, :], axis=1)
            v = v.to(dtype).to(tl.float32)
            b_ptrs = (
                down_b_ptr
                + slot * stride_down_b_slot
                + expert * stride_down_b_expert
                + rank_index_in_block[None, :]
            )
            b_ptrs = b_ptrs + column.to(tl.int64)[:, None] * stride_down_b_n
            mask = column_mask[:, None] & rank_mask[None, :]
            b = tl.load(b_ptrs, mask=mask, other=0.0).to(tl.float32)
            weight = tl.load(topk_weights_ptr + token * TOP_K + k_index)
            total += tl.sum(b * v[None, :], axis=1) * (weight * scaling)
            pairs_added += 1
    if pairs_added > 0:
        out_ptrs = out_ptr + token * stride_out + column
        total += tl.load(out_ptrs, mask=column_mask, other=0.0)
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=column_mask)
