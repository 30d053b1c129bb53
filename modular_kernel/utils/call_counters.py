"""Counters of the calls of a kernel, on the host and without synchronization.

Some calls replay recorded launches. They must be fast, and only increment an int in a list that the
recording holds. Other calls run the host code of the parts. They increment a Counter under a lock,
by the reason why they were not replayed.
"""

import threading
from collections import Counter
from typing import Any

import torch

# Reasons why a call was not replayed. RECORDED is the first call of a signature, whose launches
# later calls replay.
RECORDED = "recorded"
OWN_WORKSPACE = "own workspace"
ALLOCATES_OUTPUT = "a part allocates its output"
NOT_REPLAYABLE = "a part is not replayable"
NO_TOKENS = "no tokens"
FIRST_OF_LAYER = "first call of a layer over ranks"
PROFILED_OR_OVERLAPPING = "profiled, or an output overlaps an input"


class CallCounters:
    """Numbers of calls and tokens of one kernel.

    Replayed calls are counted by plan, other calls by the reason why they were not replayed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._tokens = 0
        self._replayed: list[ReplayCounts] = []

    def __reduce__(self) -> tuple[type["CallCounters"], tuple[()]]:
        """Pickle and copy without the counts, so that a copy starts at 0."""
        return CallCounters, ()

    def after_fork(self) -> None:
        """Replace the lock in a forked child, because a thread of the parent may have held it."""
        self._lock = threading.Lock()

    def add(self, reason: str, tokens: int) -> None:
        """Count a call that ran the host code of the parts."""
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
        """Return the numbers that FusedMoEModularKernel.counters describes."""
        with self._lock:
            other_calls, other_tokens = dict(self._calls), self._tokens
            replayed = [counts.totals() for counts in self._replayed]
        replayed_calls = sum(calls for calls, _ in replayed)
        return {
            "calls": sum(other_calls.values()) + replayed_calls,
            "tokens": other_tokens + sum(tokens for _, tokens in replayed),
            "replayed_calls": replayed_calls,
            "recorded_calls": other_calls.pop(RECORDED, 0),
            "fallback_calls": other_calls,
            "plans": len(replayed),
        }


class ReplayCounts:
    """Numbers of replayed calls of one plan, by number of tokens, guarded by the plan's lock."""

    def __init__(self) -> None:
        self._counters: dict[int, list[int]] = {}

    def counter(self, tokens: int) -> list[int]:
        """Return the number of replayed calls with `tokens` tokens, in a list of one element.

        Replays increment the element in place.
        """
        return self._counters.setdefault(tokens, [0])

    def totals(self) -> tuple[int, int]:
        """Return (calls, tokens)."""
        counts = [(tokens, calls) for tokens, (calls,) in tuple(self._counters.items())]
        return sum(calls for _, calls in counts), sum(tokens * calls for tokens, calls in counts)


class DelayedValue:
    """Reads an integer tensor on a GPU without synchronization, with a delay.

    A read starts an asynchronous copy to the host, and returns the value of the last copy that has
    finished.
    """

    def __init__(self) -> None:
        self._value = 0
        self._copy: torch.Tensor | None = None
        self._copy_event: Any = None  # torch.cuda.Event, which has no annotations

    def __reduce__(self) -> tuple[type["DelayedValue"], tuple[()]]:
        return DelayedValue, ()

    def read(self, tensor: torch.Tensor) -> int:
        """Return the value of `tensor`, (1,). On a GPU, this may be an earlier value.

        During CUDA graph capture, no copy is started.
        """
        if not tensor.is_cuda:
            return int(tensor.item())
        if torch.cuda.is_current_stream_capturing():
            return self._value
        if self._copy is not None and self._copy_event is not None and self._copy_event.query():
            self._value = int(self._copy.item())
            self._copy_event = None
        if self._copy_event is None:
            if self._copy is None:
                self._copy = torch.zeros_like(tensor, device="cpu").pin_memory()
            with torch.cuda.device(tensor.device):
                self._copy.copy_(tensor, non_blocking=True)
                self._copy_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copy_event.record()
        return self._value
