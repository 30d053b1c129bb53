"""In which order blocks take tiles."""

import cutlass
from cutlass import cute


@cute.jit
def tile_at(index, num_m, num_n, group_m: cutlass.Constexpr):
    """(m, n) of a tile: group_m row tiles walk the columns together and share weights in L2."""
    per_group = group_m * num_n
    first = (index // per_group) * group_m
    size = cutlass.min(num_m - first, group_m)  # NaN-free: integers
    within = index % per_group
    return first + within % size, within // size
