"""Where and with what a benchmark ran."""

import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import torch

Environment = dict[str, str | int | None]


def environment(device: torch.device, command: str) -> Environment:
    """Names and versions; None for what is not there."""
    found: Environment = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "version": _version("modular-kernel"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "host": platform.machine(),
        "device": "cpu",
        "driver": None,
    }
    if device.type != "cuda":
        return found
    properties = torch.cuda.get_device_properties(device)
    return found | {
        "device": properties.name,
        "driver": _driver(),
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    words = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip().partition("\n")[0] or None
