"""Limits of the measurements by `compose`: the time budget, and the free memory of the device.

`select.search` and `select.timing` check the limits before each step of a measurement.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from modular_kernel.replay.launch.runtime import call_before_compilation
from modular_kernel.select.process_group import Ranks
from modular_kernel.utils.host_memory import get_memory_id

_CGROUP = Path("/sys/fs/cgroup")


class BudgetSpentError(Exception):
    """The time of a budget is over, so the current step is given up."""


class Budget:
    """A limit on the seconds since this object was created.

    The work consists of steps. A step either builds, compiles and times one pairing of parts, or
    creates the inputs and expected outputs of one token count. A step may start if the remaining
    time is at least the duration of the longest step so far. A step that compiles a pairing for the
    first time must also have the time that `first_step_seconds` estimates, because the steps so far
    may have compiled less. A step that takes longer than expected is given up between its parts
    (`require_time`) and, on a single rank, between the compilations of Triton kernels.

    Over several ranks, the clock of rank 0 decides. All ranks must call `is_over`, `allows` and
    `require_time`.

    first_step_seconds: estimated duration of a step that compiles a pairing for the first time.
    """

    def __init__(self, seconds: float, ranks: Ranks, *, first_step_seconds: float) -> None:
        self.seconds = seconds
        self._ranks = ranks
        self._start = time.monotonic()
        self._first_step_seconds = first_step_seconds
        self._longest_step_seconds = 0.0

    @property
    def remaining(self) -> float:
        """Remaining seconds, at least 0, by this rank's clock."""
        return max(self.seconds - self.elapsed, 0.0)

    @property
    def elapsed(self) -> float:
        """Seconds since the start by this rank's clock."""
        return time.monotonic() - self._start

    def is_over(self) -> bool:
        """Return whether no time is left. All ranks get the same result."""
        return self._ranks.broadcast(self.remaining <= 0)

    def allows(self, steps: int = 1, *, new_pairs: int = 0) -> bool:
        """Return whether `steps` more steps may start. All ranks get the same result.

        new_pairs: how many of the steps compile a pairing for the first time.
        """
        longest = self._longest_step_seconds or self._first_step_seconds
        seconds = (steps - new_pairs) * longest + new_pairs * max(longest, self._first_step_seconds)
        return self._ranks.broadcast(self.remaining > 0 and self.remaining >= seconds)

    def require_time(self) -> None:
        """Raise BudgetSpentError on all ranks if no time is left."""
        if self.is_over():
            raise BudgetSpentError

    @contextmanager
    def limit_compilation(self) -> Iterator[None]:
        """Inside the context, raise BudgetSpentError before compiling a kernel after the deadline.

        This has no effect over several ranks, which would wait for each other.
        """
        if self._ranks.size > 1:
            yield
            return
        with call_before_compilation(self.require_time):
            yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the duration of one step, which runs inside the context."""
        start = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - start
            self._longest_step_seconds = max(self._longest_step_seconds, seconds)


def count_ranks_sharing_memory(ranks: Ranks, device: torch.device) -> int:
    """Return the number of ranks, including this rank, that use the memory of the same device.

    On a CPU, this is the number of ranks on the host. All ranks must call this function.
    """
    return ranks.all_gather(get_memory_id(device)).count(get_memory_id(device))


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can be allocated on a device, or None if unknown.

    For a CPU, this is the minimum of the free memory of the system and of the control group.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + int(cached)
    limits = [n for n in (_read_free_system_bytes(), _read_free_cgroup_bytes()) if n is not None]
    return min(limits, default=None)


def _read_free_system_bytes() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        line = next(line for line in text.splitlines() if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _read_free_cgroup_bytes() -> int | None:
    """Return the free bytes of this process's control group, or None if it has no limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = (_CGROUP / "memory.current").read_text(encoding="ascii").strip()
        return max(int(limit) - int(used), 0)
    except (OSError, ValueError):  # no file, or "max", which means no limit
        return None


def format_gigabytes(count: float) -> str:
    """Format a number of bytes as gigabytes: "1.5 GB"."""
    return f"{count / 1e9:.1f} GB"
