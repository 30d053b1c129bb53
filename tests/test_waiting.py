"""Where one step takes long, a verb says on stderr what it does; on a terminal a bar moves."""

import sys
import time
from collections.abc import Iterator

import pytest
from run_mk import Mk, runs_mk

from modular_kernel.cli import demo, output

TORCH_PAIR = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")
TINY = ("--tokens", "2", "--hidden", "32", "--intermediate", "32", "--experts", "4")

mk = runs_mk()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_FIRST_WORD_S", 0.005)


def test_a_long_case_is_said_while_it_lasts(mk: Mk, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("test", *TORCH_PAIR, "--one", *TINY)
    assert "case 1 of 1: 0 s so far\n" in mk(*words).err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert "so far" not in mk(*words).err


def test_a_long_profile_is_said_while_it_lasts(mk: Mk, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "profiling: 0 s so far\n" in mk("profile", *TORCH_PAIR, *TINY, "--calls", "1").err


def test_a_long_run_of_the_demo_is_said_while_it_lasts(mk: Mk, monkeypatch) -> None:
    pytest.importorskip("transformers", reason="the extra is not installed")

    def slow(*_: object) -> Iterator[demo.DemoRow]:
        time.sleep(0.2)
        yield from ()

    monkeypatch.setattr(demo, "_rows", slow)
    monkeypatch.setattr(demo, "_packed", slow)
    assert "run 1 of 40: 0 s so far\n" in mk("demo").err
