"""Cache of interpreted launches, which replays the writes of an equal launch instead of running it.

Interpreted launches are slow, and `mk test` makes equal calls several times. The interpreter runs
programs one after another, so the writes of a launch depend only on its arguments and on the bytes
that it reads. Two launches of a kernel that have arguments of equal layout and read equal bytes
write the same bytes to the same positions. The cache compares every byte that the earlier launch
read. If any byte differs, even in uninitialized memory, the launch runs. A launch that casts
addresses to integers, or integers to addresses, is replayed only at identical addresses.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import c_uint8
from functools import cache
from struct import pack
from types import FunctionType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as upstream
from triton.runtime.jit import TensorWrapper
from triton.tools.tensor_descriptor import TensorDescriptor

from modular_kernel.interpreter.access_log import ACCESS_LOG
from modular_kernel.interpreter.bounds import Bounds
from modular_kernel.interpreter.dtypes import BOOL, Array
from modular_kernel.interpreter.races import Access

_READ, _WRITTEN = range(2)  # kinds of marks of a byte
_MARK_KINDS = {
    Access.READ: (_READ,),
    Access.WRITE: (_WRITTEN,),
    Access.ATOMIC: (_READ, _WRITTEN),
}
_CONSTANT_TYPES = (int, bool, float, str, tl.constexpr)  # types of globals that a kernel may use
_MAX_OUTCOMES = 8  # maximum number of launches per key, which differ only in the bytes they read


class LaunchCache:
    """Outcomes of launches, cached for the lifetime of this object.

    computed: number of launches that the cache ran.
    hits: number of launches that the cache replayed.
    """

    def __init__(self) -> None:
        self._outcomes: dict[Hashable, list[_Outcome]] = {}
        self.computed, self.hits = 0, 0

    def launch(
        self,
        kernel: FunctionType,
        grid: tuple[int, ...],
        arguments: Mapping[str, Any],
        run: "Callable[[Trace | None], None]",
        *,
        can_replay: bool,
    ) -> None:
        """Replay the writes of an equal launch, or run this launch and record its accesses.

        arguments: arguments of the kernel, by name.
        run: executes the launch, and records the accesses in the trace that it gets, unless the
            trace is None.
        can_replay: whether a replay is allowed. If False, the launch always runs.
        """
        bounds = Bounds(arguments)
        try:
            argument_key = _ArgumentKey(bounds)
            argument_values = argument_key.make_key(tuple(arguments.items()))
            key = (
                kernel,
                grid,
                argument_key.make_globals_key(kernel, set()),
                argument_values,
                argument_key.make_ranges_key(),
            )
        except _UncacheableError:
            self.computed += 1
            run(None)
            return
        outcomes, memory = self._outcomes.setdefault(key, []), argument_key.view_memory()
        outcome = next((candidate for candidate in outcomes if candidate.matches(memory)), None)
        if outcome is not None and can_replay:
            self.hits += 1
            outcome.write(memory)
            return
        self.computed += 1
        trace = Trace(bounds, argument_key.order, memory)
        run(trace)
        if outcome is None:
            outcomes.append(trace.make_outcome())
            del outcomes[:-_MAX_OUTCOMES]


@contextmanager
def cache_launches() -> Iterator[LaunchCache]:
    """Cache the launches inside the block, and yield the cache."""
    outer, ACCESS_LOG.cache = ACCESS_LOG.cache, LaunchCache()
    try:
        yield ACCESS_LOG.cache
    finally:
        ACCESS_LOG.cache = outer


class _UncacheableError(Exception):
    """Raised for an argument whose effect on a launch cannot be determined."""


class _ArgumentKey:
    """Builds hashable keys of arguments.

    Launches with equal keys differ only in the bytes that they read.

    Keys do not contain addresses. A tensor is identified by its range and by its offset in the
    range.

    order: indices in `bounds` of the ranges that the arguments use, in order of first use.
    """

    def __init__(self, bounds: Bounds) -> None:
        if bounds.has_shared:
            raise _UncacheableError
        self._bounds = bounds
        self.order: list[int] = []

    def make_key(self, value: Any) -> Hashable:
        """Return the key of a value. Raise _UncacheableError for an unsupported type."""
        type_ = type(value)
        if value is None or type_ in (int, bool, str):
            return type_, value
        if type_ is float:
            return type_, pack("d", value)  # distinguishes 0 from -0, and NaNs
        if type_ is torch.Tensor or isinstance(value, torch.Tensor):
            return self._make_tensor_key(value)
        if isinstance(value, tuple | list):
            return type_, tuple(map(self.make_key, value))
        if type_ is tl.constexpr:
            return type_, self.make_key(value.value)
        if isinstance(value, tl.dtype | upstream.InterpretedFunction):
            return type_, str(value) if isinstance(value, tl.dtype) else value
        if type_ in (TensorDescriptor, TensorWrapper):
            return type_, tuple((name, self.make_key(field)) for name, field in vars(value).items())
        if isinstance(value, torch.dtype | torch.device):
            return type_, str(value)
        raise _UncacheableError

    def make_globals_key(self, kernel: FunctionType, visited: set[FunctionType]) -> Hashable:
        """Return the key of the global constants and helpers that a kernel and its helpers use.

        visited: functions whose keys are already part of the result. `kernel` is added.
        """
        visited.add(kernel)
        keys: list[Hashable] = []
        for name in kernel.__code__.co_names:
            value = kernel.__globals__.get(name)
            if type(value) in _CONSTANT_TYPES:
                keys.append((name, self.make_key(value)))
            elif isinstance(value, upstream.InterpretedFunction):
                helper = value.rewrite()
                keys.append((name, helper))
                if helper not in visited:
                    keys.append(self.make_globals_key(helper, visited))
        return tuple(keys)

    def _make_tensor_key(self, tensor: torch.Tensor) -> Hashable:
        if tensor.device.type != "cpu":
            raise _UncacheableError
        if not tensor.numel():
            return tensor.dtype, None
        position = self._bounds.locate(tensor.data_ptr())
        if position is None:  # a tensor in a list, whose memory the launch may not access
            raise _UncacheableError
        range_index, offset = position
        if range_index not in self.order:
            self.order.append(range_index)
        relative_position = self.order.index(range_index), offset
        return tensor.dtype, relative_position, tensor.shape, tensor.stride()

    def make_ranges_key(self) -> Hashable:
        """Return (size in bytes, address modulo 16) of each range.

        The alignment is included because tensor descriptors depend on it.
        """
        bounds = (self._bounds.get_range(index) for index in self.order)
        return tuple((end - start, start % 16) for start, end in bounds)

    def view_memory(self) -> list[Array]:
        """Return writable views of the bytes of each range."""
        return [_view_bytes(*self._bounds.get_range(index)) for index in self.order]


class Trace:
    """Record of the bytes that a running launch accesses.

    order: indices in `bounds` of the ranges that the arguments use.
    memory: views of the bytes of these ranges.
    """

    def __init__(self, bounds: Bounds, order: list[int], memory: list[Array]) -> None:
        self._bounds, self._memory = bounds, memory
        self._memory_index = {range_index: index for index, range_index in enumerate(order)}
        self._initial_memory = [array.copy() for array in memory]
        # (index in `memory`, _READ or _WRITTEN, element size) -> (marks, offset). A byte's mark is
        # True if an accessed element starts at the byte. The address of an element plus the offset
        # is the address of its mark.
        self._marks: dict[tuple[int, int, int], tuple[Array, Any]] = {}
        self._casts_addresses = False

    def mark_address_cast(self) -> None:
        """Record that the launch depends on the addresses of its arguments."""
        self._casts_addresses = True

    def record_access(
        self, access: Access, pointers: Array, lanes: Array, nbytes: int, range_index: int | None
    ) -> None:
        """Record an access to elements of `nbytes` bytes in the active lanes, before it happens.

        range_index: index of the range that contains all pointers; None if there is no such range.
        """
        indices = (
            self._bounds.find_range_indices(pointers, lanes)
            if range_index is None
            else (range_index,)
        )
        for index in indices:
            lanes_in_range = (
                lanes if len(indices) == 1 else lanes & self._bounds.is_in_range(pointers, index)
            )
            for kind in _MARK_KINDS[access]:
                shift = self._get_marks((self._memory_index[index], kind, nbytes), index)[1]
                upstream._interpreter.store(
                    pointers + shift, _make_all_lanes(pointers.shape), lanes_in_range
                )

    def _get_marks(self, key: tuple[int, int, int], range_index: int) -> tuple[Array, Any]:
        entry = self._marks.get(key)
        if entry is None:
            marks = np.zeros(len(self._memory[key[0]]), BOOL)
            distance = marks.ctypes.data - self._bounds.get_range(range_index)[0]
            entry = self._marks[key] = marks, np.uint64(distance % 2**64)
        return entry

    def make_outcome(self) -> "_Outcome":
        masks: dict[tuple[int, int], Array] = {}
        for (index, kind, nbytes), (marks, _) in self._marks.items():
            mask = masks.setdefault((index, kind), np.zeros(len(marks), BOOL))
            for byte in range(nbytes):
                mask[byte:] |= marks[: len(marks) - byte]
        read_bytes = [
            (index, mask, self._initial_memory[index])
            for (index, kind), mask in masks.items()
            if kind == _READ
        ]
        written_bytes = [
            (index, mask, self._memory[index].copy())
            for (index, kind), mask in masks.items()
            if kind == _WRITTEN
        ]
        addresses = tuple(map(_get_address, self._memory)) if self._casts_addresses else None
        return _Outcome(read_bytes, written_bytes, addresses)


class _Outcome:
    """The bytes that a launch read and wrote.

    read, written: (index of a range, mask of its bytes, contents of the range), for each range.
    addresses: start addresses of the ranges; None if the launch does not depend on them.
    """

    def __init__(
        self,
        read: list[tuple[int, Array, Array]],
        written: list[tuple[int, Array, Array]],
        addresses: tuple[int, ...] | None,
    ) -> None:
        self._read, self._written, self._addresses = read, written, addresses

    def matches(self, memory: list[Array]) -> bool:
        """Return whether a launch would read the same bytes from this memory."""
        if self._addresses is not None and self._addresses != tuple(map(_get_address, memory)):
            return False
        return not any(
            ((memory[index] != expected) & mask).any() for index, mask, expected in self._read
        )

    def write(self, memory: list[Array]) -> None:
        """Write the bytes that the launch wrote, and no others."""
        for index, mask, contents in self._written:
            np.copyto(memory[index], contents, where=mask)


def _view_bytes(start: int, end: int) -> Array:
    return np.ctypeslib.as_array((c_uint8 * (end - start)).from_address(start))


def _get_address(memory: Array) -> int:
    address: int = memory.ctypes.data
    return address


@cache
def _make_all_lanes(shape: tuple[int, ...]) -> Array:
    return np.ones(shape, BOOL)
