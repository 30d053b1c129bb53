"""Tests of tools/verify_record.py, which writes the record of `make verify`, and of the committed
record.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tools" / "verify_record.py"
RECORD = ROOT / "docs" / "verified.json"


def run_program(commit: str, folder: Path, *contents: str) -> subprocess.CompletedProcess[str]:
    files = [folder / f"verified-{number}.json" for number, _ in enumerate(contents, 1)]
    for file, content in zip(files, contents, strict=True):
        file.write_text(content, encoding="utf-8")
    command = [sys.executable, str(PROGRAM), commit, *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("ok", [True, False])
def test_the_record_has_the_commit_the_versions_and_the_runs(tmp_path: Path, ok: bool) -> None:
    runs = [{"ok": True, "pairs": [{"cases": 3}]}, {"ok": ok, "world_size": 2, "pairs": []}]
    result = run_program("0a1b2c", tmp_path, *map(json.dumps, runs))
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["commit"] == "0a1b2c"
    assert set(record["versions"]) == {"torch", "triton", "numpy"}
    assert record["ok"] is ok
    assert record["runs"] == runs
    assert json.loads(run_program("0a1b2c", tmp_path).stdout)["ok"] is False


def test_an_invalid_record_is_refused(tmp_path: Path) -> None:
    result = run_program("0a1b2c", tmp_path, json.dumps({"ok": True}), "no case was run")
    assert result.returncode != 0
    assert result.stdout == ""


def test_the_committed_record_passed() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert len(record["commit"]) == 40
    assert record["ok"]
    assert [run.get("world_size", 1) for run in record["runs"]] == [1, 2]
    for recorded_run in record["runs"]:
        pairs = recorded_run["pairs"]
        assert len(pairs) >= 5
        assert all(pair["cases"] > 20 and pair["failed"] == 0 for pair in pairs)
