"""Program of tests/core/test_cuda_replay.py, run with a stand-in for libcuda.so.1."""

import ctypes
import json
import sys
from typing import Any

from modular_kernel.replay.launch.launch import cuda_replay as replayer

stand_in = ctypes.CDLL("libcuda.so.1")
KERNEL = ctypes.cast(stand_in.scale_kernel, ctypes.c_void_p).value
COUNTERS = ("maps", "launches", "graph_launches", "sets", "instantiations", "dependent_launches")


class Buffer:
    """Floats in host memory, at least four."""

    def __init__(self, *values: float) -> None:
        self.memory = (ctypes.c_float * max(len(values), 4))(*values)
        self.pointer = ctypes.addressof(self.memory)


def set_to(name: str, value: int) -> None:
    ctypes.c_int.in_dll(stand_in, name).value = value


def counters() -> dict[str, int]:
    counts = {name: ctypes.c_int.in_dll(stand_in, name).value for name in COUNTERS}
    for name in COUNTERS:
        set_to(name, 0)
    return {name: value for name, value in counts.items() if value}


def scale(
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
    assert KERNEL is not None
    assert None not in values
    if mapped:  # x is passed as a TMA map, of which the stand-in only reads the address
        values = (values[0], values[1].ljust(replayer.MAP_BYTES, b"?"), *values[2:])  # type: ignore[union-attr]
    return replayer.LaunchRecord(
        kernel=None,
        function=KERNEL,
        grid=(1, 1, 1),
        threads=32,
        shared=0,
        dependent=dependent,
        cooperative=False,
        values=(*values, bytes(8), bytes(8)),  # type: ignore[arg-type]
        slots=tuple(slots),
    )


def record_launches(
    *, dependent: bool = False, launches: int = 2, mapped: bool = False
) -> tuple[Any, Buffer]:
    """Record `between = 2 x - 3` and `out = -0.5 between + 1`; return the record and `between`.

    Inputs of a replay are out and x, which starts at the second float of its memory.
    """
    between = Buffer()
    first = scale((between.pointer, 0), 2.0, -3, [(1, 0, 4)], mapped=mapped)
    second = scale((0, between.pointer), -0.5, 1, [(0, 1, 0)], dependent=dependent)
    described = (first, second)[:launches]
    recorded = replayer.get_module().pack(0, 2, *replayer.make_pack_arguments(described), described)
    return recorded, between


def record_movable_launches(*, mapped: bool = False) -> tuple[Any, Buffer]:
    """Record the same launches, but with `between` at the second float of a third input.

    Return the record and the memory of that input at the time of recording.
    """
    memory = Buffer(*[7.0] * 8)
    between = memory.pointer + 4
    first = scale((between, 0), 2.0, -3, [(0, 2, 4), (1, 0, 4)])
    second = scale((0, between), -0.5, 1, [(0, 1, 0), (1, 2, 4)], mapped=mapped)
    described = (first, second)
    return replayer.get_module().pack(
        0, 3, *replayer.make_pack_arguments(described), described
    ), memory


def replay_in(recorded: Any, x: Buffer, out: Buffer, memory: Buffer) -> list[float]:
    out.memory[:] = [float("nan")] * 4
    replayer.get_module().replay(recorded, 7, [x.pointer - 4, out.pointer, memory.pointer])
    return list(out.memory)


def replay(recorded: Any, x: Buffer, out: Buffer, stream: int = 7) -> list[float]:
    out.memory[:] = [float("nan")] * 4
    replayer.get_module().replay(recorded, stream, [x.pointer - 4, out.pointer])
    return list(out.memory)


def error(call: Any) -> str:
    try:
        call()
    except Exception as caught:  # noqa: BLE001
        return f"{type(caught).__name__}: {caught}"
    return ""


def main() -> dict[str, Any]:
    results: dict[str, Any] = {}
    one, two = Buffer(1, 2, 3, 4), Buffer(-8, 0, 8, 16)
    out, other = Buffer(), Buffer()
    recorded, _between = record_launches()
    for name, x, to in (
        ("first", one, out),
        ("same again", one, out),
        ("other x", two, out),
        ("other out", two, other),
        ("both back", one, out),
    ):
        results[name] = [replay(recorded, x, to), counters()]
    set_to("capturing", 1)
    results["captured"] = [replay(recorded, two, other), counters()]
    set_to("capturing", 0)
    results["after it"] = [replay(recorded, one, out), counters()]
    results["stream"] = ctypes.c_ulonglong.in_dll(stand_in, "last_stream").value
    dependent, _other_between = record_launches(dependent=True)
    values = [replay(dependent, one, out)]
    set_to("capturing", 1)
    values.append(replay(dependent, one, out))
    set_to("capturing", 0)
    results["dependent"] = [values, counters()]
    boxes, _of_boxes = record_launches(mapped=True)
    results["map"] = [[replay(boxes, x, out) for x in (one, two)], counters()]
    for name, mapped in (("moved workspace", False), ("moved map", True)):
        movable, recorded_memory = record_movable_launches(mapped=mapped)
        memories = [Buffer(*[0.0] * 8) for _ in range(2)]
        values = [
            replay_in(movable, x, out, memory)
            for x, memory in zip((one, two), memories, strict=True)
        ]
        written = [memory.memory[0] == 0 != memory.memory[1] for memory in memories]
        kept = set(recorded_memory.memory) == {7.0}
        results[name] = [values, written, kept, counters()]
    single, _third = record_launches(launches=1)
    for _ in range(3):
        replay(single, one, out)
    results["single"] = counters()
    set_to("fail", 2)
    ungraphable, _fourth = record_launches()
    results["no graphs"] = [[replay(ungraphable, one, out) for _ in range(3)], counters()]
    set_to("fail", 1)
    set_to("capturing", 1)
    results["failed"] = error(lambda: replay(record_launches()[0], one, out))
    set_to("fail", 0)
    module = replayer.get_module()
    results["pointers"] = error(lambda: module.replay(recorded, 0, [1]))
    results["no recorded"] = error(lambda: module.replay(None, 0, [1, 2]))
    results["slot"] = error(lambda: module.pack(0, 1, [], [(5, 0, 0, 0)], [], b"", None))
    results["parameters"] = error(
        lambda: module.pack(0, 1, [(1, (1, 1, 1), 32, 0, 0, 0, 3, 4)], [], [0] * 5, bytes(40), None)
    )
    results["inputs"] = error(lambda: module.pack(0, 65, [], [], [], b"", None))
    results["word offset"] = error(lambda: module.pack(0, 1, [], [], [0, 5], bytes(40), None))
    return results


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
