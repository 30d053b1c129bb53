"""Tests of tools/mutate_modules.py, which runs pytest on mutants of a set of modules."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from modular_kernel.errors import ConfigurationError
from modular_kernel.testing.mutation import Coverage, Mutant, mutants_of
from modular_kernel.testing.mutation.scope import find_file

ROOT = Path(__file__).resolve().parents[2]
MODULE = "modular_kernel.spec.lora"
DETECTING = "tests/layers/test_adapters.py::test_maximum_ranks_and_adapters"
COVERING = "tests/layers/test_adapters.py::test_tokens_get_the_slots_of_their_sequences"
NOT_DETECTING = "tests/layers/test_adapters.py::test_the_text_form_round_trips[]"


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "mutate_modules", ROOT / "tools/mutate_modules.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = load_tool()


def find_first_mutant(line: str) -> Mutant:
    """Return the first mutant that changes a line to `line`."""
    path = find_file(MODULE)
    assert path is not None
    return next(m for m in mutants_of(MODULE, path) if f"\n+{line}" in m.diff())


def make_scope(mutant: Mutant, tests: tuple[str, ...]) -> object:
    """Return a scope with one mutant and tests that all execute its lines, the fastest test
    first.
    """
    lines = {str(mutant.path): frozenset(range(mutant.first, mutant.last + 1))}
    scope_tests = tuple(tool.Test(name, 1.0 + i, lines) for i, name in enumerate(tests))
    return tool.Scope("adapters", (), (mutant,), scope_tests, Coverage({}, ()))


def test_a_mutant_is_killed_by_the_test_that_detects_it() -> None:
    changed_limits = find_first_mutant("MAX_ADAPTERS, MAX_RANK = 65537, 256")
    outcome = tool.run_mutant(
        changed_limits, make_scope(changed_limits, (NOT_DETECTING, DETECTING))
    )
    assert (outcome.status, outcome.finding, outcome.num_cases) == (
        "killed",
        f"test: {DETECTING}",
        2,
    )
    outcome = tool.run_mutant(changed_limits, make_scope(changed_limits, (NOT_DETECTING,)))
    assert (outcome.status, outcome.num_cases) == ("survived", 1)


def test_a_mutant_that_cannot_be_imported_is_killed() -> None:
    not_importable = find_first_mutant("MAX_ADAPTERS, MAX_RANK = 65537, 256")
    outcome = tool.run_mutant(
        not_importable, make_scope(not_importable, ("tests/layers/test_adapters.py::no_such_test",))
    )
    assert (outcome.status, outcome.finding) == ("killed", "import: pytest ended with 4")


def test_scopes_name_existing_modules_and_tests() -> None:
    for scope in json.loads(tool.SCOPES.read_text(encoding="utf-8")).values():
        assert all(find_file(module) for module in scope["modules"])
        assert all((ROOT / test).is_file() for test in scope["tests"])
    with pytest.raises(ConfigurationError, match="adapters"):
        tool.read_scope("nothing")


def test_executed_lines_are_recorded_per_test(monkeypatch: pytest.MonkeyPatch) -> None:
    path = find_file(MODULE)
    assert path is not None
    monkeypatch.setattr(tool, "_MAX_TEST_S", 60.0)
    loading, tests = tool.cover_tests({str(path)}, {MODULE}, [COVERING, DETECTING], [DETECTING])
    assert [test.name for test in tests] == [COVERING]
    mutant = next(m for m in mutants_of(MODULE, path) if "right=True" in m.diff())
    assert mutant.first in tests[0].lines[str(path)]
    assert mutant.first not in loading[str(path)]
