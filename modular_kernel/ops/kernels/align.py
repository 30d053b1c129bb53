"""Lay pairs out expert by expert, each expert padded to whole blocks."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.count import rank_in_chunk
from modular_kernel.ops.kernels.ids import load_local_ids


@triton.jit
def _bucket_starts(
    totals_ptr, num_local,
    IGNORE_INVALID: tl.constexpr, BLOCK_SIZE: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Per bucket: pairs, padded pairs, and the first position."""
    bins = tl.arange(0, BINS)
    totals = tl.load(totals_ptr + bins, mask=bins < num_local + 1, other=0)
    if IGNORE_INVALID:
        totals = tl.where(bins == 0, 0, totals)
    padded = (totals + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    return totals, padded, tl.cumsum(padded, axis=0) - padded


@triton.jit
def _place_chunk(
    chunk, starts, ids_ptr, map_ptr, prefix_ptr, sorted_ptr,
    numel, num_experts, num_local, num_chunks,
    HAS_MAP: tl.constexpr, IGNORE_INVALID: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store each pair of a chunk at its expert's start + earlier pairs of that expert."""
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = pairs < numel
    local, _ = load_local_ids(ids_ptr, pairs, mask, map_ptr, num_experts, num_local, HAS_MAP)
    key = local + 1
    before = tl.load(prefix_ptr + key * num_chunks + chunk, mask=mask, other=0)
    position = tl.gather(starts, key, 0) + before + rank_in_chunk(key, mask, CHUNK)
    if IGNORE_INVALID:
        mask = mask & (key > 0)
    tl.store(sorted_ptr + position, pairs, mask=mask)


@triton.jit
def _fill_blocks(
    first_block, totals, padded, starts, sorted_ptr, expert_ids_ptr,
    numel, num_post, num_positions, num_blocks,
    BINS: tl.constexpr, BLOCK_SIZE: tl.constexpr, FILL_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Name the expert of each block and mark its padding, for FILL_BLOCKS blocks."""
    block = first_block + tl.arange(0, FILL_BLOCKS)
    first = block * BLOCK_SIZE
    past = (starts + padded)[None, :] <= first[:, None]
    bucket = tl.minimum(tl.sum(past.to(tl.int32), axis=1), BINS - 1)
    used = first < num_post
    tl.store(expert_ids_ptr + block, tl.where(used, bucket - 1, -1), mask=block < num_blocks)
    # Past the last pair of its bucket every position of a block is padding.
    padding = tl.where(used, tl.gather(starts, bucket, 0) + tl.gather(totals, bucket, 0), 0)
    position = first[:, None] + tl.arange(0, BLOCK_SIZE)[None, :]
    fill = (position >= padding[:, None]) & (position < num_positions)
    tl.store(sorted_ptr + position, numel + tl.zeros_like(position), mask=fill)


@triton.jit
def align_place_kernel(
    ids_ptr, map_ptr, prefix_ptr, totals_ptr, sorted_ptr, expert_ids_ptr, num_post_ptr,
    numel, num_experts, num_local, num_chunks, num_positions, num_blocks,
    HAS_MAP: tl.constexpr, IGNORE_INVALID: tl.constexpr, CHUNK: tl.constexpr,
    BINS: tl.constexpr, BLOCK_SIZE: tl.constexpr, FILL_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Programs below num_chunks place one chunk's pairs; the others fill FILL_BLOCKS blocks.

    The two kinds write disjoint positions, so one launch does both.
    """
    pid = tl.program_id(0)
    totals, padded, starts = _bucket_starts(totals_ptr, num_local, IGNORE_INVALID, BLOCK_SIZE, BINS)
    if pid < num_chunks:
        _place_chunk(
            pid, starts, ids_ptr, map_ptr, prefix_ptr, sorted_ptr,
            numel, num_experts, num_local, num_chunks, HAS_MAP, IGNORE_INVALID, CHUNK,
        )  # fmt: skip
    else:
        num_post = tl.sum(padded, axis=0)
        _fill_blocks(
            (pid - num_chunks) * FILL_BLOCKS, totals, padded, starts, sorted_ptr, expert_ids_ptr,
            numel, num_post, num_positions, num_blocks, BINS, BLOCK_SIZE, FILL_BLOCKS,
        )  # fmt: skip
        if pid == num_chunks:
            tl.store(num_post_ptr, num_post)
