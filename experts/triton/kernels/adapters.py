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
    slot = tl.min(slots, axis=0)
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
        slot = tl.min(tl.where(slots > slot, slots, NO_SLOT), axis=0)
    return total


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
    r = tl.arange(0, BLOCK_R)
    u_rows = u_ptr + rows.to(tl.int64)[:, None] * stride_u
    b_rows = b_ptr + row.to(tl.int64)[None, :] * stride_bn
    # An argument of 1, as up_row of alternating rows is, is a constant without a dtype of its own.
    up_rows = b_ptr + (row + up_row).to(tl.int64)[None, :] * stride_bn
    slot = tl.min(slots, axis=0)
    while slot < NO_SLOT:
        mine = (slots == slot)[:, None]
        b_ptrs = b_rows + slot.to(tl.int64) * stride_bl
        for start in range(0, rank, BLOCK_R):
            at = start + r
            inside = at < rank
            u_mask, b_mask = mine & inside[None, :], inside[:, None] & column_mask[None, :]
            u = tl.load(u_rows + at[None, :], mask=u_mask, other=0.0)
            b = tl.load(b_ptrs + at[:, None], mask=b_mask, other=0.0)
            gate = tl.dot(u, b, gate, input_precision=PRECISION)
            if GATED:
                if U_UP > 0:
                    u = tl.load(u_rows + at[None, :] + U_UP, mask=u_mask, other=0.0)
                up_ptrs = up_rows + slot.to(tl.int64) * stride_bl
                b = tl.load(up_ptrs + at[:, None], mask=b_mask, other=0.0)
                up = tl.dot(u, b, up, input_precision=PRECISION)
        slot = tl.min(tl.where(slots > slot, slots, NO_SLOT), axis=0)
    return gate, up
