"""Automatic preparation: a kernel prepares weights the first time it uses them.

`AUTO_PREPARED.find(...)` returns the weights with prepared tensors (see
`modular_kernel.quant.prepared`), which it derives on first use. The prepared tensors are freed with
the storages of the weights. All kernels whose experts read the same layout share them. After a
write that torch tracks, they are derived again in the same memory, so that CUDA graphs that read
them stay valid.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from modular_kernel.quant import prepared
from modular_kernel.replay.recording import Prepared, may_keep_buffers, storage_of
from modular_kernel.tensors import ExpertWeights
from modular_kernel.utils import forks
from modular_kernel.workspace import BufferSpec

_LOG = logging.getLogger("modular_kernel.weights")

# Fraction of a GPU's memory that must stay free, for activations, caches and other weights.
_MIN_FREE = 0.2

Prepare = Callable[[ExpertWeights, Mapping[str, torch.Tensor]], None]
_Key = tuple[object, ...]


@dataclass(frozen=True)
class _Entry:
    """Prepared tensors, the function that derives them, and what the cache tracks about them.

    storages: those of the source tensors. If one of them is freed, the entry is dropped.
    token: identifies the entry without keeping its tensors alive.
    finalizers: one for each storage, which frees the entry.
    """

    tensors: dict[str, torch.Tensor]
    prepare: Prepare
    storages: tuple[StorageWeakRef, ...]
    token: object
    finalizers: list[Any]

    def is_alive(self) -> bool:
        """Return whether all source storages exist."""
        return not any(storage.expired() for storage in self.storages)  # type: ignore[no-untyped-call]


class AutoPrepared:
    """Cache of prepared tensors, keyed by layout and by the addresses of their sources."""

    def __init__(self) -> None:
        self._entries: dict[_Key, _Entry] = {}
        self._lock = threading.RLock()
        forks.on_fork(self)

    def after_fork(self) -> None:
        """In a forked child, renew the lock and drop tensors on GPUs.

        A forked child cannot use the CUDA context of its parent.
        """
        forks.reset_lock(self._lock)
        for key, entry in tuple(self._entries.items()):
            if any(tensor.is_cuda for tensor in entry.tensors.values()):
                del self._entries[key]

    def find(
        self,
        weights: ExpertWeights,
        specs: Mapping[str, BufferSpec],
        layout: str,
        prepare: Prepare,
    ) -> ExpertWeights | None:
        """Return `weights` with prepared tensors; None if there is not enough memory for them.

        Deriving the tensors synchronizes with the current stream, so that calls on other streams
        can use them.

        weights: have passed the kernel's checks, and have no prepared tensors.
        specs, prepare: `prepared_specs` and `prepare` of the experts.
        layout: see `prepared.layout_key`.
        """
        sources = prepared.sources_of(weights, specs)
        key = layout, *_addresses(sources)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and not entry.is_alive():
                entry = None
            if entry is None:
                tensors = self._allocate(weights, specs, layout)
                if tensors is None:
                    return None
                try:
                    _derive(weights, tensors, layout, prepare)
                except torch.OutOfMemoryError:  # of temporary tensors
                    _warn_low_memory(sum(t.nbytes for t in tensors.values()), 0, weights.w1.device)
                    return None
                token = object()
                storages = [source.untyped_storage() for source in sources]
                finalizers = [weakref.finalize(s, self._discard, key, token) for s in storages]
                for finalizer in finalizers:
                    finalizer.atexit = False
                storage_refs = tuple(map(storage_of, sources))
                entry = _Entry(tensors, prepare, storage_refs, token, finalizers)
                self._entries[key] = entry
            elif not prepared.is_current(weights, entry.tensors):
                _derive(weights, entry.tensors, layout, prepare)
        return replace(weights, **entry.tensors)

    def refresh(self, weights: ExpertWeights) -> None:
        """Update the prepared tensors if the weights have been written to.

        The next call would also update them, but a CUDA graph that is replayed before that call
        would read the old values.
        """
        with self._lock:
            for (layout, *addresses), entry in tuple(self._entries.items()):
                sources = prepared.sources_of(weights, entry.tensors)
                if tuple(addresses) != _addresses(sources) or not entry.is_alive():
                    continue
                if not prepared.is_current(weights, entry.tensors):
                    _derive(weights, entry.tensors, str(layout), entry.prepare)

    def held_bytes(self) -> dict[torch.device, int]:
        """Return the bytes of the prepared tensors by device."""
        nbytes_by_device: dict[torch.device, int] = {}
        for entry in tuple(self._entries.values()):
            for tensor in entry.tensors.values():
                nbytes_by_device[tensor.device] = (
                    nbytes_by_device.get(tensor.device, 0) + tensor.nbytes
                )
        return nbytes_by_device

    def _discard(self, key: _Key, token: object) -> None:
        """Free an entry. Runs in any thread when one of the entry's source storages is freed."""
        entry = self._entries.get(key)
        if entry is not None and entry.token is token:
            self._entries.pop(key, None)
            for finalizer in entry.finalizers:
                finalizer.detach()

    def _allocate(
        self, weights: ExpertWeights, specs: Mapping[str, BufferSpec], layout: str
    ) -> dict[str, torch.Tensor] | None:
        """Allocate the prepared tensors; None, with a warning, if too little memory is free."""
        device, nbytes = weights.w1.device, sum(spec.nbytes for spec in specs.values())
        free = 0
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            if not has_free_memory(nbytes, free, total):
                _warn_low_memory(nbytes, free, device)
                return None
        try:
            return prepared.allocate_prepared(weights, specs, layout)
        except torch.OutOfMemoryError:
            _warn_low_memory(nbytes, free, device)
            return None


