"""Process states that change what runs are reported by `mk doctor` and `mk profile`, and logged
once.

Such a state is, for example, a missing C compiler or an active interpreter.
"""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_mk import run_mk

from modular_kernel import process_status
from modular_kernel.cli import doctor
from modular_kernel.process_status import ProcessState

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["replay", "interpreter", "packages", "C compiler", "caches", "variables"]
# A program that makes two kernels of TorchExperts, and prints the states and the log.
PRINT_STATUS = """
import json, logging, sys
lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(f"{record.levelname} {record.getMessage()}")
log = logging.getLogger("modular_kernel.process_status")
log.addHandler(Lines())
log.setLevel(logging.INFO)
import modular_kernel as mk
from modular_kernel.process_status import get_all_states
problem = mk.Problem(tokens=2, hidden=32, intermediate=32, experts=2, top_k=1)
for _ in range(2):
    try:
        mk.make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", problem)
    except mk.ModularKernelError as error:
        lines.append(f"refused: {error}")
print(json.dumps([{s.name: str(s) for s in get_all_states()}, lines]))
"""


def import_record_module() -> Any:
    """Import the module that records launches before a test changes the environment."""
    try:
        from modular_kernel.replay.launch import record
    except ImportError:
        return None
    return record


RECORD_MODULE = import_record_module()


@pytest.fixture(autouse=True)
def use_cpu_and_empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # programs run on a CPU
    monkeypatch.setenv("MK_CACHE_DIR", str(tmp_path / "cache"))


def run_program(source: str) -> str:
    process = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def run_and_read_status(setup: str = "") -> tuple[dict[str, str], list[str]]:
    """Return the states and the log lines of a new process that runs the code `setup` first."""
    states, lines = json.loads(run_program(setup + PRINT_STATUS))
    return states, lines


def test_normal_process_has_no_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("CC", sys.executable)
    states, lines = run_and_read_status()
    assert list(states) == NAMES
    assert states["interpreter"] == "on"
    assert states["packages"] == "ours"
    assert states["C compiler"] == "found"
    assert states["caches"] == "kept"
    assert states["variables"] == "known"
    assert lines == []


def test_the_interpreter_is_reported_if_it_is_active_unexpectedly() -> None:
    pytest.importorskip("triton")
    states, lines = run_and_read_status()
    assert states["interpreter"].startswith("off: TRITON_INTERPRET is not set")
    assert lines == [f"INFO interpreter {states['interpreter']}"]


def test_the_interpreter_is_refused_if_it_is_requested_too_late() -> None:
    """The interpreter is off. Torch parts work, and Triton parts are refused."""
    pytest.importorskip("triton")
    set_variable_late = "import os, triton; os.environ['TRITON_INTERPRET'] = '1'\n"
    states, lines = run_and_read_status(set_variable_late)
    assert states["interpreter"].startswith("off: TRITON_INTERPRET was set after triton")
    assert lines == [f"WARNING interpreter {states['interpreter']}"]
    call_kernels = """
import torch
import modular_kernel as mk
problem = mk.Problem(tokens=2, hidden=32, intermediate=32, experts=2, top_k=2, dtype=torch.float32)
weights = mk.ExpertWeights(w1=torch.ones(2, 64, 32), w2=torch.ones(2, 32, 32))
routing = mk.Routing(torch.ones(2, 2), torch.tensor([[0, 1], [1, 0]]))
for pf, experts in (("MoEPrepareAndFinalizeNoEP", "TorchExperts"),
                    ("BatchedPrepareAndFinalize", "NaiveBatchedExperts")):
    print(mk.make_kernel(pf, experts, problem)(torch.ones(2, 32), weights, routing)[0, 0].item())
print(mk.check("MoEPrepareAndFinalizeNoEP", "TritonExperts", problem).ok)
"""
    torch_output, batched_output, triton_ok = run_program(set_variable_late + call_kernels).split()
    assert float(torch_output) == pytest.approx(2 * 32.0**3, rel=1e-5)
    assert float(batched_output) == pytest.approx(2 * 32.0**3, rel=1e-5)
    assert triton_ok == "False"


