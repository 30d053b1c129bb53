"""The list of defects written by hand: each is there to be put in, and is put where it says."""

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
LIST = ROOT / "tools/source_defects.json"


def test_every_defect_can_be_put_in() -> None:
    """A change of the source that takes a defect's place away has to take the defect along."""
    defects = read_defects(LIST, ROOT)
    assert len({defect.description for defect in defects}) == len(defects) >= 75
    for defect in defects:
        ast.parse(defect.mutant.text())
        assert defect.mutant.first <= defect.mutant.last
        assert defect.mutant.diff()


def test_an_entry_that_does_not_fit_is_named(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("x = 1\ny = (\n    1,\n    2,\n)\n", encoding="utf-8")
    listed = tmp_path / "defects.json"

    def read(old: str, file: str = "part.py") -> tuple[int, int]:
        entry = {"file": file, "old": old, "new": "3", "what": "one"}
        listed.write_text(json.dumps([entry]), encoding="utf-8")
        (defect,) = read_defects(listed, tmp_path)
        return defect.mutant.first, defect.mutant.last

    assert read("2") == (2, 5)  # the whole statement
    for old, file in (("1", "part.py"), ("7", "part.py"), ("x", "other.py")):
        with pytest.raises(ConfigurationError, match="one"):
            read(old, file)


def test_what_full_leaves_met_the_tests_of_operations() -> None:
    """And the page says how many of them those tests notice."""
    record = json.loads((ROOT / "docs/source-defects.json").read_text(encoding="utf-8"))
    left = [told for told in record.values() if not told["full"].startswith("killed")]
    assert left
    killed = sum(told["tests"].startswith("killed by tests/ops/test_ops_") for told in left)
    page = (ROOT / "docs/mutation-scores.md").read_text(encoding="utf-8")
    assert f"Of the {len(left)} that full does not kill, the tests of operations" in page
    assert f"kill {killed}." in page


def the_tool() -> Any:
    spec = importlib.util.spec_from_file_location(
        "source_defects", ROOT / "tools/source_defects.py"
    )
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


@pytest.mark.parametrize(
    ("names", "ends"), [([], "survived"), (["E"], "survived"), (["Other"], "killed by x in P x E")]
)
def test_a_kill_of_an_earlier_run_is_no_result_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], ends: str
) -> None:
    """Lists of cases change: what one of them killed may live before those of today."""
    tool = the_tool()
    (defect, *_) = read_defects(LIST, ROOT)
    monkeypatch.setattr(tool, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(tool, "pairings", lambda *_: [("P", "E"), ("P", "Other")])
    nothing = Coverage({}, (), "")
    monkeypatch.setattr(tool, "cover", lambda *_: nothing)
    monkeypatch.setattr(tool, "run_mutant", lambda mutant, *_: MutantOutcome(mutant, "survived"))
    record = {defect.description: {"smoke": "survived", "full": "killed by x in P x E"}}
    tool.run_cases([defect], record, "full", names)
    assert record[defect.description] == {"smoke": "survived", "full": ends}


def test_tests_that_fail_without_a_defect_notice_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = the_tool()
    first, second = read_defects(LIST, ROOT)[:2]
    monkeypatch.setattr(tool, "RECORD", tmp_path / "record.json")
    record = {
        first.description: {"full": "survived"},
        second.description: {"full": "killed by x", "tests": "survived"},
    }
    seen = []

    def by_tests(mutant: object) -> str:
        seen.append(mutant)
        return "killed by tests/ops/test_ops_x.py::test_y"

    monkeypatch.setattr(tool, "test_outcome", by_tests)
    with pytest.raises(RuntimeError, match="without a defect: killed by tests/ops/test_ops_x"):
        tool.run_tests([first, second], record)
    sound = {None: "survived"}
    monkeypatch.setattr(tool, "test_outcome", lambda mutant: sound.get(mutant, by_tests(mutant)))
    tool.run_tests([first, second], record)
    kept = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert kept[first.description]["tests"].startswith("killed by tests/ops/test_ops_x")
    assert "tests" not in kept[second.description]
