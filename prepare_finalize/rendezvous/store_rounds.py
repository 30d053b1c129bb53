"""Where ranks tell each other facts, before they share a vendor library's buffers."""

import json
import time
from collections.abc import Mapping

from torch._C._distributed_c10d import Store

from modular_kernel.errors import CommunicationError
from prepare_finalize.rendezvous.failure_log import failure_key

Facts = Mapping[str, object]
_POLL_S = 0.005  # a store's own wait may count in whole seconds


class Meeting:
    """Rounds over a store: each rank tells its facts and hears those of all, or nobody goes on.

    store: under the prefix that `meeting_place` gives. Every rank makes the same rounds in the
    same order. deadline_s: of each round.
    """

    def __init__(self, store: Store, rank: int, world_size: int, deadline_s: float) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._deadline_s, self._round = deadline_s, 0

    def tell(self, facts: Facts) -> tuple[dict[str, str], ...]:
        """Tell `facts`; return what every rank told, by rank, as text.

        CommunicationError names who stayed away.
        """
        self._round += 1
        until = time.monotonic() + self._deadline_s
        told = json.dumps({name: str(value) for name, value in facts.items()})
        heard: dict[int, dict[str, str]] = {}
        try:
            self._store.set(self._key(self._rank), told)
            while len(heard) < self._world_size and time.monotonic() < until:
                self._listen(heard)
            missing = [rank for rank in range(self._world_size) if rank not in heard]
            if missing:
                # Ranks that try again then meet elsewhere, see `meeting_place`.
                self._store.set(failure_key(self._rank), "{}")
        except RuntimeError as error:  # the store's host is gone
            raise self._error(f"a store that fails: {error}", ()) from error
        if missing:
            raise self._error("no sign of life", missing)
        return tuple(heard[rank] for rank in range(self._world_size))

    def _listen(self, heard: dict[int, dict[str, str]]) -> None:
        """Note who has spoken by now; a moment later where somebody has not."""
        for rank in range(self._world_size):
            if rank not in heard and self._store.check([self._key(rank)]):
                heard[rank] = self._read(rank)
        if len(heard) < self._world_size:
            time.sleep(_POLL_S)

    def _read(self, rank: int) -> dict[str, str]:
        """RuntimeError where that is not what a rank tells."""
        told = self._store.get(self._key(rank))
        try:
            facts = json.loads(told)
        except ValueError as error:
            raise RuntimeError(f"it holds {told[:20]!r} for rank {rank}") from error
        if not isinstance(facts, dict):
            raise RuntimeError(f"it holds {told[:20]!r} for rank {rank}")
        return {str(name): str(value) for name, value in facts.items()}

    def agree(self, facts: Facts) -> None:
        """CommunicationError on every rank alike if they do not all tell the same."""
        told = self.tell(facts)
        mine = told[self._rank]
        peers = [rank for rank, theirs in enumerate(told) if theirs != mine]
        if peers:
            names = dict.fromkeys(name for theirs in told for name in theirs)
            by_rank = {name: [theirs.get(name, "nothing") for theirs in told] for name in names}
            differ = [
                f"{name} {', '.join(values)} by rank"
                for name, values in by_rank.items()
                if len(set(values)) > 1
            ]
            raise self._error("; ".join(differ), peers, need="the same on all ranks")

    def _key(self, rank: int) -> str:
        return f"meeting/{self._round}/{rank}"

    def _error(
        self, got: str, peers: list[int] | tuple[int, ...], need: str | None = None
    ) -> CommunicationError:
        need = need or f"every rank within {self._deadline_s:g} s"
        what = "ranks that share buffers"
        return CommunicationError(
            what, got=got, need=need, rank=self._rank, phase="construct", peers=peers
        )
