"""Counters of a kernel's calls, on the host and without synchronization.

A replayed call only increments a number that its recording holds, because it must be fast. Other
calls run the parts' host code, which takes many times longer than counting.
"""

import threading
from collections import Counter
from typing import Any

import torch

# Reasons why a call was not replayed. RECORDED is the first call of a signature, whose launches
# later calls replay.
RECORDED = "recorded"
OWN_WORKSPACE = "own workspace"
ALLOCATES = "a part allocates its output"
NOT_DECLARED = "a part is not replayable"
NO_TOKENS = "no tokens"
FIRST_OF_LAYER = "first call of a layer over ranks"
OBSERVED = "profiled, or an output overlaps an input"


class CallCounters:
    """Calls and tokens of one kernel: replayed calls by plan, and other calls by their reason."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._tokens = 0
        self._replayed: list[ReplayCounts] = []

    def __reduce__(self) -> tuple[type["CallCounters"], tuple[()]]:
        """Pickle and copy without the counts: the copy starts at 0."""
        return CallCounters, ()

    def after_fork(self) -> None:
        """In a forked child, renew the lock, which a lost thread may hold."""
        self._lock = threading.Lock()

    def add(self, reason: str, tokens: int) -> None:
        """Count a call that ran the parts' host code."""
        with self._lock:
            self._calls[reason] += 1
            self._tokens += tokens

    def add_plan(self) -> "ReplayCounts":
        """Return the counts of a new plan."""
        counts = ReplayCounts()
        with self._lock:
            self._replayed.append(counts)
        return counts

    def totals(self) -> dict[str, object]:
        """Return calls, tokens, replayed and recorded calls, fallbacks by reason, and plans."""
        with self._lock:
            calls, tokens = dict(self._calls), self._tokens
            replayed = [counts.totals() for counts in self._replayed]
        replayed_calls = sum(calls_ for calls_, _ in replayed)
        return {
            "calls": sum(calls.values()) + replayed_calls,
            "tokens": tokens + sum(tokens_ for _, tokens_ in replayed),
            "replayed_calls": replayed_calls,
            "recorded_calls": calls.pop(RECORDED, 0),
            "fallback_calls": calls,
            "plans": len(replayed),
        }


class ReplayCounts:
    """Replayed calls of one plan, by number of tokens. The plan's lock guards them."""

    def __init__(self) -> None:
        self._cells: dict[int, list[int]] = {}

    def cell(self, tokens: int) -> list[int]:
        """Return a list with one number: the count of replayed calls of `tokens` tokens."""
        return self._cells.setdefault(tokens, [0])

    def totals(self) -> tuple[int, int]:
        """Return (calls, tokens)."""
        cells = [(tokens, cell[0]) for tokens, cell in tuple(self._cells.items())]
        return sum(calls for _, calls in cells), sum(tokens * calls for tokens, calls in cells)


class DelayedValue:
    """Reads an integer tensor without waiting; on a GPU, the value is that of an earlier read."""

    def __init__(self) -> None:
        self._value = 0
        self._copy: torch.Tensor | None = None
        self._copied: Any = None  # torch.cuda.Event, which has no annotations

    def __reduce__(self) -> tuple[type["DelayedValue"], tuple[()]]:
        return DelayedValue, ()

    def read(self, tensor: torch.Tensor) -> int:
        """Return the value of `tensor`, (1,).

        On a GPU, return the value that was copied last, and start another copy.
        """
        if not tensor.is_cuda:
            return int(tensor.item())
        if torch.cuda.is_current_stream_capturing():
            return self._value
        if self._copy is not None and self._copied is not None and self._copied.query():
            self._value = int(self._copy.item())
            self._copied = None
        if self._copied is None:
            if self._copy is None:
                self._copy = torch.zeros_like(tensor, device="cpu").pin_memory()
            with torch.cuda.device(tensor.device):
                self._copy.copy_(tensor, non_blocking=True)
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copied.record()
        return self._value
