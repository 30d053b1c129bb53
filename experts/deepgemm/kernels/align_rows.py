"""Kernel that assigns a row to each pair, in the order of experts.

The rows of each expert start at a multiple of TILE. A pair is a token together with one of its
top_k experts. Chunks and buckets are defined in `modular_kernel.ops.kernels.count`.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.pdl import pdl_wait
from modular_kernel.ops.kernels.sort import find_chunk_rows, load_expert_rows


@triton.jit
def align_rows_kernel(
    topk_ids_ptr, expert_map_ptr, chunk_prefix_ptr, bucket_totals_ptr, rows_ptr, ends_ptr,
    num_pairs, num_experts, num_local_experts, num_chunks,
    HAS_EXPERT_MAP: tl.constexpr, CHUNK_SIZE: tl.constexpr, NUM_BINS: tl.constexpr,
    TILE: tl.constexpr, USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """Write the row of each pair, and the end of each expert's rows.

    Grid: (num_chunks,). A program handles one chunk of pairs. The first program also writes ends.

    topk_ids_ptr, expert_map_ptr, num_experts, num_local_experts, HAS_EXPERT_MAP: the expert ids of
        the pairs; see `load_local_ids`.
    chunk_prefix_ptr: int32 (num_local_experts + 1, num_chunks), the number of pairs of a bucket in
        earlier chunks.
    bucket_totals_ptr: int32 (num_local_experts + 1,), the number of pairs in each bucket.
    rows_ptr: output (num_pairs,) int32, the row of each pair, -1 if the pair is skipped.
    ends_ptr: output (num_local_experts,) int32, one past the last row of each expert.
    CHUNK_SIZE: pairs per chunk.
    NUM_BINS: number of lanes for experts, a power of two greater than num_local_experts + 1.
    TILE: rows per tile.
    USE_PDL: whether the launch uses programmatic dependent launch (`pdl_wait`).
    """
    pdl_wait(USE_PDL)
    chunk = tl.program_id(0)
    counts, _ = load_expert_rows(bucket_totals_ptr, num_local_experts, NUM_BINS)
    padded_counts = (counts + TILE - 1) // TILE * TILE
    starts = tl.cumsum(padded_counts, 0) - padded_counts
    expert = tl.arange(0, NUM_BINS)
    tl.store(ends_ptr + expert, starts + counts, mask=(expert < num_local_experts) & (chunk == 0))
    pairs, mask, row = find_chunk_rows(
        chunk, starts, topk_ids_ptr, expert_map_ptr, chunk_prefix_ptr, num_pairs, num_experts,
        num_local_experts, num_chunks,
        HAS_EXPERT_MAP, CHUNK_SIZE,
    )  # fmt: skip
    tl.store(rows_ptr + pairs, row, mask=mask)
