"""Kernels that count pairs per expert and chunk, and compute prefix sums over chunks.

A chunk is CHUNK consecutive pairs. Bucket 0 holds skipped pairs, bucket i + 1 those of expert i.
The table `counts` is (buckets, chunks), so that one program scans the row of one bucket.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.ids import load_local_ids


@triton.jit
def is_repeat(
    ids_ptr, pairs, mask, local, map_ptr, num_experts, num_local,
    TOP_K: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    """Return whether an earlier pair of the same token has the same (valid) expert."""
    first_pair = (pairs // TOP_K) * TOP_K
    repeat = local < -1
    for slot in range(TOP_K):
        is_earlier = mask & (first_pair + slot < pairs)
        other, _ = load_local_ids(
            ids_ptr, first_pair + slot, is_earlier, map_ptr, num_experts, num_local, HAS_MAP
        )
        repeat = repeat | (is_earlier & (other == local) & (local >= 0))
    return repeat


@triton.jit
def count_pairs_kernel(
    ids_ptr, map_ptr, invalid_ptr, counts_ptr,
    numel, num_experts, num_local, num_chunks,
    TOP_K: tl.constexpr, HAS_MAP: tl.constexpr, DEDUPE: tl.constexpr,
    CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """counts[bucket, chunk] = number of pairs, for one chunk per program.

    Also add the chunk's invalid ids to the counter at invalid_ptr.

    DEDUPE: count several pairs of one token with the same expert once.
    BINS: a power of two > num_local + 1. The last bin takes lanes that must not be counted.
    """
    chunk = tl.program_id(0)
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = pairs < numel
    local, invalid = load_local_ids(ids_ptr, pairs, mask, map_ptr, num_experts, num_local, HAS_MAP)
    is_counted = mask
    if DEDUPE:
        is_counted = is_counted & ~is_repeat(
            ids_ptr, pairs, mask, local, map_ptr, num_experts, num_local, TOP_K, HAS_MAP
        )
    histogram = tl.histogram(tl.where(is_counted, local + 1, BINS - 1), BINS)
    bins = tl.arange(0, BINS)
    tl.store(counts_ptr + bins * num_chunks + chunk, histogram, mask=bins < num_local + 1)
    num_invalid = tl.sum(invalid.to(tl.int32), axis=0)
    if num_invalid > 0:
        tl.atomic_add(invalid_ptr, num_invalid)


@triton.jit
def scan_counts_kernel(
    counts_ptr, totals_ptr, expert_counts_ptr, num_chunks,
    HAS_EXPERT_COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace one bucket's counts by their exclusive prefix sums; store their sum, totals[bucket].

    Grid: (buckets,). If HAS_EXPERT_COUNTS, the totals of experts are stored in expert_counts, too.
    """
    bucket = tl.program_id(0)
    row_ptr = counts_ptr + bucket * num_chunks
    carry = 0
    for start in range(0, num_chunks, BLOCK):
        chunks = start + tl.arange(0, BLOCK)
        counts = tl.load(row_ptr + chunks, mask=chunks < num_chunks, other=0)
        inclusive = tl.cumsum(counts, axis=0)
        tl.store(row_ptr + chunks, carry + inclusive - counts, mask=chunks < num_chunks)
        carry += tl.sum(counts, axis=0)
    tl.store(totals_ptr + bucket, carry)
    if HAS_EXPERT_COUNTS:
        tl.store(expert_counts_ptr + bucket - 1, carry, mask=bucket > 0)


@triton.jit
def rank_in_chunk(key, is_counted, CHUNK: tl.constexpr):
    """Return, per lane, the number of earlier counted lanes of the chunk with the same key."""
    lanes = tl.arange(0, CHUNK)
    same = (key[:, None] == key[None, :]) & (lanes[None, :] < lanes[:, None])
    return tl.sum((same & is_counted[None, :]).to(tl.int32), axis=1)
