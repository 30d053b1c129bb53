"""Replayed launches equal launches by the installed triton byte for byte.

These tests need no GPU, because Triton's launcher and cuda_replay.c use a stand-in for
libcuda.so.1.
"""

from typing import Any

import pytest
from driver_stand_in import run_with_stand_in


@pytest.fixture(scope="module")
def program_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run replayed_launch_program.py, and return its results by name."""
    return run_with_stand_in("replayed_launch_program", tmp_path_factory.mktemp("driver"))


# The size of each kernel's parameters. 49 bytes are two pointers, int32, float32, int64, a flag and
# two scratch pointers. 180 bytes are a tensor map with two sizes and two strides, a pointer, int32
# and two scratch pointers.
@pytest.mark.parametrize(("kernel", "nbytes"), [("plain", 49), ("dependent", 49), ("boxes", 180)])
def test_a_replayed_launch_equals_that_of_triton(
    program_results: dict[str, Any], kernel: str, nbytes: int
) -> None:
    """Grid, threads, shared memory, attributes, stream and all parameters are compared."""
    calls = program_results[kernel]
    assert "refused" not in calls
    assert [launch.pop("number") for launch in calls["triton"] + calls["replayed"]] == [1, 2, 3, 4]
    assert calls["replayed"] == calls["triton"]
    first, second = calls["triton"]
    assert first["bytes"] == nbytes
    assert first["value"] != second["value"]  # the calls have different inputs
    assert first["dependent"] == (kernel == "dependent")


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("another release", "launchers of triton"),
        ("instrumented", "kernels are instrumented (consan)"),
        ("clusters", "it uses clusters"),
        ("scratch", "it uses scratch memory"),
        ("oversized", "bytes of shared memory"),
    ],
)
def test_launches_with_unknown_parameters_are_not_replayed(
    program_results: dict[str, Any], case: str, reason: str
) -> None:
    assert program_results["as it is"] == ""
    assert reason in program_results[case]


def test_the_reason_for_disabled_replay_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    triton_versions = pytest.importorskip("modular_kernel.replay.launch.triton_versions")
    from modular_kernel.process_status import get_replay_state
    from modular_kernel.replay.launch import launch

    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    # Without a GPU, `mk` can set TRITON_INTERPRET, so the variable is not reported as the reason.
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: False)
    assert str(get_replay_state()) == "off: no NVIDIA GPU"
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: True)
    assert str(get_replay_state()) == "off: TRITON_INTERPRET is 1: nothing is compiled"
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: False)
    assert str(get_replay_state()) == "off: no NVIDIA GPU"
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch.cuda_replay, "why_no_module", lambda: "no C compiler found")
    assert str(get_replay_state()) == "off: no C compiler found"
    monkeypatch.setattr(launch.cuda_replay, "why_no_module", lambda: "")
    assert str(get_replay_state()) == "on"
    for release in triton_versions.REPLAYABLE_RELEASES:
        monkeypatch.setattr(triton_versions, "RELEASE", release)
        assert str(get_replay_state()) == "on"
    for release in ("3.5", "3.10", "4.0"):
        monkeypatch.setattr(triton_versions, "RELEASE", release)
        assert str(get_replay_state()).startswith("off: launchers of triton")
    monkeypatch.setattr(launch, "HAS_TRITON", False)
    assert str(get_replay_state()) == "off: triton is not installed"


@pytest.mark.parametrize("num_warps", [0, 3, 7, 9])
def test_the_interpreter_refuses_numbers_of_warps_that_the_compiler_refuses(num_warps: int) -> None:
    pytest.importorskip("triton")
    from modular_kernel.replay.launch.launch import _check_num_warps

    for valid_num_warps in (1, 2, 4, 8, 16):
        _check_num_warps(valid_num_warps)
    with pytest.raises(ValueError, match=f"num_warps: got {num_warps}, need a power of 2"):
        _check_num_warps(num_warps)
