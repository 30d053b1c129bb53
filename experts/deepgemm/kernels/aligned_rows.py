"""Rows in the order of experts, moved so that each expert begins a tile."""

import triton
import triton.language as tl


@triton.jit
def aligned_rows_kernel(
    rows_ptr, starts_ptr, out_ptr, ends_ptr, numel, num_local,
    TILE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """out[p] = rows[p], further by what the experts before its own are rounded up; -1 stays.

    rows, out: (numel,) int32. starts: (num_local + 1,) int32. ends: (num_local,) int32, the row
    behind each expert's last one. A grid of ceil(numel / BLOCK_P) programs, one at least.
    """
    program = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    here = expert < num_local
    start = tl.load(starts_ptr + expert, mask=here, other=0)
    end = tl.load(starts_ptr + expert + 1, mask=here, other=0)
    room = (end - start + TILE - 1) // TILE * TILE
    first = tl.cumsum(room, 0) - room
    tl.store(ends_ptr + expert, first + end - start, mask=here & (program == 0))
    pair = program * BLOCK_P + tl.arange(0, BLOCK_P)
    known = pair < numel
    row = tl.load(rows_ptr + pair, mask=known, other=-1)
    own = (row[:, None] >= start[None, :]) & (row[:, None] < end[None, :])
    shift = tl.sum(tl.where(own, (first - start)[None, :], 0), 1)
    tl.store(out_ptr + pair, row + shift, mask=known)
