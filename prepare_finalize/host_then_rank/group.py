"""HostThenRankGroup: a TorchGroup between hosts, and memory shared by the ranks of each host.

manager = HostThenRankGroup(group, deadline_s=2.0)
kernel = make_kernel("HostThenRankPrepareAndFinalize", "TritonExperts", problem, group=manager)
...
manager.destroy()
"""

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
from prepare_finalize.symm_mem.group import NO_VALUE, Heap, SharedMemory
from prepare_finalize.symm_mem.shared_files import share_memory

_WORD = 4  # bytes of the failure flag
_numbers = count()  # numbers of the groups that this process registers with torch


class HostMemory(SharedMemory):
    """Memory shared by the ranks of this host, for a group that spans several hosts.

    Every rank of the group must allocate heaps in the same order, and all agree on them. `ranks`
    are the group's ranks on this host.

    store: a store of the group that only this manager uses.
    rank: the rank in the group.
    hosts: the hosts of the group's ranks.
    device, deadline_s, history: as in `SymmetricGroup`.
    """

    def __init__(
        self, store: Store, rank: int, hosts: Hosts, *, device: str, deadline_s: float, history: int
    ) -> None:
        self.ranks = hosts.ranks_on(hosts.index_W[rank])
        self._store, self._hosts, self._group_rank, self._heaps = store, hosts, rank, 0
        super().__init__(
            self.ranks.index(rank),
            len(self.ranks),
            device=device,
            deadline_s=deadline_s,
            last_calls=ExchangeLog(rank, history),
        )
        self.reported_rank = rank
        # The flag is in shared memory, so that a rank that fails ends the waits of all ranks here.
        words = self.heap(_WORD, "failure", lambda heap: heap.bytes_N.zero_())
        self.failed = words.bytes_N.view(torch.int32)
        self._failed_of_ranks: list[Any] = [*words.owners]
        if device == "cuda":
            (shared,) = self._failed_of_ranks
            ranks = range(self.world_size)
            self._failed_of_ranks = [
                shared.get_buffer(index, (_WORD,), torch.uint8) for index in ranks
            ]

    def fail(self) -> None:
        """End all current and future waits for the ranks of this host."""
        for word in self._failed_of_ranks:
            word.view(torch.int32).fill_(1)

    def missing(self) -> tuple[int, ...] | None:
        """Return the ranks that a failed wait found missing; None if no wait has failed.

        The result is empty if another rank ended the wait. Does not wait for a GPU.
        """
        word = int(self.status[0])
        if word:
            return tuple(rank for index, rank in enumerate(self.ranks) if word >> 32 >> index & 1)
        return () if self.device == "cpu" and int(self.failed[0]) else None

    def _open_store_collectives(self) -> StoreCollectives:
        self._heaps += 1
        store = PrefixStore(f"memory/{self._heaps}", self._store)
        return StoreCollectives(store, self._group_rank, len(self._hosts.index_W), self.deadline_s)

    def _shared_file(self, collectives: StoreCollectives, nbytes: int) -> list[torch.Tensor]:
        return share_memory(collectives, self._group_rank, nbytes, NO_VALUE, self.ranks)

    def _rendezvous(self, own: torch.Tensor) -> Any:
        host = self._hosts.index_W[self._group_rank]
        store = PrefixStore(f"memory/{self._heaps}/host/{host}", self._store)
        name: Any = (
            f"modular_kernel/host_memory/{next(_numbers)}"  # torch declares another string type
        )
        # torch looks up a group of this name for its rank, size and store; it needs no backend.
        group = ProcessGroup(store, self.rank, self.world_size)  # torch keeps no reference to it
        register_process_group(name, group)
        try:
            return _SymmetricMemory.rendezvous(own, name)
        finally:
            unregister_process_group(name)


class HostThenRankGroup(TorchGroup):
    """Exchanges over the ranks of one process group, and memory shared by the ranks of each host.

    Takes the arguments of `TorchGroup`. host_memory is the shared memory. Raise ConfigurationError
    on every rank unless all hosts have the same number of ranks, numbered consecutively.
    """

    def __init__(
        self,
        group: object | None = None,
        *,
        deadline_s: float | None = None,
        device: str | None = None,
        history: int = 1024,
    ) -> None:
        self.host_memory: HostMemory | None = None  # set once the hosts are known
        super().__init__(group, deadline_s=deadline_s, device=device, history=history)
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
                deadline_s=self.deadline_s,
                history=history,
            )
        except CommunicationError:
            self._close_connections()
            raise

    @property
    def host(self) -> int:
        """The index of this rank's host."""
        return self.hosts.index_W[self.rank]

    @property
    def memory(self) -> HostMemory:
        assert self.host_memory is not None
        return self.host_memory

    def heap(self, nbytes: int, signature: str, initialize: Callable[[Heap], object]) -> Heap:
        """Call `SharedMemory.heap` for the ranks of this host. Collective over all ranks."""
        self._check_open()
        return self.memory.heap(nbytes, signature, initialize)

    def note(self, step: int, phase: str) -> None:
        """Add an exchange within the hosts to the sequence, which must be equal on all ranks."""
        self.order = zlib.crc32(f"{step} {phase} inside".encode(), self.order)

    def check_host_memory(self, step: int, phase: str, nbytes: int, started_s: float) -> None:
        """Raise CommunicationError if this manager, or a wait for ranks of this host, has failed.

        nbytes: size of this rank's data.
        started_s: start of the wait (time.monotonic).
        """
        self._check_open()
        missing = self.memory.missing()
        if missing is None:
            return
        record = self.last_calls.begin(step, phase, nbytes)
        ranks = f"{pluralize('rank', len(missing))} {', '.join(map(str, missing))}"
        no_flag = f"no flag from {ranks} of this host"
        reason = no_flag if missing else "a rank of this host ended the wait"
        record["awaited"] = missing
        raise self._handle_failure(record, started_s, RuntimeError(reason))

    def destroy(self) -> None:
        super().destroy()
        if self.host_memory is not None:
            self.host_memory.destroy()

    def _close_connections(self) -> None:
        super()._close_connections()
        if self.host_memory is not None:
            with suppress(RuntimeError):  # the GPU may have failed; peers then hit their deadline
                self.host_memory.fail()
