"""`assign_rows_kernel`: assign a row of the batched format to each pair.

A pair is a token together with one of its top_k experts: pair p belongs to token p // top_k. In the
batched format, (num_local_experts, capacity, hidden_size), the tokens of an expert are in its first
rows. Buckets and chunks of pairs are defined in `count`.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.count import is_repeat, rank_in_chunk
from modular_kernel.ops.kernels.ids import load_local_ids


@triton.jit
def assign_rows_kernel(
    topk_ids_ptr, expert_map_ptr, chunk_prefix_ptr, row_of_pair_ptr,
    num_pairs, num_experts, num_local_experts, num_chunks, capacity,
    TOP_K: tl.constexpr, HAS_EXPERT_MAP: tl.constexpr, CHUNK_SIZE: tl.constexpr,
):  # fmt: skip
    """row_of_pair[p] = expert * capacity + position among the expert's tokens; -1 if p is skipped.

    If a token selects an expert twice, the second pair (a repeat) shares the row of the first pair.
    Repeats are not counted.

    Grid: (num_chunks,). A program handles one chunk of pairs.

    topk_ids_ptr, expert_map_ptr, num_experts, num_local_experts, HAS_EXPERT_MAP: the expert ids of
        the pairs; see `load_local_ids`.
    chunk_prefix_ptr: int32 (buckets, num_chunks), the number of counted pairs of a bucket in
        earlier chunks.
    row_of_pair_ptr: int32 output (num_pairs,).
    """
    chunk = tl.program_id(0)
    pairs = chunk * CHUNK_SIZE + tl.arange(0, CHUNK_SIZE)
    mask = pairs < num_pairs
    local_expert, _ = load_local_ids(
        topk_ids_ptr, pairs, mask, expert_map_ptr, num_experts, num_local_experts, HAS_EXPERT_MAP
    )
    repeat = is_repeat(
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
    bucket = local_expert + 1
    preceding = tl.load(chunk_prefix_ptr + bucket * num_chunks + chunk, mask=mask, other=0)
    # The last counted pair of the expert before a repeat is the pair whose row the repeat shares.
    position = preceding + rank_in_chunk(bucket, mask & ~repeat, CHUNK_SIZE) - repeat.to(tl.int32)
    row = tl.where(local_expert >= 0, local_expert * capacity + position, -1)
    tl.store(row_of_pair_ptr + pairs, row, mask=mask)
