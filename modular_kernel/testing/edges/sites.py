"""Find the source lines (sites) that can refuse a pairing of an exchange and an experts class.

A site creates a `Rejection`, in a compatibility rule or in the method `extra_rejections` of one of
the classes ("parts"). Tests check that the edges found by `edges_of` reach every site.
"""

import ast
import inspect
from collections.abc import Iterable, Iterator
from textwrap import dedent
from types import CodeType, FunctionType

from modular_kernel.compatibility.rules import RULES
from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize

Site = tuple[str, int]  # file, line


def find_rule_sites() -> frozenset[Site]:
    """Return the sites in the rules that apply to all pairings."""
    return frozenset(_find_sites(RULES.values()))


def find_part_sites(part: type[PrepareAndFinalize | PermuteExpertsUnpermute]) -> frozenset[Site]:
    """Return the sites in a part's own and inherited `extra_rejections`, and in their callees."""
    methods = (vars(cls).get("extra_rejections") for cls in part.__mro__)
    return frozenset(
        _find_sites(getattr(method, "__func__", method) for method in methods if method)
    )


def _find_sites(roots: Iterable[object]) -> Iterator[Site]:
    for function in _find_reachable_functions(roots):
        first_line = function.__code__.co_firstlineno
        for node in ast.walk(ast.parse(dedent(inspect.getsource(function)))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Rejection":
                yield function.__code__.co_filename, first_line + node.lineno - 1


def _is_frozen(function: FunctionType) -> bool:
    return function.__code__.co_filename.startswith("<frozen ")


def _find_reachable_functions(roots: Iterable[object]) -> set[FunctionType]:
    """Return `roots` and all functions that they refer to, except functions without source."""
    functions, pending = set[FunctionType](), list(roots)
    while pending:
        candidate = pending.pop()
        if (
            isinstance(candidate, FunctionType)
            and candidate not in functions
            and not _is_frozen(candidate)
        ):
            functions.add(candidate)
            pending += [candidate.__globals__.get(name) for name in _list_names(candidate.__code__)]
    return functions


def _list_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for nested_code in code.co_consts:
        if isinstance(nested_code, CodeType):
            yield from _list_names(nested_code)
