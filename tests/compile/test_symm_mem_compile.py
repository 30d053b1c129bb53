"""The kernels of SymmMemPrepareAndFinalize compile for sm_90 without spills."""

from typing import Any

import pytest
import triton

from modular_kernel import Problem
from modular_kernel.replay.launch import triton_versions
from modular_kernel.testing.compile.report import check, record_compiles
from prepare_finalize.symm_mem import launch as symm_launch
from prepare_finalize.symm_mem.compile_cases import launch_all, problems


@pytest.mark.parametrize("problem", problems(), ids=str)
def test_dispatch_and_combine_compile_without_spills(problem: Problem) -> None:
    with record_compiles() as records:
        launch_all(problem)
    assert [record.kernel for record in records] == [
        "dispatch_kernel",
        "dispatch_kernel",
        "arrival_kernel",
        "combine_kernel",
    ]
    failures = [failure for record in records for failure in check(record)]
    assert failures == []


@pytest.mark.parametrize(
    ("release", "sets_occupancy"), [("3.6", False), ("3.8", False), ("3.9", True)]
)
def test_dispatch_sets_the_occupancy_from_triton_3_9_on(
    release: str, sets_occupancy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the option, Triton 3.9 spills registers. Older releases do not need it."""
    launches: list[dict[str, Any]] = []
    monkeypatch.setattr(symm_launch, "launch", lambda *_, **kwargs: launches.append(kwargs))
    monkeypatch.setattr(triton_versions, "RELEASE", release)
    with record_compiles():  # replaces the CUDA driver
        launch_all(problems()[0])
    expected = "--minnctapersm=4" if sets_occupancy else None
    options = [launch.get("ptx_options") for launch in launches]
    assert options == [expected, expected, None, None]


def test_ptx_options_of_the_environment_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_versions, "RELEASE", "3.9")
    monkeypatch.setattr(triton.knobs.nvidia, "ptxas_options", "--verbose")
    assert triton_versions.make_occupancy_options(2) == {
        "ptx_options": "--verbose --minnctapersm=2"
    }
