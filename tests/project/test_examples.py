"""The programs of examples/ run as they stand there, and print what they promise."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Program -> what it prints, at the least.
PRINTED = {
    "compose_and_check.py": ["(16, 64)", "the same within 1e-4", "plan: the same bits"],
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


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.name)
def test_the_notebook_runs_and_shows_what_is_stored(path: Path) -> None:
    """`python tools/run_notebook.py` stores new outputs. Numbers may differ."""
    import torch

    tool = runpy.run_path(str(EXAMPLES.parent / "tools" / "run_notebook.py"))
    stored = json.loads(path.read_text(encoding="utf-8"))
    try:
        executed = tool["execute"](stored)
    finally:
        torch.set_default_device(None)
    assert tool["shown"](executed) == tool["shown"](stored)
    cells = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert tool["dump"](stored) == path.read_text(encoding="utf-8")


def test_the_notebook_composes_refuses_verifies_and_profiles() -> None:
    notebook = json.loads((EXAMPLES / "compose.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    texts = ["".join(out.get("text", [])) for cell in cells for out in cell["outputs"]]
    printed = "".join(texts)
    for text in ("NoEP x TorchExperts (64, 128)", "refused\n- format: got", "cases passed",
                 "hidden_tail: numeric", "mk::gemm1_activation"):  # fmt: skip
        assert text in printed


def test_a_cell_s_output_is_what_it_prints_and_the_value_at_its_end() -> None:
    tool = runpy.run_path(str(EXAMPLES.parent / "tools" / "run_notebook.py"))
    code = {"cell_type": "code", "metadata": {}, "source": ["a = 2\n", "print('one')\n", "a + 1"]}
    text = {"cell_type": "markdown", "metadata": {}, "source": ["text"]}
    silent = code | {"source": ["b = a * 1.5"]}
    (_, first, second) = tool["execute"]({"cells": [text, code, silent]})["cells"]
    assert first["outputs"][0]["text"] == ["one\n"]
    assert first["outputs"][1]["data"] == {"text/plain": ["3"]}
    assert (second["execution_count"], second["outputs"]) == (2, [])
    assert tool["shown"]({"cells": [first]}) == ["one", "#"]
    with pytest.raises(ZeroDivisionError):
        tool["execute"]({"cells": [code | {"source": ["1 / 0"]}]})
