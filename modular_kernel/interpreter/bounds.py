"""Memory that an interpreted launch may access: its arguments, and memory shared by processes.

A GPU accesses any mapped address, and an access out of bounds often goes unnoticed. In the
interpreter, every access is checked against the arguments of its launch.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from modular_kernel.errors import CorruptionError

# Kernels compute addresses in other ranks' memory from their own, so it is not an argument.
_shared: "WeakValueDictionary[int, torch.Tensor]" = WeakValueDictionary()


def make_reachable(shared: torch.Tensor) -> None:
    """Allow every launch to access all of `shared`, as long as that tensor lives."""
    _shared[shared.data_ptr()] = shared


class Bounds:
    """Address ranges that a launch may access.

    Overlapping and adjacent tensors are merged into one range. Ranges are numbered by address.

    arguments: the launch's arguments by name. Their tensors may also be elements of tuples, or
    bases of tensor descriptors. A tensor's range extends from its first to its last element,
    including gaps.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        shared = [("shared memory", tensor) for tensor in _shared.values()]
        self.has_shared = bool(shared)  # whether memory other than the arguments is accessible
        tensors = [*_tensors(arguments), *shared]
        self._named_ranges = sorted((*_extent(t), name) for name, t in tensors if t.numel())
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end, _ in self._named_ranges:
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)
        sizes = [end - start for start, end in zip(self._starts, self._ends, strict=True)]
        self._start_array = np.array(self._starts, np.uint64)
        self._offsets = np.cumsum([0, *sizes])

    @property
    def nbytes(self) -> int:
        """Total size of all ranges in bytes."""
        return int(self._offsets[-1])

    def offsets_of(self, pointers: Any) -> Any:
        """Return the byte offsets of `pointers` in the concatenated ranges, as int64.

        All pointers must be in bounds.
        """
        index = np.searchsorted(self._start_array, pointers, "right") - 1
        return self._offsets[index] + (pointers - self._start_array[index]).astype(np.int64)

    def range(self, index: int) -> tuple[int, int]:
        """Return start and end address of a range, given its index."""
        return self._starts[index], self._ends[index]

    def locate(self, address: int) -> tuple[int, int] | None:
        """Return the index of the range that contains an address, and the address's offset in it.

        Returns None if no range contains it.
        """
        index = self._find_range(address, address + 1)
        return None if index is None else (index, address - self._starts[index])

    def range_indices(self, pointers: Any, lanes: Any) -> list[int]:
        """Return the indices of the ranges that contain the active pointers, all in bounds."""
        active = pointers[lanes]
        indices: list[int] = np.unique(
            np.searchsorted(self._start_array, active, "right") - 1
        ).tolist()
        return indices

    def in_range(self, pointers: Any, index: int) -> Any:
        """Return a mask of the pointers in the range with this index."""
        return np.searchsorted(self._start_array, pointers, "right") - 1 == index

    def check(self, pointers: Any, lanes: Any, nbytes: int) -> int | None:
        """Raise CorruptionError unless all elements at active `pointers` are in bounds.

        pointers, lanes: numpy arrays of one shape: addresses, and the mask of the active ones.
        nbytes: size of an element. Returns the index of the range that contains all pointers, or
        None if they lie in several.
        """
        index = self._range_around(pointers, nbytes)
        if index is not None:
            return index  # the usual case: even inactive pointers are in bounds
        active = pointers[lanes]
        if active.size and self._range_around(active, nbytes) is None:
            for address in np.unique(active).tolist():
                if self._find_range(address, address + nbytes) is None:
                    raise CorruptionError(self._message(address, nbytes))
        return None

    def _range_around(self, pointers: Any, nbytes: int) -> int | None:
        """Return the index of the range that contains all elements; None if no range does."""
        return self._find_range(int(pointers.min()), int(pointers.max()) + nbytes)

    def _find_range(self, start: int, end: int) -> int | None:
        index = bisect_right(self._starts, start) - 1
        return index if index >= 0 and end <= self._ends[index] else None

    def name_of(self, address: int) -> str:
        """Return the name of the argument that contains `address`, or of the nearest one."""
        return self._nearest(address, 1)[2]

    def _nearest(self, address: int, nbytes: int) -> tuple[int, int, str]:
        return min(
            self._named_ranges,
            key=lambda entry: max(entry[0] - address, address + nbytes - entry[1]),
        )

    def _message(self, address: int, nbytes: int) -> str:
        """Return a message with the bytes accessed, relative to the nearest argument."""
        if not self._named_ranges:
            return f"kernel memory access: got {nbytes} bytes, need none (no argument has memory)"
        start, end, name = self._nearest(address, nbytes)
        first = address - start
        got, need = f"bytes {first} to {first + nbytes - 1} of {name}", f"0 to {end - start - 1}"
        return f"kernel memory access: got {got}, need {need}"


def _tensors(arguments: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in arguments.items():
        if isinstance(value, tuple):
            yield from _tensors(
                {f"{name}[{index}]": element for index, element in enumerate(value)}
            )
        elif isinstance(value, torch.Tensor):
            yield name, value
        elif hasattr(value, "base"):  # a tensor descriptor, or a reinterpreted tensor
            yield from _tensors({name: value.base})


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and past the last byte of a non-empty tensor."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in strides)
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()
