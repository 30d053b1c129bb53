"""Runs the `mk` command in the process of a test."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest

from modular_kernel.cli import main, output


class Ended(NamedTuple):
    """The exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run_mk(capsys: pytest.CaptureFixture[str], *words: str) -> Ended:
    """Run `mk` with these words. Lines are not wrapped unless COLUMNS is set."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "_DEFAULT_WIDTH", 10_000)
        with pytest.raises(SystemExit) as ended:
            main.run(list(words))
    code = ended.value.code
    assert isinstance(code, int | None)
    return Ended(code or 0, *capsys.readouterr())


Mk = Callable[..., Ended]


def runs_mk(*first: str) -> Any:
    """Return the fixture `mk`, which runs `mk` with the words `first` and those of the call."""

    @pytest.fixture
    def mk(capsys: pytest.CaptureFixture[str]) -> Mk:
        return partial(run_mk, capsys, *first)

    return mk
