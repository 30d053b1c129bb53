"""Collects the device and the software versions, for the records of benchmarks and profiles."""

import platform
import shutil
import subprocess
from datetime import UTC, datetime

import torch

from modular_kernel.utils.package_probes import installed_version

Environment = dict[str, str | int | None]


def collect_environment(device: torch.device, command: str) -> Environment:
    """Return the device, the software versions and the command of a measurement.

    A value is None if it is not available.

    command: the command line of the measurement.
    """
    fields: Environment = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "version": installed_version("modular-kernel"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "cuda": torch.version.cuda,
        "host": platform.machine(),
        "device": "cpu",
        "driver": None,
    }
    if device.type != "cuda":
        return fields
    properties = torch.cuda.get_device_properties(device)
    return fields | {
        "device": properties.name,
        "driver": read_driver_version(),
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
    }


def read_driver_version() -> str | None:
    """Return the version of the GPU driver, or None if it is not available."""
    output = run_nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    return output.splitlines()[0].strip() if output else None


def run_nvidia_smi(*arguments: str) -> str | None:
    """Return the output of nvidia-smi, or None if the program is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        result = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.rstrip() if result.returncode == 0 else None
