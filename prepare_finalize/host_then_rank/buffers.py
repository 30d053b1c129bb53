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
from prepare_finalize.symm_mem.group import Heap, align_up
from prepare_finalize.symm_mem.launch import CallBuffers, buffer_sections
from prepare_finalize.symm_mem.part import layer_signature

_MAX_IN_FLIGHT = 2  # calls between prepare and finalize
_FLAGS = ("arrived_W", "summed_W", "dispatches", "combines")
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
        self.rows = buffers
        if rows < len(buffers.x_RH):
            tensors: dict[str, Any] = {name: getattr(buffers, name) for name in _ROWS}
            views: dict[str, Any] = {n: t if t is None else t[:rows] for n, t in tensors.items()}
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

    The constructor is collective: all ranks must call it with the same `problem`.

    All ranks of a host must use the same set of buffers in a call. Ranks do so if they start and
    finish the same calls in the same order.

    host_problem: the problem restricted to the ranks of this host.
    rows: maximum number of rows of a call.
    shares_flags: whether all sets have the same flags. If not, the waits of ranks that use
        different sets fail at their deadlines, instead of reading rows of an earlier call. The
        handshake on the host finds such ranks earlier.
    """

    def __init__(
        self,
        host_problem: Problem,
        problem: Problem,
        manager: HostThenRankGroup,
        rows: int,
        *,
        shares_flags: bool,
    ) -> None:
        sections = buffer_sections(host_problem, rows)
        nbytes = sum(align_up(section.nbytes) for section in sections.values())
        self._buffers: list[CallBuffers] = []

        def initialize(heap: Heap) -> None:
            for index in range(_MAX_IN_FLIGHT):
                views = heap.view_sections(sections, index * nbytes)
                views["arrived_W"].zero_()
                views["summed_W"].zero_()
                counters = torch.zeros(2, 2, dtype=torch.int32, device=heap.deltas_W.device)
                scale_RG = views.pop("scale_RG", None)
                self._buffers.append(
                    CallBuffers(
                        scale_RG=scale_RG, dispatches=counters[0], combines=counters[1], **views
                    )
                )

        self.heap = manager.allocate_heap(
            _MAX_IN_FLIGHT * nbytes, layer_signature(problem), initialize
        )
        if shares_flags:
            flags = {name: getattr(self._buffers[0], name) for name in _FLAGS}
            self._buffers = [replace(buffers, **flags) for buffers in self._buffers]
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
        return PooledBuffers(self._buffers[index], rows, partial(self._release, index))

    def _release(self, index: int) -> None:
        self._free_indices = sorted((*self._free_indices, index))
