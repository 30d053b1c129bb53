"""cuda_replay.c without a GPU: against a libcuda.so.1 of this test's own."""

from typing import Any

import pytest
from stand_in_driver import run_with_stand_in

from modular_kernel.replay.launch.cuda_replay import map_values, pack_value

ONE, TWO = [1.5, 0.5, -0.5, -1.5], [10.5, 2.5, -5.5, -13.5]  # 2.5 - x of both inputs


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What replayer_program.py saw."""
    return run_with_stand_in("replayer_program", tmp_path_factory.mktemp("driver"))


@pytest.mark.parametrize(
    ("when", "values", "asked"),
    [
        ("first", ONE, {"instantiations": 1, "graph_launches": 1}),
        ("same again", ONE, {"graph_launches": 1}),
        ("other x", TWO, {"sets": 1, "graph_launches": 1}),
        ("other out", TWO, {"sets": 1, "graph_launches": 1}),
        ("both back", ONE, {"sets": 2, "graph_launches": 1}),
        ("captured", TWO, {"launches": 2}),
        ("after it", ONE, {"graph_launches": 1}),
    ],
)
def test_a_tape_played_again(
    found: dict[str, Any], when: str, values: list[float], asked: dict[str, int]
) -> None:
    """Right each time, as one graph, which is told what has changed and nothing else."""
    assert found[when] == [values, asked]


def test_the_stream_is_the_one_given(found: dict[str, Any]) -> None:
    assert found["stream"] == 7


def test_dependent_launches_stay_dependent(found: dict[str, Any]) -> None:
    """And launch by launch, into a capture."""
    assert found["dependent"] == [
        [ONE, ONE],
        {"instantiations": 1, "graph_launches": 1, "launches": 2, "dependent_launches": 2},
    ]


def test_a_map_is_told_of_another_address(found: dict[str, Any]) -> None:
    """At each call, on 128 bytes; the launch that has it is told, not the other."""
    asked = {"maps": 2, "instantiations": 1, "graph_launches": 2, "sets": 1}
    assert found["map"] == [[ONE, TWO], asked]


def test_a_single_launch_is_not_made_a_graph(found: dict[str, Any]) -> None:
    assert found["single"] == {"launches": 3}


def test_launches_serve_where_graphs_fail(found: dict[str, Any]) -> None:
    assert found["no graphs"] == [[ONE] * 3, {"launches": 6}]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("failed", "RuntimeError: CUDA error in a replayed launch: launch failed"),
        ("pointers", "ValueError: 1 pointers for 2 inputs"),
        ("no recorded", "ValueError: PyCapsule_GetPointer"),
        ("slot", "ValueError: a slot for a parameter or an input that is not there"),
        ("place", "ValueError: a parameter whose value is not there"),
        ("parameters", "ValueError: a launch has parameters that are not there"),
        ("inputs", "ValueError: 65 inputs"),
    ],
)
def test_errors(found: dict[str, Any], what: str, text: str) -> None:
    assert found[what].startswith(text)


class EncodedMap:
    """As large as triton's object around a map, which lies in its second half. Python keeps slots
    in the order of their names."""

    __slots__ = tuple(f"word{i:02}" for i in range(30))


def test_a_map_comes_with_its_sizes_and_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    encoded = EncodedMap()
    encoded.word14 = encoded.word29 = encoded  # type: ignore[attr-defined]
    address = id(encoded).to_bytes(8, "little")
    monkeypatch.setattr(driver, "make_tensordesc_arg", lambda *_: [encoded, 64, 2880, 2880, 1])
    found = map_values("descriptor", {"swizzle": 3})
    assert found == [address + bytes(112) + address, *map(word, (64, 2880, 2880, 1))]


def test_maps_that_lie_otherwise_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a launch that has one is not replayed: as with a kernel that makes its map itself."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.setattr(driver, "make_tensordesc_arg", lambda *_: [object(), 64, 1])
    assert map_values("descriptor", {"swizzle": 3}) is None
    assert map_values("descriptor", None) is None


def word(number: int) -> bytes:
    return number.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("kind", "value", "packed"),
    [
        ("*bf16", 0x7F0012345678, b"\x78\x56\x34\x12\x00\x7f\0\0"),
        ("i32", -2, b"\xfe\xff\xff\xff\xff\xff\xff\xff"),
        ("i64", 1 << 40, b"\0\0\0\0\0\1\0\0"),
        ("u1", True, b"\1\0\0\0\0\0\0\0"),
        ("fp32", 1.5, b"\0\0\xc0\x3f\0\0\0\0"),
        ("fp64", 1.5, b"\0\0\0\0\0\0\xf8\x3f"),
        ("fp16", 1.5, None),
        ("tensordesc<bf16[64, 64]>", 0, None),
        ("nvTmaDesc", 0, None),
    ],
)
def test_values_are_packed_as_kernels_read_them(
    kind: str, value: float, packed: bytes | None
) -> None:
    assert pack_value(kind, value) == packed
