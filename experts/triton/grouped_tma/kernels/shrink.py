"""LoRA shrink kernel for the TMA GEMMs: u = A x, with columns for every adapter slot of a tile."""

import triton
import triton.language as tl

from experts.triton.kernels.adapters import NO_SLOT, load_slots, shrink_tile
from experts.triton.kernels.shrink import tile_rows


@triton.jit(do_not_specialize=["max_tiles"])
def shrink_tiles_kernel(
    x_ptr, slots_ptr, tokens_ptr, a_ptr, u_ptr, tile_slots_ptr, tiles_ptr,
    max_tiles, num_slots, rank_rows, depth, stride_u,
    stride_xm, stride_xk, stride_al, stride_ae, stride_ar,
    GATHER: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, BOX: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """u[r, s * WIDTH:] = A[s-th slot of r's tile, expert of r] @ x[r]; 0 if r has another slot.

    Like `shrink_segments_kernel`, but each row of u has WIDTH columns for every slot that occurs in
    its tile. Only the columns of the row's own slot are nonzero.

    Grid: (max_tiles, blocks of WIDTH columns, PARTS). A program computes one tile and one block of
    columns, for every PARTS-th slot of the tile.

    tile_slots_ptr: int32 output (max_tiles, num_slots + 1). Each row holds the number of slots in
        the tile, followed by the slots.
    WIDTH: columns of u per slot, a multiple of BOX.
    BOX: columns of a TMA box.
    PARTS: number of programs among which the slots of a tile are divided.
    BLOCK_R: BOX, or the number of rows of A if that is smaller. The remaining columns of the box
        are set to zero.

    The other arguments are as in `shrink_segments_kernel`.
    """
    pid_m = tl.program_id(0)
    if pid_m >= tl.load(tiles_ptr + 3 * max_tiles):
        return
    expert, row, row_mask, tokens = tile_rows(tiles_ptr, tokens_ptr, pid_m, max_tiles, BLOCK_M)
    slots = load_slots(slots_ptr, tokens, row_mask, num_slots)
    rank_row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    x_row = (tokens if GATHER else row).to(tl.int64)
    u_ptrs = u_ptr + row.to(tl.int64)[:, None] * stride_u + rank_row[None, :]
    tile_slots_ptr += pid_m * (num_slots + 1)
    slot = tl.min(slots, axis=0)  # NaN-free: integers
    index = 0
    while slot < NO_SLOT:
        if index % PARTS == tl.program_id(2):
            u = shrink_tile(
                x_ptr + x_row[:, None] * stride_xm, tl.where(slots == slot, slots, NO_SLOT),
                a_ptr + expert * stride_ae, rank_row, rank_row < rank_rows,
                depth, stride_xk, stride_al, stride_ar, PRECISION, BLOCK_M, BLOCK_R, BLOCK_K,
            )  # fmt: skip
            slot_ptrs = u_ptrs + index * WIDTH
            u_mask = row_mask[:, None] & (rank_row < WIDTH)[None, :]
            tl.store(slot_ptrs, u.to(u_ptr.dtype.element_ty), mask=u_mask)
            zeros = tl.zeros((BLOCK_M, BLOCK_R), u_ptr.dtype.element_ty)
            for offset in tl.static_range(BLOCK_R, BOX, BLOCK_R):  # zero the rest of the box
                tl.store(slot_ptrs + offset, zeros, mask=row_mask[:, None])
            if tl.program_id(1) == 0:
                tl.store(tile_slots_ptr + 1 + index, slot)
        slot = tl.min(tl.where(slots > slot, slots, NO_SLOT), axis=0)  # NaN-free: integers
        index += 1
    if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        tl.store(tile_slots_ptr, index)
