"""`mk` reports output that it cannot write in one line, and with an exit code for this error."""

import subprocess
import sys
from pathlib import Path

import pytest

from modular_kernel.cli.output_streams import EXIT_OUTPUT_LOST

ROOT = Path(__file__).resolve().parents[2]
needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
# Arguments with an output that is long enough for `mk` to notice a pipe without a reader.
LONG_OUTPUT = "list --json"
SHORT_OUTPUT = "--version"
HELP = "--help"
REFUSED = "check --pf-type BatchedPrepareAndFinalize --experts-type TritonExperts"


def run_in_shell(arguments: str, redirection: str) -> "subprocess.CompletedProcess[str]":
    script = f'set -o pipefail; "$0" -m modular_kernel {arguments} {redirection}'
    return subprocess.run(
        ["bash", "-c", script, sys.executable],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def check_output_lost(result: "subprocess.CompletedProcess[str]") -> None:
    assert result.returncode == EXIT_OUTPUT_LOST, result.stderr
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr


@needs_dev_full
@pytest.mark.parametrize("arguments", [LONG_OUTPUT, SHORT_OUTPUT, HELP, REFUSED])
def test_full_disk_is_lost_output(arguments: str) -> None:
    result = run_in_shell(arguments, "> /dev/full")
    check_output_lost(result)
    assert "error: output was lost: stdout: No space left on device" in result.stderr


@pytest.mark.parametrize("reader", ["true", "head -1"])
@pytest.mark.parametrize(
    ("arguments", "status"),
    [(LONG_OUTPUT, 0), ("list", 0), (SHORT_OUTPUT, 0), (HELP, 0), (REFUSED, 1), ("check", 0)],
)
def test_closed_pipe_keeps_the_exit_status(arguments: str, status: int, reader: str) -> None:
    """A reader that has seen enough is not an error; the verb ends with its own status."""
    result = run_in_shell(arguments, f"| {reader}")
    assert result.returncode == status, result.stderr
    for word in ("error", "Traceback", "Exception ignored", "Broken pipe"):
        assert word not in result.stderr


@pytest.mark.parametrize("arguments", [SHORT_OUTPUT, REFUSED])
def test_closed_stdout_is_lost_output(arguments: str) -> None:
    check_output_lost(run_in_shell(arguments, ">&-"))


def test_progress_that_cannot_be_written_is_ignored() -> None:
    unwritable = "2> /dev/full" if Path("/dev/full").exists() else "2>&-"
    for redirection in (unwritable, "2>&-"):
        result = run_in_shell(REFUSED, redirection)
        assert result.returncode == 1
        assert "refused" in result.stdout
        assert "no CUDA device" not in result.stdout  # notes are not part of the output
