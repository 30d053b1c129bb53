"""Tests of the handwritten defects in tools/source_defects.json and of the tool that runs tests
with them.
"""

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from modular_kernel.errors import ConfigurationError
from modular_kernel.testing.mutation.coverage import Coverage
from modular_kernel.testing.mutation.defects import read_defects
from modular_kernel.testing.mutation.mutant_outcome import MutantOutcome

ROOT = Path(__file__).resolve().parents[2]
DEFECTS_FILE = ROOT / "tools/source_defects.json"


def test_every_defect_can_be_applied() -> None:
    """A change of a line that a defect replaces must update or remove the defect."""
    defects = read_defects(DEFECTS_FILE, ROOT)
    assert len({defect.description for defect in defects}) == len(defects) >= 75
    for defect in defects:
        ast.parse(defect.mutant.text())
        assert defect.mutant.first <= defect.mutant.last
        assert defect.mutant.diff()


def test_invalid_entries_are_reported(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("x = 1\ny = (\n    1,\n    2,\n)\n", encoding="utf-8")
    defect_file = tmp_path / "defects.json"

    def read_lines_of_defect(old: str, file: str = "part.py") -> tuple[int, int]:
        entry = {"file": file, "old": old, "new": "3", "what": "one"}
        defect_file.write_text(json.dumps([entry]), encoding="utf-8")
        (defect,) = read_defects(defect_file, tmp_path)
        return defect.mutant.first, defect.mutant.last

    assert read_lines_of_defect("2") == (2, 5)  # the whole statement
    for old, file in (("1", "part.py"), ("7", "part.py"), ("x", "other.py")):
        with pytest.raises(ConfigurationError, match="one"):
            read_lines_of_defect(old, file)


def test_defects_missed_by_full_have_results_of_the_ops_tests() -> None:
    """The page states how many of the defects that level full misses are detected by the tests of
    operations.
    """
    record = json.loads((ROOT / "docs/source-defects.json").read_text(encoding="utf-8"))
    missed_results = [
        result for result in record.values() if not result["full"].startswith("killed")
    ]
    assert missed_results
    killed = sum(
        result["tests"].startswith("killed by tests/ops/test_ops_") for result in missed_results
    )
    page = (ROOT / "docs/mutation-scores.md").read_text(encoding="utf-8")
    assert (
        f"Of the {len(missed_results)} that level full does not kill, the tests of operations"
        in page
    )
    assert f"kill {killed}." in page


def load_tool() -> Any:
    spec = importlib.util.spec_from_file_location(
        "source_defects", ROOT / "tools/source_defects.py"
    )
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


@pytest.mark.parametrize(
    ("names", "result"),
    [([], "survived"), (["E"], "survived"), (["Other"], "killed by x in P x E")],
)
def test_kills_of_previous_runs_are_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], result: str
) -> None:
    """Case lists change, so a defect that a previous list killed may survive the current one."""
    tool = load_tool()
    (defect, *_) = read_defects(DEFECTS_FILE, ROOT)
    monkeypatch.setattr(tool, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(tool, "pairings", lambda *_: [("P", "E"), ("P", "Other")])
    no_coverage = Coverage({}, (), "")
    monkeypatch.setattr(tool, "cover", lambda *_: no_coverage)
    monkeypatch.setattr(tool, "run_mutant", lambda mutant, *_: MutantOutcome(mutant, "survived"))
    record = {defect.description: {"smoke": "survived", "full": "killed by x in P x E"}}
    tool.run_cases([defect], record, "full", names)
    assert record[defect.description] == {"smoke": "survived", "full": result}


def test_tests_that_fail_without_a_defect_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = load_tool()
    first, second = read_defects(DEFECTS_FILE, ROOT)[:2]
    monkeypatch.setattr(tool, "RECORD", tmp_path / "record.json")
    record = {
        first.description: {"full": "survived"},
        second.description: {"full": "killed by x", "tests": "survived"},
    }

    def report_killed_by_tests(mutant: object) -> str:
        return "killed by tests/ops/test_ops_x.py::test_y"

    monkeypatch.setattr(tool, "run_operation_tests", report_killed_by_tests)
    with pytest.raises(RuntimeError, match="without a defect: killed by tests/ops/test_ops_x"):
        tool.run_tests([first, second], record)
    without_defect = {None: "survived"}
    monkeypatch.setattr(
        tool,
        "run_operation_tests",
        lambda mutant: without_defect.get(mutant, report_killed_by_tests(mutant)),
    )
    tool.run_tests([first, second], record)
    saved = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert saved[first.description]["tests"].startswith("killed by tests/ops/test_ops_x")
    assert "tests" not in saved[second.description]
