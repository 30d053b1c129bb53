"""Program of tests/core/test_cuda_replay.py, run with a stand-in for libcuda.so.1."""

import ctypes
import json
import sys
from typing import Any

from modular_kernel.replay.launch.launch import cuda_replay as replayer

stand_in = ctypes.CDLL("libcuda.so.1")
KERNEL_ADDRESS = ctypes.cast(stand_in.scale_kernel, ctypes.c_void_p).value
COUNTERS = ("maps", "launches", "graph_launches", "sets", "instantiations", "dependent_launches")


class Buffer:
    """Floats in host memory, at least four."""

    def __init__(self, *values: float) -> None:
        self.memory = (ctypes.c_float * max(len(values), 4))(*values)
        self.pointer = ctypes.addressof(self.memory)


def set_global(name: str, value: int) -> None:
    ctypes.c_int.in_dll(stand_in, name).value = value


def read_and_reset_counters() -> dict[str, int]:
    counts = {name: ctypes.c_int.in_dll(stand_in, name).value for name in COUNTERS}
    for name in COUNTERS:
        set_global(name, 0)
    return {name: value for name, value in counts.items() if value}


def make_scale_record(
    pointers: tuple[int, int],
    factor: float,
    step: int,
    slots: list[tuple[int, int, int]],
    *,
    dependent: bool = False,
    mapped: bool = False,
) -> replayer.LaunchRecord:
    kinds = ("*fp32", "*fp32", "fp32", "i32")
    values = tuple(
        replayer.pack_value(kind, value)
        for kind, value in zip(kinds, (*pointers, factor, step), strict=True)
    )
    assert KERNEL_ADDRESS is not None
    assert None not in values
    if mapped:  # x is passed as a TMA map, of which the stand-in only reads the address
        values = (values[0], values[1].ljust(replayer.MAP_BYTES, b"?"), *values[2:])  # type: ignore[union-attr]
    return replayer.LaunchRecord(
        kernel=None,
        function=KERNEL_ADDRESS,
        grid=(1, 1, 1),
        threads=32,
        shared=0,
        dependent=dependent,
        cooperative=False,
        values=(*values, bytes(8), bytes(8)),  # type: ignore[arg-type]
        slots=tuple(slots),
    )


def record_launches(
    *, dependent: bool = False, num_launches: int = 2, mapped: bool = False
) -> tuple[Any, Buffer]:
    """Record launches of `intermediate = 2 x - 3` and `out = -0.5 intermediate + 1`.

    Returns the recording and `intermediate`. The inputs of a replay are the memory of x, whose
    second float is the start of x, and out.
    """
    intermediate = Buffer()
    first = make_scale_record((intermediate.pointer, 0), 2.0, -3, [(1, 0, 4)], mapped=mapped)
    second = make_scale_record((0, intermediate.pointer), -0.5, 1, [(0, 1, 0)], dependent=dependent)
    launch_records = (first, second)[:num_launches]
    recorded = replayer.get_module().pack(
        0, 2, *replayer.make_pack_arguments(launch_records), launch_records
    )
    return recorded, intermediate


def record_movable_launches(*, mapped: bool = False) -> tuple[Any, Buffer]:
    """Record the same launches, but with `intermediate` at the second float of a third input.

    Returns the recording and the memory of the third input at the time of recording.
    """
    memory = Buffer(*[7.0] * 8)
    intermediate = memory.pointer + 4
    first = make_scale_record((intermediate, 0), 2.0, -3, [(0, 2, 4), (1, 0, 4)])
    second = make_scale_record((0, intermediate), -0.5, 1, [(0, 1, 0), (1, 2, 4)], mapped=mapped)
    launch_records = (first, second)
    return replayer.get_module().pack(
        0, 3, *replayer.make_pack_arguments(launch_records), launch_records
    ), memory


