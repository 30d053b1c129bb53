"""Races in an interpreted launch: programs that touch what another one writes, in no certain order.

A GPU runs programs side by side; the interpreter runs one after the other, so that a race gives the
same numbers every time and nobody sees it. Here every access of a launch is noted by its program.
Programs are in order where one has read, by an atomic operation that acquires and releases, what
another one has so written before; whole programs, so that what the other one does later counts as
in order too. Elements are told apart by their first byte.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Any

import numpy as np

from modular_kernel.interpreter.bounds import Bounds

_MANY = -1  # programs, more than one


class Access(Enum):
    """How an element is touched. Atomic ones, and volatile loads, do not race with each other."""

    READ = "reads"
    WRITE = "writes"
    ATOMIC = "atomically changes"


# What must not meet without order.
_RIVALS = {
    Access.READ: (Access.WRITE, Access.ATOMIC),
    Access.WRITE: (Access.READ, Access.WRITE, Access.ATOMIC),
    Access.ATOMIC: (Access.READ, Access.WRITE),
}


class Races:
    """What the programs of one launch have touched so far. Programs come one after the other."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        # By place: 1 + the program that has touched it, 0 for none. Zeros take no memory yet.
        self._by = {access: np.zeros(bounds.nbytes, np.int32) for access in Access}
        self._before: dict[int, set[int]] = {}  # by program: those that are ordered before it
        self._released: dict[int, set[int]] = {}  # by address: those whose past it tells

    def touch(self, access: Access, pointers: Any, program: int) -> Iterator[str]:
        """Note that `program` touches the elements at `pointers` (numpy, 1-d, inside the bounds).

        Yields what that races with, for each way of touching the first argument concerned.
        """
        at = self._bounds.places(pointers)
        for rival in _RIVALS[access]:
            others = self._by[rival][at]
            strange = (others != 0) & (others != program + 1)
            if strange.any() and not self._ordered(others[strange], program):
                where = self._bounds.named(int(pointers[strange][0]))
                yield f"a program {access.value} what another one {rival.value}, in {where}"
        own = self._by[access]
        own[at] = np.where((own[at] == 0) | (own[at] == program + 1), program + 1, _MANY)

    def order(self, pointers: Any, program: int) -> None:
        """`program` acquires and releases at `pointers`."""
        before = self._before.setdefault(program, set())
        for address in np.unique(pointers).tolist():
            released = self._released.setdefault(address, set())
            before |= released - {program}  # one that was here before is not before itself
            released |= before | {program}

    def _ordered(self, others: Any, program: int) -> bool:
        """Whether all of those (1 + a program, or _MANY) are ordered before `program`."""
        before = self._before.get(program, set())
        if len(before) == program:
            return True
        return all(other - 1 in before for other in np.unique(others).tolist())
