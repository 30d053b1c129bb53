"""Memory that an interpreted launch may access: its arguments, and memory shared by processes.

On a GPU, an out-of-bounds access often goes unnoticed, because it hits other mapped memory. In the
interpreter, every access is checked against the arguments of its launch.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from modular_kernel.errors import CorruptionError

# Address -> memory of another rank. Kernels that exchange tokens access it through computed
# addresses, so it is not among their arguments.
_shared: "WeakValueDictionary[int, torch.Tensor]" = WeakValueDictionary()


def allow_access(shared: torch.Tensor) -> None:
    """Allow every launch to access the memory of `shared`, as long as this tensor object lives."""
    _shared[shared.data_ptr()] = shared


class Bounds:
    """Address ranges that a launch may access, sorted by address.

    The range of a tensor extends from its first to its last element, including gaps. Ranges that
    overlap or touch are merged.

    arguments: arguments of the launch, by name. Tensors in tuples and in tensor descriptors are
        included.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        shared = [("shared memory", tensor) for tensor in _shared.values()]
        self.has_shared = bool(shared)  # whether memory other than the arguments is accessible
        tensors = [*_list_tensors(arguments), *shared]
        self._named_ranges = sorted((*_get_extent(t), name) for name, t in tensors if t.numel())
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

    def to_offsets(self, pointers: Any) -> Any:
        """Return the offsets of `pointers` in the concatenation of all ranges, int64 bytes.

        All pointers must be in bounds.
        """
        index = np.searchsorted(self._start_array, pointers, "right") - 1
        return self._offsets[index] + (pointers - self._start_array[index]).astype(np.int64)

    def get_range(self, index: int) -> tuple[int, int]:
        """Return (start address, end address) of the range with this index."""
        return self._starts[index], self._ends[index]

    def locate(self, address: int) -> tuple[int, int] | None:
        """Return (index of the range that contains `address`, byte offset in it), or None."""
        index = self._find_range(address, address + 1)
        return None if index is None else (index, address - self._starts[index])

    def find_range_indices(self, pointers: Any, lanes: Any) -> list[int]:
        """Return the indices of the ranges that contain active pointers.

        All active pointers must be in bounds.
        """
        active = pointers[lanes]
        indices: list[int] = np.unique(
            np.searchsorted(self._start_array, active, "right") - 1
        ).tolist()
        return indices

    def is_in_range(self, pointers: Any, index: int) -> Any:
        """Return the mask of the pointers that are in the range with this index."""
        return np.searchsorted(self._start_array, pointers, "right") - 1 == index

    def check(self, pointers: Any, lanes: Any, nbytes: int) -> int | None:
        """Raise CorruptionError unless all elements at active pointers are in bounds.

        Returns the index of the range that contains all pointers; None if there is no such range.

        pointers, lanes: numpy arrays of equal shape: addresses, and the mask of active pointers.
        nbytes: size of an element.
        """
        index = self._find_common_range(pointers, nbytes)
        if index is not None:
            return index  # usually, even the inactive pointers are in bounds
        active = pointers[lanes]
        if active.size and self._find_common_range(active, nbytes) is None:
            for address in np.unique(active).tolist():
                if self._find_range(address, address + nbytes) is None:
                    raise CorruptionError(self._format_message(address, nbytes))
        return None

    def _find_common_range(self, pointers: Any, nbytes: int) -> int | None:
        return self._find_range(int(pointers.min()), int(pointers.max()) + nbytes)

    def _find_range(self, start: int, end: int) -> int | None:
        index = bisect_right(self._starts, start) - 1
        return index if index >= 0 and end <= self._ends[index] else None

    def find_name(self, address: int) -> str:
        """Return the name of the argument that contains `address`, or of the nearest one."""
        return self._find_nearest(address, 1)[2]

    def _find_nearest(self, address: int, nbytes: int) -> tuple[int, int, str]:
        return min(
            self._named_ranges,
            key=lambda named_range: max(
                named_range[0] - address, address + nbytes - named_range[1]
            ),
        )

    def _format_message(self, address: int, nbytes: int) -> str:
        if not self._named_ranges:
            return f"kernel memory access: got {nbytes} bytes, need none (no argument has memory)"
        start, end, name = self._find_nearest(address, nbytes)
        first = address - start
        got, need = f"bytes {first} to {first + nbytes - 1} of {name}", f"0 to {end - start - 1}"
        return f"kernel memory access: got {got}, need {need}"


def _list_tensors(arguments: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in arguments.items():
        if isinstance(value, tuple):
            yield from _list_tensors(
                {f"{name}[{index}]": element for index, element in enumerate(value)}
            )
        elif isinstance(value, torch.Tensor):
            yield name, value
        elif hasattr(value, "base"):  # a tensor descriptor, or a reinterpreted tensor
            yield from _list_tensors({name: value.base})


def _get_extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return (address of the first byte, address after the last byte) of a non-empty tensor."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in strides)
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()
