"""Automatic preparation of 4-bit weights, when a kernel uses them for the first time.

Prepared tensors are copies of weights in a layout that kernels read faster
(`modular_kernel.quant.prepared`). All kernels whose experts read the same layout share them. They
are freed with the storages of the weights. If the weights are written, they are computed again in
the same memory, so that CUDA graphs that read them stay valid. Only writes that torch tracks are
detected.
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
from modular_kernel.replay.recording import PreparedWeights, can_keep_buffers, make_weak_storage_ref
from modular_kernel.tensors import ExpertWeights
from modular_kernel.utils import forks
from modular_kernel.workspace import BufferSpec

_LOG = logging.getLogger("modular_kernel.weights")

# Fraction of a GPU's memory that must stay free, for activations, caches and other weights.
_MIN_FREE_FRACTION = 0.2

# Function of (weights, tensors by prepared field) that writes the prepared tensors.
PrepareFunction = Callable[[ExpertWeights, Mapping[str, torch.Tensor]], None]
_Key = tuple[object, ...]


@dataclass(frozen=True)
class _CacheEntry:
    """Prepared tensors by field, and the function that computes them.

    storage_refs: the storages of the source tensors.
    token: identifies the entry without keeping its tensors alive.
    finalizers: callbacks that drop the entry when a storage is freed.
    """

    tensors: dict[str, torch.Tensor]
    prepare: PrepareFunction
    storage_refs: tuple[StorageWeakRef, ...]
    token: object
    finalizers: list[Any]

    def is_alive(self) -> bool:
        """Return whether all source storages exist."""
        return not any(ref.expired() for ref in self.storage_refs)  # type: ignore[no-untyped-call]


class PreparedTensorCache:
    """Cache of prepared tensors, keyed by layout and by the addresses of their sources."""

    def __init__(self) -> None:
        self._entries: dict[_Key, _CacheEntry] = {}
        self._lock = threading.RLock()
        forks.on_fork(self)

    def after_fork(self) -> None:
        """Reset the lock in a forked child, and drop GPU tensors, which a child cannot use."""
        forks.reset_lock(self._lock)
        for key, entry in tuple(self._entries.items()):
            if any(tensor.is_cuda for tensor in entry.tensors.values()):
                del self._entries[key]

    def get_or_prepare(
        self,
        weights: ExpertWeights,
        specs: Mapping[str, BufferSpec],
        layout: str,
        prepare: PrepareFunction,
    ) -> ExpertWeights | None:
        """Return `weights` with prepared tensors; None if there is not enough memory for them.

        Computing the tensors synchronizes the current stream, so that calls on other streams can
        read them.

        weights: weights that passed the checks of the kernel, without prepared tensors.
        specs, prepare: `prepared_specs` and `prepare` of the experts.
        layout: see `prepared.make_layout_key`.
        """
        sources = prepared.list_sources(weights, specs)
        key = layout, *_make_address_key(sources)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and not entry.is_alive():
                entry = None
            if entry is None:
                tensors = allocate_and_prepare(weights, specs, layout, prepare)
                if tensors is None:
                    return None
                token = object()
                storages = [source.untyped_storage() for source in sources]
                finalizers = [weakref.finalize(s, self._discard, key, token) for s in storages]
                for finalizer in finalizers:
                    finalizer.atexit = False
                storage_refs = tuple(map(make_weak_storage_ref, sources))
                entry = _CacheEntry(tensors, prepare, storage_refs, token, finalizers)
                self._entries[key] = entry
            elif not prepared.is_current(weights, entry.tensors):
                write_prepared(weights, entry.tensors, layout, prepare)
        return replace(weights, **entry.tensors)

    def refresh(self, weights: ExpertWeights, *, force: bool = False) -> None:
        """Update the prepared tensors if the weights have been written to.

        The next call of a kernel also does this. However, a CUDA graph that is replayed before this
        call would read the old values.

        force: whether to update the tensors even if torch has tracked no write.
        """
        with self._lock:
            for (layout, *addresses), entry in tuple(self._entries.items()):
                sources = prepared.list_sources(weights, entry.tensors)
                if tuple(addresses) != _make_address_key(sources) or not entry.is_alive():
                    continue
                if force or not prepared.is_current(weights, entry.tensors):
                    write_prepared(weights, entry.tensors, str(layout), entry.prepare)

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
        """Drop an entry. Called in any thread when a storage of its sources is freed."""
        entry = self._entries.get(key)
        if entry is not None and entry.token is token:
            self._entries.pop(key, None)
            for finalizer in entry.finalizers:
                finalizer.detach()


def allocate_and_prepare(
    weights: ExpertWeights,
    specs: Mapping[str, BufferSpec],
    layout: str,
    prepare: PrepareFunction,
    *,
    warn: bool = True,
) -> dict[str, torch.Tensor] | None:
    """Allocate the prepared tensors and write them. Return None if too little memory is free.

    `PreparedTensorCache.get_or_prepare` describes the other arguments.

    warn: whether to log a warning if too little memory is free.
    """
    warn_low_memory = _warn_low_memory if warn else _skip_warning
    device, nbytes = weights.w1.device, sum(spec.nbytes for spec in specs.values())
    free = 0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if not has_free_memory(nbytes, free, total):
            warn_low_memory(nbytes, free, device)
            return None
    try:
        tensors = prepared.allocate_prepared(weights, specs, layout)
    except torch.OutOfMemoryError:
        warn_low_memory(nbytes, free, device)
        return None
    try:
        write_prepared(weights, tensors, layout, prepare)
    except torch.OutOfMemoryError:  # while `prepare` allocated temporary tensors
        warn_low_memory(nbytes, 0, device)
        return None
    return tensors


def has_free_memory(nbytes: int, free: int, total: int) -> bool:
    """Return whether enough memory stays free if `nbytes` more bytes are allocated.

    free, total: bytes of the GPU's memory.
    """
    return free - nbytes >= _MIN_FREE_FRACTION * total


def _make_address_key(sources: Sequence[torch.Tensor]) -> tuple[object, ...]:
    return tuple(
        (t.device, t.untyped_storage()._cdata, t.data_ptr(), t.shape, t.stride(), t.dtype)
        for t in sources
    )


def write_prepared(
    weights: ExpertWeights,
    tensors: Mapping[str, torch.Tensor],
    layout: str,
    prepare: PrepareFunction,
) -> None:
    """Write the prepared tensors, and wait until the GPU has finished."""
    prepared.record_sources(weights, tensors, layout)
    prepare(weights, tensors)
    prepared.mark_complete(tensors)
    if weights.w1.is_cuda:
        torch.cuda.current_stream(weights.w1.device).synchronize()


def _warn_low_memory(nbytes: int, free: int, device: torch.device) -> None:
    _LOG.warning(
        "4-bit weights stay as loaded, which is slower: preparing them takes %d MiB; %d MiB are "
        "free on %s, and %d%% of its memory must stay free",
        nbytes >> 20, free >> 20, device, round(100 * _MIN_FREE_FRACTION),
    )  # fmt: skip


def _skip_warning(nbytes: int, free: int, device: torch.device) -> None:
    """Do nothing, in place of `_warn_low_memory`."""


AUTO_PREPARED = PreparedTensorCache()


class WeightPreparer:
    """Prepares the weights of one kernel on their first use.

    Implements `modular_kernel.replay.recording.Preparer`.

    specs, prepare: `prepared_specs` and `prepare` of the experts.
    layout: see `prepared.make_layout_key`.
    enabled: whether weights are prepared; None means on GPUs only.
    """

    def __init__(
        self,
        specs: Callable[[], Mapping[str, BufferSpec]],
        prepare: PrepareFunction,
        layout: str,
        *,
        enabled: bool | None,
    ) -> None:
        self._make_specs, self._prepare = specs, prepare
        self._layout, self._enabled = layout, enabled

    @cached_property
    def _specs(self) -> Mapping[str, BufferSpec]:
        return self._make_specs()

    def is_enabled_on(self, device: torch.device) -> bool:
        """Return whether weights on `device` are prepared."""
        return device.type == "cuda" if self._enabled is None else self._enabled

    def is_postponed(self, device: torch.device) -> bool:
        """Return whether weights are prepared by a later call instead of now.

        This is the case while a CUDA graph is captured: replays of the graph overwrite memory that
        is allocated during the capture.
        """
        return self.is_enabled_on(device) and bool(self._specs) and not can_keep_buffers(device)

    def __call__(self, weights: ExpertWeights) -> PreparedWeights | None:
        """Return (weights with prepared tensors, source tensors, prepared tensors).

        Returns None if the experts prepare nothing, if there is not enough memory, or while a CUDA
        graph is captured.
        """
        device = weights.w1.device
        if not (self.is_enabled_on(device) and self._specs and can_keep_buffers(device)):
            return None
        prepared_weights = AUTO_PREPARED.get_or_prepare(
            weights, self._specs, self._layout, self._prepare
        )
        if prepared_weights is None:
            return None
        return (
            prepared_weights,
            prepared.list_source_tensors(prepared_weights),
            prepared.list_prepared_tensors(prepared_weights),
        )
