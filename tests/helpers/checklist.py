"""Rows of a checklist, and whether the tests that they name are there."""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]


class Row(NamedTuple):
    """What is asked for, its tests, and what they leave out."""

    what: str
    tests: tuple[str, ...]
    left_out: str = ""


@cache
def functions(file: str) -> frozenset[str]:
    (path,) = TESTS.rglob(f"{file.rpartition('/')[2]}.py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def absent(row: Row) -> list[str]:
    """The tests of a row, `file::function`, that no file has."""
    named = (name.partition("::") for name in row.tests)
    return [f"{file}::{test}" for file, _, test in named if test not in functions(file)]
