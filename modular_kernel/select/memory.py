"""Free memory of a device, checked before large allocations."""

import os
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a device, or None if unknown.

    For a CPU it is the minimum of the system's and the control group's.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + int(cached)
    limits = [n for n in (_system(), _group()) if n is not None]
    return min(limits, default=None)


def _system() -> int | None:
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


def _group() -> int | None:
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
