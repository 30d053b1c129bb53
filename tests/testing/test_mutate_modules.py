"""tools/mutate_modules.py: a mutant dies before a test that notices it, and before that alone."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from modular_kernel.errors import ConfigurationError
from modular_kernel.testing.mutation import Coverage, Mutant, mutants_of
from modular_kernel.testing.mutation.scope import file_of

ROOT = Path(__file__).resolve().parents[2]
MODULE = "modular_kernel.spec.lora"
NOTICES = "tests/layers/test_adapters.py::test_the_largest_allowed_numbers"
SEQUENCES = "tests/layers/test_adapters.py::test_tokens_get_the_slots_of_their_sequences"
DOES_NOT = "tests/layers/test_adapters.py::test_text_round_trip[]"


def loaded() -> ModuleType:
    """The tool as a module."""
    spec = importlib.util.spec_from_file_location(
        "mutate_modules", ROOT / "tools/mutate_modules.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = loaded()


def mutant(line: str) -> Mutant:
    """The first mutant of a line of the module."""
    path = file_of(MODULE)
    assert path is not None
    return next(m for m in mutants_of(MODULE, path) if f"\n+{line}" in m.diff())


def scope(one: Mutant, tests: tuple[str, ...]) -> object:
    """Tests that execute the lines of a mutant, the first one fastest."""
    lines = {str(one.path): frozenset(range(one.first, one.last + 1))}
    found = tuple(tool.Test(name, 1.0 + i, lines) for i, name in enumerate(tests))
    return tool.Scope("adapters", (), (one,), found, Coverage({}, ()))


def test_a_mutant_dies_before_the_test_that_notices_it() -> None:
    wider = mutant("MAX_ADAPTERS, MAX_RANK = 65537, 256")
    fate = tool.run_mutant(wider, scope(wider, (DOES_NOT, NOTICES)))
    assert (fate.status, fate.finding, fate.num_cases) == ("killed", f"test: {NOTICES}", 2)
    fate = tool.run_mutant(wider, scope(wider, (DOES_NOT,)))
    assert (fate.status, fate.num_cases) == ("survived", 1)


def test_what_cannot_be_imported_is_dead() -> None:
    broken = mutant("MAX_ADAPTERS, MAX_RANK = 65537, 256")
    fate = tool.run_mutant(broken, scope(broken, ("tests/layers/test_adapters.py::no_such_test",)))
    assert (fate.status, fate.finding) == ("killed", "import: pytest ended with 4")


def test_scopes_name_modules_and_tests_that_are_there() -> None:
    for given in json.loads(tool.SCOPES.read_text(encoding="utf-8")).values():
        assert all(file_of(module) for module in given["modules"])
        assert all((ROOT / test).is_file() for test in given["tests"])
    with pytest.raises(ConfigurationError, match="adapters"):
        tool.read_scope("nothing")


def test_tests_are_watched_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_of(MODULE)
    assert path is not None
    monkeypatch.setattr(tool, "_MAX_TEST_S", 60.0)
    loading, tests = tool.cover_tests({str(path)}, {MODULE}, [SEQUENCES, NOTICES], [NOTICES])
    assert [test.name for test in tests] == [SEQUENCES]
    one = next(m for m in mutants_of(MODULE, path) if "right=True" in m.diff())
    assert one.first in tests[0].lines[str(path)]
    assert one.first not in loading[str(path)]
