"""LoRA shrink kernels, which compute u = A x before each of the two GEMMs.

The adapter slots of a tile are divided among PARTS programs. X_TOP_K is the number of pairs per row
of x: TOP_K if the rows are tokens, and 1 if they are pairs.
"""

import triton
import triton.language as tl

from experts.triton.kernels.adapters import NO_SLOT, load_slots, shrink_tile
from modular_kernel.ops.kernels.ids import load_local_ids
from modular_kernel.ops.kernels.pdl import pdl_wait


@triton.jit
def _select_slots(slots, part, PARTS: tl.constexpr):
    """Return slots, with NO_SLOT in place of the slots of other programs.

    Slot s belongs to the program with part = s % PARTS.
    """
    return tl.where(slots % PARTS == part, slots, NO_SLOT)


@triton.jit
def tile_rows(tiles_ptr, tokens_ptr, tile, max_tiles, BLOCK_M: tl.constexpr):
    """Return the expert, the rows, the row mask and the tokens of a tile (see `ops.sort`)."""
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    row = tl.load(tiles_ptr + max_tiles + tile) + tl.arange(0, BLOCK_M)
    row_mask = row < tl.load(tiles_ptr + 2 * max_tiles + tile)
    return expert, row, row_mask, tl.load(tokens_ptr + row, mask=row_mask, other=0)


