"""The programs and notebooks in examples/ run and print the expected text."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Program -> texts that its output must contain.
EXPECTED_TEXTS = {
    "compose_and_check.py": ["(16, 64)", "the same output within 1e-4", "plan: bitwise"],
    "in_a_transformers_model.py": ["the same as with eager experts"],
    "layer_over_ranks.py": ["(128.0, 0.0)", "balanced: ", "the same as on one rank"],
    "profile_to_a_trace.py": ["mk::experts", "mk::finalize", "trace: "],
    "two_ranks.py": ["rank 0 of 2", "rank 1 of 2", "the same as on one rank"],
    "why_not.py": ["NoEP x TritonExperts\n", "format: got", "raises IncompatibleError"],
}
EXAMPLES_WITH_PROCESSES = {"two_ranks.py"}  # The processes import the main module.


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED_TEXTS)


@pytest.mark.parametrize("name", sorted(set(EXPECTED_TEXTS) - EXAMPLES_WITH_PROCESSES))
def test_example_runs(
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
    output, error_output = capfd.readouterr()
    assert [text for text in EXPECTED_TEXTS[name] if text not in output] == []
    assert "USDT:" not in error_output
    created_files = [path.name for path in tmp_path.iterdir()]
    assert created_files == (["layer.trace.json"] if name == "profile_to_a_trace.py" else [])


def test_trace_folder_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    path = tmp_path / "new" / "layer.json"
    monkeypatch.setattr(sys, "argv", ["profile_to_a_trace.py", str(path)])
    try:
        runpy.run_path(str(EXAMPLES / "profile_to_a_trace.py"), run_name="__main__")
    finally:
        torch.set_default_device(None)
    assert path.is_file()


@pytest.mark.parametrize("name", sorted(EXAMPLES_WITH_PROCESSES))
def test_example_with_processes_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / name)]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert [text for text in EXPECTED_TEXTS[name] if text not in result.stdout] == []


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.name)
def test_notebook_outputs_equal_the_stored_outputs(path: Path) -> None:
    """Numbers may differ. `python tools/run_notebook.py` stores the new outputs."""
    import torch

    tool = runpy.run_path(str(EXAMPLES.parent / "tools" / "run_notebook.py"))
    stored = json.loads(path.read_text(encoding="utf-8"))
    try:
        executed = tool["execute"](stored)
    finally:
        torch.set_default_device(None)
    assert tool["normalize_outputs"](executed) == tool["normalize_outputs"](stored)
    cells = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert tool["format_notebook"](stored) == path.read_text(encoding="utf-8")


def test_notebook_shows_compose_check_test_and_profile() -> None:
    notebook = json.loads((EXAMPLES / "compose.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    texts = ["".join(out.get("text", [])) for cell in cells for out in cell["outputs"]]
    printed = "".join(texts)
    for text in ("NoEP x TorchExperts (64, 128)", "refused\n- format: got", "cases passed",
                 "hidden_tail: numeric", "mk::gemm1_activation"):  # fmt: skip
        assert text in printed


def test_cell_output_is_printed_text_and_last_value() -> None:
    tool = runpy.run_path(str(EXAMPLES.parent / "tools" / "run_notebook.py"))
    code = {"cell_type": "code", "metadata": {}, "source": ["a = 2\n", "print('one')\n", "a + 1"]}
    markdown = {"cell_type": "markdown", "metadata": {}, "source": ["text"]}
    cell_without_output = code | {"source": ["b = a * 1.5"]}
    (_, first, second) = tool["execute"]({"cells": [markdown, code, cell_without_output]})["cells"]
    assert first["outputs"][0]["text"] == ["one\n"]
    assert first["outputs"][1]["data"] == {"text/plain": ["3"]}
    assert (second["execution_count"], second["outputs"]) == (2, [])
    assert tool["normalize_outputs"]({"cells": [first]}) == ["one", "#"]
    with pytest.raises(ZeroDivisionError):
        tool["execute"]({"cells": [code | {"source": ["1 / 0"]}]})
