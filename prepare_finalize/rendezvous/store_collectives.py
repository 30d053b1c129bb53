"""Collectives over a torch.distributed store, for the time before ranks have a communicator.

The ranks of a group connect through a key-value store (`torch.distributed.Store`). While a manager
is created, they use the store to compare small properties, such as host names and buffer sizes. If
ranks with different properties shared buffers, the library that owns them would hang or corrupt
memory.
"""

import json
import time
from collections.abc import Mapping

from torch._C._distributed_c10d import Store

from modular_kernel.errors import CommunicationError
from prepare_finalize.rendezvous.failure_log import failure_key

Properties = Mapping[str, object]
_POLL_S = 0.005  # polling, because the timeout of a store's own wait may be in whole seconds


class StoreCollectives:
    """All-gather, comparison and barrier of the ranks of a group, over a store.

    Every rank must call the same methods in the same order. If a rank does not respond, all ranks
    raise CommunicationError with the missing ranks.

    store: a store with a prefix that no other object uses, from `connect.new_prefix_store`.
    timeout_s: timeout of one collective, in seconds.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout_s = timeout_s
        self._num_gathers = 0  # part of the keys, so that every collective has different keys

    def all_gather(self, properties: Properties) -> tuple[dict[str, str], ...]:
        """Publish `properties`; return the properties of each rank, with string values."""
        self._num_gathers += 1
        deadline = time.monotonic() + self._timeout_s
        payload = json.dumps({name: str(value) for name, value in properties.items()})
        received: dict[int, dict[str, str]] = {}
        try:
            self._store.set(self._make_key(self._rank), payload)
            while len(received) < self._world_size and time.monotonic() < deadline:
                self._poll(received)
            missing = [rank for rank in range(self._world_size) if rank not in received]
            if missing:
                # Record the failure, so that the next attempt uses other keys; see
                # `connect.agree_on_prefix`.
                self._store.set(failure_key(self._rank), "{}")
        except RuntimeError as error:  # the store is unreachable
            raise self._make_error(f"a store that fails: {error}", ()) from error
        if missing:
            raise self._make_error("no sign of life", missing)
        return tuple(received[rank] for rank in range(self._world_size))

    def check_equal(self, properties: Properties) -> None:
        """Raise CommunicationError on every rank unless all ranks pass the same properties."""
        gathered = self.all_gather(properties)
        local_properties = gathered[self._rank]
        peers = [rank for rank, other in enumerate(gathered) if other != local_properties]
        if peers:
            names = dict.fromkeys(name for other in gathered for name in other)
            by_rank = {name: [other.get(name, "nothing") for other in gathered] for name in names}
            differences = [
                f"{name} {', '.join(values)} by rank"
                for name, values in by_rank.items()
                if len(set(values)) > 1
            ]
            raise self._make_error("; ".join(differences), peers, need="the same on all ranks")

    def barrier(self) -> None:
        """Wait until all ranks have reached this call."""
        self.all_gather({})

    def _poll(self, received: dict[int, dict[str, str]]) -> None:
        """Read the properties that have arrived; sleep briefly if some are missing."""
        for rank in range(self._world_size):
            if rank not in received and self._store.check([self._make_key(rank)]):
                received[rank] = self._read(rank)
        if len(received) < self._world_size:
            time.sleep(_POLL_S)

    def _read(self, rank: int) -> dict[str, str]:
        """Read the properties of a rank. Raise RuntimeError if they are not valid."""
        payload = self._store.get(self._make_key(rank))
        try:
            properties = json.loads(payload)
        except ValueError as error:
            raise RuntimeError(f"it holds {payload[:20]!r} for rank {rank}") from error
        if not isinstance(properties, dict):
            raise RuntimeError(f"it holds {payload[:20]!r} for rank {rank}")
        return {str(name): str(value) for name, value in properties.items()}

    def _make_key(self, rank: int) -> str:
        return f"gather/{self._num_gathers}/{rank}"

    def _make_error(
        self, got: str, peers: list[int] | tuple[int, ...], need: str | None = None
    ) -> CommunicationError:
        need = need or f"every rank within {self._timeout_s:g} s"
        subject = "ranks that share buffers"
        return CommunicationError(
            subject, got=got, need=need, rank=self._rank, phase="construct", peers=peers
        )
