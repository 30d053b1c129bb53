"""A checklist of requirements, and a check that the tests named in it exist."""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]


class Row(NamedTuple):
    """A requirement, its tests as `file::function`, and what the tests do not cover."""

    what: str
    tests: tuple[str, ...]
    left_out: str = ""


@cache
def functions_in(file: str) -> frozenset[str]:
    (path,) = TESTS.rglob(f"{file.rpartition('/')[2]}.py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def missing_tests(row: Row) -> list[str]:
    """Return the tests of a row, `file::function`, that do not exist."""
    names = (name.partition("::") for name in row.tests)
    return [f"{file}::{test}" for file, _, test in names if test not in functions_in(file)]
