"""LoRA shrink kernels, which compute u = A x before each of the two GEMMs.

The adapter slots of a tile are divided among PARTS programs. PAIRS_PER_X_ROW is the number of
pairs per row
of x: TOP_K if the rows are tokens, and 1 if they are pairs.
"""

import triton
import triton.language as tl

from experts.triton.kernels.adapters import NO_SLOT, load_slots, shrink_tile
from modular_kernel.ops.kernels.ids import load_local_ids
from modular_kernel.ops.kernels.pdl import pdl_wait


@triton.jit
def _select_slots(adapter_slots, slot_program, SLOT_PROGRAMS: tl.constexpr):
    """Return slots, with NO_SLOT in place of the slots of other programs.

    Slot s belongs to the program with part = s % PARTS.
    """
    return tl.where(adapter_slots % SLOT_PROGRAMS == slot_program, adapter_slots, NO_SLOT)


@triton.jit
def tile_rows(tiles_ptr, tokens_ptr, tile, max_tiles, BLOCK_M: tl.constexpr):
    """Return the expert, the rows, the row mask and the tokens of a tile (see `ops.sort`)."""
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    row = tl.load(tiles_ptr + max_tiles + tile) + tl.arange(0, BLOCK_M)
    row_mask = row < tl.load(tiles_ptr + 2 * max_tiles + tile)
    return expert, row, row_mask, tl.load(tokens_ptr + row, mask=row_mask, other=0)


