"""SymmetricGroup: memory that all ranks of a process group can access, and flags that guard it.

    manager = SymmetricGroup(group, deadline_s=2.0)
    kernel = make_kernel("SymmMemPrepareAndFinalize", "TritonExperts", problem, group=manager)
    ...
    manager.destroy()

On GPUs, this is torch's symmetric memory (CUDA backend): kernels access peers over NVLink through
pointers, without multicast. On a CPU, Triton's interpreter runs the same kernels, and the ranks of
a machine share memory through files. Allocating a heap is collective: every rank of the group must
do it, in the same order.
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
    resolve_deadline,
    resolve_process_group,
    select_device_type,
)
from prepare_finalize.rendezvous.failure_log import ExchangeLog
from prepare_finalize.rendezvous.hosts import Hosts, find_hosts
from prepare_finalize.rendezvous.store_collectives import StoreCollectives
from prepare_finalize.symm_mem.shared_files import share_memory

_ALIGNMENT = 256  # bytes; every section begins at a multiple of it
_PHASES = {1: "dispatch", 2: "combine"}
NO_VALUE = 0xFF  # a byte whose repetition is NaN in every floating-point dtype


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

    bytes_N: (N,) uint8, this rank's memory. The layout is the same on every rank.
    deltas_W: (W,) int64, on the device. Adding deltas_W[r] to an address in this rank's heap gives
        the address in rank r's heap.
    owners: objects that keep the memory mapped.
    """

    bytes_N: torch.Tensor
    deltas_W: torch.Tensor
    owners: tuple[object, ...]

    def sections(self, layout: dict[str, Section], start: int) -> dict[str, torch.Tensor]:
        """Return views of consecutive sections, from byte `start`."""
        views = {}
        for name, section in layout.items():
            raw = self.bytes_N[start : start + section.nbytes]
            views[name] = raw.view(section.dtype).view(section.shape)
            start += aligned(section.nbytes)
        return views


def aligned(nbytes: int) -> int:
    """Return the bytes that a section takes, rounded up to the alignment."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class SharedMemory(ABC):
    """Heaps shared by ranks of one host, and the deadline of waits for their flags.

    `failed` and `status` are written by kernels when a wait reaches its deadline; see
    `kernels.signals`.

    rank, world_size: this rank's index among the sharing ranks, and their number.
    device: "cpu" or "cuda".
    deadline_s: the longest time that a kernel waits for other ranks.
    last_calls: the log of the last exchanges.
    """

    def __init__(
        self, rank: int, world_size: int, *, device: str, deadline_s: float, last_calls: ExchangeLog
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.reported_rank = rank  # rank in error messages
        self.device, self.deadline_s, self.last_calls = device, deadline_s, last_calls
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
        # Every call reads it twice; this takes less time than an element of the tensor does.
        self._status_word = ctypes.c_int64.from_address(self.status.data_ptr())

    @property
    def timeout_ns(self) -> int:
        """The deadline in nanoseconds."""
        return int(self.deadline_s * 1e9)

    @abstractmethod
    def _open_store_collectives(self) -> StoreCollectives:
        """Return collectives over a store. Raise CommunicationError if it does not answer."""

    @abstractmethod
    def _shared_file(self, collectives: StoreCollectives, nbytes: int) -> list[torch.Tensor]:
        """Share a block of memory of each rank, filled with `NO_VALUE`, on a CPU."""

    @abstractmethod
    def _rendezvous(self, own: torch.Tensor) -> Any:
        """Exchange the handles of a symmetric-memory tensor with the sharing ranks, on a GPU."""

    def heap(self, nbytes: int, signature: str, initialize: Callable[[Heap], object]) -> Heap:
        """Allocate new memory of `nbytes` bytes, all 0xFF. Collective.

        All ranks must pass equal `nbytes` and `signature`, which says what the memory is for.
        `initialize` initializes the heap before other ranks may write to it. Raise
        CommunicationError on every rank if ranks disagree, or if one does not respond within the
        deadline.
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
            need = f"a store that answers within {self.deadline_s:g} s"
            raise self._error(first_sentence(error), need, "construct", ()) from error
        except CommunicationError as error:
            self.last_calls.end(record, str(error))
            raise
        self.last_calls.end(record)
        return heap

    def _share(self, nbytes: int, collectives: StoreCollectives) -> Heap:
        owners: tuple[object, ...]
        if self.device == "cpu":
            blocks = self._shared_file(collectives, nbytes)
            local_block, owners = blocks[self.rank], tuple(blocks)
            addresses = [block.data_ptr() for block in blocks]
        else:
            import torch.distributed._symmetric_memory as symmetric_memory

            local_block = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self._device)
            local_block.fill_(NO_VALUE)
            shared = self._rendezvous(local_block)
            addresses, owners = list(shared.buffer_ptrs), (shared,)
        own_address = addresses[self.rank]
        distances = [address - own_address for address in addresses]
        deltas = torch.tensor(distances, dtype=torch.int64, device=self._device)
        return Heap(local_block, deltas, owners)

    def check_device(self, device: torch.device | str) -> None:
        """Raise DeviceError unless tensors on `device` can be exchanged."""
        check_device_type(device, self.device)

    def next_step(self) -> int:
        """Return the number of the call that begins; it is the same on every rank."""
        self.check_open()
        self.step += 1
        return self.step

    def log_launch(self, phase: str, nbytes: int) -> None:
        """Add an exchange of the last step to the log. Nothing waits for its end."""
        self.last_calls.end(self.last_calls.begin(self.step, phase, nbytes), "launched")

    def check_open(self) -> None:
        """Raise an error if the manager is destroyed or a wait is known to have failed.

        The error is UnsupportedError or CommunicationError. Does not synchronize with the device.
        """
        check_process(self._generation)
        if self._destroyed:
            raise UnsupportedError("exchange", got="a destroyed manager", need="a new one")
        if self._failure is None and (word := self._status_word.value):
            self._failure = self._error_from_status(word)
        if self._failure is not None:
            raise self._failure

    def check(self) -> None:
        """Wait for the device, then raise CommunicationError if any call so far is incomplete."""
        if self.device == "cuda":
            torch.cuda.synchronize(self._device)
        self.check_open()

    def _error_from_status(self, word: int) -> CommunicationError:
        """Return the error for a status word of `kernels.signals`.

        The word has the phase, the missing ranks as bits, and the number of the call.
        """
        bits = (word >> 32) & 0xFFFFFF
        peers = [rank for rank in range(self.world_size) if bits >> rank & 1]
        ranks = f"{pluralize('rank', len(peers))} {', '.join(map(str, peers))}"
        got = f"no flag of call {word & 0xFFFFFFFF} from {ranks}"
        need = f"every rank within {self.deadline_s:g} s"
        return self._error(got, need, _PHASES[word >> 56], peers)

    def _error(self, got: str, need: str, phase: str, peers: Sequence[int]) -> CommunicationError:
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
        """Make later use raise. The memory is freed together with the parts that use it."""
        self._destroyed = True


