"""Kernel that assigns rows in the order of experts, starting each expert at a multiple of TILE."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.pdl import pdl_wait
from modular_kernel.ops.kernels.sort import chunk_rows, expert_rows


@triton.jit
def align_rows_kernel(
    ids_ptr, map_ptr, prefix_ptr, totals_ptr, rows_ptr, ends_ptr,
    numel, num_experts, num_local, num_chunks,
    HAS_MAP: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """rows[p] = row of pair p, -1 if it is skipped.

    Grid: (num_chunks,). A program handles one chunk of pairs; the first one also writes ends.

    prefix_ptr, totals_ptr: from `count_pairs`, (num_local + 1, num_chunks) and (num_local + 1,).
    rows_ptr: output (numel,) int32.
    ends_ptr: output (num_local,) int32, one past the last row of each expert.
    BINS: a power of two > num_local + 1.
    TILE: rows of a tile; the rows of each expert start at a multiple of TILE.
    """
    pdl_wait(OVERLAP)
    chunk = tl.program_id(0)
    rows, _ = expert_rows(totals_ptr, num_local, BINS)
    padded = (rows + TILE - 1) // TILE * TILE
    starts = tl.cumsum(padded, 0) - padded
    expert = tl.arange(0, BINS)
    tl.store(ends_ptr + expert, starts + rows, mask=(expert < num_local) & (chunk == 0))
    pairs, mask, row = chunk_rows(
        chunk, starts, ids_ptr, map_ptr, prefix_ptr, numel, num_experts, num_local, num_chunks,
        HAS_MAP, CHUNK,
    )  # fmt: skip
    tl.store(rows_ptr + pairs, row, mask=mask)