def has_free_memory(nbytes: int, free: int, total: int) -> bool:
    """Return whether `_MIN_FREE` of `total` bytes stay free after `nbytes` more are used."""
    return free - nbytes >= _MIN_FREE * total


def _addresses(sources: Sequence[torch.Tensor]) -> tuple[object, ...]:
    return tuple(
        (t.device, t.untyped_storage()._cdata, t.data_ptr(), t.shape, t.stride(), t.dtype)
        for t in sources
    )


def _derive(
    weights: ExpertWeights, tensors: Mapping[str, torch.Tensor], layout: str, prepare: Prepare
) -> None:
    """Write prepared tensors, and wait until they are complete."""
    prepared.record_sources(weights, tensors, layout)
    prepare(weights, tensors)
    prepared.mark_complete(tensors)
    if weights.w1.is_cuda:
        torch.cuda.current_stream(weights.w1.device).synchronize()


def _warn_low_memory(nbytes: int, free: int, device: torch.device) -> None:
    _LOG.warning(
        "4-bit weights stay as loaded, which is slower: preparing them takes %d MiB; %d MiB are "
        "free on %s, and %d%% of its memory must stay free",
        nbytes >> 20, free >> 20, device, round(100 * _MIN_FREE),
    )  # fmt: skip


AUTO_PREPARED = AutoPrepared()


class WeightPreparer:
    """Preparation of the weights of one kernel, on their first use.

    specs, prepare: `prepared_specs` and `prepare` of the experts.
    layout: see `prepared.layout_key`.
    enabled: None prepares weights on GPUs only.
    """

    def __init__(
        self,
        specs: Callable[[], Mapping[str, BufferSpec]],
        prepare: Prepare,
        layout: str,
        *,
        enabled: bool | None,
    ) -> None:
        self._make_specs, self._prepare = specs, prepare
        self._layout, self._enabled = layout, enabled

    @cached_property
    def _specs(self) -> Mapping[str, BufferSpec]:
        return self._make_specs()

    def enabled_on(self, device: torch.device) -> bool:
        """Return whether weights on this device are to be prepared."""
        return device.type == "cuda" if self._enabled is None else self._enabled

    def is_postponed(self, device: torch.device) -> bool:
        """Return whether weights are to be prepared in a later call.

        That is the case while a CUDA graph is captured, because its memory cannot be kept.
        """
        return self.enabled_on(device) and bool(self._specs) and not may_keep_buffers(device)

    def __call__(self, weights: ExpertWeights) -> Prepared | None:
        """Return the weights with prepared tensors, the sources of these tensors, and the tensors.

        Return None if the experts prepare nothing, if memory is short, or while a CUDA graph is
        captured.
        """
        device = weights.w1.device
        if not (self.enabled_on(device) and self._specs and may_keep_buffers(device)):
            return None
        prepared_weights = AUTO_PREPARED.find(weights, self._specs, self._layout, self._prepare)
        if prepared_weights is None:
            return None
        return (
            prepared_weights,
            prepared.source_tensors(prepared_weights),
            prepared.prepared_tensors(prepared_weights),
        )
