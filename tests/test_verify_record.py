"""What `make verify` writes down."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[1] / "tools" / "verify_record.py"


def run(commit: str, text: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), commit]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def test_the_record_has_the_commit_the_versions_and_the_proofs() -> None:
    done = run("0a1b2c", json.dumps({"ok": True, "pairs": [{"cases": 3}]}))
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout)
    assert written["commit"] == "0a1b2c"
    assert set(written["versions"]) == {"torch", "triton"}
    assert written["ok"] is True
    assert written["pairs"] == [{"cases": 3}]


def test_what_is_no_record_of_proofs_is_not_written() -> None:
    done = run("0a1b2c", "no case was run")
    assert done.returncode != 0
    assert done.stdout == ""
