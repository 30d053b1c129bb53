"""Kernel that writes the tile schedules of the ragged matmul (see `experts.triton_kernels`)."""

import triton
import triton.language as tl


@triton.jit
def tile_maps_kernel(
    starts_ptr, counts_ptr, ends_ptr, maps_ptr, num_local, max_tiles,
    MIN_TILE_ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Schedule tiles of MIN_TILE_ROWS << s rows, where s is the index along the second grid axis.

    Grid: (ceil(max_tiles / BLOCK_T), sizes).

    starts_ptr: (num_local + 1,) int32, the first row of each expert, then the number of rows.
    counts_ptr: output (num_local,) int32, the number of rows of each expert.
    ends_ptr: output (sizes, num_local + 1) int32, the number of tiles before each expert, then the
        total.
    maps_ptr: output (sizes, max_tiles) int32, tile << 16 | expert, where `tile` is the index of the
        tile within its expert. Unused entries are -1.
    BLOCK_T: entries of a schedule per program.
    BLOCK_E: a power of two >= num_local.
    """
    program, size_index = tl.program_id(0), tl.program_id(1)
    tile_rows = MIN_TILE_ROWS << size_index
    expert = tl.arange(0, BLOCK_E)
    mask = expert < num_local
    start = tl.load(starts_ptr + expert, mask=mask, other=0)
    count = tl.load(starts_ptr + expert + 1, mask=mask, other=0) - start
    tiles = (count + tile_rows - 1) // tile_rows
    end_tile = tl.cumsum(tiles, 0)
    first_tile = end_tile - tiles
    ends_ptr += size_index * (num_local + 1)
    tl.store(ends_ptr + expert, first_tile, mask=mask & (program == 0))
    tl.store(ends_ptr + expert + 1, end_tile, mask=(expert == num_local - 1) & (program == 0))
    tl.store(counts_ptr + expert, count, mask=mask & (program == 0) & (size_index == 0))
    tile = program * BLOCK_T + tl.arange(0, BLOCK_T)
    in_expert = (tile[:, None] >= first_tile[None, :]) & (tile[:, None] < end_tile[None, :])
    entry = ((tile[:, None] - first_tile[None, :]) << 16) | expert[None, :]
    value = tl.sum(tl.where(in_expert, entry + 1, 0), 1) - 1
    tl.store(maps_ptr + size_index * max_tiles + tile, value, mask=tile < max_tiles)
