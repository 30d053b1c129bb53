"""A x of adapters: few columns for each row, for both products, before each of them."""

import triton
import triton.language as tl

from experts.triton.kernels.adapters import NO_SLOT, load_slots, shrunk_tile


@triton.jit(do_not_specialize=["num_pairs"])
def shrink_pairs_kernel(
    x_ptr, slots_ptr, a_ptr, u_ptr, sorted_ptr, expert_ids_ptr, num_post_ptr,
    num_pairs, num_slots, rank_rows, depth,
    stride_xm, stride_xk, stride_al, stride_ae, stride_ar,
    TOP_K: tl.constexpr, X_TOP_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """u[p] = A[slot of p's token, expert of p] @ x[p // X_TOP_K] for every aligned pair p.

    u is (num_pairs, rank_rows) contiguous; pairs that are skipped or whose token has no adapter are
    not written. Grid (blocks of ops.align, parts of rank_rows).
    """
    pid_m = tl.program_id(0)
    if pid_m * BLOCK_M >= tl.load(num_post_ptr):
        return
    expert = tl.load(expert_ids_ptr + pid_m).to(tl.int64)
    if expert < 0:
        return
    pairs = tl.load(sorted_ptr + pid_m * BLOCK_M + tl.arange(0, BLOCK_M))
    slots = load_slots(slots_ptr, pairs // TOP_K, pairs < num_pairs, num_slots)
    rank_row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    rank_mask = rank_row < rank_rows
    x_row = (pairs // X_TOP_K).to(tl.int64)
    u = shrunk_tile(
        x_ptr + x_row[:, None] * stride_xm, slots, a_ptr + expert * stride_ae, rank_row, rank_mask,
        depth, stride_xk, stride_al, stride_ar, PRECISION, BLOCK_M, BLOCK_R, BLOCK_K,
    )  # fmt: skip
    u_ptrs = u_ptr + pairs.to(tl.int64)[:, None] * rank_rows + rank_row[None, :]
    mask = (slots < NO_SLOT)[:, None] & rank_mask[None, :]
    tl.store(u_ptrs, u.to(u_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["max_tiles"])
def shrink_segments_kernel(
    x_ptr, slots_ptr, tokens_ptr, a_ptr, u_ptr, tiles_ptr,
    max_tiles, num_slots, rank_rows, depth,
    stride_xm, stride_xk, stride_al, stride_ae, stride_ar,
    GATHER: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """u[r] = A[slot of r's token, expert of r] @ x[r], or x of r's token if GATHER.

    tiles and tokens: as in ops.sort.Sorted, of at most BLOCK_M rows each. u is (rows, rank_rows)
    contiguous; rows without an adapter are not written. Grid (most tiles, parts of rank_rows).
    """
    pid_m = tl.program_id(0)
    if pid_m >= tl.load(tiles_ptr + 3 * max_tiles):
        return
    expert = tl.load(tiles_ptr + pid_m).to(tl.int64)
    row = tl.load(tiles_ptr + max_tiles + pid_m) + tl.arange(0, BLOCK_M)
    row_mask = row < tl.load(tiles_ptr + 2 * max_tiles + pid_m)
    tokens = tl.load(tokens_ptr + row, mask=row_mask, other=0)
    slots = load_slots(slots_ptr, tokens, row_mask, num_slots)
    rank_row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    rank_mask = rank_row < rank_rows
    x_row = (tokens if GATHER else row).to(tl.int64)
    u = shrunk_tile(
        x_ptr + x_row[:, None] * stride_xm, slots, a_ptr + expert * stride_ae, rank_row, rank_mask,
        depth, stride_xk, stride_al, stride_ar, PRECISION, BLOCK_M, BLOCK_R, BLOCK_K,
    )  # fmt: skip
    u_ptrs = u_ptr + row.to(tl.int64)[:, None] * rank_rows + rank_row[None, :]
    mask = (slots < NO_SLOT)[:, None] & rank_mask[None, :]
    tl.store(u_ptrs, u.to(u_ptr.dtype.element_ty), mask=mask)


@triton.jit
def shrink_batched_kernel(
    x_ptr, slots_ptr, a_ptr, u_ptr, counts_ptr,
    capacity, num_slots, rank_rows, depth, stride_al, stride_ae, stride_ar,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """u[i, c] = A[slot of row c, i] @ x[i, c] for c < counts[i].

    x (e, capacity, depth), slots (e, capacity) and u (e, capacity, rank_rows) are contiguous; rows
    without an adapter are not written. Grid (blocks of an expert's rows, parts of rank_rows, e).
    """
    expert = tl.program_id(2).to(tl.int64)
    count = tl.load(counts_ptr + expert)
    if tl.program_id(0) * BLOCK_M >= count:
        return
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    place = expert * capacity + row.to(tl.int64)
    slots = load_slots(slots_ptr, place, row < count, num_slots)
    rank_row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    rank_mask = rank_row < rank_rows
    u = shrunk_tile(
        x_ptr + place[:, None] * depth, slots, a_ptr + expert * stride_ae, rank_row, rank_mask,
        depth, 1, stride_al, stride_ar, PRECISION, BLOCK_M, BLOCK_R, BLOCK_K,
    )  # fmt: skip
    u_ptrs = u_ptr + place[:, None] * rank_rows + rank_row[None, :]
    mask = (slots < NO_SLOT)[:, None] & rank_mask[None, :]
    tl.store(u_ptrs, u.to(u_ptr.dtype.element_ty), mask=mask)
