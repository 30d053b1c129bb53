"""Places that are filled and read in turn, and the phase of their barriers."""

import cutlass
from cutlass import cute


@cute.jit
def next_place(place, phase, places: cutlass.Constexpr):
    """(place, phase) of the place behind: the phase turns where the ring begins anew."""
    place += 1
    if place == places:
        place = cutlass.Int32(0)
        phase = phase ^ 1
    return place, phase
