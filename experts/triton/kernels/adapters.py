"""Device functions of adapters: A x of a tile's rows, and B of it added to a tile of a product.

Both go through the adapters that occur in a tile, each slot once and in order: matrices of the
others are not read, and rows without an adapter have what they would have alone.
"""

import triton
import triton.language as tl

NO_SLOT = tl.constexpr(2147483647)


@triton.jit
def load_slots(slots_ptr, tokens, row_mask, num_slots):
    """Slot of each row's adapter; NO_SLOT for those without one."""
    slots = tl.load(slots_ptr + tokens, mask=row_mask, other=-1)
    return tl.where((slots >= 0) & (slots < num_slots), slots, NO_SLOT)


@triton.jit
def shrunk_tile(
    x_ptrs, slots, a_ptr, rank_row, rank_mask, depth, stride_xk, stride_al, stride_ar,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Float32 (BLOCK_M, BLOCK_R): rows of A times each row x, 0 for rows without an adapter.

    x_ptrs (BLOCK_M, 1) and a_ptr (one expert's A of slot 0) point at k = 0; rank_row (BLOCK_R,):
    rows of A.
    """
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    slot = tl.min(slots, axis=0)  # NaN-free: integers
    while slot < NO_SLOT:
        mine = (slots == slot)[:, None]
        a_ptrs = a_ptr + slot.to(tl.int64) * stride_al + rank_row.to(tl.int64)[None, :] * stride_ar
        for start in range(0, depth, BLOCK_K):
            inside = start + k < depth
            x = tl.load(
                x_ptrs + (start + k)[None, :] * stride_xk, mask=mine & inside[None, :], other=0.0
            )
            a = tl.load(
                a_ptrs + (start + k)[:, None], mask=rank_mask[None, :] & inside[:, None], other=0.0
            )
            total = tl.dot(x, a, total, input_precision=PRECISION)
        slot = tl.min(tl.where(slots > slot, slots, NO_SLOT), axis=0)  # NaN-free: integers
    return total


@triton.jit
def load_deltas(
    slot, start, slots, rows, u_ptr, b_ptr, row, up_row, column_mask, rank,
    stride_u, stride_bl, stride_bn, U_UP: tl.constexpr, GATED: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """u (BLOCK_M, BLOCK_R) and B (BLOCK_R, BLOCK_N) of one slot from rank `start` on, twice.

    The second two are up's if GATED, else the same. Zeros of rows whose slot is another, and of
    NO_SLOT, of which nothing is read. Arguments: see add_adapters.
    """
    at = start + tl.arange(0, BLOCK_R)
    inside = (at < rank) & (slot < NO_SLOT)
    u_mask, b_mask = (slots == slot)[:, None] & inside[None, :], inside[:, None] & column_mask[None]
    u_ptrs = u_ptr + rows.to(tl.int64)[:, None] * stride_u + at[None, :]
    b_ptr += slot.to(tl.int64) * stride_bl
    b_ptrs = b_ptr + row.to(tl.int64)[None, :] * stride_bn + at[:, None]
    u = tl.load(u_ptrs, mask=u_mask, other=0.0)
    b = tl.load(b_ptrs, mask=b_mask, other=0.0)
    up_u, up_b = u, b
    if GATED:
        if U_UP > 0:
            up_u = tl.load(u_ptrs + U_UP, mask=u_mask, other=0.0)
        # An argument of 1, as up_row of alternating rows is, is a constant without a dtype of its
        # own.
        up_ptrs = b_ptr + (row + up_row).to(tl.int64)[None, :] * stride_bn + at[:, None]
        up_b = tl.load(up_ptrs, mask=b_mask, other=0.0)
    return u, b, up_u, up_b


@triton.jit
def add_loaded(
    gate, up, u, b, up_u, up_b, slots, rows, u_ptr, b_ptr, row, up_row, column_mask, rank,
    stride_u, stride_bl, stride_bn, U_UP: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """(gate, up) with B u of each row added; u to up_b: the first slot's, see load_deltas."""
    slot, start = tl.min(slots, axis=0), 0  # NaN-free: integers
    while slot < NO_SLOT:
        gate = tl.dot(u, b, gate, input_precision=PRECISION)
        if GATED:
            up = tl.dot(up_u, up_b, up, input_precision=PRECISION)
        start += BLOCK_R
        if start >= rank:
            # NaN-free: integers
            slot, start = tl.min(tl.where(slots > slot, slots, NO_SLOT), axis=0), 0
        u, b, up_u, up_b = load_deltas(
            slot, start, slots, rows, u_ptr, b_ptr, row, up_row, column_mask, rank,
            stride_u, stride_bl, stride_bn, U_UP, GATED, BLOCK_R,
        )  # fmt: skip
    return gate, up


@triton.jit
def add_adapters(
    gate, up, slots, rows, u_ptr, b_ptr, row, up_row, column_mask, rank,
    stride_u, stride_bl, stride_bn, U_UP: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """(gate, up) with B u of each row added.

    rows (BLOCK_M,): where each row's u lies. b_ptr: one expert's B of slot 0, whose row of each
    column is row (BLOCK_N,), and up_row further for up. U_UP: how far up's u lies behind gate's.
    """
    # NaN-free: integers
    u, b, up_u, up_b = load_deltas(
        tl.min(slots, axis=0), 0, slots, rows, u_ptr, b_ptr, row, up_row, column_mask, rank,
        stride_u, stride_bl, stride_bn, U_UP, GATED, BLOCK_R,
    )  # fmt: skip
    return add_loaded(
        gate, up, u, b, up_u, up_b, slots, rows, u_ptr, b_ptr, row, up_row, column_mask, rank,
        stride_u, stride_bl, stride_bn, U_UP, GATED, PRECISION, BLOCK_R,
    )  # fmt: skip