def test_a_module_that_shadows_a_package_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shadowing module is reported and not imported."""
    (tmp_path / "experts.py").write_text("raise SystemExit('the user s own script ran')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    states, lines = run_and_read_status("import sys; sys.path.remove('')\n")
    assert states["packages"] == f"shadowed: experts by {tmp_path}/experts.py"
    assert lines.count(f"WARNING packages {states['packages']}") == 1
    assert "the user s own script ran" not in str(lines)
    refusals = [line for line in lines if line.startswith("refused")]
    assert len(refusals) == 2
    assert f"package experts: got {tmp_path}/experts.py" in refusals[0]


def test_a_missing_compiler_and_an_unknown_variable_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    monkeypatch.setenv("MK_CACHE_DRI", "/x")
    monkeypatch.setenv("MK_\x1b[31m", "/x")
    states, lines = run_and_read_status()
    assert states["C compiler"].startswith("missing: no CC, gcc or clang")
    assert sum("C compiler missing" in line for line in lines) == 1
    assert "MK_CACHE_DRI (did you mean MK_CACHE_DIR?)" in states["variables"]
    assert states["variables"].isprintable()
    assert lines.count(f"WARNING variables {states['variables']}") == 1


def test_unwritable_cache_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MK_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", raise_error)
    assert process_status.get_caches_state() == ProcessState(
        "caches", "off", "no home directory; set MK_CACHE_DIR"
    )


def test_replay_off_is_a_warning_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("modular_kernel.replay.launch.launch")
    monkeypatch.setattr(launch, "why_not_replayed", lambda: "launchers of triton 9.9 are unknown")
    for has_gpu in (True, False):
        monkeypatch.setattr(process_status, "_has_gpu", lambda has_gpu=has_gpu: has_gpu)
        assert process_status.get_replay_state() == ProcessState(
            "replay", "off", "launchers of triton 9.9 are unknown", loud=has_gpu
        )
    monkeypatch.setattr(launch, "why_not_replayed", lambda: "")
    assert str(process_status.get_replay_state()) == "on"


def test_a_triton_without_replay_is_logged_once_when_a_launch_is_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record = RECORD_MODULE
    if record is None:
        pytest.skip("triton is not installed")
    monkeypatch.setattr(record.triton_versions, "RELEASE", "3.5")
    monkeypatch.setattr(record, "JITFunction", StandInFunction)
    monkeypatch.setattr(record, "CompiledKernel", StandInKernel)
    record._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "modular_kernel"):
        function, kernel = StandInFunction(), StandInKernel()
        reasons = {record._find_refusal_reason(function, kernel) for _ in range(3)}
    record._warn_once.cache_clear()
    (reason,) = reasons
    (log_record,) = caplog.records
    assert "are unknown" in log_record.getMessage()
    assert "are unknown" in reason


class StandInFunction:
    """A stand-in for a JIT function."""

    pre_run_hooks = ()


class StandInKernel:
    """A stand-in for a compiled kernel."""

    metadata = None


def test_doctor_and_profile_report_all_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    monkeypatch.setenv("MK_TIMEOUT", "3")
    why = "MK_TIMEOUT (did you mean MK_TIMEOUT_S?)"
    states: list[dict[str, Any]] = run_mk(capsys, "doctor", "--json").json["states"]
    assert [state["name"] for state in states] == NAMES
    assert states[-1] == {"name": "variables", "word": "unknown", "why": why, "loud": True}
    pair = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")
    results = run_mk(capsys, "doctor"), run_mk(capsys, "profile", *pair, "--out", str(tmp_path))
    for result in results:
        assert result.code == 0
        for state in states:
            lines = [line for line in result.out.splitlines() if state["name"] in line]
            assert any(state["word"] in line and state["why"] in line for line in lines), state
    (path,) = tmp_path.glob("*.profile.json")
    assert [state["name"] for state in json.loads(path.read_text())["states"]] == NAMES
    (page,) = tmp_path.glob("*.html")
    assert why in page.read_text()


def test_doctor_explains_a_normal_state(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", sys.executable)
    states: list[dict[str, Any]] = run_mk(capsys, "doctor", "--json").json["states"]
    normal_states = [(state["name"], state["word"]) for state in states if not state["why"]]
    assert {"packages", "C compiler", "caches", "variables"} <= {name for name, _ in normal_states}
    output = run_mk(capsys, "doctor").out
    assert [state for state in normal_states if doctor._EXPLANATIONS[state] not in output] == []
