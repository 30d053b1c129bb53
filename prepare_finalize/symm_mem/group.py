"""SymmetricGroup: memory of the ranks of a process group that all of them can access.

A SymmetricGroup is the manager of `SymmMemPrepareAndFinalize`, and many layers can share it:

    manager = SymmetricGroup(group, timeout_s=2.0)
    kernel = make_kernel("SymmMemPrepareAndFinalize", "TritonExperts", problem, group=manager)
    ...
    manager.destroy()

On GPUs, this is torch's symmetric memory (CUDA backend): kernels access the memory of peers over
NVLink through pointers, without multicast. On a CPU, Triton's interpreter runs the same kernels,
and the ranks of a machine share memory through files.

Each part allocates a heap, a block of memory with the same layout on every rank. The allocation is
collective: every rank of the group must do it, in the same order. Kernels synchronize through flags
in the heap, and wait for the flags of peers with a deadline (`kernels.signals`).
"""

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from modular_kernel.errors import CommunicationError, UnsupportedError
from modular_kernel.text import pluralize
from modular_kernel.utils import forks
from prepare_finalize.common.torch_group import first_sentence
from prepare_finalize.rendezvous.connect import (
    check_device_type,
    check_process,
    new_prefix_store,
    resolve_process_group,
    resolve_timeout,
    select_device_type,
)
from prepare_finalize.rendezvous.failure_log import ExchangeLog
from prepare_finalize.rendezvous.hosts import Hosts, find_hosts
from prepare_finalize.rendezvous.store_collectives import StoreCollectives
from prepare_finalize.symm_mem.shared_files import share_memory

_ALIGNMENT = 256  # bytes; every section begins at a multiple of it
_PHASES = {1: "dispatch", 2: "combine"}  # by the number that kernels write to the status word
NAN_BYTE = 0xFF  # a value with only this byte is NaN in every floating-point dtype


@dataclass(frozen=True)
class Section:
    """The shape and dtype of a tensor in a heap."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Heap:
    """Memory of this rank that peers can access, and the address offsets of their memory.

    bytes_N: (N,) uint8, memory of this rank. The layout is the same on every rank.
    deltas_W: (W,) int64, on the device. Adding deltas_W[r] to an address in the heap of this rank
        gives the address in the heap of rank r.
    owners: objects whose lifetime keeps the memory mapped.
    """

    bytes_N: torch.Tensor
    deltas_W: torch.Tensor
    owners: tuple[object, ...]

    def view_sections(self, layout: dict[str, Section], start: int) -> dict[str, torch.Tensor]:
        """Return views of consecutive sections, the first of which begins at byte `start`."""
        views = {}
        for name, section in layout.items():
            section_bytes = self.bytes_N[start : start + section.nbytes]
            views[name] = section_bytes.view(section.dtype).view(section.shape)
            start += align_up(section.nbytes)
        return views


def align_up(nbytes: int) -> int:
    """Round the size of a section up to a multiple of the alignment."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class SharedMemory(ABC):
    """Base of managers that allocate heaps for the ranks of one host.

    Kernels write `failed` and `status` if a wait reaches its deadline; see `kernels.signals`.

    rank, world_size: index of this rank among the ranks that share the memory, and their number.
    device: "cpu" or "cuda".
    timeout_s: timeout of a wait for other ranks in a kernel, in seconds.
    last_calls: log of the last exchanges.
    """

    def __init__(
        self, rank: int, world_size: int, *, device: str, timeout_s: float, last_calls: ExchangeLog
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.reported_rank = rank  # rank in error messages
        self.device, self.timeout_s, self.last_calls = device, timeout_s, last_calls
        self.step = 0
        self._generation = forks.generation()
        self._destroyed = False
        self._failure: CommunicationError | None = None
        current_device = torch.device(device)
        if current_device.type == "cuda":
            current_device = torch.device("cuda", torch.cuda.current_device())
        self._device = current_device
        self.failed = torch.zeros(1, dtype=torch.int32, device=current_device)
        pinned = current_device.type == "cuda"
        self.status = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=pinned)
        # Every call reads this word twice. Reading it through ctypes is faster than through a
        # tensor.
        self._status_word = ctypes.c_int64.from_address(self.status.data_ptr())

    @property
    def timeout_ns(self) -> int:
        """Timeout of a wait in a kernel, in nanoseconds."""
        return int(self.timeout_s * 1e9)

    @abstractmethod
    def _open_store_collectives(self) -> StoreCollectives:
        """Return collectives over a store. Raise CommunicationError if it is unreachable."""

    @abstractmethod
    def _map_shared_files(self, collectives: StoreCollectives, nbytes: int) -> list[torch.Tensor]:
        """Return the memory of each rank, shared through files and filled with NAN_BYTE (CPU)."""

    @abstractmethod
    def _rendezvous(self, tensor: torch.Tensor) -> Any:
        """Exchange the handles of a symmetric-memory tensor with the other ranks (GPU)."""

    def allocate_heap(
        self, nbytes: int, signature: str, initialize: Callable[[Heap], object]
    ) -> Heap:
        """Allocate a heap of `nbytes` bytes, filled with NAN_BYTE. Collective.

        signature: identifies the use of the memory. Both nbytes and signature must be equal on all
            ranks.
        initialize: function that initializes the heap before other ranks may write to it.

        Raise CommunicationError on every rank if ranks pass different values, or if a rank does not
        respond within the deadline.
        """
        self.check_open()
        record = self.last_calls.begin(0, "construct", nbytes)
        try:
            collectives = self._open_store_collectives()
            collectives.check_equal({"bytes": nbytes, "meaning": signature})
            heap = self._share(nbytes, collectives)
            initialize(heap)
            if self.device == "cuda":
                torch.cuda.synchronize(self._device)
            collectives.barrier()  # no rank writes before all heaps are initialized
        except RuntimeError as error:  # the store is unreachable
            self.last_calls.end(record, str(error))
            need = f"a store that answers within {self.timeout_s:g} s"
            raise self._make_error(first_sentence(error), need, "construct", ()) from error
        except CommunicationError as error:
            self.last_calls.end(record, str(error))
            raise
        self.last_calls.end(record)
        return heap

    def _share(self, nbytes: int, collectives: StoreCollectives) -> Heap:
        owners: tuple[object, ...]
        if self.device == "cpu":
            blocks = self._map_shared_files(collectives, nbytes)
            local_block, owners = blocks[self.rank], tuple(blocks)
            addresses = [block.data_ptr() for block in blocks]
        else:
            import torch.distributed._symmetric_memory as symmetric_memory

            local_block = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self._device)
            local_block.fill_(NAN_BYTE)
            shared = self._rendezvous(local_block)
            addresses, owners = list(shared.buffer_ptrs), (shared,)
        local_address = addresses[self.rank]
        deltas = torch.tensor(
            [address - local_address for address in addresses],
            dtype=torch.int64,
            device=self._device,
        )
        return Heap(local_block, deltas, owners)

    def check_device(self, device: torch.device | str) -> None:
        """Raise DeviceError unless tensors on `device` can be exchanged."""
        check_device_type(device, self.device)

    def next_step(self) -> int:
        """Return the number of the call that begins, the same on every rank."""
        self.check_open()
        self.step += 1
        return self.step

    def log_launch(self, phase: str, nbytes: int) -> None:
        """Add an exchange of the current call to the log, without waiting for its end."""
        self.last_calls.end(self.last_calls.begin(self.step, phase, nbytes), "launched")

    def check_open(self) -> None:
        """Raise UnsupportedError after `destroy`, and CommunicationError after a failed wait.

        Does not wait for the device. A failure is raised only once it has reached the host.
        """
        check_process(self._generation)
        if self._destroyed:
            raise UnsupportedError("exchange", got="a destroyed manager", need="a new one")
        if self._failure is None and (word := self._status_word.value):
            self._failure = self._make_status_error(word)
        if self._failure is not None:
            raise self._failure

    def check(self) -> None:
        """Wait for the device. Raise CommunicationError if any call so far has failed."""
        if self.device == "cuda":
            torch.cuda.synchronize(self._device)
        self.check_open()

    def _make_status_error(self, word: int) -> CommunicationError:
        """Return the error for a status word of `kernels.signals.wait_for_all`.

        word: phase << 56 | bitmask of missing ranks << 32 | number of the call.
        """
        bits = (word >> 32) & 0xFFFFFF
        peers = [rank for rank in range(self.world_size) if bits >> rank & 1]
        ranks = f"{pluralize('rank', len(peers))} {', '.join(map(str, peers))}"
        got = f"no flag of call {word & 0xFFFFFFFF} from {ranks}"
        need = f"every rank within {self.timeout_s:g} s"
        return self._make_error(got, need, _PHASES[word >> 56], peers)

    def _make_error(
        self, got: str, need: str, phase: str, peers: Sequence[int]
    ) -> CommunicationError:
        subject = "exchange between ranks"
        return CommunicationError(
            subject,
            got=got,
            need=need,
            rank=self.reported_rank,
            phase=phase,
            step=self.step,
            peers=peers,
        )

    def destroy(self) -> None:
        """Make later use raise an error. The memory is freed with the parts that use it."""
        self._destroyed = True


