"""Kernel of `sort_pairs`: sort pairs by expert without padding, and list tiles of the sorted rows.

A pair is a token together with one of its top_k experts: pair p belongs to token p // top_k. Each
pair of an expert on this rank gets a row, and the rows of an expert are adjacent. A tile is at most
BLOCK_M rows of one expert. Buckets and chunks of pairs are defined in `count`: bucket 0 is for
skipped pairs, bucket i + 1 for local expert i.
"""

import triton
import triton.language as tl

from modular_kernel.ops.kernels.count import rank_in_chunk
from modular_kernel.ops.kernels.ids import load_local_ids


@triton.jit
def load_expert_rows(bucket_totals_ptr, num_local_experts, NUM_BINS: tl.constexpr):
    """Return (numbers of rows, first rows) of the experts, (NUM_BINS,) each.

    Values from index num_local_experts on stand for experts without rows.

    bucket_totals_ptr: int32 (num_local_experts + 1,), the number of pairs in each bucket.
    """
    expert = tl.arange(0, NUM_BINS)
    rows = tl.load(bucket_totals_ptr + 1 + expert, mask=expert < num_local_experts, other=0)
    return rows, tl.cumsum(rows, axis=0) - rows


@triton.jit
def find_chunk_rows(
    chunk, starts, topk_ids_ptr, expert_map_ptr, chunk_prefix_ptr, num_pairs, num_experts,
    num_local_experts, num_chunks,
    HAS_EXPERT_MAP: tl.constexpr, CHUNK_SIZE: tl.constexpr,
):  # fmt: skip
    """Return (pairs, mask of existing pairs, rows) of a chunk.

    The row of a skipped pair is -1. Pairs of an expert keep their order.

    starts: (NUM_BINS,), the first row of each expert.
    topk_ids_ptr, expert_map_ptr, num_experts, num_local_experts, HAS_EXPERT_MAP: the expert ids of
        the pairs; see `load_local_ids`.
    chunk_prefix_ptr: int32 (buckets, num_chunks), the number of pairs of a bucket in earlier
        chunks.
    """
    pairs = chunk * CHUNK_SIZE + tl.arange(0, CHUNK_SIZE)
    mask = pairs < num_pairs
    local_expert, _ = load_local_ids(
        topk_ids_ptr, pairs, mask, expert_map_ptr, num_experts, num_local_experts, HAS_EXPERT_MAP
    )
    preceding = tl.load(
        chunk_prefix_ptr + (local_expert + 1) * num_chunks + chunk, mask=mask, other=0
    )
    row = preceding + rank_in_chunk(local_expert, mask, CHUNK_SIZE)
    row += tl.gather(starts, tl.maximum(local_expert, 0), 0)  # NaN-free: integer operands
    return pairs, mask, tl.where(local_expert >= 0, row, -1)


@triton.jit
def _store_tiles(
    first_tile, rows, starts, tiles_ptr, max_tiles,
    BLOCK_M: tl.constexpr, NUM_BINS: tl.constexpr, TILES_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Store the arrays of `tiles` in `sort_place_kernel`, for TILES_PER_PROGRAM tiles.

    Tiles past the last one are not stored.

    first_tile: the index of the first tile to store.
    rows, starts: from `load_expert_rows`.
    """
    tiles = (rows + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(tiles, axis=0)
    tile = first_tile + tl.arange(0, TILES_PER_PROGRAM)
    expert = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), axis=1)
    expert = tl.minimum(expert, NUM_BINS - 1)  # NaN-free: integer operands
    is_used = tile < tl.sum(tiles, axis=0)
    tile_in_expert = tile - tl.gather(tile_ends - tiles, expert, 0)
    start = tl.gather(starts, expert, 0)
    tl.store(tiles_ptr + tile, expert, mask=is_used)
    tl.store(tiles_ptr + max_tiles + tile, start + tile_in_expert * BLOCK_M, mask=is_used)
    tl.store(tiles_ptr + 2 * max_tiles + tile, start + tl.gather(rows, expert, 0), mask=is_used)


@triton.jit
def sort_place_kernel(
    topk_ids_ptr, expert_map_ptr, chunk_prefix_ptr, bucket_totals_ptr, row_of_pair_ptr,
    token_of_row_ptr, tiles_ptr,
    expert_starts_ptr, num_pairs, num_experts, num_local_experts, num_chunks, max_tiles, top_k,
    HAS_EXPERT_MAP: tl.constexpr, CHUNK_SIZE: tl.constexpr, NUM_BINS: tl.constexpr,
    BLOCK_M: tl.constexpr, TILES_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Write the rows of pairs, and the tiles of the rows, with counts from the kernels of `count`.

    Grid: (num_chunks + ceil(max_tiles / TILES_PER_PROGRAM),). The first num_chunks programs place
        one chunk of pairs each. Each further program stores TILES_PER_PROGRAM tiles. Program
        num_chunks also stores the first row of each expert and the numbers of rows and tiles.

    topk_ids_ptr, expert_map_ptr, num_experts, num_local_experts, HAS_EXPERT_MAP: the expert ids of
        the pairs; see `load_local_ids`.
    chunk_prefix_ptr: int32 (buckets, num_chunks), the number of pairs of a bucket in earlier
        chunks.
    bucket_totals_ptr: int32 (buckets,), the number of pairs in each bucket.
    row_of_pair_ptr: int32 output (num_pairs,), the row of each pair, or -1 if it is skipped.
    token_of_row_ptr: int32 output (num_pairs,), the token of each row.
    tiles_ptr: int32 output (3 * max_tiles + 1,): three arrays of max_tiles values, with the local
        expert of each tile, its first row, and the end of the expert's rows, followed by the number
        of tiles.
    expert_starts_ptr: int32 output (num_local_experts + 1,), the first row of each expert, followed
        by the number of rows.
    BLOCK_M: maximum number of rows of a tile.
    NUM_BINS: a power of two > num_local_experts + 1.
    """
    pid = tl.program_id(0)
    rows, starts = load_expert_rows(bucket_totals_ptr, num_local_experts, NUM_BINS)
    if pid < num_chunks:
        pairs, mask, row = find_chunk_rows(
            pid, starts, topk_ids_ptr, expert_map_ptr, chunk_prefix_ptr, num_pairs, num_experts,
            num_local_experts, num_chunks,
            HAS_EXPERT_MAP, CHUNK_SIZE,
        )  # fmt: skip
        tl.store(row_of_pair_ptr + pairs, row, mask=mask)
        tl.store(token_of_row_ptr + row, pairs // top_k, mask=mask & (row >= 0))
    else:
        first_tile = (pid - num_chunks) * TILES_PER_PROGRAM
        _store_tiles(
            first_tile, rows, starts, tiles_ptr, max_tiles, BLOCK_M, NUM_BINS, TILES_PER_PROGRAM
        )
        if first_tile == 0:
            num_tiles = tl.sum((rows + BLOCK_M - 1) // BLOCK_M, axis=0)
            tl.store(tiles_ptr + 3 * max_tiles, num_tiles)
            expert = tl.arange(0, NUM_BINS)
            tl.store(expert_starts_ptr + expert, starts, mask=expert <= num_local_experts)
