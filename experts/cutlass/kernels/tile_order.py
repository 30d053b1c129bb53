"""The order in which thread blocks compute tiles."""

import cutlass
from cutlass import cute


@cute.jit
def tile_at(index, num_m, num_n, group_m: cutlass.Constexpr):
    """Return (m, n) of a tile, in groups of group_m row tiles that share weights in L2."""
    per_group = group_m * num_n
    first = (index // per_group) * group_m
    group_size = cutlass.min(num_m - first, group_m)  # NaN-free: integers
    index_in_group = index % per_group
    return first + index_in_group % group_size, index_in_group // group_size
