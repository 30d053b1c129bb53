"""Records of a rank's last exchanges and of failures, for finding the rank that caused one.

A call costs only one entry in a ring buffer. The store is written and read only after a failure.
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
_SILENCE_S = 0.5  # time without an answer after which a store is considered dead


class LastCalls:
    """The last exchanges of one rank, oldest first.

    A record is {rank, step, phase, bytes, started_s, ended_s, state}: bytes sent, wall-clock
    seconds, and the state "under way", "done" or a description of the failure.
    """

    def __init__(self, rank: int, max_records: int) -> None:
        self._rank = rank
        self._records: deque[dict[str, Any]] = deque(maxlen=max_records)

    def begin(self, step: int, phase: str, nbytes: int) -> dict[str, Any]:
        """Add a record and return it. Pass it to `end` once the exchange has been waited for."""
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
        record["ended_s"], record["state"] = time.time(), state

    def json_lines(self) -> str:
        """Return the records as JSON lines."""
        return "".join(json.dumps(record) + "\n" for record in self._records)

    def write(self, path: str | Path) -> None:
        """Write `json_lines` to a file."""
        Path(path).write_text(self.json_lines(), encoding="utf-8")


class FailureBoard:
    """Failure records of all ranks, published in the store. A rank without one is a culprit.

    `ended` is whether the store closed the connection in the last access, which means that its
    process has exited.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self.ended = False

    def post(self, record: Mapping[str, Any], until_s: float) -> dict[int, dict[str, Any]] | None:
        """Publish a record; return those of all ranks known at `until_s` (time.monotonic).

        Return None if the store does not answer: its host may be what failed. Accessing such a
        store can block forever, so a thread does it.
        """
        records: dict[int, dict[str, Any]] = {}
        answered_s = [-math.inf]

        def poll_store() -> None:
            try:
                self._store.set(failure_key(self._rank), json.dumps(record))
                while len(records) < self._world_size and time.monotonic() < until_s:
                    self._poll_once(records)
                    answered_s[0] = time.monotonic()
                    time.sleep(_POLL_S)
            except RuntimeError:
                answered_s[0], self.ended = -math.inf, True

        thread = run_in_thread(poll_store)
        thread.join(until_s + _SILENCE_S - time.monotonic())
        is_silent = time.monotonic() - answered_s[0] > _SILENCE_S
        return None if is_silent else dict(records)

    def _poll_once(self, records: dict[int, dict[str, Any]]) -> None:
        for rank in range(self._world_size):
            if rank not in records and self._store.check([failure_key(rank)]):
                record = _parse_record(self._store.get(failure_key(rank)))
                if record is not None:
                    records[rank] = record


def _parse_record(payload: bytes) -> dict[str, Any] | None:
    """Parse the record of a rank; return None if the entry is not a record."""
    try:
        record = json.loads(payload)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    is_valid = record.get("phase") in PHASES and isinstance(record.get("step"), int)
    return record if is_valid and isinstance(record.get("waited_s"), int | float) else None


def failure_key(rank: int) -> str:
    """Return the key of a rank's failure record."""
    return f"failed/{rank}"


def culprits(
    rank: int, world_size: int, failed: Mapping[int, Mapping[str, Any]], deadline_s: float
) -> tuple[tuple[int, ...], str]:
    """Return the ranks that probably caused a failure, and the reason, from all published records.

    The first of these that applies:

    - ranks that aborted a call;
    - ranks that published no record;
    - ranks in an earlier exchange than others, unless they waited there for a peer ("awaited");
    - ranks that were late to the exchange;
    - if this rank was late, the ranks that timed out waiting for it;
    - all other ranks.

    A rank was late if it waited for less time than others. Each rank measures its own waiting time,
    so clocks of different ranks are not compared.
    """
    broke_off = tuple(r for r in failed if r != rank and "broke_off" in failed[r])
    if broke_off:
        return broke_off, str(failed[broke_off[0]]["broke_off"])
    missing = tuple(r for r in range(world_size) if r not in failed)
    if missing:
        return missing, "no sign of life"
    others = tuple(sorted(failed.keys() - {rank}))
    position = {r: (record["step"], PHASES.index(record["phase"])) for r, record in failed.items()}
    is_waiting = {r for r, record in failed.items() if record.get("awaited")}
    earlier = [r for r in others if position[r] < max(position.values()) and r not in is_waiting]
    if earlier:
        return tuple(earlier), "still in an earlier exchange"
    longest_s = max(record["waited_s"] for record in failed.values())
    delay_s = {r: longest_s - record["waited_s"] for r, record in failed.items()}
    late_ranks = tuple(r for r in others if delay_s[r] > deadline_s / 2)
    if late_ranks:
        return late_ranks, f"at least {max(delay_s[r] for r in late_ranks):.1f} s late"
    if delay_s[rank] > deadline_s / 2:
        return others, f"gave up on this rank, which was at least {delay_s[rank]:.1f} s late"
    return others, "failed too"
