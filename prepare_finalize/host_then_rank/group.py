"""HostThenRankGroup: the manager of a two-level exchange (`host_then_rank.part`).

The manager consists of a TorchGroup for the exchange between hosts, and of memory that the ranks of
each host share for the exchange within a host:

    manager = HostThenRankGroup(group, timeout_s=2.0)
    kernel = make_kernel("HostThenRankPrepareAndFinalize", "TritonExperts", problem, group=manager)
    ...
    manager.destroy()

If one of the two exchanges fails, both are closed on all ranks.
"""

import ctypes
import zlib
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store, _SymmetricMemory
from torch._C._distributed_c10d import _register_process_group as register_process_group
from torch._C._distributed_c10d import _unregister_process_group as unregister_process_group

from modular_kernel.errors import CommunicationError, ConfigurationError
from modular_kernel.text import pluralize
from prepare_finalize.common.torch_group import TorchGroup
from prepare_finalize.rendezvous.failure_log import ExchangeLog
from prepare_finalize.rendezvous.hosts import Hosts
from prepare_finalize.rendezvous.store_collectives import StoreCollectives
from prepare_finalize.symm_mem.group import NAN_BYTE, Heap, SharedMemory
from prepare_finalize.symm_mem.shared_files import share_memory

_FLAG_BYTES = 4  # size of the failure flag
_group_numbers = count()  # for unique names of the groups that this process registers with torch


class HostMemory(SharedMemory):
    """Memory shared by the ranks of this host, for a group that spans several hosts.

    Every rank of the group, on all hosts, must allocate the same heaps in the same order.

    store: a store of the group that only this manager uses.
    rank: rank in the group.
    hosts: hosts of the group's ranks.
    device, timeout_s, history: as in `SymmetricGroup`.

    ranks: ranks in the group that are on this host.
    """

    def __init__(
        self, store: Store, rank: int, hosts: Hosts, *, device: str, timeout_s: float, history: int
    ) -> None:
        self.ranks = hosts.ranks_on(hosts.index_W[rank])
        self._store, self._hosts, self._group_rank = store, hosts, rank
        self._num_heaps = 0  # part of the store keys, so that every heap has different keys
        super().__init__(
            self.ranks.index(rank),
            len(self.ranks),
            device=device,
            timeout_s=timeout_s,
            last_calls=ExchangeLog(rank, history),
        )
        self.reported_rank = rank
        # The flag is in shared memory, so that one failed rank ends the waits of all ranks of the
        # host.
        heap = self.allocate_heap(_FLAG_BYTES, "failure", lambda heap: heap.bytes_N.zero_())
        self.failed = heap.bytes_N.view(torch.int32)
        self._flags_of_ranks: list[Any] = [*heap.owners]
        self._failed_word = ctypes.c_int32(
            0
        )  # remains 0 on a GPU, whose memory the host cannot read
        if device == "cpu":
            # Every call reads this word. Reading it through ctypes is faster than through a tensor.
            self._failed_word = ctypes.c_int32.from_address(self.failed.data_ptr())
        else:
            (shared,) = self._flags_of_ranks
            ranks = range(self.world_size)
            self._flags_of_ranks = [
                shared.get_buffer(index, (_FLAG_BYTES,), torch.uint8) for index in ranks
            ]

    def fail(self) -> None:
        """Set the failure flags of all ranks of this host, which ends their waits."""
        for flag in self._flags_of_ranks:
            flag.view(torch.int32).fill_(1)

    @property
    def has_failed(self) -> bool:
        """Whether a wait for a rank of this host has failed. Reading it does not synchronize."""
        return bool(self._status_word.value or self._failed_word.value)

    def missing(self) -> tuple[int, ...] | None:
        """Return the ranks that a failed wait was waiting for; None if no wait has failed.

        The result is empty if another rank has set the failure flag. This does not synchronize with
        a GPU.
        """
        if not self.has_failed:
            return None
        word = self._status_word.value
        return tuple(rank for index, rank in enumerate(self.ranks) if word >> 32 >> index & 1)

    def _open_store_collectives(self) -> StoreCollectives:
        self._num_heaps += 1
        store = PrefixStore(f"memory/{self._num_heaps}", self._store)
        return StoreCollectives(store, self._group_rank, len(self._hosts.index_W), self.timeout_s)

    def _map_shared_files(self, collectives: StoreCollectives, nbytes: int) -> list[torch.Tensor]:
        return share_memory(collectives, self._group_rank, nbytes, NAN_BYTE, self.ranks)

    def _rendezvous(self, tensor: torch.Tensor) -> Any:
        host = self._hosts.index_W[self._group_rank]
        store = PrefixStore(f"memory/{self._num_heaps}/host/{host}", self._store)
        name: Any = (
            f"modular_kernel/host_memory/{next(_group_numbers)}"  # torch's stubs want another type
        )
        # torch looks up the group by name for its rank, size and store. The group needs no backend.
        group = ProcessGroup(store, self.rank, self.world_size)  # torch keeps no reference to it
        register_process_group(name, group)
        try:
            return _SymmetricMemory.rendezvous(tensor, name)
        finally:
            unregister_process_group(name)


