"""The harness reports rows that a part does not mark as checked."""

from typing import Any

import pytest

from modular_kernel.catalog import this_machine
from modular_kernel.tensors import ExpertRows
from modular_kernel.testing.cases.lists import cases_for
from modular_kernel.testing.verify.checks import check_marked_rows
from modular_kernel.testing.verify.trial import Trial
from prepare_finalize.common import tokens

PAIR = "MoEPrepareAndFinalizeNoEP", "TorchExperts"


def make_trial() -> Trial:
    machine = this_machine(device="cpu")
    case = next(c for c in cases_for(*PAIR, machine, "smoke").cases if c.problem.tokens)
    return Trial(case, machine)


def test_marked_rows_pass() -> None:
    trial = make_trial()
    assert not [*check_marked_rows(trial)]
    assert trial.first_call.unchecked_rows == 0


def test_unmarked_rows_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_unmarked_rows(*args: Any, checked: bool) -> ExpertRows:
        assert checked
        return ExpertRows(*args)  # the default is not checked

    monkeypatch.setattr(tokens, "ExpertRows", make_unmarked_rows)
    assert [*check_marked_rows(make_trial())] == [
        "1 ExpertRows of a call are not marked as checked"
    ]
