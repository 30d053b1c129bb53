"""Identifiers of hosts and GPUs, by which processes find out whether they share memory."""

import socket
from pathlib import Path

import torch

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the boot id of this host, or its name if the system has no boot ids."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def get_memory_id(device: torch.device) -> str:
    """Return an identifier of the memory of `device`, which is the same in all processes."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return boot_id()
