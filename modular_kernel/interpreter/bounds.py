"""Which memory an interpreted launch may touch: its arguments, and what processes share.

A GPU reads and writes wherever an address leads, and often nobody notices. In the interpreter every
access is held against the arguments of its launch.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from modular_kernel.errors import CorruptionError

# Kernels find other ranks' memory at a distance from their own: it is no argument of theirs.
_shared: "WeakValueDictionary[int, torch.Tensor]" = WeakValueDictionary()


def make_reachable(shared: torch.Tensor) -> None:
    """Let every launch touch all of `shared`, as long as that tensor lives."""
    _shared[shared.data_ptr()] = shared


class Bounds:
    """The ranges of addresses that a launch may touch.

    arguments: the launch's, by name; tensors count, alone, in tuples, or as the base of a tensor
    descriptor. A tensor reaches from its first element to its last, with what lies between.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        shared = [("shared memory", each) for each in _shared.values()]
        self.shared = bool(shared)  # whether it may touch more than its arguments
        tensors = [*_tensors(arguments), *shared]
        self._named = sorted((*_extent(each), name) for name, each in tensors if each.numel())
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end, _ in self._named:
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)
        sizes = [end - start for start, end in zip(self._starts, self._ends, strict=True)]
        self._first = np.array(self._starts, np.uint64)
        self._places = np.cumsum([0, *sizes])

    @property
    def nbytes(self) -> int:
        """Of all ranges together."""
        return int(self._places[-1])

    def places(self, pointers: Any) -> Any:
        """Where `pointers`, all inside, are: int64 numbers of bytes if ranges lay side by side."""
        at = np.searchsorted(self._first, pointers, "right") - 1
        return self._places[at] + (pointers - self._first[at]).astype(np.int64)

    def range(self, place: int) -> tuple[int, int]:
        """Return where the range of this number begins and ends."""
        return self._starts[place], self._ends[place]

    def place_of(self, address: int) -> tuple[int, int] | None:
        """Return the number of the range that holds an address, and how far inside it that is."""
        at = self._inside(address, address + 1)
        return None if at is None else (at, address - self._starts[at])

    def places_of(self, pointers: Any, lanes: Any) -> list[int]:
        """Return the numbers of the ranges that hold pointers, all inside, whose lanes are on."""
        live = pointers[lanes]
        places: list[int] = np.unique(np.searchsorted(self._first, live, "right") - 1).tolist()
        return places

    def within(self, pointers: Any, place: int) -> Any:
        """Tell which pointers that range holds."""
        return np.searchsorted(self._first, pointers, "right") - 1 == place

    def check(self, pointers: Any, lanes: Any, nbytes: int) -> int | None:
        """Raise CorruptionError unless all elements at `pointers` whose `lanes` are on lie inside.

        pointers, lanes: numpy arrays of one shape; nbytes: of an element. Returns the number of the
        range that holds all pointers, None if no range does.
        """
        place = self._around(pointers, nbytes)
        if place is not None:
            return place  # masked off or not; so it is nearly always
        live = pointers[lanes]
        if live.size and self._around(live, nbytes) is None:
            for address in np.unique(live).tolist():
                if self._inside(address, address + nbytes) is None:
                    raise CorruptionError(self._told(address, nbytes))
        return None

    def _around(self, pointers: Any, nbytes: int) -> int | None:
        """Return the number of the range that holds all of them, if one does."""
        return self._inside(int(pointers.min()), int(pointers.max()) + nbytes)

    def _inside(self, start: int, end: int) -> int | None:
        at = bisect_right(self._starts, start) - 1
        return at if at >= 0 and end <= self._ends[at] else None

    def named(self, address: int) -> str:
        """Name the argument that holds `address`, or the nearest one."""
        return self._nearest(address, 1)[2]

    def _nearest(self, address: int, nbytes: int) -> tuple[int, int, str]:
        return min(self._named, key=lambda each: max(each[0] - address, address + nbytes - each[1]))

    def _told(self, address: int, nbytes: int) -> str:
        """Tell what was touched, counted from the beginning of the nearest argument."""
        if not self._named:
            return f"a kernel's access: got {nbytes} bytes, need none: no argument holds memory"
        start, end, name = self._nearest(address, nbytes)
        first = address - start
        got, need = f"bytes {first} to {first + nbytes - 1} of {name}", f"0 to {end - start - 1}"
        return f"a kernel's access: got {got}, need {need}"


def _tensors(arguments: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in arguments.items():
        if isinstance(value, tuple):
            yield from _tensors({f"{name}[{at}]": each for at, each in enumerate(value)})
        elif isinstance(value, torch.Tensor):
            yield name, value
        elif hasattr(value, "base"):  # a tensor descriptor, or a tensor taken for another dtype's
            yield from _tensors({name: value.base})


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of the first byte, and behind the last, of a tensor that is not empty."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in strides)
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()
