"""Which expert and which of its tiles a program of the ragged product takes."""

import triton
import triton.language as tl


@triton.jit
def tile_maps_kernel(
    starts_ptr, counts_ptr, ends_ptr, maps_ptr, num_local, most_tiles,
    LEAST: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """For tiles of LEAST << s rows, s the second program axis.

    starts: (num_local + 1,) int32. counts: (num_local,) int32. ends: (sizes, num_local + 1) int32,
    tiles before each expert, and all of them. maps: (sizes, most_tiles) int32, tile << 16 | expert,
    -1 behind the last. A grid of (ceil(most_tiles / BLOCK_T), sizes).
    """
    program, size = tl.program_id(0), tl.program_id(1)
    rows = LEAST << size
    expert = tl.arange(0, BLOCK_E)
    here = expert < num_local
    start = tl.load(starts_ptr + expert, mask=here, other=0)
    count = tl.load(starts_ptr + expert + 1, mask=here, other=0) - start
    tiles = (count + rows - 1) // rows
    end = tl.cumsum(tiles, 0)
    first = end - tiles
    ends_ptr += size * (num_local + 1)
    tl.store(ends_ptr + expert, first, mask=here & (program == 0))
    tl.store(ends_ptr + expert + 1, end, mask=(expert == num_local - 1) & (program == 0))
    tl.store(counts_ptr + expert, count, mask=here & (program == 0) & (size == 0))
    tile = program * BLOCK_T + tl.arange(0, BLOCK_T)
    own = (tile[:, None] >= first[None, :]) & (tile[:, None] < end[None, :])
    named = ((tile[:, None] - first[None, :]) << 16) | expert[None, :]
    value = tl.sum(tl.where(own, named + 1, 0), 1) - 1
    tl.store(maps_ptr + size * most_tiles + tile, value, mask=tile < most_tiles)
