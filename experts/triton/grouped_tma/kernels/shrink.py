"""LoRA shrink kernel for the TMA GEMMs: u = A x, with columns for every adapter slot of a tile."""

import triton
import triton.language as tl

from experts.triton.kernels.adapters import NO_SLOT, load_slots, shrink_tile
from experts.triton.kernels.shrink import tile_rows


@triton.jit(do_not_specialize=["max_tiles"])
def shrink_tiles_kernel(
    x_ptr, adapter_slots_ptr, tokens_ptr, lora_a_ptr, lora_u_ptr, tile_slots_ptr, tiles_ptr,
    max_tiles, num_adapter_slots, lora_a_rows, size_k, stride_lora_u,
    stride_xm, stride_xk, stride_lora_a_slot, stride_lora_a_expert, stride_lora_a_rank,
    GATHER_TOKENS: tl.constexpr, INPUT_PRECISION: tl.constexpr, SLOT_COLUMNS: tl.constexpr,
    BOX_COLUMNS: tl.constexpr,
    SLOT_PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """u[r, s * SLOT_COLUMNS:] = A[s-th slot of r's tile, expert of r] @ x[r]; 0 if r has another
    slot.

    Like `shrink_segments_kernel`, but each row of u has SLOT_COLUMNS columns for every slot that
    occurs in
    its tile. Only the columns of the row's own slot are nonzero.

    Grid: (max_tiles, blocks of SLOT_COLUMNS columns, PARTS). A program computes one tile and one
        block of
    columns, for every PARTS-th slot of the tile.

    tile_slots_ptr: int32 output (max_tiles, num_adapter_slots + 1). Each row holds the number of
        slots in
        the tile, followed by the slots.
    SLOT_COLUMNS: columns of u per slot, a multiple of BOX_COLUMNS.
    BOX_COLUMNS: columns of a TMA box.
    PARTS: number of programs among which the slots of a tile are divided.
    BLOCK_RANK: BOX_COLUMNS, or the number of rows of A if that is smaller. The remaining columns
        of the box
        are set to zero.

    The other arguments are as in `shrink_segments_kernel`.
    """
    pid_m = tl.program_id(0)
    if pid_m >= tl.load(tiles_ptr + 3 * max_tiles):
        return
    expert, row, row_mask, tokens = tile_rows(tiles_ptr, tokens_ptr, pid_m, max_tiles, BLOCK_M)
    adapter_slots = load_slots(adapter_slots_ptr, tokens, row_mask, num_adapter_slots)
    rank_row = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    x_row = (tokens if GATHER_TOKENS else row).to(tl.int64)
    u_ptrs = lora_u_ptr + row.to(tl.int64)[:, None] * stride_lora_u + rank_row[None, :]
    tile_slots_ptr += pid_m * (num_adapter_slots + 1)
    slot = tl.min(adapter_slots, axis=0)  # NaN-free: integers
    index = 0
    while slot < NO_SLOT:
        if index % SLOT_PROGRAMS == tl.program_id(2):
            u = shrink_tile(
                x_ptr + x_row[:, None] * stride_xm,
                tl.where(adapter_slots == slot, adapter_slots, NO_SLOT),
                lora_a_ptr + expert * stride_lora_a_expert, rank_row, rank_row < lora_a_rows,
                size_k, stride_xk, stride_lora_a_slot, stride_lora_a_rank, INPUT_PRECISION,
                BLOCK_M, BLOCK_RANK, BLOCK_K,
            )  # fmt: skip
            slot_ptrs = u_ptrs + index * SLOT_COLUMNS
            u_mask = row_mask[:, None] & (rank_row < SLOT_COLUMNS)[None, :]
            tl.store(slot_ptrs, u.to(lora_u_ptr.dtype.element_ty), mask=u_mask)
            zeros = tl.zeros((BLOCK_M, BLOCK_RANK), lora_u_ptr.dtype.element_ty)
            for offset in tl.static_range(
                BLOCK_RANK, BOX_COLUMNS, BLOCK_RANK
            ):  # zero the rest of the box
                tl.store(slot_ptrs + offset, zeros, mask=row_mask[:, None])
            if tl.program_id(1) == 0:
                tl.store(tile_slots_ptr + 1 + index, slot)
        slot = tl.min(
            tl.where(adapter_slots > slot, adapter_slots, NO_SLOT), axis=0
        )  # NaN-free: integers
        index += 1
    if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        tl.store(tile_slots_ptr, index)
