"""Where a pairing can be refused: every place in the code of the rules, and of what a part adds to
them, that makes a Rejection."""

import ast
import inspect
from collections.abc import Iterable, Iterator
from textwrap import dedent
from types import CodeType, FunctionType

from modular_kernel.compatibility.rules import RULES
from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize

Site = tuple[str, int]  # file, line


def sites_of_rules() -> frozenset[Site]:
    """Places in the rules that all pairings are judged by."""
    return frozenset(_sites(RULES.values()))


def sites_of_part(part: type[PrepareAndFinalize | PermuteExpertsUnpermute]) -> frozenset[Site]:
    """Places in a part's own `extra_rejections`, its bases', and the functions that these name."""
    own = (vars(cls).get("extra_rejections") for cls in part.__mro__)
    return frozenset(_sites(getattr(method, "__func__", method) for method in own if method))


def _sites(asked: Iterable[object]) -> Iterator[Site]:
    for function in _reached(asked):
        first = function.__code__.co_firstlineno
        for node in ast.walk(ast.parse(dedent(inspect.getsource(function)))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Rejection":
                yield function.__code__.co_filename, first + node.lineno - 1


def _frozen(function: FunctionType) -> bool:
    return function.__code__.co_filename.startswith("<frozen ")


def _reached(asked: Iterable[object]) -> set[FunctionType]:
    """Return these functions, and those that they name; Python's frozen modules have no source."""
    found, left = set[FunctionType](), list(asked)
    while left:
        one = left.pop()
        if isinstance(one, FunctionType) and one not in found and not _frozen(one):
            found.add(one)
            left += [one.__globals__.get(name) for name in _names(one.__code__)]
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
