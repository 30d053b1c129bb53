"""A checklist of requirements, and a check that the tests named in it exist."""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]


class Row(NamedTuple):
    """A requirement, its tests as `file::function`, and what the tests do not cover."""

    requirement: str
    tests: tuple[str, ...]
    not_covered: str = ""


@cache
def list_functions(file: str) -> frozenset[str]:
    """Return the names of the functions of a test file, given its path without a suffix."""
    (path,) = TESTS.rglob(f"{file.rpartition('/')[2]}.py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def missing_tests(row: Row) -> list[str]:
    """Return the tests of a row, `file::function`, that do not exist."""
    names = (name.partition("::") for name in row.tests)
    return [f"{file}::{test}" for file, _, test in names if test not in list_functions(file)]
