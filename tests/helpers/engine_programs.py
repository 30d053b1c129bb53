"""Programs of engines with faulty classes, and the reproducers that the checks of engines write."""

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
for case, allowed in pickle.loads(bytes.fromhex({cases!r})):
    text, message = engine.make_reproducer(case, allowed), ""
    # vLLM has a module of the same name.
    assert "modular_kernel" not in text.replace("config as c, modular_kernel as mk", "")
    try:
        exec(text, {{"__name__": "__main__"}})
    except AssertionError as error:
        message = str(error)
    results.append([message, count_statements(text)])
print(json.dumps(results))
"""


def count_statements(program: str) -> int:
    """Return the number of statements other than imports."""
    statements = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.stmt)]
    return sum(not isinstance(node, ast.Import | ast.ImportFrom) for node in statements)


def make_program(module: str, environment: Mapping[str, str]) -> EngineProgram:
    """Return the program of a helper module with faulty classes.

    Its process finds helper modules as pytest does.
    """
    path = os.pathsep.join(filter(None, sys.path))
    return EngineProgram(module, {**environment, "PYTHONPATH": path})


def check_reproducers(
    program: EngineProgram, right: Sequence[EngineCase], wrong: Sequence[EngineCase]
) -> None:
    """Run the reproducers of all cases in one process, and assert that only wrong cases fail.

    Those of right cases find a small error, so their own references are right.
    """
    cases = [
        (case, 0.2 if case.problem.scheme.quantizes_activations else 0.01)
        for case in (*right, *wrong)
    ]
    text = _RUN_ALL.format(module=program.module, cases=pickle.dumps(cases).hex())
    status, line = run_reproducer(program, text, 580)
    assert status == 0, line
    results = json.loads(line)
    expected = [False] * len(right) + [True] * len(wrong)
    assert [bool(message) for message, _ in results] == expected, results
    assert max(statements for _, statements in results) <= MAX_STATEMENTS
    for message, _ in results[len(right) :]:
        assert message.startswith("relative RMS error ")


def check_faulty_classes(
    program: EngineProgram, cases: Sequence[EngineCase], kinds: Mapping[str, Kind]
) -> dict[str, Outcome]:
    """Judge cases of faulty classes, and return the outcomes by class.

    kinds: the expected outcome of each class, except WrongActivation, Raising, Aborting, Hanging
        and MissingOperator, which both programs have.
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
