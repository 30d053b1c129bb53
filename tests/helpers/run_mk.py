"""Runs the `mk` command in the process of a test."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest

from modular_kernel.cli import main, output


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run_mk(capsys: pytest.CaptureFixture[str], *words: str) -> Ended:
    """Exit code, and what was printed since; lines are not folded unless COLUMNS is set."""
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
    """A fixture that runs `mk`, with these words first, in the process of a test."""

    @pytest.fixture
    def mk(capsys: pytest.CaptureFixture[str]) -> Mk:
        return partial(run_mk, capsys, *first)

    return mk
