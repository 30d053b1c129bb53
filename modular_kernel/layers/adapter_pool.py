"""AdapterPool: the LoRA adapters of one layer, in tensors whose addresses never change.

pool = AdapterPool(problem, device)
slot = pool.load("mine", load_adapter("adapter/", 3, problem))
y_TH = kernel(x_TH, pool.weights(base), routing)  # routing.adapters_T refers to `slot`
"""

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from modular_kernel.errors import (
    CapacityError,
    ConfigurationError,
    DeviceError,
    DtypeError,
    ShapeError,
    StateError,
    WeightsError,
)
from modular_kernel.replay import modes
from modular_kernel.replay.recording import is_capturing
from modular_kernel.spec.lora import Adapter
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights
from modular_kernel.utils import forks
from modular_kernel.utils.argument_checks import expect, resolve_device
from modular_kernel.utils.tensor_checks import check_tensor

_MAX_NAME_LENGTH = 256
_OUT_OF_MEMORY = re.compile("can't allocate memory|size calculation overflowed")


@contextmanager
def _convert_out_of_memory_errors(
    label: str, needed: int, device: torch.device | str
) -> Iterator[None]:
    """Raise torch's out-of-memory errors as a CapacityError with the required number of bytes."""
    try:
        yield
    except RuntimeError as error:
        message = str(error).splitlines()[0]
        # The CPU allocator raises a RuntimeError instead of an OutOfMemoryError.
        if not isinstance(error, torch.OutOfMemoryError) and not _OUT_OF_MEMORY.search(message):
            raise
        need = f"{needed} bytes on {device}"
        raise CapacityError(label, got=f"no memory: {message[:160]}", need=need) from None


