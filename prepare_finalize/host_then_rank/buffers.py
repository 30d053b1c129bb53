"""Receive buffers in memory that the ranks of a host share, one set for each call in flight.

In a two-level exchange (`host_then_rank.part`), a rank that receives rows from another host writes
them to the buffers of the ranks on its own host. A call takes a set of buffers in its dispatch and
releases it in its combine.
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from modular_kernel.errors import UnsupportedError
from modular_kernel.spec.problem import Problem
from prepare_finalize.host_then_rank.group import HostThenRankGroup
from prepare_finalize.symm_mem.group import Heap, Section, align_up
from prepare_finalize.symm_mem.launch import CallBuffers, buffer_sections
from prepare_finalize.symm_mem.part import layer_signature

_MAX_IN_FLIGHT = 2  # calls between prepare and finalize
_FLAGS = ("arrived_W", "summed_W")
_ROWS = ("x_RH", "scale_RG", "ids_RK", "weights_RK", "y_RH", "adapters_R")


class PooledBuffers:
    """Receive buffers of one call, which return to the pool when they are released.

    If a call is never finished, for example after an error in its experts, garbage collection
    releases its buffers.

    full: the buffers, with the maximum number of rows.
    rows: the same buffers, restricted to the rows that this call uses.
    """

    def __init__(self, buffers: CallBuffers, rows: int, release: Callable[[], None]) -> None:
        self.full = buffers
        tensors: dict[str, Any] = {name: getattr(buffers, name) for name in _ROWS}
        views: dict[str, Any] = {n: p if p is None else p[:rows] for n, p in tensors.items()}
        self.rows = replace(buffers, **views)
        self._finalizer = weakref.finalize(self, release)
        self._finalizer.atexit = False

    def release(self) -> None:
        """Return the buffers to the pool. Raise UnsupportedError if they were released before."""
        if not self._finalizer.alive:
            raise UnsupportedError(
                "handle", got="the handle of a finished call", need="the handle of a call in flight"
            )
        self._finalizer()


class HostBufferPool:
    """Receive buffers for all calls in flight of one part.

    The constructor is collective: all ranks must call it with the same `problem`. All calls share
    one set of flags, because the numbers in flags only increase.

    host_problem: the problem restricted to the ranks of this host.
    rows: maximum number of rows of a call.
    """

    def __init__(
        self, host_problem: Problem, problem: Problem, manager: HostThenRankGroup, rows: int
    ) -> None:
        self._sections = buffer_sections(host_problem, rows)
        self._flags = {name: self._sections.pop(name) for name in _FLAGS}
        call_nbytes, flag_nbytes = _nbytes(self._sections), _nbytes(self._flags)
        self._views: list[dict[str, torch.Tensor]] = []

        def initialize(heap: Heap) -> None:
            for index in range(_MAX_IN_FLIGHT):
                self._views.append(
                    heap.view_sections(self._sections, flag_nbytes + index * call_nbytes)
                )
            self._flag_views = heap.view_sections(self._flags, 0)
            for flag in self._flag_views.values():
                flag.zero_()

        self.heap = manager.allocate_heap(
            flag_nbytes + _MAX_IN_FLIGHT * call_nbytes, layer_signature(problem), initialize
        )
        counters = torch.zeros(2, 2, dtype=torch.int32, device=self.heap.deltas_W.device)
        self._counters = {"dispatches": counters[0], "combines": counters[1]}
        self._free_indices = list(range(_MAX_IN_FLIGHT))

    @property
    def next_index(self) -> int | None:
        """Index of the buffers that the next call takes; None if too many calls are in flight."""
        return self._free_indices[0] if self._free_indices else None

    def check_free(self) -> None:
        """Raise UnsupportedError if too many calls are in flight."""
        if not self._free_indices:
            need = f"at most {_MAX_IN_FLIGHT}: finish one first"
            raise UnsupportedError("calls in flight", got=_MAX_IN_FLIGHT + 1, need=need)

    def take(self, rows: int) -> PooledBuffers:
        index = self._free_indices.pop(0)
        views = dict(self._views[index]) | self._flag_views | self._counters
        buffers = CallBuffers(scale_RG=views.pop("scale_RG", None), **views)
        return PooledBuffers(buffers, rows, partial(self._release, index))

    def _release(self, index: int) -> None:
        self._free_indices = sorted((*self._free_indices, index))


def _nbytes(layout: dict[str, Section]) -> int:
    return sum(align_up(section.nbytes) for section in layout.values())
