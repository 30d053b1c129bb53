"""What tests/test_player.py runs in a process whose libcuda.so.1 is the stand-in."""

import ctypes
import json
import sys
from typing import Any

from modular_kernel.ops.launch.launch import cuda_replay as player

stand_in = ctypes.CDLL("libcuda.so.1")
KERNEL = ctypes.cast(stand_in.scale_kernel, ctypes.c_void_p).value
COUNTERS = ("maps", "launches", "graph_launches", "sets", "instantiations", "dependent_launches")


class Buffer:
    """Four floats."""

    def __init__(self, *values: float) -> None:
        self.memory = (ctypes.c_float * 4)(*values)
        self.pointer = ctypes.addressof(self.memory)


def set_to(name: str, value: int) -> None:
    ctypes.c_int.in_dll(stand_in, name).value = value


def counters() -> dict[str, int]:
    found = {name: ctypes.c_int.in_dll(stand_in, name).value for name in COUNTERS}
    for name in COUNTERS:
        set_to(name, 0)
    return {name: value for name, value in found.items() if value}


def scale(
    pointers: tuple[int, int],
    factor: float,
    step: int,
    slots: list[tuple[int, int, int]],
    *,
    dependent: bool = False,
    mapped: bool = False,
) -> player.Packed:
    kinds = ("*fp32", "*fp32", "fp32", "i32")
    values = tuple(
        player.pack_value(kind, value)
        for kind, value in zip(kinds, (*pointers, factor, step), strict=True)
    )
    assert KERNEL is not None
    assert None not in values
    if mapped:  # x comes as a TMA map, of which the stand-in reads the address
        values = (values[0], values[1].ljust(player.MAP_BYTES, b"?"), *values[2:])  # type: ignore[union-attr]
    return player.Packed(
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


def make(*, dependent: bool = False, launches: int = 2, mapped: bool = False) -> tuple[Any, Buffer]:
    """between = 2 x - 3, out = -0.5 between + 1. Inputs: x (from its second float), out."""
    between = Buffer()
    first = scale((between.pointer, 0), 2.0, -3, [(1, 0, 4)], mapped=mapped)
    second = scale((0, between.pointer), -0.5, 1, [(0, 1, 0)], dependent=dependent)
    described = (first, second)[:launches]
    tape = player.module().pack(0, 2, *player.describe(described), described)
    return tape, between


def play(tape: Any, x: Buffer, out: Buffer, stream: int = 7) -> list[float]:
    out.memory[:] = [float("nan")] * 4
    player.module().play(tape, stream, [x.pointer - 4, out.pointer])
    return list(out.memory)


def error(call: Any) -> str:
    try:
        call()
    except Exception as caught:  # noqa: BLE001
        return f"{type(caught).__name__}: {caught}"
    return ""


def main() -> dict[str, Any]:
    found: dict[str, Any] = {}
    one, two = Buffer(1, 2, 3, 4), Buffer(-8, 0, 8, 16)
    out, other = Buffer(), Buffer()
    tape, _between = make()
    for name, x, to in (
        ("first", one, out),
        ("same again", one, out),
        ("other x", two, out),
        ("other out", two, other),
        ("both back", one, out),
    ):
        found[name] = [play(tape, x, to), counters()]
    set_to("capturing", 1)
    found["captured"] = [play(tape, two, other), counters()]
    set_to("capturing", 0)
    found["after it"] = [play(tape, one, out), counters()]
    found["stream"] = ctypes.c_ulonglong.in_dll(stand_in, "last_stream").value
    dependent, _other_between = make(dependent=True)
    values = [play(dependent, one, out)]
    set_to("capturing", 1)
    values.append(play(dependent, one, out))
    set_to("capturing", 0)
    found["dependent"] = [values, counters()]
    boxes, _of_boxes = make(mapped=True)
    found["map"] = [[play(boxes, x, out) for x in (one, two)], counters()]
    single, _third = make(launches=1)
    for _ in range(3):
        play(single, one, out)
    found["single"] = counters()
    set_to("fail", 2)
    ungraphable, _fourth = make()
    found["no graphs"] = [[play(ungraphable, one, out) for _ in range(3)], counters()]
    set_to("fail", 1)
    set_to("capturing", 1)
    found["failed"] = error(lambda: play(make()[0], one, out))
    set_to("fail", 0)
    module = player.module()
    found["pointers"] = error(lambda: module.play(tape, 0, [1]))
    found["no tape"] = error(lambda: module.play(None, 0, [1, 2]))
    found["slot"] = error(lambda: module.pack(0, 1, [], [(5, 0, 0, 0)], [], b"", None))
    found["parameters"] = error(
        lambda: module.pack(0, 1, [(1, (1, 1, 1), 32, 0, 0, 0, 3, 4)], [], [0] * 5, bytes(40), None)
    )
    found["inputs"] = error(lambda: module.pack(0, 65, [], [], [], b"", None))
    found["place"] = error(lambda: module.pack(0, 1, [], [], [0, 5], bytes(40), None))
    return found


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
