"""Counts the kernels, copies and fills that a call launches on a GPU, with torch's profiler.

Once the profiler has run, it stays loaded and slows down later launches. Count launches after all
timing.
"""

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, schedule

from modular_kernel.measure.timing import Call

_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


def count_launches(call: Call, device: torch.device) -> int | None:
    """Count the launches of an eager call. Returns None if the profiler cannot trace a GPU."""
    if device.type != "cuda":
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with torch.profiler.profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
            # The profiler initializes itself in the first step, so only the second one is recorded.
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
            acc_events=True,
        ) as profiler:
            for _ in range(2):
                call()
                torch.cuda.synchronize()
                profiler.step()
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return count_device_events(events) or None


def count_device_events(events: Iterable[Mapping[str, Any]]) -> int:
    """Count the kernels, copies and fills on the device in the events of a Chrome trace."""
    return sum(event.get("cat") in _DEVICE_CATEGORIES for event in events)
