"""Hand-written events of a Chrome trace, in the format of torch's profiler."""

from typing import Any

from modular_kernel.replay import stages

Event = dict[str, Any]
HOST = {"ph": "X", "pid": 7, "tid": 7}


def make_range_event(name: str, begin: float, end: float, thread: int = 7) -> Event:
    """Return a named range on the host."""
    event = {**HOST, "cat": "user_annotation", "name": name, "ts": begin, "dur": end - begin}
    return event | {"tid": thread}


def make_launch_event(begin: float, link: int, thread: int = 7) -> Event:
    """Return a launch on the host. link: correlation id of the device work that it launches."""
    event = {**HOST, "cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": begin, "dur": 2}
    return event | {"tid": thread, "args": {"correlation": link}}


def make_device_event(
    name: str, begin: float, dur: float, link: int, kind: str = "kernel"
) -> Event:
    """Return work on the device."""
    event = {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": "stream 7"}
    return event | {"ts": begin, "dur": dur, "args": {"correlation": link}}


def make_call_events() -> list[Event]:
    """Return the events of a call that takes 100 us on the host.

    The call has four launches in stages, and a launch in the experts outside of their stages.
    Another launch precedes the call. Work on the device overlaps twice.
    """
    return [
        {"ph": "M", "name": "process_labels", "pid": 7, "tid": 0, "args": {"labels": "CPU"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
        {"ph": "M", "name": "thread_name", "pid": 7, "tid": 7, "args": {"name": "thread 7"}},
        make_launch_event(-5, 9),
        make_range_event(stages.CALL, 0, 100),
        make_range_event(stages.PREPARE, 5, 20),
        make_range_event(stages.SORT, 6, 16),
        make_launch_event(7, 1),
        make_range_event(stages.EXPERTS, 20, 80),
        make_range_event(stages.GATHER_GEMM1, 25, 45),
        make_launch_event(26, 2),
        make_launch_event(30, 3),
        make_range_event(stages.GEMM2, 50, 60),
        make_launch_event(52, 4),
        make_launch_event(70, 5),
        make_range_event("of another library", 70, 72),
        make_range_event(stages.GEMM2, 500, 600),  # outside of a call
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "pid": 7, "tid": 7, "ts": 26, "id": 2},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": "stream 7", "ts": 210, "id": 2},
        make_device_event("before", 150, 55, 9),  # overlaps "align" by 5 us
        make_device_event("align", 200, 10, 1),
        make_device_event("gemm", 210, 1000, 2),
        make_device_event("copy", 1210, 100, 3, "gpu_memcpy"),
        make_device_event("gemm", 1300, 410, 4),  # overlaps the copy by 10 us
        make_device_event("fill", 1720, 30, 5, "gpu_memset"),
    ]
