"""Kernels that count pairs per expert and chunk, and compute prefix sums over chunks.

The kernels that sort pairs (align, batch, sort) use these counts. A pair is a token together with
one of its top_k experts: pair p belongs to token p // top_k. A chunk is CHUNK_SIZE consecutive
pairs, which one program handles. Pairs are counted in buckets: bucket 0 is for skipped pairs, and
bucket i + 1 for the pairs of local expert i.

The table `counts` has the shape (buckets, chunks). After the scan, counts[bucket, chunk] is the
number of pairs of the bucket in earlier chunks. A pair's position among the pairs of its expert is
this number plus its rank in its chunk (`rank_in_chunk`).
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.ids import load_local_ids


@triton.jit
def is_repeat(
    topk_ids_ptr, pairs, mask, local_expert, expert_map_ptr, num_experts, num_local_experts,
    TOP_K: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr,
):  # fmt: skip
    """Return whether an earlier pair of the same token has the same expert on this rank.

    pairs, mask: the pairs, and a mask of existing pairs.
    local_expert: the local id of each pair's expert, or -1.
    """
    first_pair = (pairs // TOP_K) * TOP_K
    repeat = local_expert < -1
    for k_index in range(TOP_K):
        is_earlier = mask & (first_pair + k_index < pairs)
        earlier_expert, _ = load_local_ids(
            topk_ids_ptr,
            first_pair + k_index,
            is_earlier,
            expert_map_ptr,
            num_experts,
            num_local_experts,
            HAS_EXPERT_MAP,
        )
        repeat = repeat | (is_earlier & (earlier_expert == local_expert) & (local_expert >= 0))
    return repeat


@triton.jit
def count_pairs_kernel(
    topk_ids_ptr, expert_map_ptr, invalid_count_ptr, counts_ptr,
    num_pairs, num_experts, num_local_experts, num_chunks,
    TOP_K: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr, DEDUPE: tl.constexpr,
    CHUNK_SIZE: tl.constexpr, NUM_BINS: tl.constexpr,
):  # fmt: skip
    """counts[bucket, chunk] = number of pairs of the bucket in the chunk.

    Grid: (num_chunks,).

    topk_ids_ptr, expert_map_ptr, num_experts, num_local_experts, HAS_EXPERT_MAP: the expert ids of
        the pairs; see `load_local_ids`.
    invalid_count_ptr: int32, incremented by the number of invalid ids.
    counts_ptr: int32 output (num_local_experts + 1, num_chunks).
    DEDUPE: whether pairs of a token with the same expert are counted only once.
    NUM_BINS: a power of two > num_local_experts + 1. The last bin takes lanes that must not be
        counted.
    """
    chunk = tl.program_id(0)
    pairs = chunk * CHUNK_SIZE + tl.arange(0, CHUNK_SIZE)
    mask = pairs < num_pairs
    local_expert, invalid = load_local_ids(
        topk_ids_ptr, pairs, mask, expert_map_ptr, num_experts, num_local_experts, HAS_EXPERT_MAP
    )
    is_counted = mask
    if DEDUPE:
        is_counted = is_counted & ~is_repeat(
            topk_ids_ptr,
            pairs,
            mask,
            local_expert,
            expert_map_ptr,
            num_experts,
            num_local_experts,
            TOP_K,
            HAS_EXPERT_MAP,
        )
    histogram = tl.histogram(tl.where(is_counted, local_expert + 1, NUM_BINS - 1), NUM_BINS)
    bins = tl.arange(0, NUM_BINS)
    tl.store(counts_ptr + bins * num_chunks + chunk, histogram, mask=bins < num_local_experts + 1)
    num_invalid = tl.sum(invalid.to(tl.int32), axis=0)
    if num_invalid > 0:
        tl.atomic_add(invalid_count_ptr, num_invalid)


@triton.jit
def scan_counts_kernel(
    counts_ptr, bucket_totals_ptr, expert_counts_ptr, num_chunks,
    HAS_EXPERT_COUNTS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Replace the counts of one bucket by their exclusive prefix sums, and store the total.

    Grid: (buckets,).

    counts_ptr: int32 (buckets, num_chunks), from `count_pairs_kernel`, overwritten.
    bucket_totals_ptr: int32 output (buckets,), the number of pairs in each bucket.
    expert_counts_ptr: int32 output (buckets - 1,), the number of pairs of each local expert.
        Written if HAS_EXPERT_COUNTS.
    BLOCK_CHUNKS: chunks per step of the scan.
    """
    bucket = tl.program_id(0)
    row_ptr = counts_ptr + bucket * num_chunks
    carry = 0
    for start in range(0, num_chunks, BLOCK_CHUNKS):
        chunks = start + tl.arange(0, BLOCK_CHUNKS)
        counts = tl.load(row_ptr + chunks, mask=chunks < num_chunks, other=0)
        inclusive = tl.cumsum(counts, axis=0)
        tl.store(row_ptr + chunks, carry + inclusive - counts, mask=chunks < num_chunks)
        carry += tl.sum(counts, axis=0)
    tl.store(bucket_totals_ptr + bucket, carry)
    if HAS_EXPERT_COUNTS:
        tl.store(expert_counts_ptr + bucket - 1, carry, mask=bucket > 0)


@triton.jit
def rank_in_chunk(bucket, is_counted, CHUNK_SIZE: tl.constexpr):
    """Return, for each lane, the number of earlier counted lanes of the chunk with the same bucket.

    bucket: (CHUNK_SIZE,), the bucket of each pair of the chunk.
    is_counted: (CHUNK_SIZE,), whether the lane is counted.
    """
    lanes = tl.arange(0, CHUNK_SIZE)
    same = (bucket[:, None] == bucket[None, :]) & (lanes[None, :] < lanes[:, None])
    return tl.sum((same & is_counted[None, :]).to(tl.int32), axis=1)
