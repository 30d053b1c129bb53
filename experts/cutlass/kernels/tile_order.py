"""The order in which thread blocks compute tiles."""

import cutlass
from cutlass import cute


@cute.jit
def tile_at(index, num_m, num_n, group_m: cutlass.Constexpr):
    """Return (m, n), the row tile and the column tile with number `index`.

    A group of group_m row tiles is computed for one column tile, then for the next, so that the row
    tiles share weights in the L2 cache.
    """
    tiles_per_group = group_m * num_n
    first_m = (index // tiles_per_group) * group_m
    group_size = cutlass.min(num_m - first_m, group_m)  # NaN-free: integer operands
    index_in_group = index % tiles_per_group
    return first_m + index_in_group % group_size, index_in_group // group_size
