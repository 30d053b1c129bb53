"""Limits of a measurement: its time budget, and the free memory of the device."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from modular_kernel.select.process_group import Ranks
from modular_kernel.utils.host_memory import memory_id

_CGROUP = Path("/sys/fs/cgroup")


class Budget:
    """A time limit in seconds, counted from its creation.

    A step is either the build, compilation and timing of one pairing, or the creation of inputs and
    expected outputs for one token count. A step cannot be interrupted, so it is started only if the
    remaining time is at least that of the longest step so far. With several ranks, rank 0's clock
    is used, and `is_over` and `allows` are collective.

    first_step: estimated seconds of the first step.
    """

    def __init__(self, seconds: float, ranks: Ranks, *, first_step: float) -> None:
        self.seconds = seconds
        self._ranks = ranks
        self._start = time.monotonic()
        self._first_step = first_step
        self._longest = 0.0

    @property
    def remaining(self) -> float:
        """Remaining seconds by this rank's clock, at least 0."""
        return max(self.seconds - self.elapsed, 0.0)

    @property
    def elapsed(self) -> float:
        """Seconds since the start by this rank's clock."""
        return time.monotonic() - self._start

    def is_over(self) -> bool:
        """Return whether no time is left; the same on all ranks."""
        return self._ranks.broadcast(self.remaining <= 0)

    def allows(self, steps: int = 1) -> bool:
        """Return whether this many steps are expected to finish in time; the same on all ranks."""
        longest = self._longest or self._first_step
        return self._ranks.broadcast(self.remaining > 0 and self.remaining >= steps * longest)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the duration of the step inside the context."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._longest = max(self._longest, time.monotonic() - start)


def ranks_sharing_memory(ranks: Ranks, device: torch.device) -> int:
    """Return how many ranks use the memory of this rank's device, including this one. Collective.

    The ranks of a host share its memory; ranks on GPUs usually have one each.
    """
    return ranks.all_gather(memory_id(device)).count(memory_id(device))


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a device, or None if unknown.

    For a CPU this is the smaller of the system's free memory and that of the control group.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + int(cached)
    limits = [n for n in (_free_bytes_of_system(), _free_bytes_of_cgroup()) if n is not None]
    return min(limits, default=None)


def _free_bytes_of_system() -> int | None:
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


def _free_bytes_of_cgroup() -> int | None:
    """Return the bytes left in this process's control group, or None without a limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = (_CGROUP / "memory.current").read_text(encoding="ascii").strip()
        return max(int(limit) - int(used), 0)
    except (OSError, ValueError):  # no such limit, or "max"
        return None


def gigabytes(count: float) -> str:
    """Format bytes for a message."""
    return f"{count / 1e9:.1f} GB"