class HostThenRankGroup(TorchGroup):
    """Collectives over one process group, and memory that the ranks of each host share.

    The arguments are as in `TorchGroup`. Raise ConfigurationError on every rank unless all hosts
    have the same number of ranks, numbered consecutively.

    host_memory: the shared memory of this host; None until it is created.
    agreement: headers and flags of calls with a fixed capacity (`fixed_capacity.HostAgreement`);
        None until a layer needs them.
    """

    def __init__(
        self,
        group: object | None = None,
        *,
        timeout_s: float | None = None,
        device: str | None = None,
        history: int = 1024,
        checked: bool = True,
    ) -> None:
        self.host_memory: HostMemory | None = None  # set once the hosts are known
        self.agreement: Any = None
        super().__init__(
            group, timeout_s=timeout_s, device=device, history=history, checked=checked
        )
        self.ranks_per_host = self.world_size // len(self.hosts)
        if not self.hosts.has_consecutive_ranks(self.ranks_per_host):
            self.destroy()
            need = "the same number of consecutive ranks on each host"
            raise ConfigurationError("hosts of the ranks", got=str(self.hosts), need=need)
        try:
            self.host_memory = HostMemory(
                PrefixStore("inside", self._store),
                self.rank,
                self.hosts,
                device=self.device,
                timeout_s=self.timeout_s,
                history=history,
            )
        except CommunicationError:
            self._close_connections()
            raise

    @property
    def host(self) -> int:
        """Index of this rank's host."""
        return self.hosts.index_W[self.rank]

    @property
    def memory(self) -> HostMemory:
        """The shared memory of this host."""
        assert self.host_memory is not None
        return self.host_memory

    def allocate_heap(
        self, nbytes: int, signature: str, initialize: Callable[[Heap], object]
    ) -> Heap:
        """Allocate a heap on each host; see `SharedMemory`. Collective over all ranks."""
        self._check_open()
        return self.memory.allocate_heap(nbytes, signature, initialize)

    def record_host_exchange(self, step: int, phase: str) -> None:
        """Add an exchange within hosts to the sequence of exchanges that handshakes compare."""
        self.order = zlib.crc32(f"{step} {phase} inside".encode(), self.order)

    def check_host_memory(self, step: int, phase: str, nbytes: int, started_s: float) -> None:
        """Raise CommunicationError if this manager, or a wait for ranks of this host, has failed.

        nbytes: bytes that this rank exchanges, for the log.
        started_s: start of the exchange (time.monotonic).
        """
        self._check_open()
        missing = self.memory.missing()
        if missing is None:
            return
        record = self.last_calls.begin(step, phase, nbytes)
        ranks = f"{pluralize('rank', len(missing))} {', '.join(map(str, missing))}"
        missing_flags = f"no flag from {ranks} of this host"
        reason = missing_flags if missing else "a rank of this host ended the wait"
        record["awaited"] = missing
        raise self._handle_failure(record, started_s, RuntimeError(reason))

    def destroy(self) -> None:
        super().destroy()
        if self.host_memory is not None:
            self.host_memory.destroy()

    def _close_connections(self) -> None:
        super()._close_connections()
        if self.host_memory is not None:
            with suppress(RuntimeError):  # if the GPU has failed, peers time out instead
                self.host_memory.fail()
