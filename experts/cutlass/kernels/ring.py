"""Advance the slot and the mbarrier phase of a ring buffer in shared memory."""

import cutlass
from cutlass import cute


@cute.jit
def advance_slot(slot, phase, num_slots: cutlass.Constexpr):
    """Return the next (slot, phase). The phase flips when the ring wraps around."""
    slot += 1
    if slot == num_slots:
        slot = cutlass.Int32(0)
        phase = phase ^ 1
    return slot, phase
