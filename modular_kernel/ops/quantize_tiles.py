"""How the quantizing kernels cut rows into tiles, and share these among programs."""

from dataclasses import dataclass

from modular_kernel.ops.count import next_power_of_2

_TILE = 2048  # values a program holds, unless one group has more
_WARP_TILE = 512  # values of a warp
_MAX_BLOCK = 16384  # columns a program holds; a longer group is read twice
# Many values are streamed: tiles of a few rows' neighboring groups, by as many programs as an
# H200 holds at a time, each of which fetches its next tiles while it computes one.
_STREAMED = 1 << 23  # values, from which on
_STREAM_COLUMNS = 1024  # of a row, in a tile
_STREAM_PROGRAMS = 1056  # 8 for each of 132 multiprocessors
_STREAM_STAGES = 3


@dataclass(frozen=True)
class Tiles:
    """Rows of `segments` of `capacity` rows, `parts` programs a segment and share of columns.

    block_r rows, block_g groups of at most block_c columns at a time. stages: tiles that a program
    has under way, or computes, at a time.
    """

    segments: int
    capacity: int
    parts: int
    block_r: int
    block_c: int
    block_g: int = 1
    stages: int = 1

    def rows(self) -> dict[str, int]:
        """Return the arguments of a kernel that looks at rows."""
        return {
            "capacity": self.capacity,
            "parts": self.parts,
            "BLOCK_R": self.block_r,
            "BLOCK_C": self.block_c,
        }

    @property
    def num_warps(self) -> int:
        values = self.block_r * self.block_g * self.block_c
        return min(16, max(4, values // _WARP_TILE))


def row_tiles(segments: int, capacity: int, group: int, most: int) -> Tiles:
    """Return tiles of one group of columns, for at most `most` programs, or one a segment."""
    block_c = min(_MAX_BLOCK, next_power_of_2(group))
    block_r = max(1, min(next_power_of_2(capacity), _TILE // block_c))
    parts = max(1, min(-(-capacity // block_r), most // segments))
    return Tiles(segments, capacity, parts, block_r, block_c)


def group_tiles(plain: Tiles, columns: int, group: int) -> Tiles:
    """Return what streams rows of `columns`, of which `group` share a scale.

    `plain` if they are few, or come in segments, of which one may have all that there are.
    """
    capacity, groups = plain.capacity, -(-columns // group)
    few = groups == 1 or capacity * columns < _STREAMED
    whole = group == plain.block_c <= _STREAM_COLUMNS
    if few or not whole or plain.segments > 1:
        return plain
    # As many as divide the groups, so that no lane idles.
    wide = min(groups & -groups, _STREAM_COLUMNS // group)
    block_r = max(1, _TILE // (wide * group))
    parts = max(1, min(-(-capacity // block_r), _STREAM_PROGRAMS * wide // groups))
    return Tiles(1, capacity, parts, block_r, group, wide, _STREAM_STAGES)
