"""Receive buffers in memory that the ranks of a host share, one set for each call in flight."""

import hashlib
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from modular_kernel.errors import UnsupportedError
from modular_kernel.spec.problem import Problem
from prepare_finalize.host_then_rank.group import HostThenRankGroup
from prepare_finalize.symm_mem.group import Heap, Section, aligned
from prepare_finalize.symm_mem.launch import Slot, sections

_IN_FLIGHT = 2  # calls between prepare and finalize
_FLAGS = ("arrived_W", "summed_W")
_ROWS = ("x_RH", "scale_RG", "ids_RK", "weights_RK", "y_RH", "adapters_R")


class CallMemory:
    """The receive buffers of one call, until they are released or garbage collected.

    `slot` has the full buffers, `rows` views of the rows that this call uses. Garbage collection
    returns the buffers of a call that is never finished, such as after an error in its experts.
    """

    def __init__(self, slot: Slot, rows: int, release: Callable[[], None]) -> None:
        self.slot = slot
        tensors: dict[str, Any] = {name: getattr(slot, name) for name in _ROWS}
        views: dict[str, Any] = {n: p if p is None else p[:rows] for n, p in tensors.items()}
        self.rows = replace(slot, **views)
        self._finalizer = weakref.finalize(self, release)
        self._finalizer.atexit = False

    def release(self) -> None:
        """Release the buffers. Raise UnsupportedError if they have been released before."""
        if not self._finalizer.alive:
            raise UnsupportedError("handle", got="a finished call's", need="one in flight")
        self._finalizer()


class HostSlots:
    """The receive buffers for all calls in flight of one part.

    The constructor is collective: all ranks must call it with the same `problem`. The calls share
    one set of flags, because the numbers in flags only increase.

    host_problem: the problem restricted to the ranks of this host.
    rows: maximum rows of a call.
    """

    def __init__(
        self, host_problem: Problem, problem: Problem, manager: HostThenRankGroup, rows: int
    ) -> None:
        self._sections = sections(host_problem, rows)
        self._flags = {name: self._sections.pop(name) for name in _FLAGS}
        slot_nbytes, flag_nbytes = _nbytes(self._sections), _nbytes(self._flags)
        self._views: list[dict[str, torch.Tensor]] = []

        def initialize(heap: Heap) -> None:
            for index in range(_IN_FLIGHT):
                self._views.append(heap.sections(self._sections, flag_nbytes + index * slot_nbytes))
            self._shared = heap.sections(self._flags, 0)
            for flag in self._shared.values():
                flag.zero_()

        self.heap = manager.heap(
            flag_nbytes + _IN_FLIGHT * slot_nbytes, _layer_signature(problem), initialize
        )
        counters = torch.zeros(2, 2, dtype=torch.int32, device=self.heap.deltas_W.device)
        self._shared |= {"dispatches": counters[0], "combines": counters[1]}
        self._free = list(range(_IN_FLIGHT))

    def check_free(self) -> None:
        """Raise UnsupportedError if too many calls are in flight."""
        if not self._free:
            need = f"at most {_IN_FLIGHT}: finish one first"
            raise UnsupportedError("calls in flight", got=_IN_FLIGHT + 1, need=need)

    def take(self, rows: int) -> CallMemory:
        """Take the buffers of one call with `rows` rows."""
        index = self._free.pop(0)
        views = dict(self._views[index])
        slot = Slot(scale_RG=views.pop("scale_RG", None), **views, **self._shared)
        return CallMemory(slot, rows, partial(self._release, index))

    def _release(self, index: int) -> None:
        self._free = sorted((*self._free, index))


def _nbytes(layout: dict[str, Section]) -> int:
    return sum(aligned(section.nbytes) for section in layout.values())


def _layer_signature(problem: Problem) -> str:
    """Return a string that identifies the layer and its placement; equal on all ranks."""
    first = replace(problem.parallel, rank=0)
    shared = replace(problem, parallel=first, local_experts=None)
    return f"{shared} {hashlib.sha256(repr(shared).encode()).hexdigest()[:8]}"
