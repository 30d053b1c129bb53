"""Program of tests/core/test_replayed_launch.py, run with a stand-in for libcuda.so.1.

The program launches kernels compiled for sm_90 with Triton's launcher, and then replays a recording
of these launches.
"""

import ctypes
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from experts.triton.kernels.tma_descriptors import tma_descriptor
from modular_kernel.replay import recording
from modular_kernel.replay.launch import triton_versions as compat
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.triton_versions import tma_async_load
from modular_kernel.testing.compile.report import NoDevice

stand_in = ctypes.CDLL("libcuda.so.1")
MAP_PARAMETER_BYTES = (128, 4, 4, 8, 8)  # of a 2D TMA descriptor: map, two sizes, two strides
MAX_BYTES = 1024


class RecordedLaunch(ctypes.Structure):
    """The struct `RecordedLaunch` of driver_stand_in.c."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        *((name, ctypes.c_uint) for name in ("threads", "shared", "dependent", "cooperative")),
        ("other", ctypes.c_uint),
        ("bytes", ctypes.c_uint),
        ("stream", ctypes.c_ulonglong),
        ("value", ctypes.c_ubyte * MAX_BYTES),
    )


class Device(NoDevice):
    """A device that launches with Triton's launcher through the stand-in."""

    launcher_cls = CudaLauncher

    def __init__(self) -> None:
        super().__init__("sm_90")
        self.utils = CudaUtils()

    def get_current_device(self) -> int:  # type: ignore[override]
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 5


@triton.jit
def plain_kernel(x_ptr, out_ptr, rows, factor, wide, flag, none_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=(offsets < rows) & flag, other=0.0)
    tl.store(out_ptr + offsets + wide, x * factor, mask=offsets < rows)


@gluon.jit
def boxes_kernel(x_desc, out_ptr, rows, SIZE: gl.constexpr, num_warps: gl.constexpr):
    shared = gl.allocate_shared_memory(x_desc.dtype, [SIZE, SIZE], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, x_desc.block_type.nbytes)
    tma_async_load(x_desc, [gl.program_id(0) * SIZE, 0], ready, shared)
    mbarrier.wait(ready, 0)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    row = gl.arange(0, SIZE, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(out_ptr + row * SIZE + column, shared.load(LAYOUT), mask=row < rows)


def set_parameter_sizes(sizes: tuple[int, ...]) -> None:
    """Set the parameter sizes of later kernels, in bytes, without the two scratch pointers."""
    sizes += (8, 8)
    (ctypes.c_int * 64).in_dll(stand_in, "parameter_bytes")[: len(sizes)] = sizes
    ctypes.c_int.in_dll(stand_in, "parameter_count").value = len(sizes)


def get_last_launch() -> dict[str, Any]:
    """Return the last launch that the stand-in recorded."""
    count = ctypes.c_int.in_dll(stand_in, "recorded_count").value
    recorded = (RecordedLaunch * 8).in_dll(stand_in, "recorded")[(count - 1) % 8]
    fields = {name: getattr(recorded, name) for name, _ in RecordedLaunch._fields_[1:-1]}
    return {
        **fields,
        "number": count,
        "grid": list(recorded.grid),
        "value": bytes(recorded.value[: recorded.bytes]).hex(),
    }


def launch_both(first: list[torch.Tensor], second: list[torch.Tensor], call: Any) -> dict[str, Any]:
    """Launch two sets of inputs with Triton, then replay a recording of the first with both sets.

    Returns {"refused": reason} if the launch cannot be replayed.
    """
    with recording.record_launches(first) as recorder:
        call(*first)
    num_earlier_launches = get_last_launch()["number"] - 1
    triton_first = get_last_launch()
    call(*second)
    triton_second = get_last_launch()
    recorded = recorder.make_recorded_call()
    if recorded is None:
        return {"refused": recorder.refusal_reason}
    replayed = []
    for tensors in (first, second):
        recorded.replay(5, [tensor.data_ptr() for tensor in tensors])
        replayed.append(get_last_launch())
    for launched in (triton_first, triton_second, *replayed):
        launched["number"] -= num_earlier_launches
    return {"triton": [triton_first, triton_second], "replayed": replayed}


def launch_plain(x: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
    launch(
        plain_kernel, (3, 2), x_ptr=x, out_ptr=out, rows=300, factor=1.25, wide=1 << 40, flag=True,
        none_ptr=None, BLOCK=128, num_warps=8, **options,
    )  # fmt: skip


def launch_boxes(x: torch.Tensor, out: torch.Tensor) -> None:
    launch(
        boxes_kernel,
        (4,),
        x_desc=tma_descriptor(x, 64, 64),
        out_ptr=out,
        rows=60,
        SIZE=64,
        num_warps=4,
    )


def main() -> dict[str, Any]:
    # The stand-in lacks functions that are not called, so symbols must be resolved lazily.
    sys.setdlopenflags(os.RTLD_LAZY)
    triton.runtime.driver.set_active(Device())
    torch.cuda.current_device = lambda: 0
    results: dict[str, Any] = {"triton": triton.__version__}
    first = [torch.zeros(512, dtype=torch.float16), torch.zeros(512, dtype=torch.float16)]
    second = [torch.zeros(512, dtype=torch.float16), torch.zeros(512, dtype=torch.float16)]
    set_parameter_sizes((8, 8, 4, 4, 8, 1))
    results["plain"] = launch_both(first, second, launch_plain)
    results["dependent"] = launch_both(
        first, second, lambda x, out: launch_plain(x, out, launch_pdl=True)
    )
    first, second = (
        [torch.zeros(256, 64, dtype=torch.float16) for _ in range(2)] for _ in range(2)
    )
    set_parameter_sizes((*MAP_PARAMETER_BYTES, 8, 4))
    results["boxes"] = launch_both(first, second, launch_boxes)
    return {**results, **list_refusals()}


def list_refusals() -> dict[str, str]:
    """Return the reasons why launches are not replayed, with one field of the kernel changed."""
    replayable = SimpleNamespace(
        target=SimpleNamespace(backend="cuda"),
        num_ctas=1,
        global_scratch_size=0,
        profile_scratch_size=0,
        shared=232_448,
        instrumentation_mode="",
    )
    reasons = {"as it is": compat.why_not_replayed(replayable)}
    for name, change in (
        ("instrumented", {"instrumentation_mode": "consan"}),
        ("clusters", {"num_ctas": 2}),
        ("scratch", {"global_scratch_size": 8}),
        ("oversized", {"shared": 233_473}),
    ):
        reasons[name] = compat.why_not_replayed(SimpleNamespace(**{**vars(replayable), **change}))
    compat.RELEASE = "3.10"
    return {**reasons, "another release": compat.why_not_replayed(replayable)}


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
