"""Kernel that assigns rows to pairs in expert order. Each expert starts at a multiple of TILE."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.pdl import pdl_wait
from modular_kernel.ops.kernels.sort import chunk_rows, expert_rows


@triton.jit
def align_rows_kernel(
    topk_ids_ptr, expert_map_ptr, prefix_ptr, totals_ptr, rows_ptr, ends_ptr,
    numel, num_experts, num_local_experts, num_chunks,
    HAS_EXPERT_MAP: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
    USE_PDL: tl.constexpr = False,
):  # fmt: skip
    """Set rows[p] to the row of pair p, or to -1 if pair p is skipped.

    Grid: (num_chunks,). A program handles one chunk of pairs. The first program also writes ends.

    prefix_ptr: (num_local_experts + 1, num_chunks), from `count_pairs`.
    totals_ptr: (num_local_experts + 1,), from `count_pairs`.
    rows_ptr: output (numel,) int32.
    ends_ptr: output (num_local_experts,) int32, one past the last row of each expert.
    BINS: a power of two > num_local_experts + 1.
    TILE: rows of a tile; the rows of each expert start at a multiple of TILE.
    """
    pdl_wait(USE_PDL)
    chunk = tl.program_id(0)
    rows, _ = expert_rows(totals_ptr, num_local_experts, BINS)
    padded = (rows + TILE - 1) // TILE * TILE
    starts = tl.cumsum(padded, 0) - padded
    expert = tl.arange(0, BINS)
    tl.store(ends_ptr + expert, starts + rows, mask=(expert < num_local_experts) & (chunk == 0))
    pairs, mask, row = chunk_rows(
        chunk, starts, topk_ids_ptr, expert_map_ptr, prefix_ptr, numel, num_experts,
        num_local_experts, num_chunks,
        HAS_EXPERT_MAP, CHUNK,
    )  # fmt: skip
    tl.store(rows_ptr + pairs, row, mask=mask)
