"""Progress of long steps: lines on stderr, or a bar on a terminal.

`mk demo` also prints the path of the `mk` command that it mentions at the end.
"""

import re
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from run_mk import Mk, make_mk_fixture

from modular_kernel.catalog import load_catalog, this_machine
from modular_kernel.cli import demo, demo_output, output
from modular_kernel.testing.input_mutations import run as input_mutations
from modular_kernel.testing.mutation import coverage
from modular_kernel.testing.mutation.score import list_mutants

TORCH_PAIR = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")
TINY = ("--tokens", "2", "--hidden", "32", "--intermediate", "32", "--experts", "4")

MACHINE = this_machine()

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


@pytest.mark.cpu  # mutants run in forked processes
def test_mutation_testing_reports_each_step(mk: Mk, monkeypatch: pytest.MonkeyPatch) -> None:
    """For most parts, input mutations, the search for cases, and each mutant take minutes."""
    monkeypatch.setattr(output, "_FIRST_LINE_S", 0.0)
    two_mutations = partial(input_mutations.sensitivity, mutants=input_mutations.MUTANTS[:2])
    monkeypatch.setattr(input_mutations, "sensitivity", two_mutations)
    list_cases = coverage.list_cases
    monkeypatch.setattr(coverage, "list_cases", lambda *args: (list_cases(*args)[0][:2], MACHINE))
    mutants = list_mutants("TorchExperts", load_catalog())
    ident = next(m.ident for m in mutants if "invalid_ids.add_" in m.diff())
    arguments = ("test", "--mutate", "TorchExperts", *TORCH_PAIR, "--level", "smoke")
    pair = "MoEPrepareAndFinalizeNoEP x TorchExperts"
    err = mk(*arguments, "--mutants", "0").err
    assert "mutating inputs and outputs of 1 pairing\n" in err
    assert re.search(rf"^pairing 1 of 1, {pair}: 1 of 2 mutations in \d+ s$", err, re.M)
    killed = rf"^pairing 1 of 1, {pair}: (\d) input mutations, \1 killed, \d+ s$"
    assert re.search(killed, err, re.M)
    result = mk(*arguments, "--only", ident)
    assert "finding the cases that execute each line of the source\n" in result.err
    assert re.search(rf"^{pair}: 1 of 2 cases in \d+ s$", result.err, re.M)
    assert re.search(rf"^{ident}: 0 of \d cases in \d+ s$", result.err, re.M)
    assert re.search(rf"^mutant 1 of 1, {ident}: \w+", result.err, re.M)
    assert "mutant 1 of 1" not in result.out


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
