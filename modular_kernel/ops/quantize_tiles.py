"""Tiling of rows for the quantization kernels, and distribution of tiles over programs."""

from dataclasses import dataclass

from modular_kernel.ops.count import next_power_of_2

_TILE = 2048  # values of a tile, unless a group has more
_WARP_TILE = 512  # values per warp
_MAX_BLOCK = 16384  # maximum columns of a tile; a longer group is read twice
# Large inputs are streamed with software-pipelined loads. A tile then has adjacent groups of a few
# rows, there are as many programs as an H200 runs concurrently, and each program prefetches its
# next tiles.
_STREAMED = 1 << 23  # minimum number of values to stream
_STREAM_COLUMNS = 1024  # maximum columns of a tile
_STREAM_PROGRAMS = 1056  # 8 on each of 132 SMs
_STREAM_STAGES = 3


@dataclass(frozen=True)
class Tiles:
    """Tiles of `segments` segments of `capacity` rows.

    programs_per_segment: programs per segment and range of columns.
    block_r: rows of a tile.
    block_c: maximum columns of a group.
    block_g: groups of a tile.
    stages: stages of the software pipeline: tiles that a program loads or computes at a time.
    """

    segments: int
    capacity: int
    programs_per_segment: int
    block_r: int
    block_c: int
    block_g: int = 1
    stages: int = 1

    def rows(self) -> dict[str, int]:
        """Return the arguments of a kernel that iterates over rows."""
        return {
            "capacity": self.capacity,
            "programs_per_segment": self.programs_per_segment,
            "BLOCK_R": self.block_r,
            "BLOCK_C": self.block_c,
        }

    @property
    def num_warps(self) -> int:
        values = self.block_r * self.block_g * self.block_c
        return min(16, max(4, values // _WARP_TILE))


def row_tiles(segments: int, capacity: int, group: int, max_programs: int) -> Tiles:
    """Return tiles of one group of columns each.

    There are at most max_programs programs, or one per segment if that is more. A program handles
    every `programs_per_segment`-th tile of its segment.
    """
    block_c = min(_MAX_BLOCK, next_power_of_2(group))
    block_r = max(1, min(next_power_of_2(capacity), _TILE // block_c))
    programs_per_segment = max(1, min(-(-capacity // block_r), max_programs // segments))
    return Tiles(segments, capacity, programs_per_segment, block_r, block_c)


def group_tiles(base: Tiles, columns: int, group: int) -> Tiles:
    """Return tiles for streaming rows of `columns` columns, of which `group` share a scale.

    Return `base` for small inputs, and for several segments, one of which may hold all rows.
    """
    capacity, groups = base.capacity, -(-columns // group)
    is_small = groups == 1 or capacity * columns < _STREAMED
    full_groups = group == base.block_c <= _STREAM_COLUMNS
    if is_small or not full_groups or base.segments > 1:
        return base
    # The largest power of two that divides the number of groups, so that no lane is idle.
    groups_per_tile = min(groups & -groups, _STREAM_COLUMNS // group)
    block_r = max(1, _TILE // (groups_per_tile * group))
    programs_per_segment = max(
        1, min(-(-capacity // block_r), _STREAM_PROGRAMS * groups_per_tile // groups)
    )
    return Tiles(1, capacity, programs_per_segment, block_r, group, groups_per_tile, _STREAM_STAGES)
