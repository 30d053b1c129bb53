"""Optional packages are identified by their contents and version without importing them."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from modular_kernel.compatibility.rules import judge_part
from modular_kernel.compatibility.support import ExpertsRequirements
from modular_kernel.machine import current_machine
from modular_kernel.select import cache_keys
from modular_kernel.spec.problem import ActivationFormat, Reduce
from modular_kernel.utils.package_probes import (
    PackageProbe,
    ProbeResult,
    find_package,
    find_packages,
)

PROBE = PackageProbe(
    "swift_gemm",
    ("swift_gemm", "engine/third_party/swift_gemm"),
    (("api.py", "def grouped_gemm("), ("api.py", "psum")),
    "swift_gemm 2 or newer",
    "its install script",
)
# Source of an api.py that has both markers of PROBE.
MATCHING_API = "raise SystemExit('imported')\ndef grouped_gemm(a, psum): ..."


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write_package(site: Path, name: str, *, version: str = "2.0", **files: str) -> Path:
    """Write a package whose import raises an error. `files` has the source of each module."""
    folder = site / name
    folder.mkdir(parents=True)
    top_level_module = site / name.split("/")[0] / "__init__.py"
    top_level_module.write_text("raise SystemExit('imported')\n")
    (folder / "__init__.py").write_text(
        f"raise SystemExit('imported')\n__version__ = '{version}'\n"
    )
    for module, source in files.items():
        (folder / f"{module}.py").write_text(source)
    return folder


def test_one_of_several_sets_of_markers_is_sufficient(site: Path) -> None:
    probe = replace(PROBE, alternatives=((("core.py", "def grouped("), ("_C*.so", "")),))
    folder = write_package(site, "swift_gemm", core="def grouped(a): ...")
    reason = "unsupported swift_gemm 2.0: no api.py and no _C*.so"
    assert find_package(probe) == ProbeResult(reason=reason)
    (folder / "_C.cpython-311.so").write_bytes(b"\x7fELF\xff")
    assert find_package(probe) == ProbeResult(folder, "2.0")
    (folder / "core.py").write_text("")
    assert "no api.py and no def grouped( in core.py" in find_package(probe).reason
    (folder / "api.py").write_text(MATCHING_API)
    assert find_package(probe) == ProbeResult(folder, "2.0")


def test_a_marker_can_be_beside_the_package(site: Path) -> None:
    probe = replace(PROBE, markers=(("../swift_gemm_cpp*", ""),))
    folder = write_package(site, "swift_gemm")
    assert "no ../swift_gemm_cpp*" in find_package(probe).reason
    (site / "swift_gemm_cpp").mkdir()  # a folder is no extension module
    assert "no ../swift_gemm_cpp*" in find_package(probe).reason
    (site / "swift_gemm_cpp.cpython-311.so").write_bytes(b"\x7fELF")
    assert find_package(probe) == ProbeResult(folder, "2.0")


def test_an_absent_package_is_not_found() -> None:
    assert find_package(PROBE) == ProbeResult()


def test_a_package_is_identified_by_its_interface_without_import(site: Path) -> None:
    folder = write_package(site, "swift_gemm", api=MATCHING_API)
    assert find_package(PROBE) == ProbeResult(folder, "2.0")
    assert "swift_gemm" not in sys.modules


def test_a_package_inside_another_is_found_without_import(site: Path) -> None:
    folder = write_package(site, "engine/third_party/swift_gemm", version="2.5.0", api=MATCHING_API)
    assert find_package(PROBE) == ProbeResult(folder, "2.5.0")
    assert "engine" not in sys.modules


def test_another_package_of_the_same_name_is_unsupported(site: Path) -> None:
    write_package(site, "swift_gemm", version="0.1")
    assert find_package(PROBE) == ProbeResult(reason="unsupported swift_gemm 0.1: no api.py")


def test_a_package_that_is_too_old_is_unsupported(site: Path) -> None:
    write_package(site, "swift_gemm", version="1.0.0", api="def grouped_gemm(a, m_indices): ...")
    assert find_package(PROBE).reason == "unsupported swift_gemm 1.0.0: no psum in api.py"


def test_a_copy_inside_another_package_is_used_if_the_name_is_taken(site: Path) -> None:
    write_package(site, "swift_gemm", version="0.1")
    folder = write_package(site, "engine/third_party/swift_gemm", api=MATCHING_API)
    assert find_package(PROBE) == ProbeResult(folder, "2.0")


def test_a_single_file_of_the_same_name_is_not_accepted(site: Path) -> None:
    (site / "swift_gemm.py").write_text(MATCHING_API)
    assert find_package(PROBE) == ProbeResult()


def test_the_machine_states_which_package_it_found(site: Path) -> None:
    calm_probe = replace(PROBE, name="calm", locations=("calm",))
    write_package(site, "calm", api=MATCHING_API)
    write_package(site, "swift_gemm", version="0.1")
    packages, reasons = find_packages((PROBE, calm_probe))
    assert packages == {"calm"}
    assert reasons == {"swift_gemm": "unsupported swift_gemm 0.1: no api.py"}
    machine = current_machine(("swift_gemm", "calm"), probes=(PROBE, calm_probe), device="cpu")
    assert "calm" in machine.packages
    assert "swift_gemm" not in machine.packages  # it can be imported, but does not match the probe
    requires = ExpertsRequirements(
        activation_format=ActivationFormat.STANDARD,
        reduce=Reduce.NOOP,
        packages=("swift_gemm",),
        providers=(PROBE,),
    )
    (rejection,) = judge_part("Fast", requires, machine)
    assert str(rejection) == (
        "[package] Fast / machine: got unsupported swift_gemm 0.1: no api.py, "
        "need swift_gemm 2 or newer (its install script)"
    )


def test_cached_choices_depend_on_the_version_of_the_found_package(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy inside another package has no metadata, so its version is read from the source."""
    write_package(site, "engine/third_party/swift_gemm", version="2.5.0", api=MATCHING_API)
    monkeypatch.setattr(cache_keys, "collect_probes", lambda catalog: (PROBE,))
    assert cache_keys._version("swift_gemm") == "2.5.0"
    assert cache_keys._version("no_such_package") == "none"
