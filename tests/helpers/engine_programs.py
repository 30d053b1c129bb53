"""Helpers that test the engine checks: they must detect faulty classes, and the reproducers that
they write must be valid.
"""

import ast
import json
import os
import pickle
import sys
from collections.abc import Mapping, Sequence

from modular_kernel.integrations.engine import EngineCase, Kind, Outcome
from modular_kernel.testing.engines.processes import (
    EngineProgram,
    TimeLimits,
    run_cases,
    run_reproducer,
)

MAX_STATEMENTS = 10  # of a reproducer, without imports
_RUN_ALL = """
import json, pickle
from engine_programs import count_statements
from {module} import load_engine
engine, results = load_engine(), []
for case, max_error in pickle.loads(bytes.fromhex({cases!r})):
    source, message = engine.make_reproducer(case, max_error), ""
    # Reproducers must not import this package. vLLM has a module of the same name.
    assert "modular_kernel" not in source.replace("config as c, modular_kernel as mk", "")
    try:
        exec(source, {{"__name__": "__main__"}})
    except AssertionError as error:
        message = str(error)
    results.append([message, count_statements(source)])
print(json.dumps(results))
"""


def count_statements(program: str) -> int:
    """Return the number of statements other than imports."""
    statements = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.stmt)]
    return sum(not isinstance(node, ast.Import | ast.ImportFrom) for node in statements)


def make_program(module: str, environment: Mapping[str, str]) -> EngineProgram:
    """Return the program of a helper module with faulty classes.

    PYTHONPATH is set, so that the program can import the helper modules that pytest imports.
    """
    path = os.pathsep.join(filter(None, sys.path))
    return EngineProgram(module, {**environment, "PYTHONPATH": path})


def check_reproducers(
    program: EngineProgram, correct_cases: Sequence[EngineCase], wrong_cases: Sequence[EngineCase]
) -> None:
    """Run the reproducers of all cases in one process, and assert that only wrong cases fail.

    That the reproducers of correct cases pass shows that the references in them are correct.
    """
    cases = [
        (case, 0.2 if case.problem.scheme.quantizes_activations else 0.01)
        for case in (*correct_cases, *wrong_cases)
    ]
    source = _RUN_ALL.format(module=program.module, cases=pickle.dumps(cases).hex())
    status, output = run_reproducer(program, source, 580)
    assert status == 0, output
    results = json.loads(output)
    expected = [False] * len(correct_cases) + [True] * len(wrong_cases)
    assert [bool(message) for message, _ in results] == expected, results
    assert max(statements for _, statements in results) <= MAX_STATEMENTS
    for message, _ in results[len(correct_cases) :]:
        assert message.startswith("relative RMS error ")


def check_faulty_classes(
    program: EngineProgram, cases: Sequence[EngineCase], kinds: Mapping[str, Kind]
) -> dict[str, Outcome]:
    """Run cases of faulty classes, assert the kinds of outcome, and return the outcomes by class.

    kinds: the expected outcome of each class, except WrongActivation, Raising, Aborting, Hanging
        and MissingOperator, which `sglang_faulty_engine` and `vllm_faulty_engine` both have.
    """
    limits = TimeLimits(first_call=10, call=10)
    outcomes = {case.experts: outcome for case, outcome in run_cases(cases, program, limits, 1)}
    assert {name: outcome.kind for name, outcome in outcomes.items()} == {
        "WrongActivation": Kind.WRONG,
        "Raising": Kind.CRASHED,
        "Aborting": Kind.CRASHED,
        "Hanging": Kind.TIMEOUT,
        "MissingOperator": Kind.UNAVAILABLE,
        **kinds,
    }
    assert outcomes["Aborting"].detail.startswith("SIGABRT in its first call")
    assert outcomes["Hanging"].detail == "first call took more than 10 s"
    assert outcomes["MissingOperator"].detail == "no compiled operator 'no_such_operator'"
    return outcomes