class AdapterPool:
    """The L adapter slots of a layer, for adapters of rank up to R, as in `problem.lora`.

    Adapters are copied into existing memory, so kernels, plans and captured graphs that use
    `weights` read the new values. Copies run on the current stream, and a call on another stream
    that uses the slot must wait for them. Free slots are zero.

    Threads may load and evict concurrently, because a lock serializes them. Kernel calls do not
    take the lock, so evict an adapter only after all calls that use its slot have ended.
    """

    def __init__(self, problem: Problem, device: torch.device | str = "cpu") -> None:
        """Allocate the tensors, which are zero and have the problem's dtype.

        Raises ConfigurationError for a problem without adapters, DeviceError for a device that is
        not available or has no memory (meta), and CapacityError, with the required bytes, if memory
        is insufficient.
        """
        expect("problem", problem, Problem)
        expect("device", device, torch.device | str)
        if problem.adapters is None:
            raise ConfigurationError("lora", got="none", need="a problem with adapters")
        self._problem, self._spec = problem, problem.adapters
        shapes = self._get_shapes(self._spec.rank)
        device = resolve_device(device, what="pool")
        slots, sizes = self._spec.adapters, (problem.e, problem.w1_rows)
        values_per_slot = self._spec.slot_numel(*sizes, problem.hidden, problem.intermediate)
        self._slot_bytes = values_per_slot * problem.dtype.itemsize
        with (
            _convert_out_of_memory_errors(
                f"pool of {slots} slots", slots * self._slot_bytes, device
            ),
            modes.disable_inference_mode(),
        ):
            self._tensors = {
                name: torch.zeros(slots, *shape, dtype=problem.dtype, device=device)
                for name, shape in shapes.items()
            }
        self._slots = dict[str, int]()
        # Free slots that may be nonzero, because a load or evict was interrupted.
        self._dirty_slots = set[int]()
        self._lock = threading.RLock()
        forks.on_fork(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle or copy, without the lock."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.RLock()
        forks.on_fork(self)

    def after_fork(self) -> None:
        """Reset the lock in a forked child, because a thread of the parent may have held it."""
        forks.reset_lock(self._lock)

    @property
    def slots(self) -> Mapping[str, int]:
        """The slot of each loaded adapter by name, as a read-only view."""
        return MappingProxyType(self._slots)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self._tensors["lora_a2"].device

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self._slot_bytes

    def weights(self, base: ExpertWeights) -> ExpertWeights:
        """Return the base weights with this pool's tensors.

        Raises WeightsError if the base weights have adapters.
        """
        expect("base weights", base, ExpertWeights)
        present = [name for name in self._tensors if getattr(base, name) is not None]
        if present:
            raise WeightsError(
                "base weights", got=", ".join(present), need="no adapters: the pool supplies them"
            )
        return replace(base, **self._tensors)

    def load(self, name: str, adapter: Adapter) -> int:
        """Copy an adapter into a free slot, and return the slot.

        The values of the tensors are checked, which synchronizes with the device.

        name: name of the adapter, 1 to 256 characters. It must not be loaded.
        adapter: an adapter whose rank is at most the rank of the pool, with tensors on the pool's
            device or on the CPU. If the adapter's rank is smaller, the remaining values of the slot
            stay zero.

        Raises StateError for a name that is already loaded, or during stream capture; CapacityError
        if there is no free slot or no memory for the copy; WeightsError if the rank is too large or
        values are not finite; ShapeError, DtypeError, DeviceError or LayoutError for tensors that
        do not match. After any exception, including KeyboardInterrupt, the pool is unchanged.
        """
        with self._lock:
            return self._load(name, adapter)

    def _load(self, name: str, adapter: Adapter) -> int:
        self.check_change(name)
        if name in self._slots:
            got = f"loaded in slot {self._slots[name]}"
            raise StateError(
                f"adapter {name!r}",
                got=got,
                need="a name that is not loaded; evict the adapter to replace it",
            )
        used_slots = set(self._slots.values())
        free_slots = [slot for slot in range(self._spec.adapters) if slot not in used_slots]
        if not free_slots:
            got = f"{self._spec.adapters} slots, all of them in use"
            need = (
                f"a free slot of {self.slot_bytes} bytes on {self.device}; evict an adapter, or "
                "create a larger pool"
            )
            raise CapacityError(f"adapter {name!r}", got=got, need=need)
        rank = self._check_adapter(name, adapter)
        self._zero_dirty_slots()
        slot = free_slots[0]
        with torch.no_grad():
            # Allocate all memory before writing to the slot.
            nbytes = sum(getattr(adapter, key).nbytes for key in self._tensors)
            with _convert_out_of_memory_errors(f"adapter {name!r}", nbytes, self.device):
                copies = {key: getattr(adapter, key).to(self.device) for key in self._tensors}
            self._dirty_slots.add(slot)
            try:
                for key, tensor in copies.items():
                    self._view_slot(key, slot, rank).copy_(self._split_gate_up(key, tensor))
            except BaseException:
                self._zero_dirty_slots()
                raise
        self._slots[name] = slot
        self._dirty_slots.discard(slot)
        return slot

    def evict(self, name: str) -> None:
        """Free the slot of an adapter and zero it.

        Tokens that still select the slot are computed without an adapter.

        Raises StateError for a name that is not loaded, or during stream capture.
        """
        with self._lock:
            self._evict(name)

    def _evict(self, name: str) -> None:
        self.check_change(name)
        if name not in self._slots:
            loaded = ", ".join(sorted(self._slots)[:8]) or "none"
            need = f"a loaded adapter: {loaded}"
            raise StateError(f"adapter {name!r}", got="not loaded", need=need)
        self._dirty_slots.add(self._slots[name])
        del self._slots[name]
        self._zero_dirty_slots()

    @torch.no_grad()
    def _zero_dirty_slots(self) -> None:
        """Zero free slots that an interrupted load or evict may have left nonzero."""
        self._dirty_slots.difference_update(self._slots.values())
        for slot in tuple(self._dirty_slots):
            for tensor in self._tensors.values():
                tensor[slot].zero_()
            self._dirty_slots.discard(slot)

    def _get_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of an adapter of this rank, by field name."""
        problem = self._problem
        sizes = problem.e, problem.w1_rows, problem.hidden, problem.intermediate
        shapes = replace(self._spec, rank=rank).shapes(*sizes)
        return {name: shape[1:] for name, shape in shapes.items()}

    def check_change(self, name: str) -> None:
        """Raise ConfigurationError for an invalid name, StateError during stream capture."""
        expect("name of an adapter", name, str)
        if not 0 < len(name) <= _MAX_NAME_LENGTH:
            need = f"1 to {_MAX_NAME_LENGTH} characters"
            raise ConfigurationError("name of an adapter", got=len(name), need=need)
        if is_capturing(self.device):
            got = "a stream that is being captured"
            need = "a stream that is not being captured; change adapters between captures"
            raise StateError(f"adapter {name!r}", got=got, need=need)

    def _check_adapter(self, name: str, adapter: Adapter) -> int:
        """Check an adapter's tensors and return its rank."""
        expect(f"adapter {name!r}", adapter, Adapter)
        tensors = {key: getattr(adapter, key) for key in self._tensors}
        for key, tensor in tensors.items():
            check_tensor(f"adapter {name!r}: {key}", tensor)
        rank = tensors["lora_a2"].shape[1] if tensors["lora_a2"].dim() == 3 else self._spec.rank
        if not 0 < rank <= self._spec.rank:
            need = f"1 to {self._spec.rank}, the pool's"
            raise WeightsError(f"adapter {name!r}: rank", got=rank, need=need)
        for key, shape in self._get_shapes(rank).items():
            label, tensor = f"adapter {name!r}: {key}", tensors[key]
            if tuple(tensor.shape) != shape:
                raise ShapeError(label, got=tuple(tensor.shape), need=f"{shape} for rank {rank}")
            if tensor.dtype is not self._problem.dtype:
                raise DtypeError(label, got=tensor.dtype, need=self._problem.dtype)
            if tensor.device not in (self.device, torch.device("cpu")):
                raise DeviceError(label, got=tensor.device, need=f"{self.device} or cpu")
        for key, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                got = "values that are not finite"
                raise WeightsError(f"adapter {name!r}: {key}", got=got, need="finite values")
        return rank

    def _view_slot(self, name: str, slot: int, rank: int) -> torch.Tensor:
        """Return the view of a slot into which an adapter of this rank is copied."""
        tensor = self._tensors[name][slot]
        if "_a" not in name:
            return tensor[:, :, :rank]
        num_matrices = tensor.shape[1] // self._spec.rank
        return tensor.view(len(tensor), num_matrices, self._spec.rank, -1)[:, :, :rank]

    def _split_gate_up(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Reshape a tensor to the shape of `_view_slot`."""
        if "_a" not in name:
            return tensor
        num_matrices = self._get_shapes(1)[name][1]
        return tensor.reshape(len(tensor), num_matrices, -1, tensor.shape[-1])
