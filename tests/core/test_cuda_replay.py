"""Replays by cuda_replay.c without a GPU, with a compiled stand-in for libcuda.so.1."""

from typing import Any

import pytest
from driver_stand_in import run_with_stand_in

from modular_kernel.replay.launch.cuda_replay import pack_tensor_map, pack_value

# The output 2.5 - x for each of two inputs x.
OUT_OF_X, OUT_OF_OTHER_X = [1.5, 0.5, -0.5, -1.5], [10.5, 2.5, -5.5, -13.5]


@pytest.fixture(scope="module")
def program_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run cuda_replay_program.py, and return its results by name."""
    return run_with_stand_in("cuda_replay_program", tmp_path_factory.mktemp("driver"))


@pytest.mark.parametrize(
    ("when", "values", "driver_calls"),
    [
        ("first", OUT_OF_X, {"instantiations": 1, "graph_launches": 1}),
        ("same again", OUT_OF_X, {"graph_launches": 1}),
        ("other x", OUT_OF_OTHER_X, {"sets": 1, "graph_launches": 1}),
        ("other out", OUT_OF_OTHER_X, {"sets": 1, "graph_launches": 1}),
        ("both back", OUT_OF_X, {"sets": 2, "graph_launches": 1}),
        ("captured", OUT_OF_OTHER_X, {"launches": 2}),
        ("after it", OUT_OF_X, {"graph_launches": 1}),
    ],
)
def test_replays_are_correct_and_use_one_graph(
    program_results: dict[str, Any], when: str, values: list[float], driver_calls: dict[str, int]
) -> None:
    """A replay updates only the graph nodes whose parameters changed ("sets")."""
    assert program_results[when] == [values, driver_calls]


def test_replay_uses_the_given_stream(program_results: dict[str, Any]) -> None:
    assert program_results["stream"] == 7


def test_dependent_launches_stay_dependent(program_results: dict[str, Any]) -> None:
    """The first replay launches a graph. The second replay, during a capture, makes separate
    launches.
    """
    assert program_results["dependent"] == [
        [OUT_OF_X, OUT_OF_X],
        {"instantiations": 1, "graph_launches": 1, "launches": 2, "dependent_launches": 2},
    ]


def test_a_tensor_map_gets_the_address_of_each_call(program_results: dict[str, Any]) -> None:
    """Each replay updates the tensor map, but only in the launch that uses it."""
    driver_calls = {"maps": 2, "instantiations": 1, "graph_launches": 2, "sets": 1}
    assert program_results["map"] == [[OUT_OF_X, OUT_OF_OTHER_X], driver_calls]


@pytest.mark.parametrize(("what", "maps"), [("moved workspace", {}), ("moved map", {"maps": 2})])
def test_each_replay_may_use_another_workspace(
    program_results: dict[str, Any], what: str, maps: dict[str, int]
) -> None:
    """Both launches access the workspace, so the second replay updates both nodes of the graph."""
    driver_calls = {**maps, "graph_launches": 2, "sets": 2, "instantiations": 1}
    assert program_results[what] == [[OUT_OF_X, OUT_OF_OTHER_X], [True, True], True, driver_calls]


def test_a_single_launch_makes_no_graph(program_results: dict[str, Any]) -> None:
    assert program_results["single"] == {"launches": 3}


def test_replay_falls_back_to_launches_if_graphs_fail(program_results: dict[str, Any]) -> None:
    assert program_results["no graphs"] == [[OUT_OF_X] * 3, {"launches": 6}]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("failed", "RuntimeError: CUDA error in a replayed launch: launch failed"),
        ("pointers", "ValueError: 1 pointers for 2 inputs"),
        ("no recorded", "ValueError: PyCapsule_GetPointer"),
        ("slot", "ValueError: a slot has parameter 5 of 0, input 0 of 1"),
        ("word offset", "ValueError: got a parameter at word 5, need one of 5 words"),
        ("parameters", "ValueError: a launch has parameters beyond the 5 given"),
        ("inputs", "ValueError: 65 inputs"),
    ],
)
def test_errors_of_the_driver_are_raised(
    program_results: dict[str, Any], what: str, message: str
) -> None:
    assert program_results[what].startswith(message)


class EncodedMap:
    """An object with the size of Triton's tensor map object, whose second half is the tensor map.

    Python stores slots in the order of their names.
    """

    __slots__ = tuple(f"word{i:02}" for i in range(30))


def test_a_tensor_map_is_recorded_with_its_sizes_and_strides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    encoded = EncodedMap()
    encoded.word14 = encoded.word29 = encoded  # type: ignore[attr-defined]
    address = id(encoded).to_bytes(8, "little")
    monkeypatch.setattr(driver, "make_tensordesc_arg", lambda *_: [encoded, 64, 2880, 2880, 1])
    packed_map = pack_tensor_map("descriptor", {"swizzle": 3})
    assert packed_map == [address + bytes(112) + address, *map(pack_word, (64, 2880, 2880, 1))]


def test_tensor_maps_in_another_layout_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A map in an unknown layout, or a map that the kernel itself creates, cannot be packed."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.setattr(driver, "make_tensordesc_arg", lambda *_: [object(), 64, 1])
    assert pack_tensor_map("descriptor", {"swizzle": 3}) is None
    assert pack_tensor_map("descriptor", None) is None


def pack_word(number: int) -> bytes:
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
def test_parameters_are_packed_in_little_endian_words(
    kind: str, value: float, packed: bytes | None
) -> None:
    assert pack_value(kind, value) == packed
