"""Kernels that sort pairs by expert into blocks, like vLLM's moe_align_block_size.

A pair is a token together with one of its top_k experts: pair p belongs to token p // top_k. The
sorted positions are divided into blocks of BLOCK_SIZE. All pairs of a block have the same expert;
the rest of an expert's last block is padding. Buckets and chunks of pairs are defined in `count`:
bucket 0 is for skipped pairs, bucket i + 1 for local expert i.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.count import rank_in_chunk
from modular_kernel.ops.kernels.ids import load_local_ids
from modular_kernel.ops.kernels.pdl import pdl_wait


@triton.jit
def _compute_bucket_starts(totals, IGNORE_INVALID: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return (numbers of pairs, numbers of positions, first positions) of the buckets.

    totals: (NUM_BINS,), the number of pairs in each bucket.
    IGNORE_INVALID: whether to omit skipped pairs (bucket 0).
    """
    if IGNORE_INVALID:
        totals = tl.where(tl.arange(0, totals.shape[0]) == 0, 0, totals)
    padded_totals = (totals + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    return totals, padded_totals, tl.cumsum(padded_totals, axis=0) - padded_totals


@triton.jit
def _place_chunk(
    pairs,
    mask,
    bucket,
    first_position,
    sorted_token_ids_ptr,
    IGNORE_INVALID: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
):
    """Store the index of each pair of a chunk at its sorted position.

    pairs, mask: the pairs of the chunk, and a mask of existing pairs.
    bucket: (CHUNK_SIZE,), the bucket of each pair.
    first_position: (CHUNK_SIZE,), for each pair, the position of the chunk's first pair in the same
        bucket.
    """
    position = first_position + rank_in_chunk(bucket, mask, CHUNK_SIZE)
    if IGNORE_INVALID:
        mask = mask & (bucket > 0)
    tl.store(sorted_token_ids_ptr + position, pairs, mask=mask)


@triton.jit
def _fill_blocks(
    pid, num_chunks, totals, padded_totals, starts, sorted_token_ids_ptr, expert_ids_ptr,
    num_tokens_post_padded_ptr,
    num_pairs, num_positions, num_blocks,
    NUM_BINS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Store the experts of BLOCKS_PER_PROGRAM blocks, and mark their padding.

    Programs with an index pid >= num_chunks call this function. Program num_chunks also stores the
    number of positions in use.

    totals, padded_totals, starts: from `_compute_bucket_starts`.
    """
    num_tokens_post_padded = tl.sum(padded_totals, axis=0)
    block = (pid - num_chunks) * BLOCKS_PER_PROGRAM + tl.arange(0, BLOCKS_PER_PROGRAM)
    first_position = block * BLOCK_SIZE
    has_ended = (starts + padded_totals)[None, :] <= first_position[:, None]
    # NaN-free: integer operands
    bucket = tl.minimum(tl.sum(has_ended.to(tl.int32), axis=1), NUM_BINS - 1)
    is_used = first_position < num_tokens_post_padded
    tl.store(expert_ids_ptr + block, tl.where(is_used, bucket - 1, -1), mask=block < num_blocks)
    # In a block, all positions past the last pair of its bucket are padding.
    padding_start = tl.where(
        is_used, tl.gather(starts, bucket, 0) + tl.gather(totals, bucket, 0), 0
    )
    position = first_position[:, None] + tl.arange(0, BLOCK_SIZE)[None, :]
    is_padding = (position >= padding_start[:, None]) & (position < num_positions)
    tl.store(sorted_token_ids_ptr + position, num_pairs + tl.zeros_like(position), mask=is_padding)
    if pid == num_chunks:
        tl.store(num_tokens_post_padded_ptr, num_tokens_post_padded)


@triton.jit
def align_place_kernel(
    topk_ids_ptr, expert_map_ptr, chunk_prefix_ptr, bucket_totals_ptr, sorted_token_ids_ptr,
    expert_ids_ptr, num_tokens_post_padded_ptr,
    num_pairs, num_experts, num_local_experts, num_chunks, num_positions, num_blocks,
    HAS_EXPERT_MAP: tl.constexpr, IGNORE_INVALID: tl.constexpr, CHUNK_SIZE: tl.constexpr,
    NUM_BINS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Sort pairs by expert into blocks, with counts from the kernels of `count`.

    Grid: (num_chunks + ceil(num_blocks / BLOCKS_PER_PROGRAM),). The first num_chunks programs place
        one chunk of pairs each. Each further program writes the experts and the padding of
        BLOCKS_PER_PROGRAM blocks. Pairs and padding have different positions, so one launch
        suffices.

    topk_ids_ptr, expert_map_ptr, num_experts, num_local_experts, HAS_EXPERT_MAP: the expert ids of
        the pairs; see `load_local_ids`.
    chunk_prefix_ptr: int32 (buckets, num_chunks), the number of pairs of a bucket in earlier
        chunks.
    bucket_totals_ptr: int32 (buckets,), the number of pairs in each bucket.
    sorted_token_ids_ptr: int32 output (num_positions,), the pair at each position. The value
        num_pairs marks padding.
    expert_ids_ptr: int32 output (num_blocks,), the local expert of each block. It is -1 for blocks
        of skipped pairs and for unused blocks.
    num_tokens_post_padded_ptr: int32 output (1,), the number of positions in use, including
        padding.
    IGNORE_INVALID: whether to omit skipped pairs.
    NUM_BINS: a power of two > num_local_experts + 1.
    """
    pid = tl.program_id(0)
    bins = tl.arange(0, NUM_BINS)
    totals = tl.load(bucket_totals_ptr + bins, mask=bins < num_local_experts + 1, other=0)
    totals, padded_totals, starts = _compute_bucket_starts(totals, IGNORE_INVALID, BLOCK_SIZE)
    if pid < num_chunks:
        pairs = pid * CHUNK_SIZE + tl.arange(0, CHUNK_SIZE)
        mask = pairs < num_pairs
        local_expert, _ = load_local_ids(
            topk_ids_ptr,
            pairs,
            mask,
            expert_map_ptr,
            num_experts,
            num_local_experts,
            HAS_EXPERT_MAP,
        )
        bucket = local_expert + 1
        num_preceding = tl.load(chunk_prefix_ptr + bucket * num_chunks + pid, mask=mask, other=0)
        first_position = tl.gather(starts, bucket, 0) + num_preceding
        _place_chunk(
            pairs, mask, bucket, first_position, sorted_token_ids_ptr, IGNORE_INVALID, CHUNK_SIZE
        )
    else:
        _fill_blocks(
            pid, num_chunks, totals, padded_totals, starts, sorted_token_ids_ptr, expert_ids_ptr,
            num_tokens_post_padded_ptr,
            num_pairs, num_positions, num_blocks, NUM_BINS, BLOCK_SIZE, BLOCKS_PER_PROGRAM,
        )  # fmt: skip


# These arguments change with the number of tokens, so specializing on them would recompile.
@triton.jit(do_not_specialize=["num_pairs", "num_chunks", "num_positions", "num_blocks"])
def align_kernel(
    topk_ids_ptr, expert_map_ptr, invalid_count_ptr, sorted_token_ids_ptr, expert_ids_ptr,
    num_tokens_post_padded_ptr,
    num_pairs, num_experts, num_local_experts, num_chunks, num_positions, num_blocks,
    HAS_EXPERT_MAP: tl.constexpr, IGNORE_INVALID: tl.constexpr, CHUNK_SIZE: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    NUM_BINS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr,
    USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """Do the work of `align_place_kernel` and of the counting kernels in one launch.

    Every program counts all pairs, of which there are at most BLOCK_PAIRS.

    invalid_count_ptr: int32, incremented by the number of invalid ids.
    USE_PDL: whether the launch uses programmatic dependent launch (`pdl_wait`).

    The other arguments are those of `align_place_kernel`.
    """
    pdl_wait(USE_PDL)
    pid = tl.program_id(0)
    all_pairs = tl.arange(0, BLOCK_PAIRS)
    all_local, _ = load_local_ids(
        topk_ids_ptr,
        all_pairs,
        all_pairs < num_pairs,
        expert_map_ptr,
        num_experts,
        num_local_experts,
        HAS_EXPERT_MAP,
    )
    buckets = tl.where(all_pairs < num_pairs, all_local + 1, NUM_BINS - 1)
    totals = tl.histogram(buckets, NUM_BINS)
    totals = tl.where(tl.arange(0, NUM_BINS) < num_local_experts + 1, totals, 0)
    totals, padded_totals, starts = _compute_bucket_starts(totals, IGNORE_INVALID, BLOCK_SIZE)
    if pid < num_chunks:
        earlier_buckets = tl.where(all_pairs < pid * CHUNK_SIZE, buckets, NUM_BINS - 1)
        pairs = pid * CHUNK_SIZE + tl.arange(0, CHUNK_SIZE)
        mask = pairs < num_pairs
        local_expert, invalid = load_local_ids(
            topk_ids_ptr,
            pairs,
            mask,
            expert_map_ptr,
            num_experts,
            num_local_experts,
            HAS_EXPERT_MAP,
        )
        bucket = local_expert + 1
        first_position = tl.gather(starts + tl.histogram(earlier_buckets, NUM_BINS), bucket, 0)
        _place_chunk(
            pairs, mask, bucket, first_position, sorted_token_ids_ptr, IGNORE_INVALID, CHUNK_SIZE
        )
        num_invalid = tl.sum(invalid.to(tl.int32), axis=0)
        if num_invalid > 0:
            tl.atomic_add(invalid_count_ptr, num_invalid)
    else:
        _fill_blocks(
            pid, num_chunks, totals, padded_totals, starts, sorted_token_ids_ptr, expert_ids_ptr,
            num_tokens_post_padded_ptr,
            num_pairs, num_positions, num_blocks, NUM_BINS, BLOCK_SIZE, BLOCKS_PER_PROGRAM,
        )  # fmt: skip
