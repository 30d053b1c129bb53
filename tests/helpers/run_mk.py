"""Runs the `mk` command in the process of a test."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest

from modular_kernel.cli import main, output


class CommandResult(NamedTuple):
    """The exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run_mk(capsys: pytest.CaptureFixture[str], *args: str) -> CommandResult:
    """Run `mk` with these arguments. Lines are not wrapped unless COLUMNS is set."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "_DEFAULT_WIDTH", 10_000)
        with pytest.raises(SystemExit) as exit_info:
            main.run(list(args))
    code = exit_info.value.code
    assert isinstance(code, int | None)
    return CommandResult(code or 0, *capsys.readouterr())


Mk = Callable[..., CommandResult]


def make_mk_fixture(*leading_arguments: str) -> Any:
    """Return the fixture `mk`, which runs `mk` with `leading_arguments` and those of the call."""

    @pytest.fixture
    def mk(capsys: pytest.CaptureFixture[str]) -> Mk:
        return partial(run_mk, capsys, *leading_arguments)

    return mk
