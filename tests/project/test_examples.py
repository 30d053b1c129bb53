"""The programs of examples/ run as they stand there, and print what they promise."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Program -> what it prints, at the least.
PRINTED = {
    "compose_and_check.py": ["(16, 64)", "the same within 1e-4", "planned: the same bits"],
    "in_a_transformers_model.py": ["as with transformers' own experts"],
    "layer_over_ranks.py": ["(128.0, 0.0)", "balanced: ", "the same within 1e-4"],
    "profile_to_a_trace.py": ["mk::experts", "mk::finalize", "trace: "],
    "two_ranks.py": ["rank 0 of 2", "rank 1 of 2", "as on one rank"],
    "why_not.py": ["NoEP x TritonExperts\n", "format: got", "raises IncompatibleError"],
}
OWN_PROCESS = {"two_ranks.py"}  # starts others, which import the main module


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PRINTED)


@pytest.mark.parametrize("name", sorted(set(PRINTED) - OWN_PROCESS))
def test_the_example_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if name == "in_a_transformers_model.py":
        pytest.importorskip("transformers", reason="the extra is not installed")
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        torch.set_default_device(None)
    printed, noise = capfd.readouterr()
    assert [text for text in PRINTED[name] if text not in printed] == []
    assert "USDT:" not in noise
    made = [path.name for path in tmp_path.iterdir()]
    assert made == (["layer.trace.json"] if name == "profile_to_a_trace.py" else [])


def test_a_trace_may_lie_in_a_folder_that_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    path = tmp_path / "new" / "layer.json"
    monkeypatch.setattr(sys, "argv", ["profile_to_a_trace.py", str(path)])
    try:
        runpy.run_path(str(EXAMPLES / "profile_to_a_trace.py"), run_name="__main__")
    finally:
        torch.set_default_device(None)
    assert path.is_file()


@pytest.mark.parametrize("name", sorted(OWN_PROCESS))
def test_the_example_with_processes_runs(name: str, tmp_path: Path) -> None:
    words = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [text for text in PRINTED[name] if text not in done.stdout] == []
