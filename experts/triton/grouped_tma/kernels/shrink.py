"""`shrink_tiles_kernel`: the LoRA shrink u = A x for `grouped_gemm_tma_kernel`.

The GEMM adds B u in extra steps along K, one group of steps for each adapter that occurs in a tile.
The index of an adapter in the stacked matrices A and B is its slot. A row of u has columns for
every slot of its tile. All of them are zero except the columns of the row's own slot.
"""

import triton
import triton.language as tl

from experts.triton.kernels.adapters import SLOT_END, load_slots, shrink_tile
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
    """u[r, s * SLOT_COLUMNS:] = A[s-th slot of r's tile, expert of r] @ x[r], if r has this slot.

    If r has another slot, the result is 0. If GATHER_TOKENS, x[r] is the row of x for r's token.

    Grid: (max_tiles, blocks of BLOCK_RANK columns of a slot, SLOT_PROGRAMS). A program computes one
        tile of at most BLOCK_M rows and one block of columns, for every SLOT_PROGRAMS-th slot of
        the tile.

    x_ptr: (rows, K), or (num_tokens, K) if GATHER_TOKENS.
    adapter_slots_ptr: (num_tokens,) int32, the adapter slot of each token. A slot outside [0,
        num_adapter_slots) means no adapter.
    tokens_ptr: (rows,) int32, the token of each row.
    lora_a_ptr: A (slots, num_experts, lora_a_rows, K), with a contiguous last dimension.
    lora_u_ptr: output (rows, num_adapter_slots * SLOT_COLUMNS). Rows are stride_lora_u apart.
    tile_slots_ptr: int32 output (max_tiles, num_adapter_slots + 1). A row has the number of slots
        in the tile, then the slots.
    tiles_ptr: the tiles of expert-sorted rows; see `tile_rows`.
    size_k: K.
    SLOT_COLUMNS: columns of u per slot, a multiple of BOX_COLUMNS.
    BOX_COLUMNS: columns of a TMA box.
    SLOT_PROGRAMS: number of programs among which the slots of a tile are divided.
    BLOCK_RANK: BOX_COLUMNS, or the number of rows of A if that is smaller. The remaining columns of
        the box are set to zero.
    """
    pid_m = tl.program_id(0)
    if pid_m >= tl.load(tiles_ptr + 3 * max_tiles):
        return
    expert, row, row_mask, tokens = tile_rows(tiles_ptr, tokens_ptr, pid_m, max_tiles, BLOCK_M)
    adapter_slots = load_slots(adapter_slots_ptr, tokens, row_mask, num_adapter_slots)
    u_column = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    x_row = (tokens if GATHER_TOKENS else row).to(tl.int64)
    u_ptrs = lora_u_ptr + row.to(tl.int64)[:, None] * stride_lora_u + u_column[None, :]
    tile_slots_ptr += pid_m * (num_adapter_slots + 1)
    slot = tl.min(adapter_slots, axis=0)  # NaN-free: integer operands
    index = 0
    while slot < SLOT_END:
        if index % SLOT_PROGRAMS == tl.program_id(2):
            u = shrink_tile(
                x_ptr + x_row[:, None] * stride_xm,
                tl.where(adapter_slots == slot, adapter_slots, SLOT_END),
                lora_a_ptr + expert * stride_lora_a_expert, u_column, u_column < lora_a_rows,
                size_k, stride_xk, stride_lora_a_slot, stride_lora_a_rank, INPUT_PRECISION,
                BLOCK_M, BLOCK_RANK, BLOCK_K,
            )  # fmt: skip
            slot_ptrs = u_ptrs + index * SLOT_COLUMNS
            u_mask = row_mask[:, None] & (u_column < SLOT_COLUMNS)[None, :]
            tl.store(slot_ptrs, u.to(lora_u_ptr.dtype.element_ty), mask=u_mask)
            zeros = tl.zeros((BLOCK_M, BLOCK_RANK), lora_u_ptr.dtype.element_ty)
            for offset in tl.static_range(
                BLOCK_RANK, BOX_COLUMNS, BLOCK_RANK
            ):  # zero the remaining columns of the box
                tl.store(slot_ptrs + offset, zeros, mask=row_mask[:, None])
            if tl.program_id(1) == 0:
                tl.store(tile_slots_ptr + 1 + index, slot)
        slot = tl.min(
            tl.where(adapter_slots > slot, adapter_slots, SLOT_END), axis=0
        )  # NaN-free: integer operands
        index += 1
    if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        tl.store(tile_slots_ptr, index)
