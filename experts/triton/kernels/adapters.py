"""Device functions for LoRA adapters: the shrink u = A x of a tile, and the expand that adds B u.

Both functions loop over the adapter slots that occur in a tile, once for each slot, in ascending
order. Matrices of other slots are not read. Rows without an adapter get the same result as without
LoRA.
"""

import triton
import triton.language as tl

NO_SLOT = tl.constexpr(2147483647)


@triton.jit
def load_slots(adapter_slots_ptr, tokens, row_mask, num_adapter_slots):
    """Load the adapter slot of each row. The slot of a row without an adapter is NO_SLOT."""
    adapter_slots = tl.load(adapter_slots_ptr + tokens, mask=row_mask, other=-1)
    return tl.where(
        (adapter_slots >= 0) & (adapter_slots < num_adapter_slots), adapter_slots, NO_SLOT
    )


@triton.jit
def shrink_tile(
    x_ptrs, adapter_slots, lora_a_ptr, rank_row, rank_mask, size_k, stride_xk, stride_lora_a_slot,
    stride_lora_a_rank,
    INPUT_PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return u = A x of a tile, float32 (BLOCK_M, BLOCK_RANK). It is 0 for rows without an adapter.

    x_ptrs: (BLOCK_M, 1), pointers to the rows at k = 0.
    slots: (BLOCK_M,), from `load_slots`.
    lora_a_ptr: A of slot 0 and of the tile's expert.
    rank_row: (BLOCK_RANK,), the rows of A to multiply by.
    rank_mask: (BLOCK_RANK,), whether these rows exist.
    """
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_RANK), tl.float32)
    slot = tl.min(adapter_slots, axis=0)  # NaN-free: integers
    while slot < NO_SLOT:
        in_slot = (adapter_slots == slot)[:, None]
        lora_a_ptrs = (
            lora_a_ptr
            + slot.to(tl.int64) * stride_lora_a_slot
            + rank_row.to(tl.int64)[None, :] * stride_lora_a_rank
        )
        for start in range(0, size_k, BLOCK_K):
            in_bounds = start + k < size_k
            x = tl.load(
                x_ptrs + (start + k)[None, :] * stride_xk,
                mask=in_slot & in_bounds[None, :],
                other=0.0,
            )
            lora_a = tl.load(
                lora_a_ptrs + (start + k)[:, None],
                mask=rank_mask[None, :] & in_bounds[:, None],
                other=0.0,
            )
            total = tl.dot(x, lora_a, total, input_precision=INPUT_PRECISION)
        slot = tl.min(
            tl.where(adapter_slots > slot, adapter_slots, NO_SLOT), axis=0
        )  # NaN-free: integers
    return total


@triton.jit
def load_expand_operands(
    slot, start, adapter_slots, rows, lora_u_ptr, lora_b_ptr, row, up_row_offset, column_mask,
    lora_rank,
    stride_lora_u, stride_lora_b_slot, stride_lora_b_n, LORA_UP_OFFSET: tl.constexpr,
    GATED: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """Load u (BLOCK_M, BLOCK_RANK) and B (BLOCK_RANK, BLOCK_N) of one slot, from rank index
    `start` on.

    Return (u, B, u for up, B for up). If not GATED, the last two are equal to the first two. u is
    zero for rows with another slot. Nothing is read for NO_SLOT. The other arguments are as in
    `expand_adapters`.
    """
    rank_index = start + tl.arange(0, BLOCK_RANK)
    in_bounds = (rank_index < lora_rank) & (slot < NO_SLOT)
    u_mask, b_mask = (
        (adapter_slots == slot)[:, None] & in_bounds[None, :],
        in_bounds[:, None] & column_mask[None],
    )
    u_ptrs = lora_u_ptr + rows.to(tl.int64)[:, None] * stride_lora_u + rank_index[None, :]
    lora_b_ptr += slot.to(tl.int64) * stride_lora_b_slot
    lora_b_ptrs = lora_b_ptr + row.to(tl.int64)[None, :] * stride_lora_b_n + rank_index[:, None]
    u = tl.load(u_ptrs, mask=u_mask, other=0.0)
    lora_b = tl.load(lora_b_ptrs, mask=b_mask, other=0.0)
    up_u, up_lora_b = u, lora_b
    if GATED:
        if LORA_UP_OFFSET > 0:
            up_u = tl.load(u_ptrs + LORA_UP_OFFSET, mask=u_mask, other=0.0)
        # With interleaved rows, up_row_offset is 1, and Triton specializes it to a constant, which
        # has no
        # `to`. The sum of `row` and up_row_offset is a tensor.
        up_ptrs = (
            lora_b_ptr
            + (row + up_row_offset).to(tl.int64)[None, :] * stride_lora_b_n
            + rank_index[:, None]
        )
        up_lora_b = tl.load(up_ptrs, mask=b_mask, other=0.0)
    return u, lora_b, up_u, up_lora_b


@triton.jit
def expand_loaded(
    gate, up, u, lora_b, up_u, up_lora_b, adapter_slots, rows, lora_u_ptr, lora_b_ptr, row,
    up_row_offset, column_mask, lora_rank,
    stride_lora_u, stride_lora_b_slot, stride_lora_b_n, LORA_UP_OFFSET: tl.constexpr,
    GATED: tl.constexpr, INPUT_PRECISION: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """Like `expand_adapters`, with the operands of the first slot in the tile already loaded.

    u, b, up_u, up_lora_b: the result of `load_expand_operands` for the first slot.
    """
    slot, start = tl.min(adapter_slots, axis=0), 0  # NaN-free: integers
    while slot < NO_SLOT:
        gate = tl.dot(u, lora_b, gate, input_precision=INPUT_PRECISION)
        if GATED:
            up = tl.dot(up_u, up_lora_b, up, input_precision=INPUT_PRECISION)
        start += BLOCK_RANK
        if start >= lora_rank:
            # NaN-free: integers
            slot, start = tl.min(tl.where(adapter_slots > slot, adapter_slots, NO_SLOT), axis=0), 0
        u, lora_b, up_u, up_lora_b = load_expand_operands(
            slot, start, adapter_slots, rows, lora_u_ptr, lora_b_ptr, row, up_row_offset,
            column_mask, lora_rank,
            stride_lora_u, stride_lora_b_slot, stride_lora_b_n, LORA_UP_OFFSET, GATED, BLOCK_RANK,
        )  # fmt: skip
    return gate, up


@triton.jit
def expand_adapters(
    gate, up, adapter_slots, rows, lora_u_ptr, lora_b_ptr, row, up_row_offset, column_mask,
    lora_rank,
    stride_lora_u, stride_lora_b_slot, stride_lora_b_n, LORA_UP_OFFSET: tl.constexpr,
    GATED: tl.constexpr, INPUT_PRECISION: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """Add B u of each row to gate and up; return (gate, up), float32 (BLOCK_M, BLOCK_N).

    slots: (BLOCK_M,), from `load_slots`.
    rows: (BLOCK_M,), the row of u for each row of the tile.
    lora_b_ptr: B of slot 0 and of the tile's expert.
    row: (BLOCK_N,), the row of B for each column. The row for up is row + up_row_offset.
    LORA_UP_OFFSET: number of columns of u from those for gate to those for up.
    BLOCK_RANK: rank indices per step.
    """
    # NaN-free: integers
    u, lora_b, up_u, up_lora_b = load_expand_operands(
        tl.min(adapter_slots, axis=0), 0, adapter_slots, rows, lora_u_ptr, lora_b_ptr, row,
        up_row_offset, column_mask, lora_rank,
        stride_lora_u, stride_lora_b_slot, stride_lora_b_n, LORA_UP_OFFSET, GATED, BLOCK_RANK,
    )  # fmt: skip
    return expand_loaded(
        gate, up, u, lora_b, up_u, up_lora_b, adapter_slots, rows, lora_u_ptr, lora_b_ptr, row,
        up_row_offset, column_mask, lora_rank,
        stride_lora_u, stride_lora_b_slot, stride_lora_b_n, LORA_UP_OFFSET, GATED, INPUT_PRECISION,
        BLOCK_RANK,
    )  # fmt: skip
