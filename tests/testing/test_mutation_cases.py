"""The cases that a mutant runs, their order, and results of other runs that are reused."""

import importlib
from pathlib import Path

import pytest
from mutation_samples import KERNEL, mutants_in

from modular_kernel.catalog import this_machine
from modular_kernel.testing.cases.lists import Case, cases_for
from modular_kernel.testing.mutation import (
    Mutant,
    MutantOutcome,
    Score,
    Survey,
    mutants_of,
    mutation_score,
)
from modular_kernel.testing.mutation.coverage import CaseCoverage, Coverage, trace_lines
from modular_kernel.testing.mutation.record import record_of, recorded_kills
from modular_kernel.testing.mutation.run_mutant import KillHistory


def test_lines_executed_by_an_import_are_separate_from_lines_of_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they were not, a case would get credit for the lines of modules that it imports first."""
    path = tmp_path / "imported_late.py"
    path.write_text("def f():\n    return 2\n\n\nTWO = f()\n\n\ndef g():\n    return TWO\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with trace_lines({str(path)}) as (called, loaded):
        importlib.import_module("imported_late").g()
    assert loaded[str(path)] - {0} == {1, 2, 5, 8}  # line 0 is the start of a module
    assert called[str(path)] == {8, 9}


MODULE_WITH_CONSTANTS = """_SIZE = 4
_BOTH = 8
_TWICE: int = 2 * _BOTH
PUBLIC = 16


def f(x):
    if x:
        return (
            _SIZE)
    return PUBLIC + _BOTH


def g(size=_TWICE):
    return size
"""


def test_private_constants_are_covered_by_their_readers(tmp_path: Path) -> None:
    """Public constants and constants that are read at import are covered by the import."""
    path = tmp_path / "module.py"
    path.write_text(MODULE_WITH_CONSTANTS, encoding="utf-8")
    readers = {m.first: m.readers for m in mutants_of("module", path)}
    assert readers[1] == ((9, 10),)
    assert {readers[line] for line in (2, 3, 4, 8, 11)} == {None}
    mutant = next(m for m in mutants_of("module", path) if m.first == 1)
    cases = cases_for("MoEPrepareAndFinalizeNoEP", "TorchExperts", this_machine(), "smoke").cases
    lines = ({1, 8, 11}, {8, 10})
    covered_cases = [
        CaseCoverage(case, 1.0, "", {str(path): frozenset(executed)})
        for case, executed in zip(cases, lines, strict=False)
    ]
    coverage = Coverage({str(path): frozenset({1, 2, 3, 4})}, tuple(covered_cases))
    assert coverage.executing(mutant) == (covered_cases[1],)
    assert not coverage.loads(mutant)


def test_cases_that_execute_rare_lines_come_first(tmp_path: Path) -> None:
    mutant = mutants_in(tmp_path, KERNEL)["step lost", "pass"]
    cases = cases_for("MoEPrepareAndFinalizeNoEP", "TorchExperts", this_machine(), "smoke").cases
    lines = ({1, 2}, {1, 2}, {1, 2, 3}, {2})
    covered_cases = [
        CaseCoverage(case, seconds, "", {str(mutant.path): frozenset(executed)})
        for case, seconds, executed in zip(cases, (1.0, 2.0, 9.0, 3.0), lines, strict=False)
    ]
    history = KillHistory()
    assert [c.seconds for c in history.order(mutant, covered_cases)] == [1.0, 9.0, 2.0, 3.0]
    for _ in range(3):
        history.add(mutant, covered_cases[3].case)
    assert [c.seconds for c in history.order(mutant, covered_cases)] == [3.0, 1.0, 9.0, 2.0]


def test_a_mutant_killed_by_a_shared_case_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = mutants_in(tmp_path, KERNEL)["step lost", "pass"]
    pair = "MoEPrepareAndFinalizeNoEP", "TorchExperts"
    first, second = cases_for(*pair, this_machine(), "smoke").cases[:2]
    executed = []

    def record_and_kill(
        mutant: Mutant, coverage: Coverage, *_: object, **__: object
    ) -> MutantOutcome:
        executed.append(mutant)
        return MutantOutcome(mutant, "killed", "numeric: far off", coverage.cases[0].case)

    def make_survey(name: str, case: Case) -> Survey:
        lines = {str(mutant.path): frozenset(range(mutant.first, mutant.last + 1))}
        coverage = Coverage({}, (CaseCoverage(case, 1.0, "", lines),))
        return Survey(name, (pair,), "smoke", (mutant,), coverage)

    monkeypatch.setattr("modular_kernel.testing.mutation.score.run_mutant", record_and_kill)
    known_outcomes: dict[str, MutantOutcome] = {}
    scores = [
        mutation_score(make_survey(name, case), known_outcomes=known_outcomes)
        for name, case in (("One", first), ("Two", first), ("Three", second))
    ]
    assert [outcome.shared for score in scores for outcome in score.outcomes] == ["", "One", ""]
    assert len(executed) == 2
    records = [record_of(score) for score in scores]
    assert [record["shared"] for record in records] == [0, 1, 0]
    assert records[0]["died"] == {mutant.ident: "numeric"}
    # A later run reuses a record of the same cases.
    assert recorded_kills(records[0], make_survey("One", first)) == records[0]["died"]
    assert recorded_kills(records[0], make_survey("Two", first)) == {}
    rerun = mutation_score(make_survey("One", first), recorded=records[0]["died"])
    assert record_of(rerun)["killed_by"] == {"numeric": 1}
    assert len(executed) == 2
    assert MutantOutcome.from_record(mutant, "hang").killed


def test_recorded_kills_run_first_and_progress_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`on_progress` gets the score after every mutant, so an interrupted run keeps its results."""
    mutants = tuple(mutants_in(tmp_path, KERNEL).values())
    case = cases_for("MoEPrepareAndFinalizeNoEP", "TorchExperts", this_machine(), "smoke").cases[0]
    lines = {str(mutants[0].path): frozenset(range(1, 99))}
    coverage = Coverage({}, (CaseCoverage(case, 1.0, "", lines),))
    survey = Survey("One", (), "smoke", mutants, coverage)
    monkeypatch.setattr(
        "modular_kernel.testing.mutation.score.run_mutant",
        lambda mutant, *_, **__: MutantOutcome(mutant, "killed", "numeric: far off", case),
    )
    order = [outcome.mutant for outcome in mutation_score(survey, count=3).outcomes]
    scores: list[Score] = []
    mutation_score(survey, count=3, recorded={order[-1].ident: "hang"}, on_progress=scores.append)
    assert [[outcome.mutant for outcome in score.outcomes] for score in scores] == [
        [order[2]],
        [order[2], order[0]],
        [order[2], order[0], order[1]],
    ]
    assert record_of(scores[1])["died"] == {order[2].ident: "hang", order[0].ident: "numeric"}
