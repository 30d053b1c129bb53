"""With `--json`, stdout has only JSON, even if imported packages print something."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_mk import run_mk

from modular_kernel.catalog import load_catalog
from modular_kernel.cli.output_streams import LOST_OUTPUT

# Prints as packages do: from Python, past it, from C through a buffer, and at the end.
NOISY = """\
import atexit, ctypes, os, subprocess, sys
print("noise of Python")
os.write(1, b"noise past Python\\n")
ctypes.CDLL(None).puts(b"noise of C")
subprocess.run([sys.executable, "-c", "print('noise of a child')"])
if "pytest" not in sys.modules:
    atexit.register(print, "noise at the end")
COMPONENTS = ()
"""
NOISES = ("noise of Python", "noise past Python", "noise of C", "noise of a child")
TINY = ("--tokens", "2", "--hidden", "32", "--intermediate", "32", "--experts", "4")
PAIR = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")
VERBS: dict[str, tuple[str, ...]] = {
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
def noisy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package with parts that prints when it is imported."""
    (tmp_path / "noisy_parts.py").write_text(NOISY, encoding="utf-8")
    facts = tmp_path / "noisy_parts-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: noisy_parts\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(
        "[modular_kernel.parts]\nnoisy = noisy_parts:COMPONENTS\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.delitem(sys.modules, "noisy_parts", raising=False)
    load_catalog.cache_clear()
    yield
    sys.modules.pop("noisy_parts", None)
    load_catalog.cache_clear()


@pytest.mark.usefixtures("noisy")
@pytest.mark.parametrize("words", VERBS.values(), ids=VERBS.keys())
def test_stdout_has_only_json(capfd: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    ended = run_mk(capfd, *words, "--json")
    assert isinstance(ended.json, dict)
    for noise in NOISES:
        assert noise in ended.err


@pytest.mark.usefixtures("noisy")
def test_text_output_is_not_redirected(capfd: pytest.CaptureFixture[str]) -> None:
    """Without --json, stdout is not redirected."""
    ended = run_mk(capfd, "list")
    assert "noise of Python" in ended.out
    assert "TorchExperts" in ended.out
    os.write(1, b"still there\n")
    assert capfd.readouterr().out == "still there\n"


@pytest.mark.usefixtures("noisy")
@pytest.mark.parametrize("words", [("check",), ("check", "--top-k", "99")], ids=["ok", "refused"])
def test_process_prints_only_json(words: tuple[str, ...]) -> None:
    """This includes output of atexit functions."""
    ended = subprocess.run(
        [sys.executable, "-m", "modular_kernel", *words, "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert json.loads(ended.stdout)["pairs"]
    for noise in (*NOISES, "noise at the end"):
        assert noise in ended.stderr
    assert ended.returncode == (0 if words == ("check",) else 1)


@pytest.mark.usefixtures("noisy")
def test_full_stdout_is_lost_output() -> None:
    command = f'exec "{sys.executable}" -m modular_kernel list --json'
    for ends, told in ((">&-", ""), ("> /dev/full", "error: output was lost: stdout: ")):
        ended = subprocess.run(
            ["/bin/sh", "-c", f"{command} {ends}"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ended.returncode == LOST_OUTPUT
        assert told in ended.stderr
