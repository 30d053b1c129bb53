"""Identification of the memory that processes share: a host's, or a GPU's."""

import socket
from pathlib import Path

import torch

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return an identifier of the running machine, or its host name if there is none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def memory_id(device: torch.device) -> str:
    """Return an identifier that is equal for processes whose `device` has the same memory."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return boot_id()
