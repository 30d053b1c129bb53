"""With `--json`, stdout contains only JSON, even if imported packages print something."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_mk import run_mk

from modular_kernel.catalog import load_catalog
from modular_kernel.cli.output_streams import EXIT_OUTPUT_LOST

# A package that prints from Python, from a system call, from C with a buffer, from a child process,
# and at exit.
NOISY_PACKAGE = """\
import atexit, ctypes, os, subprocess, sys
print("noise of Python")
os.write(1, b"noise of a system call\\n")
ctypes.CDLL(None).puts(b"noise of C")
subprocess.run([sys.executable, "-c", "print('noise of a child')"])
if "pytest" not in sys.modules:
    atexit.register(print, "noise at the end")
COMPONENTS = ()
"""
NOISES = ("noise of Python", "noise of a system call", "noise of C", "noise of a child")
TINY = ("--tokens", "2", "--hidden", "32", "--intermediate", "32", "--experts", "4")
PAIR = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")
COMMANDS: dict[str, tuple[str, ...]] = {
    "list": ("list",),
    "check": ("check",),
    "a refusal": ("check", "--top-k", "99"),
    "bad usage": ("test", "--one", "--pf-type", "NoSuchPart", "--experts-type", "TorchExperts"),
    "test": ("test", *PAIR, "--one", *TINY),
    "bench": ("bench", *PAIR, *TINY, "--ms", "0.01"),
    "compose": ("compose", *TINY),
    "report": ("report",),
    "doctor": ("doctor",),
}


@pytest.fixture
def noisy_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package of parts that prints when it is imported."""
    (tmp_path / "noisy_parts.py").write_text(NOISY_PACKAGE, encoding="utf-8")
    dist_info = tmp_path / "noisy_parts-1.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: noisy_parts\nVersion: 1\n")
    (dist_info / "entry_points.txt").write_text(
        "[modular_kernel.parts]\nnoisy = noisy_parts:COMPONENTS\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.delitem(sys.modules, "noisy_parts", raising=False)
    load_catalog.cache_clear()
    yield
    sys.modules.pop("noisy_parts", None)
    load_catalog.cache_clear()


@pytest.mark.usefixtures("noisy_package")
@pytest.mark.parametrize("args", COMMANDS.values(), ids=COMMANDS.keys())
def test_stdout_has_only_json(capfd: pytest.CaptureFixture[str], args: tuple[str, ...]) -> None:
    result = run_mk(capfd, *args, "--json")
    assert isinstance(result.json, dict)
    for noise in NOISES:
        assert noise in result.err


@pytest.mark.usefixtures("noisy_package")
def test_stdout_is_not_redirected_without_json(capfd: pytest.CaptureFixture[str]) -> None:
    result = run_mk(capfd, "list")
    assert "noise of Python" in result.out
    assert "TorchExperts" in result.out
    os.write(1, b"still there\n")
    assert capfd.readouterr().out == "still there\n"


@pytest.mark.usefixtures("noisy_package")
@pytest.mark.parametrize("args", [("check",), ("check", "--top-k", "99")], ids=["ok", "refused"])
def test_process_prints_only_json(args: tuple[str, ...]) -> None:
    """Output of atexit functions also goes to stderr."""
    result = subprocess.run(
        [sys.executable, "-m", "modular_kernel", *args, "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert json.loads(result.stdout)["pairs"]
    for noise in (*NOISES, "noise at the end"):
        assert noise in result.stderr
    assert result.returncode == (0 if args == ("check",) else 1)


@pytest.mark.usefixtures("noisy_package")
def test_full_or_closed_stdout_is_lost_output() -> None:
    command = f'exec "{sys.executable}" -m modular_kernel list --json'
    for redirection, message in (
        (">&-", ""),
        ("> /dev/full", "error: output was lost: stdout: "),
    ):
        result = subprocess.run(
            ["/bin/sh", "-c", f"{command} {redirection}"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == EXIT_OUTPUT_LOST
        assert message in result.stderr
