"""Detection of races in an interpreted launch: unordered accesses of which one is a write.

A GPU runs programs concurrently. The interpreter runs them one after another, so a race gives the
same results every time and goes unnoticed. Here, every access of a launch is recorded with its
program. A program is ordered after another if it has read, with an acquire-release atomic, a value
that the other has written with one. The order applies to whole programs, so accesses of the other
program after its atomic count as ordered too. Elements are identified by their first byte.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Any

import numpy as np

from modular_kernel.interpreter.bounds import Bounds

_MANY = -1  # marks an element that several programs accessed


class Access(Enum):
    """Kind of access. Atomics and volatile loads do not race with each other."""

    READ = "reads"
    WRITE = "writes"
    ATOMIC = "atomically changes"


# Accesses that race unless they are ordered.
_CONFLICTS = {
    Access.READ: (Access.WRITE, Access.ATOMIC),
    Access.WRITE: (Access.READ, Access.WRITE, Access.ATOMIC),
    Access.ATOMIC: (Access.READ, Access.WRITE),
}


class Races:
    """Accesses of the programs of one launch so far. Programs run one after another."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        # By byte offset: 1 + the program that accessed it, 0 for none. Zero pages take no memory.
        self._by = {access: np.zeros(bounds.nbytes, np.int32) for access in Access}
        self._before: dict[int, set[int]] = {}  # program -> programs ordered before it
        self._released: dict[int, set[int]] = {}  # address -> programs that an acquire there orders

    def touch(self, access: Access, pointers: Any, program: int) -> Iterator[str]:
        """Record accesses of `program` to elements at `pointers`; yield the races.

        pointers: 1-d numpy array, in bounds. For each conflicting kind of access, the report names
        the first argument concerned.
        """
        offsets = self._bounds.places(pointers)
        for rival in _CONFLICTS[access]:
            others = self._by[rival][offsets]
            conflicting = (others != 0) & (others != program + 1)
            if conflicting.any() and not self._ordered(others[conflicting], program):
                name = self._bounds.named(int(pointers[conflicting][0]))
                yield f"a program {access.value} what another one {rival.value}, in {name}"
        own_marks = self._by[access]
        own_marks[offsets] = np.where(
            (own_marks[offsets] == 0) | (own_marks[offsets] == program + 1), program + 1, _MANY
        )

    def order(self, pointers: Any, program: int) -> None:
        """Record that `program` acquires and releases at `pointers`."""
        before = self._before.setdefault(program, set())
        for address in np.unique(pointers).tolist():
            released = self._released.setdefault(address, set())
            before |= released - {program}  # a program is not ordered before itself
            released |= before | {program}

    def _ordered(self, others: Any, program: int) -> bool:
        """Return whether all `others` (1 + program, or _MANY) are ordered before `program`."""
        before = self._before.get(program, set())
        if len(before) == program:
            return True
        return all(other - 1 in before for other in np.unique(others).tolist())
