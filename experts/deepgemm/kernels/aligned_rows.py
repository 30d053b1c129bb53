"""Rows in the order of experts, each expert from a multiple of a tile on."""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.pdl import after_predecessor
from modular_kernel.ops.kernels.sort import chunk_rows, expert_rows


@triton.jit
def aligned_rows_kernel(
    ids_ptr, map_ptr, prefix_ptr, totals_ptr, rows_ptr, ends_ptr,
    numel, num_experts, num_local, num_chunks,
    HAS_MAP: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """rows[p] = the row of pair p, -1 where it is skipped. Grid (num_chunks,).

    rows: (numel,) int32. ends: (num_local,) int32, the row behind each expert's last one. Both of
    what `count_pairs` left: prefix (num_local + 1, num_chunks), totals (num_local + 1,).
    """
    after_predecessor(OVERLAP)
    chunk = tl.program_id(0)
    rows, _ = expert_rows(totals_ptr, num_local, BINS)
    room = (rows + TILE - 1) // TILE * TILE
    starts = tl.cumsum(room, 0) - room
    expert = tl.arange(0, BINS)
    tl.store(ends_ptr + expert, starts + rows, mask=(expert < num_local) & (chunk == 0))
    pairs, mask, row = chunk_rows(
        chunk, starts, ids_ptr, map_ptr, prefix_ptr, numel, num_experts, num_local, num_chunks,
        HAS_MAP, CHUNK,
    )  # fmt: skip
    tl.store(rows_ptr + pairs, row, mask=mask)