@triton.jit
def _store_u(lora_u_ptr, u, row, adapter_slots, rank_row, lora_a_rows):
    """Store u for rows with a slot. Columns from lora_a_rows on are not stored.

    row: (BLOCK_M,) int64, the row of u to which each row is stored.
    """
    u_ptrs = lora_u_ptr + row[:, None] * lora_a_rows + rank_row[None, :]
    mask = (adapter_slots < NO_SLOT)[:, None] & (rank_row < lora_a_rows)[None, :]
    tl.store(u_ptrs, u.to(lora_u_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_pairs"])
def shrink_few_kernel(
    x_ptr, adapter_slots_ptr, lora_a_ptr, lora_u_ptr, topk_ids_ptr, expert_map_ptr,
    num_pairs, num_adapter_slots, lora_a_rows, size_k, num_experts, num_local_experts,
    stride_xm, stride_xk, stride_lora_a_slot, stride_lora_a_expert, stride_lora_a_rank,
    TOP_K: tl.constexpr, PAIRS_PER_X_ROW: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """u[p] = A[slot of p's token, expert of p] @ x[p // PAIRS_PER_X_ROW], without tensor cores.

    Grid: (num_pairs, blocks of lora_a_rows). A program computes BLOCK_RANK columns of u for one
        pair.

    lora_u_ptr: (num_pairs, lora_a_rows), contiguous. Rows of skipped pairs and of tokens without an
        adapter are not written.
    """
    pdl_wait(USE_PDL)
    pair = tl.program_id(0)
    local, _ = load_local_ids(
        topk_ids_ptr,
        pair,
        pair < num_pairs,
        expert_map_ptr,
        num_experts,
        num_local_experts,
        HAS_EXPERT_MAP,
    )
    slot = tl.load(adapter_slots_ptr + pair // TOP_K).to(tl.int64)
    if (local < 0) | (slot < 0) | (slot >= num_adapter_slots):
        return
    rank_row = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    rank_mask = rank_row < lora_a_rows
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (pair // PAIRS_PER_X_ROW).to(tl.int64) * stride_xm + k * stride_xk
    lora_a_ptr += slot * stride_lora_a_slot + local.to(tl.int64) * stride_lora_a_expert
    lora_a_ptrs = lora_a_ptr + rank_row.to(tl.int64)[:, None] * stride_lora_a_rank + k[None, :]
    total = tl.zeros((BLOCK_RANK, BLOCK_K), tl.float32)
    for start in range(0, size_k, BLOCK_K):
        in_bounds = start + k < size_k
        x = tl.load(x_ptrs + start * stride_xk, mask=in_bounds, other=0.0)
        lora_a = tl.load(
            lora_a_ptrs + start, mask=rank_mask[:, None] & in_bounds[None, :], other=0.0
        )
        total += lora_a.to(tl.float32) * x.to(tl.float32)[None, :]
    u = tl.sum(total, axis=1)
    u_ptrs = lora_u_ptr + pair.to(tl.int64) * lora_a_rows + rank_row
    tl.store(u_ptrs, u.to(lora_u_ptr.dtype.element_ty), mask=rank_mask)


@triton.jit(do_not_specialize=["num_pairs"])
def shrink_pairs_kernel(
    x_ptr, adapter_slots_ptr, lora_a_ptr, lora_u_ptr, sorted_token_ids_ptr, expert_ids_ptr,
    num_tokens_post_padded_ptr,
    num_pairs, num_adapter_slots, lora_a_rows, size_k,
    stride_xm, stride_xk, stride_lora_a_slot, stride_lora_a_expert, stride_lora_a_rank,
    TOP_K: tl.constexpr, PAIRS_PER_X_ROW: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    SLOT_PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """u[p] = A[slot of p's token, expert of p] @ x[p // PAIRS_PER_X_ROW] for every aligned pair p.

    Grid: (blocks of `ops.align`, blocks of lora_a_rows, PARTS). A program computes BLOCK_M pairs by
    BLOCK_RANK columns of u, for its part of the slots.

    lora_u_ptr: (num_pairs, lora_a_rows), contiguous. Rows of skipped pairs and of tokens without an
        adapter are not written.
    """
    pid_m = tl.program_id(0)
    if pid_m * BLOCK_M >= tl.load(num_tokens_post_padded_ptr):
        return
    expert = tl.load(expert_ids_ptr + pid_m).to(tl.int64)
    if expert < 0:
        return
    pairs = tl.load(sorted_token_ids_ptr + pid_m * BLOCK_M + tl.arange(0, BLOCK_M))
    adapter_slots = load_slots(
        adapter_slots_ptr, pairs // TOP_K, pairs < num_pairs, num_adapter_slots
    )
    adapter_slots = _select_slots(adapter_slots, tl.program_id(2), SLOT_PROGRAMS)
    rank_row = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    rank_mask = rank_row < lora_a_rows
    x_row = (pairs // PAIRS_PER_X_ROW).to(tl.int64)
    u = shrink_tile(
        x_ptr + x_row[:, None] * stride_xm, adapter_slots,
        lora_a_ptr + expert * stride_lora_a_expert, rank_row, rank_mask,
        size_k, stride_xk, stride_lora_a_slot, stride_lora_a_rank, INPUT_PRECISION, BLOCK_M,
        BLOCK_RANK, BLOCK_K,
    )  # fmt: skip
    _store_u(lora_u_ptr, u, pairs.to(tl.int64), adapter_slots, rank_row, lora_a_rows)


@triton.jit(do_not_specialize=["max_tiles"])
def shrink_segments_kernel(
    x_ptr, adapter_slots_ptr, tokens_ptr, lora_a_ptr, lora_u_ptr, tiles_ptr,
    max_tiles, num_adapter_slots, lora_a_rows, size_k,
    stride_xm, stride_xk, stride_lora_a_slot, stride_lora_a_expert, stride_lora_a_rank,
    GATHER_TOKENS: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    SLOT_PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """u[r] = A[slot of r's token, expert of r] @ x[r], or x of r's token if GATHER_TOKENS.

    Grid: (max_tiles, blocks of lora_a_rows, PARTS). A program computes a tile of at most BLOCK_M
        rows
    by BLOCK_RANK columns of u, for its part of the slots.

    tiles_ptr: `ops.sort.SortedPairs.tiles`.
    tokens_ptr: `ops.sort.SortedPairs.token_of_row`.
    lora_u_ptr: (rows, lora_a_rows), contiguous. Rows without an adapter are not written.
    """
    pid_m = tl.program_id(0)
    if pid_m >= tl.load(tiles_ptr + 3 * max_tiles):
        return
    expert, row, row_mask, tokens = tile_rows(tiles_ptr, tokens_ptr, pid_m, max_tiles, BLOCK_M)
    adapter_slots = _select_slots(
        load_slots(adapter_slots_ptr, tokens, row_mask, num_adapter_slots),
        tl.program_id(2),
        SLOT_PROGRAMS,
    )
    rank_row = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    rank_mask = rank_row < lora_a_rows
    x_row = (tokens if GATHER_TOKENS else row).to(tl.int64)
    u = shrink_tile(
        x_ptr + x_row[:, None] * stride_xm, adapter_slots,
        lora_a_ptr + expert * stride_lora_a_expert, rank_row, rank_mask,
        size_k, stride_xk, stride_lora_a_slot, stride_lora_a_rank, INPUT_PRECISION, BLOCK_M,
        BLOCK_RANK, BLOCK_K,
    )  # fmt: skip
    _store_u(lora_u_ptr, u, row.to(tl.int64), adapter_slots, rank_row, lora_a_rows)


@triton.jit
def shrink_batched_kernel(
    x_ptr, adapter_slots_ptr, lora_a_ptr, lora_u_ptr, counts_ptr,
    capacity, num_adapter_slots, lora_a_rows, size_k, stride_lora_a_slot, stride_lora_a_expert,
    stride_lora_a_rank,
    INPUT_PRECISION: tl.constexpr,
    SLOT_PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """u[i, c] = A[slot of row c, i] @ x[i, c] for the first counts[i] rows c of each expert i.

    Grid: (row blocks of an expert * PARTS, blocks of lora_a_rows, e). A program computes BLOCK_M
        rows
    by BLOCK_RANK columns of u, for its part of the slots.

    x_ptr: (e, capacity, depth), contiguous.
    adapter_slots_ptr: (e, capacity), contiguous.
    lora_u_ptr: (e, capacity, lora_a_rows), contiguous. Rows without an adapter are not written.
    """
    expert = tl.program_id(2).to(tl.int64)
    count = tl.load(counts_ptr + expert)
    block = tl.program_id(0) // SLOT_PROGRAMS
    if block * BLOCK_M >= count:
        return
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    flat_row = expert * capacity + row.to(tl.int64)
    adapter_slots = load_slots(adapter_slots_ptr, flat_row, row < count, num_adapter_slots)
    adapter_slots = _select_slots(adapter_slots, tl.program_id(0) % SLOT_PROGRAMS, SLOT_PROGRAMS)
    rank_row = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    rank_mask = rank_row < lora_a_rows
    u = shrink_tile(
        x_ptr + flat_row[:, None] * size_k, adapter_slots,
        lora_a_ptr + expert * stride_lora_a_expert, rank_row, rank_mask,
        size_k, 1, stride_lora_a_slot, stride_lora_a_rank, INPUT_PRECISION, BLOCK_M, BLOCK_RANK,
        BLOCK_K,
    )  # fmt: skip
    _store_u(lora_u_ptr, u, flat_row, adapter_slots, rank_row, lora_a_rows)