class SymmetricGroup(SharedMemory):
    """Symmetric memory of the ranks of one process group.

    group: a ProcessGroup of torch.distributed; None is the default group. Parts over symmetric
        memory reject ranks on several hosts.
    timeout_s: timeout of a wait for other ranks in a kernel, in seconds; None is MK_TIMEOUT_S, or
        10 s.
    device: "cpu" or "cuda"; None is "cuda" if the group supports it.
    history: number of exchanges that `last_calls` keeps.

    Creating a manager is collective. Raise CommunicationError if a rank does not respond.
    """

    def __init__(
        self,
        group: object | None = None,
        *,
        timeout_s: float | None = None,
        device: str | None = None,
        history: int = 1024,
    ) -> None:
        seconds = resolve_timeout(timeout_s)
        self._group = resolve_process_group(group)
        rank = self._group.rank()
        super().__init__(
            rank,
            self._group.size(),
            device=select_device_type(self._group, device),
            timeout_s=seconds,
            last_calls=ExchangeLog(rank, history),
        )
        self.hosts = self._find_hosts()

    def _find_hosts(self) -> Hosts:
        record = self.last_calls.begin(0, "construct", 0)
        try:
            hosts = find_hosts(self._open_store_collectives(), self.rank)
        except CommunicationError as error:
            self.last_calls.end(record, str(error))
            raise
        self.last_calls.end(record)
        return hosts

    def _open_store_collectives(self) -> StoreCollectives:
        try:
            store = new_prefix_store(self._group, self.timeout_s)
        except RuntimeError as error:  # the store is unreachable
            need = f"a store that answers within {self.timeout_s:g} s"
            raise self._make_error(first_sentence(error), need, "construct", ()) from error
        return StoreCollectives(store, self.rank, self.world_size, self.timeout_s)

    def _map_shared_files(self, collectives: StoreCollectives, nbytes: int) -> list[torch.Tensor]:
        return share_memory(collectives, self.rank, nbytes, NAN_BYTE)

    def _rendezvous(self, tensor: torch.Tensor) -> Any:
        import torch.distributed._symmetric_memory as symmetric_memory

        return symmetric_memory.rendezvous(tensor, self._group)
