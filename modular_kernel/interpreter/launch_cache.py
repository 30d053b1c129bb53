"""Launches whose outcome is known: what a launch read and wrote, to write it again without it.

An interpreted launch is a function of its arguments and of the bytes that it reads, since programs
run one after the other. So a launch of the same kernel whose arguments lie alike, and which finds
the same bytes wherever the earlier one read, writes the same bytes to the same places. Every byte
that was read is compared: whatever a call changed, stale memory too, is computed anew. A kernel
that makes numbers of addresses, or addresses of numbers, is repeated at the same addresses alone.
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

from modular_kernel.interpreter.access_log import watch
from modular_kernel.interpreter.bounds import Bounds
from modular_kernel.interpreter.dtypes import BOOL, Array
from modular_kernel.interpreter.races import Access

_READ, _WRITTEN = range(2)
_TOUCHED = {
    Access.READ: (_READ,),
    Access.WRITE: (_WRITTEN,),
    Access.ATOMIC: (_READ, _WRITTEN),
}
_NUMBERS = (int, bool, float, str, tl.constexpr)  # of globals, those that a kernel may have
_MOST = 8  # outcomes kept of launches that differ in what they read alone


class KnownLaunches:
    """Outcomes of launches, for as long as somebody keeps them.

    computed, repeated: how many launches ran, and how many had a known outcome.
    """

    def __init__(self) -> None:
        self._outcomes: dict[Hashable, list[_Outcome]] = {}
        self.computed, self.repeated = 0, 0

    def launch(
        self,
        kernel: FunctionType,
        grid: tuple[int, ...],
        arguments: Mapping[str, Any],
        run: "Callable[[Trace | None], None]",
        *,
        repeat: bool,
    ) -> None:
        """Write what the launch of `kernel` is known to write, or `run` it and note what it does.

        arguments: by name. repeat: False to run it in any case.
        """
        bounds = Bounds(arguments)
        try:
            told = _Told(bounds)
            given = told.of(tuple(arguments.items()))
            key = kernel, grid, told.globals_of(kernel, set()), given, told.ranges()
        except _UnknownError:
            self.computed += 1
            run(None)
            return
        known, memory = self._outcomes.setdefault(key, []), told.memory()
        outcome = next((each for each in known if each.follows(memory)), None)
        if outcome is not None and repeat:
            self.repeated += 1
            outcome.write(memory)
            return
        self.computed += 1
        trace = Trace(bounds, told.order, memory)
        run(trace)
        if outcome is None:
            known.append(trace.outcome())
            del known[:-_MOST]


@contextmanager
def known_launches() -> Iterator[KnownLaunches]:
    """Within it, a launch that can only write what an earlier one did is not run again."""
    before, watch.known = watch.known, KnownLaunches()
    try:
        yield watch.known
    finally:
        watch.known = before


class _UnknownError(Exception):
    """An argument whose meaning to a launch is not known here."""


class _Told:
    """Arguments as a launch depends on them: equal ones, at other addresses too, are told alike.

    order: the ranges of the bounds, in the order in which arguments lie in them.
    """

    def __init__(self, bounds: Bounds) -> None:
        if bounds.shared:
            raise _UnknownError
        self._bounds = bounds
        self.order: list[int] = []

    def of(self, value: Any) -> Hashable:
        """Tell a value."""
        kind = type(value)
        if value is None or kind in (int, bool, str):
            return kind, value
        if kind is float:
            return kind, pack("d", value)  # zeros and NaN have a sign
        if kind is torch.Tensor or isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, tuple | list):
            return kind, tuple(map(self.of, value))
        if kind is tl.constexpr:
            return kind, self.of(value.value)
        if isinstance(value, tl.dtype | upstream.InterpretedFunction):
            return kind, str(value) if isinstance(value, tl.dtype) else value
        if kind in (TensorDescriptor, TensorWrapper):
            return kind, tuple((name, self.of(each)) for name, each in vars(value).items())
        if isinstance(value, torch.dtype | torch.device):
            return kind, str(value)
        raise _UnknownError

    def globals_of(self, kernel: FunctionType, seen: set[FunctionType]) -> Hashable:
        """Tell the numbers and helpers that a kernel, and its helpers, find in their modules."""
        seen.add(kernel)
        found: list[Hashable] = []
        for name in kernel.__code__.co_names:
            value = kernel.__globals__.get(name)
            if type(value) in _NUMBERS:
                found.append((name, self.of(value)))
            elif isinstance(value, upstream.InterpretedFunction):
                helper = value.rewrite()
                found.append((name, helper))
                if helper not in seen:
                    found.append(self.globals_of(helper, seen))
        return tuple(found)

    def _of_tensor(self, tensor: torch.Tensor) -> Hashable:
        if tensor.device.type != "cpu":
            raise _UnknownError
        if not tensor.numel():
            return tensor.dtype, None
        found = self._bounds.place_of(tensor.data_ptr())
        if found is None:  # in a list, whose memory no launch may touch
            raise _UnknownError
        place, offset = found
        if place not in self.order:
            self.order.append(place)
        at = self.order.index(place), offset
        return tensor.dtype, at, tensor.shape, tensor.stride()  # a constexpr has those, too

    def ranges(self) -> Hashable:
        """Tell the ranges of the arguments told: their sizes, and what descriptors align by."""
        found = (self._bounds.range(place) for place in self.order)
        return tuple((end - start, start % 16) for start, end in found)

    def memory(self) -> list[Array]:
        """Return the bytes of each range, to be read and written."""
        return [_bytes(*self._bounds.range(place)) for place in self.order]


class Trace:
    """What the running launch touches: `memory`, that of some ranges, which `order` names."""

    def __init__(self, bounds: Bounds, order: list[int], memory: list[Array]) -> None:
        self._bounds, self._memory = bounds, memory
        self._at = {place: at for at, place in enumerate(order)}
        self._before = [each.copy() for each in memory]
        # By range, kind and size of elements: 1 at the first byte of every one that was touched,
        # and the distance from an element to its mark.
        self._marks: dict[tuple[int, int, int], tuple[Array, Any]] = {}
        self._sees_addresses = False

    def see_addresses(self) -> None:
        """Note that what the launch does depends on where its arguments are."""
        self._sees_addresses = True

    def touch(
        self, access: Access, pointers: Array, lanes: Array, nbytes: int, place: int | None
    ) -> None:
        """Note elements of `nbytes` bytes that are about to be touched, where lanes are on.

        place: the range that holds all pointers, None if there is none such.
        """
        places = self._bounds.places_of(pointers, lanes) if place is None else (place,)
        for each in places:
            only = lanes if len(places) == 1 else lanes & self._bounds.within(pointers, each)
            for kind in _TOUCHED[access]:
                shift = self._marked((self._at[each], kind, nbytes), each)[1]
                upstream._interpreter.store(pointers + shift, _ones(pointers.shape), only)

    def _marked(self, key: tuple[int, int, int], place: int) -> tuple[Array, Any]:
        found = self._marks.get(key)
        if found is None:
            marks = np.zeros(len(self._memory[key[0]]), BOOL)
            distance = marks.ctypes.data - self._bounds.range(place)[0]
            found = self._marks[key] = marks, np.uint64(distance % 2**64)
        return found

    def outcome(self) -> "_Outcome":
        """Return what the launch did, now that it has ended."""
        masks: dict[tuple[int, int], Array] = {}
        for (at, kind, nbytes), (marks, _) in self._marks.items():
            mask = masks.setdefault((at, kind), np.zeros(len(marks), BOOL))
            for byte in range(nbytes):
                mask[byte:] |= marks[: len(marks) - byte]
        read = [(at, mask, self._before[at]) for (at, kind), mask in masks.items() if kind == _READ]
        written = [
            (at, mask, self._memory[at].copy())
            for (at, kind), mask in masks.items()
            if kind == _WRITTEN
        ]
        where = tuple(map(_start, self._memory)) if self._sees_addresses else None
        return _Outcome(read, written, where)


class _Outcome:
    """What a launch read and wrote: of some ranges, which bytes, and what they held.

    where: the ranges' addresses, if the launch depends on them.
    """

    def __init__(
        self,
        read: list[tuple[int, Array, Array]],
        written: list[tuple[int, Array, Array]],
        where: tuple[int, ...] | None,
    ) -> None:
        self._read, self._written, self._where = read, written, where

    def follows(self, memory: list[Array]) -> bool:
        """Tell whether a launch that finds this memory reads what the one before read."""
        if self._where is not None and self._where != tuple(map(_start, memory)):
            return False
        return not any(((memory[at] != was) & mask).any() for at, mask, was in self._read)

    def write(self, memory: list[Array]) -> None:
        """Write what the launch wrote, and nothing beside it."""
        for at, mask, became in self._written:
            np.copyto(memory[at], became, where=mask)


def _bytes(start: int, end: int) -> Array:
    return np.ctypeslib.as_array((c_uint8 * (end - start)).from_address(start))


def _start(memory: Array) -> int:
    address: int = memory.ctypes.data
    return address


@cache
def _ones(shape: tuple[int, ...]) -> Array:
    return np.ones(shape, BOOL)