def replay_with_memory(recorded: Any, x: Buffer, out: Buffer, memory: Buffer) -> list[float]:
    out.memory[:] = [float("nan")] * 4
    replayer.get_module().replay(recorded, 7, [x.pointer - 4, out.pointer, memory.pointer])
    return list(out.memory)


def replay(recorded: Any, x: Buffer, out: Buffer, stream: int = 7) -> list[float]:
    out.memory[:] = [float("nan")] * 4
    replayer.get_module().replay(recorded, stream, [x.pointer - 4, out.pointer])
    return list(out.memory)


def catch_error(call: Any) -> str:
    try:
        call()
    except Exception as caught:  # noqa: BLE001
        return f"{type(caught).__name__}: {caught}"
    return ""


def main() -> dict[str, Any]:
    results: dict[str, Any] = {}
    x1, x2 = Buffer(1, 2, 3, 4), Buffer(-8, 0, 8, 16)
    out1, out2 = Buffer(), Buffer()
    recorded, _between = record_launches()
    for name, x, out in (
        ("first", x1, out1),
        ("same again", x1, out1),
        ("other x", x2, out1),
        ("other out", x2, out2),
        ("both back", x1, out1),
    ):
        results[name] = [replay(recorded, x, out), read_and_reset_counters()]
    set_global("capturing", 1)
    results["captured"] = [replay(recorded, x2, out2), read_and_reset_counters()]
    set_global("capturing", 0)
    results["after it"] = [replay(recorded, x1, out1), read_and_reset_counters()]
    results["stream"] = ctypes.c_ulonglong.in_dll(stand_in, "last_stream").value
    dependent, _other_between = record_launches(dependent=True)
    outputs = [replay(dependent, x1, out1)]
    set_global("capturing", 1)
    outputs.append(replay(dependent, x1, out1))
    set_global("capturing", 0)
    results["dependent"] = [outputs, read_and_reset_counters()]
    mapped_launches, _mapped_intermediate = record_launches(mapped=True)
    results["map"] = [
        [replay(mapped_launches, x, out1) for x in (x1, x2)],
        read_and_reset_counters(),
    ]
    for name, mapped in (("moved workspace", False), ("moved map", True)):
        movable, recorded_memory = record_movable_launches(mapped=mapped)
        memories = [Buffer(*[0.0] * 8) for _ in range(2)]
        outputs = [
            replay_with_memory(movable, x, out1, memory)
            for x, memory in zip((x1, x2), memories, strict=True)
        ]
        written = [memory.memory[0] == 0 != memory.memory[1] for memory in memories]
        is_unchanged = set(recorded_memory.memory) == {7.0}
        results[name] = [outputs, written, is_unchanged, read_and_reset_counters()]
    single, _single_intermediate = record_launches(num_launches=1)
    for _ in range(3):
        replay(single, x1, out1)
    results["single"] = read_and_reset_counters()
    set_global("fail", 2)
    ungraphable, _ungraphable_intermediate = record_launches()
    results["no graphs"] = [
        [replay(ungraphable, x1, out1) for _ in range(3)],
        read_and_reset_counters(),
    ]
    set_global("fail", 1)
    set_global("capturing", 1)
    results["failed"] = catch_error(lambda: replay(record_launches()[0], x1, out1))
    set_global("fail", 0)
    module = replayer.get_module()
    results["pointers"] = catch_error(lambda: module.replay(recorded, 0, [1]))
    results["no recorded"] = catch_error(lambda: module.replay(None, 0, [1, 2]))
    results["slot"] = catch_error(lambda: module.pack(0, 1, [], [(5, 0, 0, 0)], [], b"", None))
    results["parameters"] = catch_error(
        lambda: module.pack(0, 1, [(1, (1, 1, 1), 32, 0, 0, 0, 3, 4)], [], [0] * 5, bytes(40), None)
    )
    results["inputs"] = catch_error(lambda: module.pack(0, 65, [], [], [], b"", None))
    results["word offset"] = catch_error(lambda: module.pack(0, 1, [], [], [0, 5], bytes(40), None))
    return results


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
