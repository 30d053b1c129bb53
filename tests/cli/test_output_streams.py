"""`mk` with an output that cannot be written: one exit status, one line, no traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from modular_kernel.cli.output_streams import EXIT_OUTPUT_LOST

ROOT = Path(__file__).resolve().parents[2]
FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
# Long enough that a pipe without a reader is met before the end.
LONG = "list --json"
SHORT = "--version"
HELP = "--help"
REFUSED = "check --pf-type BatchedPrepareAndFinalize --experts-type TritonExperts"


def shell(words: str, redirection: str) -> "subprocess.CompletedProcess[str]":
    script = f'set -o pipefail; "$0" -m modular_kernel {words} {redirection}'
    return subprocess.run(
        ["bash", "-c", script, sys.executable],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def lost(done: "subprocess.CompletedProcess[str]") -> None:
    assert done.returncode == EXIT_OUTPUT_LOST, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@FULL
@pytest.mark.parametrize("words", [LONG, SHORT, HELP, REFUSED])
def test_a_full_disk(words: str) -> None:
    done = shell(words, "> /dev/full")
    lost(done)
    assert "error: output was lost: stdout: No space left on device" in done.stderr


@pytest.mark.parametrize("words", [LONG, SHORT])
def test_a_closed_pipe(words: str) -> None:
    done = shell(words, "| true")
    lost(done)
    assert "error" not in done.stderr  # who stops reading knows it


@pytest.mark.parametrize("words", [SHORT, REFUSED])
def test_stdout_is_closed(words: str) -> None:
    lost(shell(words, ">&-"))


def test_progress_that_cannot_be_written_is_ignored() -> None:
    where = "2> /dev/full" if Path("/dev/full").exists() else "2>&-"
    for redirection in (where, "2>&-"):
        done = shell(REFUSED, redirection)
        assert done.returncode == 1
        assert "refused" in done.stdout
        assert "no CUDA device" not in done.stdout  # a note is not output
