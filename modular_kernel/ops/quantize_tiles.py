"""Tile sizes and numbers of programs of the quantization kernels.

A tile is the block of rows and columns that a program quantizes in one iteration. A group is the
set of columns of a row that share a scale. A segment is a range of rows: the rows of one expert in
the batched layout, of which the first ones hold tokens, and all rows otherwise.
"""

from dataclasses import dataclass

from modular_kernel.ops.count import next_power_of_2

_VALUES_PER_TILE = 2048  # unless a group has more values
_VALUES_PER_WARP = 512
_MAX_BLOCK_C = 16384  # maximum number of columns of a tile; a longer group is read twice
# Large inputs are streamed with software-pipelined loads. A tile has several adjacent groups of a
# few rows. There are as many programs as an H200 can run at the same time, and each of them
# prefetches its next tiles.
_MIN_STREAMED_VALUES = 1 << 23
_STREAM_COLUMNS = 1024  # maximum number of columns of a tile
_STREAM_PROGRAMS = 1056  # 8 on each of 132 SMs
_STREAM_STAGES = 3


@dataclass(frozen=True)
class TileConfig:
    """Tile sizes of a quantization kernel, and the number of its programs.

    segments: number of segments of rows.
    capacity: number of rows of each segment.
    programs_per_segment: number of programs per segment and range of columns.
    block_r: number of rows of a tile.
    block_c: maximum number of columns of a group.
    block_g: number of groups of a tile.
    stages: number of stages of the software pipeline, that is, tiles in flight per program.
    """

    segments: int
    capacity: int
    programs_per_segment: int
    block_r: int
    block_c: int
    block_g: int = 1
    stages: int = 1

    def make_row_kernel_arguments(self) -> dict[str, int]:
        """Return the arguments of a kernel that iterates over rows."""
        return {
            "capacity": self.capacity,
            "programs_per_segment": self.programs_per_segment,
            "BLOCK_ROWS": self.block_r,
            "BLOCK_COLUMNS": self.block_c,
        }

    @property
    def num_warps(self) -> int:
        values = self.block_r * self.block_g * self.block_c
        return min(16, max(4, values // _VALUES_PER_WARP))


def tile_rows(segments: int, capacity: int, group: int, max_programs: int) -> TileConfig:
    """Return tile sizes for tiles with one group of columns.

    A program handles every `programs_per_segment`-th tile of its segment.

    capacity: number of rows of each segment.
    group: number of columns that share a scale.
    max_programs: maximum number of programs, unless there are more segments.
    """
    block_c = min(_MAX_BLOCK_C, next_power_of_2(group))
    block_r = max(1, min(next_power_of_2(capacity), _VALUES_PER_TILE // block_c))
    programs_per_segment = max(1, min(-(-capacity // block_r), max_programs // segments))
    return TileConfig(segments, capacity, programs_per_segment, block_r, block_c)


def tile_groups(base: TileConfig, columns: int, group: int) -> TileConfig:
    """Return tile sizes for streaming rows, with several groups per tile.

    Return `base` for small inputs, and for more than one segment, because one of the segments may
    hold all valid rows.

    group: number of columns that share a scale.
    """
    capacity, groups = base.capacity, -(-columns // group)
    is_small = groups == 1 or capacity * columns < _MIN_STREAMED_VALUES
    group_fills_block = group == base.block_c <= _STREAM_COLUMNS
    if is_small or not group_fills_block or base.segments > 1:
        return base
    # With the largest power of two that divides the number of groups, no lane is idle.
    groups_per_tile = min(groups & -groups, _STREAM_COLUMNS // group)
    block_r = max(1, _VALUES_PER_TILE // (groups_per_tile * group))
    programs_per_segment = max(
        1, min(-(-capacity // block_r), _STREAM_PROGRAMS * groups_per_tile // groups)
    )
    return TileConfig(
        1, capacity, programs_per_segment, block_r, group, groups_per_tile, _STREAM_STAGES
    )