class SymmetricGroup(SharedMemory):
    """Symmetric memory of one process group, and the deadline of waits for its flags.

    group: a ProcessGroup of torch.distributed (None: the default one). Parts that share the memory
        reject ranks of several hosts.
    deadline_s: the longest time that a kernel waits for other ranks; None is MK_DEADLINE_S, or 10
        s.
    device: "cpu" or "cuda"; None selects what the group supports, a GPU first.
    history: the number of exchanges that the log keeps.

    `hosts` are the hosts of the ranks. Creating a manager is collective. Raise CommunicationError
    if ranks do not respond or disagree.
    """

    def __init__(
        self,
        group: object | None = None,
        *,
        deadline_s: float | None = None,
        device: str | None = None,
        history: int = 1024,
    ) -> None:
        seconds = resolve_deadline(deadline_s)
        self._group = resolve_process_group(group)
        rank = self._group.rank()
        super().__init__(
            rank,
            self._group.size(),
            device=select_device_type(self._group, device),
            deadline_s=seconds,
            last_calls=ExchangeLog(rank, history),
        )
        self.hosts = self._find_hosts()

    def _find_hosts(self) -> Hosts:
        """Return the hosts of ranks. Raise CommunicationError on every rank if one is missing."""
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
            store = new_prefix_store(self._group, self.deadline_s)
        except RuntimeError as error:  # the store is unreachable
            need = f"a store that answers within {self.deadline_s:g} s"
            raise self._error(first_sentence(error), need, "construct", ()) from error
        return StoreCollectives(store, self.rank, self.world_size, self.deadline_s)

    def _shared_file(self, collectives: StoreCollectives, nbytes: int) -> list[torch.Tensor]:
        return share_memory(collectives, self.rank, nbytes, NO_VALUE)

    def _rendezvous(self, own: torch.Tensor) -> Any:
        import torch.distributed._symmetric_memory as symmetric_memory

        return symmetric_memory.rendezvous(own, self._group)
