"""What a rank did last, and what failed where: records that help to find a culprit.

Nothing here costs a call more than a line in a ring buffer: the store is written and read only
after something failed.
"""

import json
import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from prepare_finalize.rendezvous.at_exit import run_aside

PHASES = ("construct", "counts", "dispatch", "combine")
_POLL_S = 0.02
_SILENCE_S = 0.5  # after which a store is taken for dead


class LastCalls:
    """The last exchanges of one rank, oldest first.

    A record is {rank, step, phase, bytes, started_s, ended_s, state}: bytes sent, wall-clock
    seconds, and state "under way", "done" or what went wrong.
    """

    def __init__(self, rank: int, most: int) -> None:
        self._rank = rank
        self._records: deque[dict[str, Any]] = deque(maxlen=most)

    def begin(self, step: int, phase: str, nbytes: int) -> dict[str, Any]:
        """Note an exchange; the record returned is `end`ed by who waits for it."""
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
        """One JSON object a line."""
        return "".join(json.dumps(record) + "\n" for record in self._records)

    def write(self, path: str | Path) -> None:
        """Write `json_lines` to a file of this rank."""
        Path(path).write_text(self.json_lines(), encoding="utf-8")


class FailureBoard:
    """Where a rank that failed says so, and sees who else did: who is missing is the culprit.

    ended: whether the store, asked last, closed the connection, as it does when its process ends.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self.ended = False

    def post(self, record: Mapping[str, Any], until_s: float) -> dict[int, dict[str, Any]] | None:
        """Publish a record; every rank's, as far as known at `until_s` (time.monotonic).

        None if the store does not answer: its host may be what failed, and asking it may take
        for ever, so a thread does that.
        """
        found: dict[int, dict[str, Any]] = {}
        answered_s = [-math.inf]

        def ask() -> None:
            try:
                self._store.set(failure_key(self._rank), json.dumps(record))
                while len(found) < self._world_size and time.monotonic() < until_s:
                    self._look(found)
                    answered_s[0] = time.monotonic()
                    time.sleep(_POLL_S)
            except RuntimeError:
                answered_s[0], self.ended = -math.inf, True

        thread = run_aside(ask)
        thread.join(until_s + _SILENCE_S - time.monotonic())
        silent = time.monotonic() - answered_s[0] > _SILENCE_S
        return None if silent else dict(found)

    def _look(self, found: dict[int, dict[str, Any]]) -> None:
        for rank in range(self._world_size):
            if rank not in found and self._store.check([failure_key(rank)]):
                record = _record(self._store.get(failure_key(rank)))
                if record is not None:
                    found[rank] = record


def _record(told: bytes) -> dict[str, Any] | None:
    """Read what a rank posted; None where somebody else has written there."""
    try:
        record = json.loads(told)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    known = record.get("phase") in PHASES and isinstance(record.get("step"), int)
    return record if known and isinstance(record.get("waited_s"), int | float) else None


def failure_key(rank: int) -> str:
    """Where a rank posts its failure."""
    return f"failed/{rank}"


def culprits(
    rank: int, world_size: int, failed: Mapping[int, Mapping[str, Any]], deadline_s: float
) -> tuple[tuple[int, ...], str]:
    """Return the ranks to look at, and why, by what every rank published after a failure.

    First those that broke off a call; then those that published nothing; then those in an earlier
    exchange than others, unless they waited there for somebody ("awaited"); then those that came to
    it late. If that is this rank alone, those that gave it up. Who came late is who waited for less
    long: each rank counts its own seconds, and no two clocks are compared.
    """
    broke = tuple(r for r in failed if r != rank and "broke_off" in failed[r])
    if broke:
        return broke, str(failed[broke[0]]["broke_off"])
    missing = tuple(r for r in range(world_size) if r not in failed)
    if missing:
        return missing, "no sign of life"
    others = tuple(sorted(failed.keys() - {rank}))
    place = {r: (record["step"], PHASES.index(record["phase"])) for r, record in failed.items()}
    stuck = {r for r, record in failed.items() if record.get("awaited")}
    behind = [r for r in others if place[r] < max(place.values()) and r not in stuck]
    if behind:
        return tuple(behind), "still in an earlier exchange"
    longest = max(record["waited_s"] for record in failed.values())
    late = {r: longest - record["waited_s"] for r, record in failed.items()}
    tardy = tuple(r for r in others if late[r] > deadline_s / 2)
    if tardy:
        return tardy, f"at least {max(late[r] for r in tardy):.1f} s late"
    if late[rank] > deadline_s / 2:
        return others, f"gave up: this rank came at least {late[rank]:.1f} s late"
    return others, "failed too"
