"""Device functions for LoRA adapters: the shrink u = A x of a tile, and the expand that adds B u.

Both functions loop over the adapter slots that occur in a tile, once for each slot, in ascending
order. Matrices of other slots are not read. Rows without an adapter get the same result as without
LoRA.
"""

import triton
import triton.language as tl

NO_SLOT = tl.constexpr(2147483647)


@triton.jit
def load_slots(slots_ptr, tokens, row_mask, num_slots):
    """Load the adapter slot of each row. The slot of a row without an adapter is NO_SLOT."""
    slots = tl.load(slots_ptr + tokens, mask=row_mask, other=-1)
    return tl.where((slots >= 0) & (slots < num_slots), slots, NO_SLOT)


@triton.jit
def shrink_tile(
    x_ptrs, slots, a_ptr, rank_row, rank_mask, depth, stride_xk, stride_al, stride_ar,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return u = A x of a tile, float32 (BLOCK_M, BLOCK_R). It is 0 for rows without an adapter.

    x_ptrs: (BLOCK_M, 1), pointers to the rows at k = 0.
    slots: (BLOCK_M,), from `load_slots`.
    a_ptr: A of slot 0 and of the tile's expert.
    rank_row: (BLOCK_R,), the rows of A to multiply by.
    rank_mask: (BLOCK_R,), whether these rows exist.
    """
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    slot = tl.min(slots, axis=0)  # NaN-free: integers
    while slot < NO_SLOT:
        in_slot = (slots == slot)[:, None]
        a_ptrs = a_ptr + slot.to(tl.int64) * stride_al + rank_row.to(tl.int64)[None, :] * stride_ar
        for start in range(0, depth, BLOCK_K):
            in_bounds = start + k < depth
            x = tl.load(
                x_ptrs + (start + k)[None, :] * stride_xk,
                mask=in_slot & in_bounds[None, :],
                other=0.0,
            )
            a = tl.load(
                a_ptrs + (start + k)[:, None],
                mask=rank_mask[None, :] & in_bounds[:, None],
                other=0.0,
            )
            total = tl.dot(x, a, total, input_precision=PRECISION)
        slot = tl.min(tl.where(slots > slot, slots, NO_SLOT), axis=0)  # NaN-free: integers
    return total


@triton.jit
def load_expand_operands(
    slot, start, slots, rows, u_ptr, b_ptr, row, up_row, column_mask, rank,
    stride_u, stride_bl, stride_bn, U_UP: tl.constexpr, GATED: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Load u (BLOCK_M, BLOCK_R) and B (BLOCK_R, BLOCK_N) of one slot, from rank index `start` on.

    Return (u, B, u for up, B for up). If not GATED, the last two are equal to the first two. u is
    zero for rows with another slot. Nothing is read for NO_SLOT. The other arguments are as in
    `expand_adapters`.
    """
    rank_index = start + tl.arange(0, BLOCK_R)
    in_bounds = (rank_index < rank) & (slot < NO_SLOT)
    u_mask, b_mask = (
        (slots == slot)[:, None] & in_bounds[None, :],
        in_bounds[:, None] & column_mask[None],
    )
    u_ptrs = u_ptr + rows.to(tl.int64)[:, None] * stride_u + rank_index[None, :]
    b_ptr += slot.to(tl.int64) * stride_bl
    b_ptrs = b_ptr + row.to(tl.int64)[None, :] * stride_bn + rank_index[:, None]
    u = tl.load(u_ptrs, mask=u_mask, other=0.0)
    b = tl.load(b_ptrs, mask=b_mask, other=0.0)
    up_u, up_b = u, b
    if GATED:
        if U_UP > 0:
            up_u = tl.load(u_ptrs + U_UP, mask=u_mask, other=0.0)
        # With interleaved rows, up_row is 1, and Triton specializes it to a constant, which has no
        # `to`. The sum of `row` and up_row is a tensor.
        up_ptrs = b_ptr + (row + up_row).to(tl.int64)[None, :] * stride_bn + rank_index[:, None]
        up_b = tl.load(up_ptrs, mask=b_mask, other=0.0)
    return u, b, up_u, up_b


@triton.jit
def expand_loaded(
    gate, up, u, b, up_u, up_b, slots, rows, u_ptr, b_ptr, row, up_row, column_mask, rank,
    stride_u, stride_bl, stride_bn, U_UP: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Like `expand_adapters`, with the operands of the first slot in the tile already loaded.

    u, b, up_u, up_b: the result of `load_expand_operands` for the first slot.
    """
    slot, start = tl.min(slots, axis=0), 0  # NaN-free: integers
    while slot < NO_SLOT:
        gate = tl.dot(u, b, gate, input_precision=PRECISION)
        if GATED:
            up = tl.dot(up_u, up_b, up, input_precision=PRECISION)
        start += BLOCK_R
        if start >= rank:
            # NaN-free: integers
            slot, start = tl.min(tl.where(slots > slot, slots, NO_SLOT), axis=0), 0
        u, b, up_u, up_b = load_expand_operands(
            slot, start, slots, rows, u_ptr, b_ptr, row, up_row, column_mask, rank,
            stride_u, stride_bl, stride_bn, U_UP, GATED, BLOCK_R,
        )  # fmt: skip
    return gate, up


@triton.jit
def expand_adapters(
    gate, up, slots, rows, u_ptr, b_ptr, row, up_row, column_mask, rank,
    stride_u, stride_bl, stride_bn, U_UP: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Add B u of each row to gate and up; return (gate, up), float32 (BLOCK_M, BLOCK_N).

    slots: (BLOCK_M,), from `load_slots`.
    rows: (BLOCK_M,), the row of u for each row of the tile.
    b_ptr: B of slot 0 and of the tile's expert.
    row: (BLOCK_N,), the row of B for each column. The row for up is row + up_row.
    U_UP: number of columns of u from those for gate to those for up.
    BLOCK_R: rank indices per step.
    """
    # NaN-free: integers
    u, b, up_u, up_b = load_expand_operands(
        tl.min(slots, axis=0), 0, slots, rows, u_ptr, b_ptr, row, up_row, column_mask, rank,
        stride_u, stride_bl, stride_bn, U_UP, GATED, BLOCK_R,
    )  # fmt: skip
    return expand_loaded(
        gate, up, u, b, up_u, up_b, slots, rows, u_ptr, b_ptr, row, up_row, column_mask, rank,
        stride_u, stride_bl, stride_bn, U_UP, GATED, PRECISION, BLOCK_R,
    )  # fmt: skip
