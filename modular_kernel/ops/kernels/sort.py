"""Kernels that sort pairs by expert without padding, and tile the rows of each expert.

Buckets and chunks are as in `kernels.count`.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.count import rank_in_chunk
from modular_kernel.ops.kernels.ids import load_local_ids


@triton.jit
def expert_rows(totals_ptr, num_local, BINS: tl.constexpr):
    """Return the rows of each expert and its first row; lanes from num_local on have no rows."""
    expert = tl.arange(0, BINS)
    rows = tl.load(totals_ptr + 1 + expert, mask=expert < num_local, other=0)
    return rows, tl.cumsum(rows, axis=0) - rows


@triton.jit
def chunk_rows(
    chunk, starts, ids_ptr, map_ptr, prefix_ptr, numel, num_experts, num_local, num_chunks,
    HAS_MAP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the pairs of a chunk, a mask of existing pairs, and their rows, -1 for skipped pairs.

    starts (BINS,) has the first row of each expert. Pairs of an expert keep their order.
    """
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = pairs < numel
    local, _ = load_local_ids(ids_ptr, pairs, mask, map_ptr, num_experts, num_local, HAS_MAP)
    preceding = tl.load(prefix_ptr + (local + 1) * num_chunks + chunk, mask=mask, other=0)
    row = preceding + rank_in_chunk(local, mask, CHUNK)
    row += tl.gather(starts, tl.maximum(local, 0), 0)  # NaN-free: integers
    return pairs, mask, tl.where(local >= 0, row, -1)


@triton.jit
def _store_tiles(
    first_tile, rows, starts, tiles_ptr, max_tiles,
    TILE_M: tl.constexpr, BINS: tl.constexpr, TILES_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Store the expert, the first row and the end row of the expert of TILES_PER_PROGRAM tiles.

    Tiles past the last one are not stored.
    """
    tiles = (rows + TILE_M - 1) // TILE_M
    past = tl.cumsum(tiles, axis=0)
    tile = first_tile + tl.arange(0, TILES_PER_PROGRAM)
    expert = tl.sum((past[None, :] <= tile[:, None]).to(tl.int32), axis=1)
    expert = tl.minimum(expert, BINS - 1)  # NaN-free: integers
    is_used = tile < tl.sum(tiles, axis=0)
    tile_in_expert = tile - tl.gather(past - tiles, expert, 0)
    start = tl.gather(starts, expert, 0)
    tl.store(tiles_ptr + tile, expert, mask=is_used)
    tl.store(tiles_ptr + max_tiles + tile, start + tile_in_expert * TILE_M, mask=is_used)
    tl.store(tiles_ptr + 2 * max_tiles + tile, start + tl.gather(rows, expert, 0), mask=is_used)


@triton.jit
def sort_place_kernel(
    ids_ptr, map_ptr, prefix_ptr, totals_ptr, row_of_pair_ptr, token_of_row_ptr, tiles_ptr,
    starts_ptr, numel, num_experts, num_local, num_chunks, max_tiles, top_k,
    HAS_MAP: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr,
    TILE_M: tl.constexpr, TILES_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Place a chunk of pairs in programs below num_chunks; store tiles in the others.

    Each of the others stores TILES_PER_PROGRAM tiles.

    The first of the others also stores the first row of each expert, and the numbers of rows and
    tiles. The outputs are those of `ops.sort.SortedPairs`.

    prefix_ptr, totals_ptr: from the kernels of `kernels.count`.
    TILE_M: maximum rows of a tile.
    BINS: a power of two > num_local + 1.
    """
    pid = tl.program_id(0)
    rows, starts = expert_rows(totals_ptr, num_local, BINS)
    if pid < num_chunks:
        pairs, mask, row = chunk_rows(
            pid, starts, ids_ptr, map_ptr, prefix_ptr, numel, num_experts, num_local, num_chunks,
            HAS_MAP, CHUNK,
        )  # fmt: skip
        tl.store(row_of_pair_ptr + pairs, row, mask=mask)
        tl.store(token_of_row_ptr + row, pairs // top_k, mask=mask & (row >= 0))
    else:
        first = (pid - num_chunks) * TILES_PER_PROGRAM
        _store_tiles(first, rows, starts, tiles_ptr, max_tiles, TILE_M, BINS, TILES_PER_PROGRAM)
        if first == 0:
            num_tiles = tl.sum((rows + TILE_M - 1) // TILE_M, axis=0)
            tl.store(tiles_ptr + 3 * max_tiles, num_tiles)
            expert = tl.arange(0, BINS)
            tl.store(starts_ptr + expert, starts, mask=expert <= num_local)
