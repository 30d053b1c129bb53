"""Detection of data races in an interpreted launch.

Two programs race if they access the same element, at least one of them writes it, and the accesses
are not ordered. A GPU runs programs concurrently. The interpreter runs them one after another, so a
race gives the same results every time and goes unnoticed. `Races` therefore records every access of
a launch with its program. Program B is ordered after program A if B has used an acquire-release
atomic to read a value that A has written with an acquire-release atomic. The order applies to whole
programs, including accesses of A after its atomic. Elements are identified by their first byte.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Any

import numpy as np

from modular_kernel.interpreter.bounds import Bounds

_SEVERAL = -1  # mark of an element that several programs accessed


class Access(Enum):
    """Kind of access. Volatile loads count as atomics, which do not race with each other."""

    READ = "reads"
    WRITE = "writes"
    ATOMIC = "atomically changes"


# Kinds of accesses that race with each other unless they are ordered.
_CONFLICTS = {
    Access.READ: (Access.WRITE, Access.ATOMIC),
    Access.WRITE: (Access.READ, Access.WRITE, Access.ATOMIC),
    Access.ATOMIC: (Access.READ, Access.WRITE),
}


class Races:
    """Race detector for one launch, whose programs run one after another."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        # For each byte: 1 + index of the program that accessed the element that starts there, or 0
        # if no program did, or _SEVERAL.
        self._programs = {access: np.zeros(bounds.nbytes, np.int32) for access in Access}
        self._predecessors: dict[int, set[int]] = {}  # program -> programs ordered before it
        # Address -> programs that are ordered before any program that acquires at it.
        self._released: dict[int, set[int]] = {}

    def record_access(self, access: Access, pointers: Any, program: int) -> Iterator[str]:
        """Record accesses of `program` to elements at `pointers`. Yield a report of each race.

        At most one report is yielded for each kind of conflicting access. The report names the
        argument of the first conflicting element.

        pointers: 1-d numpy array of addresses in bounds.
        """
        offsets = self._bounds.to_offsets(pointers)
        for other_access in _CONFLICTS[access]:
            programs = self._programs[other_access][offsets]
            conflicting = (programs != 0) & (programs != program + 1)
            if conflicting.any() and not self._are_ordered(programs[conflicting], program):
                name = self._bounds.find_name(int(pointers[conflicting][0]))
                yield f"a program {access.value} what another one {other_access.value}, in {name}"
        marks = self._programs[access]
        marks[offsets] = np.where(
            (marks[offsets] == 0) | (marks[offsets] == program + 1), program + 1, _SEVERAL
        )

    def record_acquire_release(self, pointers: Any, program: int) -> None:
        """Record an acquire-release atomic of `program` at each of `pointers`."""
        predecessors = self._predecessors.setdefault(program, set())
        for address in np.unique(pointers).tolist():
            released = self._released.setdefault(address, set())
            predecessors |= released - {program}  # a program is not ordered before itself
            released |= predecessors | {program}

    def _are_ordered(self, programs: Any, program: int) -> bool:
        """Return whether all programs with these marks are ordered before `program`.

        programs: marks, as in `self._programs`.
        """
        predecessors = self._predecessors.get(program, set())
        if len(predecessors) == program:  # all earlier programs
            return True
        return all(
            other_program - 1 in predecessors for other_program in np.unique(programs).tolist()
        )