@triton.jit
def _store_u(u_ptr, u, row, slots, rank_row, rank_rows):
    """Store u for rows with a slot. Columns from rank_rows on are not stored.

    row: (BLOCK_M,) int64, the row of u to which each row is stored.
    """
    u_ptrs = u_ptr + row[:, None] * rank_rows + rank_row[None, :]
    mask = (slots < NO_SLOT)[:, None] & (rank_row < rank_rows)[None, :]
    tl.store(u_ptrs, u.to(u_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_pairs"])
def shrink_few_kernel(
    x_ptr, slots_ptr, a_ptr, u_ptr, ids_ptr, map_ptr,
    num_pairs, num_slots, rank_rows, depth, num_experts, num_local,
    stride_xm, stride_xk, stride_al, stride_ae, stride_ar,
    TOP_K: tl.constexpr, X_TOP_K: tl.constexpr, HAS_MAP: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """u[p] = A[slot of p's token, expert of p] @ x[p // X_TOP_K], without tensor cores.

    Grid: (num_pairs, blocks of rank_rows). A program computes BLOCK_R columns of u for one pair.

    u_ptr: (num_pairs, rank_rows), contiguous. Rows of skipped pairs and of tokens without an
        adapter are not written.
    """
    pdl_wait(OVERLAP)
    pair = tl.program_id(0)
    local, _ = load_local_ids(
        ids_ptr, pair, pair < num_pairs, map_ptr, num_experts, num_local, HAS_MAP
    )
    slot = tl.load(slots_ptr + pair // TOP_K).to(tl.int64)
    if (local < 0) | (slot < 0) | (slot >= num_slots):
        return
    rank_row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    rank_mask = rank_row < rank_rows
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (pair // X_TOP_K).to(tl.int64) * stride_xm + k * stride_xk
    a_ptr += slot * stride_al + local.to(tl.int64) * stride_ae
    a_ptrs = a_ptr + rank_row.to(tl.int64)[:, None] * stride_ar + k[None, :]
    total = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
    for start in range(0, depth, BLOCK_K):
        in_bounds = start + k < depth
        x = tl.load(x_ptrs + start * stride_xk, mask=in_bounds, other=0.0)
        a = tl.load(a_ptrs + start, mask=rank_mask[:, None] & in_bounds[None, :], other=0.0)
        total += a.to(tl.float32) * x.to(tl.float32)[None, :]
    u = tl.sum(total, axis=1)
    u_ptrs = u_ptr + pair.to(tl.int64) * rank_rows + rank_row
    tl.store(u_ptrs, u.to(u_ptr.dtype.element_ty), mask=rank_mask)


@triton.jit(do_not_specialize=["num_pairs"])
def shrink_pairs_kernel(
    x_ptr, slots_ptr, a_ptr, u_ptr, sorted_ptr, expert_ids_ptr, num_post_ptr,
    num_pairs, num_slots, rank_rows, depth,
    stride_xm, stride_xk, stride_al, stride_ae, stride_ar,
    TOP_K: tl.constexpr, X_TOP_K: tl.constexpr, PRECISION: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """u[p] = A[slot of p's token, expert of p] @ x[p // X_TOP_K] for every aligned pair p.

    Grid: (blocks of `ops.align`, blocks of rank_rows, PARTS). A program computes BLOCK_M pairs by
    BLOCK_R columns of u, for its part of the slots.

    u_ptr: (num_pairs, rank_rows), contiguous. Rows of skipped pairs and of tokens without an
        adapter are not written.
    """
    pid_m = tl.program_id(0)
    if pid_m * BLOCK_M >= tl.load(num_post_ptr):
        return
    expert = tl.load(expert_ids_ptr + pid_m).to(tl.int64)
    if expert < 0:
        return
    pairs = tl.load(sorted_ptr + pid_m * BLOCK_M + tl.arange(0, BLOCK_M))
    slots = load_slots(slots_ptr, pairs // TOP_K, pairs < num_pairs, num_slots)
    slots = _select_slots(slots, tl.program_id(2), PARTS)
    rank_row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    rank_mask = rank_row < rank_rows
    x_row = (pairs // X_TOP_K).to(tl.int64)
    u = shrink_tile(
        x_ptr + x_row[:, None] * stride_xm, slots, a_ptr + expert * stride_ae, rank_row, rank_mask,
        depth, stride_xk, stride_al, stride_ar, PRECISION, BLOCK_M, BLOCK_R, BLOCK_K,
    )  # fmt: skip
    _store_u(u_ptr, u, pairs.to(tl.int64), slots, rank_row, rank_rows)


@triton.jit(do_not_specialize=["max_tiles"])
def shrink_segments_kernel(
    x_ptr, slots_ptr, tokens_ptr, a_ptr, u_ptr, tiles_ptr,
    max_tiles, num_slots, rank_rows, depth,
    stride_xm, stride_xk, stride_al, stride_ae, stride_ar,
    GATHER: tl.constexpr, PRECISION: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """u[r] = A[slot of r's token, expert of r] @ x[r], or x of r's token if GATHER.

    Grid: (max_tiles, blocks of rank_rows, PARTS). A program computes a tile of at most BLOCK_M rows
    by BLOCK_R columns of u, for its part of the slots.

    tiles_ptr: `ops.sort.SortedPairs.tiles`.
    tokens_ptr: `ops.sort.SortedPairs.token_of_row`.
    u_ptr: (rows, rank_rows), contiguous. Rows without an adapter are not written.
    """
    pid_m = tl.program_id(0)
    if pid_m >= tl.load(tiles_ptr + 3 * max_tiles):
        return
    expert, row, row_mask, tokens = tile_rows(tiles_ptr, tokens_ptr, pid_m, max_tiles, BLOCK_M)
    slots = _select_slots(
        load_slots(slots_ptr, tokens, row_mask, num_slots), tl.program_id(2), PARTS
    )
    rank_row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    rank_mask = rank_row < rank_rows
    x_row = (tokens if GATHER else row).to(tl.int64)
    u = shrink_tile(
        x_ptr + x_row[:, None] * stride_xm, slots, a_ptr + expert * stride_ae, rank_row, rank_mask,
        depth, stride_xk, stride_al, stride_ar, PRECISION, BLOCK_M, BLOCK_R, BLOCK_K,
    )  # fmt: skip
    _store_u(u_ptr, u, row.to(tl.int64), slots, rank_row, rank_rows)


@triton.jit
def shrink_batched_kernel(
    x_ptr, slots_ptr, a_ptr, u_ptr, counts_ptr,
    capacity, num_slots, rank_rows, depth, stride_al, stride_ae, stride_ar,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """u[i, c] = A[slot of row c, i] @ x[i, c] for the first counts[i] rows c of each expert i.

    Grid: (row blocks of an expert * PARTS, blocks of rank_rows, e). A program computes BLOCK_M rows
    by BLOCK_R columns of u, for its part of the slots.

    x_ptr: (e, capacity, depth), contiguous.
    slots_ptr: (e, capacity), contiguous.
    u_ptr: (e, capacity, rank_rows), contiguous. Rows without an adapter are not written.
    """
    expert = tl.program_id(2).to(tl.int64)
    count = tl.load(counts_ptr + expert)
    block = tl.program_id(0) // PARTS
    if block * BLOCK_M >= count:
        return
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    flat_row = expert * capacity + row.to(tl.int64)
    slots = load_slots(slots_ptr, flat_row, row < count, num_slots)
    slots = _select_slots(slots, tl.program_id(0) % PARTS, PARTS)
    rank_row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    rank_mask = rank_row < rank_rows
    u = shrink_tile(
        x_ptr + flat_row[:, None] * depth, slots, a_ptr + expert * stride_ae, rank_row, rank_mask,
        depth, 1, stride_al, stride_ar, PRECISION, BLOCK_M, BLOCK_R, BLOCK_K,
    )  # fmt: skip
    _store_u(u_ptr, u, flat_row, slots, rank_row, rank_rows)
