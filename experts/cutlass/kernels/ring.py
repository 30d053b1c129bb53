"""Slot and mbarrier phase of a ring buffer."""

import cutlass
from cutlass import cute


@cute.jit
def advance_slot(place, phase, places: cutlass.Constexpr):
    """Return the next (slot, phase); the phase flips when the ring wraps around."""
    place += 1
    if place == places:
        place = cutlass.Int32(0)
        phase = phase ^ 1
    return place, phase
