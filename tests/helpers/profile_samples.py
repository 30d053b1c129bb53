"""Hand-written events of a Chrome trace, in the format of torch's profiler."""

from typing import Any

from modular_kernel.replay import stages

Event = dict[str, Any]
HOST = {"ph": "X", "pid": 7, "tid": 7}


def ranged(name: str, begin: float, end: float, thread: int = 7) -> Event:
    """Return a named range on the host."""
    event = {**HOST, "cat": "user_annotation", "name": name, "ts": begin, "dur": end - begin}
    return event | {"tid": thread}


def launch(begin: float, link: int, thread: int = 7) -> Event:
    """Return the host's launch of the device work with the same correlation id."""
    event = {**HOST, "cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": begin, "dur": 2}
    return event | {"tid": thread, "args": {"correlation": link}}


def ran(name: str, begin: float, dur: float, link: int, kind: str = "kernel") -> Event:
    """Return work on the device."""
    event = {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": "stream 7"}
    return event | {"ts": begin, "dur": dur, "args": {"correlation": link}}


def one_call() -> list[Event]:
    """Return a call of 100 us on the host.

    It has 1 + 2 + 1 launches in stages, one elsewhere in the experts and one before the call; two
    kernels overlap on the device.
    """
    return [
        {"ph": "M", "name": "process_labels", "pid": 7, "tid": 0, "args": {"labels": "CPU"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
        {"ph": "M", "name": "thread_name", "pid": 7, "tid": 7, "args": {"name": "thread 7"}},
        launch(-5, 9),
        ranged(stages.CALL, 0, 100),
        ranged(stages.PREPARE, 5, 20),
        ranged(stages.SORT, 6, 16),
        launch(7, 1),
        ranged(stages.EXPERTS, 20, 80),
        ranged(stages.GATHER_GEMM1, 25, 45),
        launch(26, 2),
        launch(30, 3),
        ranged(stages.GEMM2, 50, 60),
        launch(52, 4),
        launch(70, 5),
        ranged("of another library", 70, 72),
        ranged(stages.GEMM2, 500, 600),  # outside of a call
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "pid": 7, "tid": 7, "ts": 26, "id": 2},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": "stream 7", "ts": 210, "id": 2},
        ran("before", 150, 55, 9),  # overlaps the next by 5
        ran("align", 200, 10, 1),
        ran("gemm", 210, 1000, 2),
        ran("copy", 1210, 100, 3, "gpu_memcpy"),
        ran("gemm", 1300, 410, 4),  # begins while the copy has 10 us to go
        ran("fill", 1720, 30, 5, "gpu_memset"),
    ]
