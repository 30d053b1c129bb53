"""Log of a rank's exchanges, and the search for the ranks that caused a failure.

In normal operation, an exchange only adds an entry to a ring buffer. After a failure, each rank
publishes a record of its failed exchange in the process group's key-value store. From the records
of all ranks, `find_culprits` determines which ranks did not take part or arrived late. The step of
an exchange is the number of its call among the calls of the manager.
"""

import json
import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from prepare_finalize.rendezvous.at_exit import run_in_thread

PHASES = ("construct", "counts", "dispatch", "combine")
_POLL_S = 0.02
_STORE_TIMEOUT_S = 0.5  # time without an answer after which a store is considered dead


class ExchangeLog:
    """Ring buffer with the last exchanges of one rank, oldest first.

    The fields of a record are rank, step, phase, bytes (bytes sent), started_s and ended_s
    (wall-clock seconds), and state: "under way", "done", or a description of the failure.
    """

    def __init__(self, rank: int, max_records: int) -> None:
        self._rank = rank
        self._records: deque[dict[str, Any]] = deque(maxlen=max_records)

    def begin(self, step: int, phase: str, nbytes: int) -> dict[str, Any]:
        """Add a record and return it. The caller passes the record to `end` after the exchange."""
        record: dict[str, Any] = {
            "rank": self._rank,
            "step": step,
            "phase": phase,
            "bytes": nbytes,
            "started_s": time.time(),
            "ended_s": None,
            "state": "under way",
        }
        self._records.append(record)
        return record

    @staticmethod
    def end(record: dict[str, Any], state: str = "done") -> None:
        """Set the end time and the state of a record."""
        record["ended_s"], record["state"] = time.time(), state

    def json_lines(self) -> str:
        """Return the records as JSON lines."""
        return "".join(json.dumps(record) + "\n" for record in self._records)

    def write(self, path: str | Path) -> None:
        Path(path).write_text(self.json_lines(), encoding="utf-8")


class FailureRecords:
    """The failure records of all ranks, in the store of the group.

    is_closed: whether the store closed the connection in the last access, because the process that
        serves it has exited.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self.is_closed = False

    def publish_and_collect(
        self, record: Mapping[str, Any], deadline_s: float
    ) -> dict[int, dict[str, Any]] | None:
        """Publish this rank's record, and wait for the records of all ranks.

        Returns the records by rank, without ranks that have not published a record. Returns None if
        the store does not answer, which may be because its host has failed. A separate thread
        accesses the store, because an access can block forever.

        deadline_s: end of the wait, as a value of time.monotonic.
        """
        records: dict[int, dict[str, Any]] = {}
        last_answer_s = [-math.inf]

        def poll_store() -> None:
            try:
                self._store.set(failure_key(self._rank), json.dumps(record))
                while len(records) < self._world_size and time.monotonic() < deadline_s:
                    self._poll_once(records)
                    last_answer_s[0] = time.monotonic()
                    time.sleep(_POLL_S)
            except RuntimeError:
                last_answer_s[0], self.is_closed = -math.inf, True

        thread = run_in_thread(poll_store)
        thread.join(deadline_s + _STORE_TIMEOUT_S - time.monotonic())
        has_timed_out = time.monotonic() - last_answer_s[0] > _STORE_TIMEOUT_S
        return None if has_timed_out else dict(records)

    def _poll_once(self, records: dict[int, dict[str, Any]]) -> None:
        for rank in range(self._world_size):
            if rank not in records and self._store.check([failure_key(rank)]):
                record = _parse_record(self._store.get(failure_key(rank)))
                if record is not None:
                    records[rank] = record


def _parse_record(payload: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(payload)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    is_valid = record.get("phase") in PHASES and isinstance(record.get("step"), int)
    return record if is_valid and isinstance(record.get("waited_s"), int | float) else None


def failure_key(rank: int) -> str:
    """Return the store key of a rank's failure record."""
    return f"failed/{rank}"


def find_culprits(
    rank: int, world_size: int, records: Mapping[int, Mapping[str, Any]], timeout_s: float
) -> tuple[tuple[int, ...], str]:
    """Return the ranks that probably caused a failure, and the reason.

    rank: this rank, which does not blame itself.
    records: the published failure records by rank.
    timeout_s: timeout of an exchange.

    The result is the first group of this list that is not empty:

    - ranks that aborted a call;
    - ranks that published no record;
    - ranks in an earlier exchange than others, unless they waited there for a peer ("awaited");
    - ranks that were late to the exchange;
    - if this rank was late, the ranks that timed out waiting for it;
    - all other ranks.

    A rank was late if it waited for less time than others. Each rank measures its own waiting time,
    so clocks of different ranks are not compared.
    """
    aborting_ranks = tuple(r for r in records if r != rank and "broke_off" in records[r])
    if aborting_ranks:
        return aborting_ranks, str(records[aborting_ranks[0]]["broke_off"])
    missing_ranks = tuple(r for r in range(world_size) if r not in records)
    if missing_ranks:
        return missing_ranks, "no sign of life"
    other_ranks = tuple(sorted(records.keys() - {rank}))
    position_by_rank = {
        r: (record["step"], PHASES.index(record["phase"])) for r, record in records.items()
    }
    waiting_ranks = {r for r, record in records.items() if record.get("awaited")}
    earlier_ranks = [
        r
        for r in other_ranks
        if position_by_rank[r] < max(position_by_rank.values()) and r not in waiting_ranks
    ]
    if earlier_ranks:
        return tuple(earlier_ranks), "still in an earlier exchange"
    longest_s = max(record["waited_s"] for record in records.values())
    delay_s = {r: longest_s - record["waited_s"] for r, record in records.items()}
    late_ranks = tuple(r for r in other_ranks if delay_s[r] > timeout_s / 2)
    if late_ranks:
        return late_ranks, f"at least {max(delay_s[r] for r in late_ranks):.1f} s late"
    if delay_s[rank] > timeout_s / 2:
        return other_ranks, f"gave up on this rank, which was at least {delay_s[rank]:.1f} s late"
    return other_ranks, "failed too"
