"""Kernels that place pairs by expert, with each expert padded to whole blocks.

Buckets and chunks are as in `kernels.count`.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.count import rank_in_chunk
from modular_kernel.ops.kernels.ids import load_local_ids
from modular_kernel.ops.kernels.pdl import pdl_wait


@triton.jit
def _bucket_starts(totals, IGNORE_INVALID: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return, per bucket, the pairs to place, their padded number, and the first position."""
    if IGNORE_INVALID:
        totals = tl.where(tl.arange(0, totals.shape[0]) == 0, 0, totals)
    padded = (totals + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    return totals, padded, tl.cumsum(padded, axis=0) - padded


@triton.jit
def _place_chunk(
    pairs, mask, key, first, sorted_ptr, IGNORE_INVALID: tl.constexpr, CHUNK: tl.constexpr
):
    """Store each pair of a chunk after the earlier ones of its bucket.

    first[i] is the position of the chunk's first pair in the bucket of pair i.
    """
    position = first + rank_in_chunk(key, mask, CHUNK)
    if IGNORE_INVALID:
        mask = mask & (key > 0)
    tl.store(sorted_ptr + position, pairs, mask=mask)


@triton.jit
def _fill_blocks(
    pid, num_chunks, totals, padded, starts, sorted_ptr, expert_ids_ptr, num_post_ptr,
    numel, num_positions, num_blocks,
    BINS: tl.constexpr, BLOCK_SIZE: tl.constexpr, FILL_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store the experts of FILL_BLOCKS blocks, and mark their padding.

    For programs from num_chunks on; the first of them also stores the number of used positions.
    """
    num_post = tl.sum(padded, axis=0)
    block = (pid - num_chunks) * FILL_BLOCKS + tl.arange(0, FILL_BLOCKS)
    first = block * BLOCK_SIZE
    is_past = (starts + padded)[None, :] <= first[:, None]
    bucket = tl.minimum(tl.sum(is_past.to(tl.int32), axis=1), BINS - 1)  # NaN-free: integers
    is_used = first < num_post
    tl.store(expert_ids_ptr + block, tl.where(is_used, bucket - 1, -1), mask=block < num_blocks)
    # In a block, all positions past the last pair of its bucket are padding.
    padding = tl.where(is_used, tl.gather(starts, bucket, 0) + tl.gather(totals, bucket, 0), 0)
    position = first[:, None] + tl.arange(0, BLOCK_SIZE)[None, :]
    fill = (position >= padding[:, None]) & (position < num_positions)
    tl.store(sorted_ptr + position, numel + tl.zeros_like(position), mask=fill)
    if pid == num_chunks:
        tl.store(num_post_ptr, num_post)


@triton.jit
def align_place_kernel(
    ids_ptr, map_ptr, prefix_ptr, totals_ptr, sorted_ptr, expert_ids_ptr, num_post_ptr,
    numel, num_experts, num_local, num_chunks, num_positions, num_blocks,
    HAS_MAP: tl.constexpr, IGNORE_INVALID: tl.constexpr, CHUNK: tl.constexpr,
    BINS: tl.constexpr, BLOCK_SIZE: tl.constexpr, FILL_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Place a chunk of pairs in programs below num_chunks; fill FILL_BLOCKS blocks in the others.

    Both write different positions, so one launch suffices.

    prefix_ptr, totals_ptr: from the kernels of `kernels.count`.
    sorted_ptr, expert_ids_ptr, num_post_ptr: the tensors of `ops.align.AlignedPairs`.
    num_positions, num_blocks: the lengths of sorted and expert_ids.
    IGNORE_INVALID: omit skipped pairs.
    BINS: a power of two > num_local + 1.
    """
    pid = tl.program_id(0)
    bins = tl.arange(0, BINS)
    totals = tl.load(totals_ptr + bins, mask=bins < num_local + 1, other=0)
    totals, padded, starts = _bucket_starts(totals, IGNORE_INVALID, BLOCK_SIZE)
    if pid < num_chunks:
        pairs = pid * CHUNK + tl.arange(0, CHUNK)
        mask = pairs < numel
        local, _ = load_local_ids(ids_ptr, pairs, mask, map_ptr, num_experts, num_local, HAS_MAP)
        key = local + 1
        num_preceding = tl.load(prefix_ptr + key * num_chunks + pid, mask=mask, other=0)
        first = tl.gather(starts, key, 0) + num_preceding
        _place_chunk(pairs, mask, key, first, sorted_ptr, IGNORE_INVALID, CHUNK)
    else:
        _fill_blocks(
            pid, num_chunks, totals, padded, starts, sorted_ptr, expert_ids_ptr, num_post_ptr,
            numel, num_positions, num_blocks, BINS, BLOCK_SIZE, FILL_BLOCKS,
        )  # fmt: skip


# These arguments change with the number of tokens; specializing on them would recompile.
@triton.jit(do_not_specialize=["numel", "num_chunks", "num_positions", "num_blocks"])
def align_kernel(
    ids_ptr, map_ptr, invalid_ptr, sorted_ptr, expert_ids_ptr, num_post_ptr,
    numel, num_experts, num_local, num_chunks, num_positions, num_blocks,
    HAS_MAP: tl.constexpr, IGNORE_INVALID: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr,
    BINS: tl.constexpr, BLOCK_SIZE: tl.constexpr, FILL_BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Do the work of `align_place_kernel` for at most PAIRS pairs, all counted by every program.

    Programs of chunks also add their invalid ids to the counter. The arguments are those of
    `align_place_kernel`.
    """
    pdl_wait(OVERLAP)
    pid = tl.program_id(0)
    all_pairs = tl.arange(0, PAIRS)
    all_local, _ = load_local_ids(
        ids_ptr, all_pairs, all_pairs < numel, map_ptr, num_experts, num_local, HAS_MAP
    )
    buckets = tl.where(all_pairs < numel, all_local + 1, BINS - 1)
    totals = tl.histogram(buckets, BINS)
    totals = tl.where(tl.arange(0, BINS) < num_local + 1, totals, 0)
    totals, padded, starts = _bucket_starts(totals, IGNORE_INVALID, BLOCK_SIZE)
    if pid < num_chunks:
        earlier_buckets = tl.where(all_pairs < pid * CHUNK, buckets, BINS - 1)
        pairs = pid * CHUNK + tl.arange(0, CHUNK)
        mask = pairs < numel
        local, invalid = load_local_ids(
            ids_ptr, pairs, mask, map_ptr, num_experts, num_local, HAS_MAP
        )
        key = local + 1
        first = tl.gather(starts + tl.histogram(earlier_buckets, BINS), key, 0)
        _place_chunk(pairs, mask, key, first, sorted_ptr, IGNORE_INVALID, CHUNK)
        num_invalid = tl.sum(invalid.to(tl.int32), axis=0)
        if num_invalid > 0:
            tl.atomic_add(invalid_ptr, num_invalid)
    else:
        _fill_blocks(
            pid, num_chunks, totals, padded, starts, sorted_ptr, expert_ids_ptr, num_post_ptr,
            numel, num_positions, num_blocks, BINS, BLOCK_SIZE, FILL_BLOCKS,
        )  # fmt: skip
