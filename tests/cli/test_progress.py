"""Progress of long steps. A subcommand reports its steps on stderr, and shows a bar on a terminal.

`mk demo` also prints the path of the `mk` command that it mentions at the end.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_mk import Mk, make_mk_fixture

from modular_kernel.cli import demo, demo_output, output

TORCH_PAIR = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")
TINY = ("--tokens", "2", "--hidden", "32", "--intermediate", "32", "--experts", "4")

mk = make_mk_fixture()


@pytest.fixture(autouse=True)
def _report_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_FIRST_LINE_S", 0.005)


def test_long_cases_report_progress(mk: Mk, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("test", *TORCH_PAIR, "--one", *TINY)
    assert "case 1 of 1: 0 s so far\n" in mk(*arguments).err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert "so far" not in mk(*arguments).err


def test_long_profiles_report_progress(mk: Mk, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "profiling: 0 s so far\n" in mk("profile", *TORCH_PAIR, *TINY, "--calls", "1").err


def test_long_demos_report_progress(mk: Mk, monkeypatch) -> None:
    pytest.importorskip("transformers", reason="the extra is not installed")

    def wait_without_rows(*_: object) -> Iterator[demo.DemoRow]:
        time.sleep(0.2)
        yield from ()

    monkeypatch.setattr(demo, "_run_models", wait_without_rows)
    monkeypatch.setattr(demo, "_run_checkpoints", wait_without_rows)
    assert "run 1 of 40: 0 s so far\n" in mk("demo").err


def test_demo_prints_the_path_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mk").touch()
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for found_path, printed_path in ((None, f" (mk is {tmp_path / 'mk'})"), ("/usr/bin/mk", "")):
        monkeypatch.setattr(demo_output, "which", lambda _, found_path=found_path: found_path)
        demo_output.print_demo([], [], 1.0, {}, [], [])
        assert f"\nnext{printed_path}:\n" in capsys.readouterr().out
