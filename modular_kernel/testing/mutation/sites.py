"""Mutation sites of a module: every expression and statement that affects the computation.

Not mutated: strings, docstrings, annotations, imports, assertions, arguments of raised errors, and
conditions that only guard such a raise. They refuse bad input, and `mk test` uses valid input; such
a guard is only negated.
"""

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from modular_kernel.testing.mutation.operators import OPERATORS, SPEED, duration
from modular_kernel.testing.mutation.source import (
    Edit,
    Mutant,
    Placed,
    Source,
    last_line,
    named,
    names_in,
)

_SKIPPED = (ast.Import, ast.ImportFrom, ast.Assert, ast.Raise, ast.JoinedStr, ast.Global)
_TEXTS = ("Error", "Rejection", "TypeVar", "cast", "rejection", "note", "warn")
# Statements by which a loop iteration affects a later one or the result.
_LEAVES = (ast.AugAssign, ast.Yield, ast.YieldFrom, ast.Return, ast.Break)
_GROWS = ("append", "extend", "insert")
_TOLD = frozenset({"__str__", "__repr__"})

Found = Iterator[tuple[Edit, int, int, str]]


def mutants_of(module: str, path: Path) -> tuple[Mutant, ...]:
    """Return every mutant of a module in the order of its lines."""
    source = Source(module, path)
    mutants = named(source, _statements(source, source.tree.body, "", set()))
    return tuple(sorted(mutants, key=lambda mutant: (mutant.edit.start, mutant.ident)))


def _statements(source: Source, body: list[ast.stmt], function: str, known: set[str]) -> Found:
    """Yield the edits of a block. known: names assigned before in this function."""
    for node in body:
        yield from _statement(source, node, function, known)


def _statement(source: Source, node: ast.stmt, function: str, known: set[str]) -> Found:
    if isinstance(node, _SKIPPED) or _is_text(node) or _is_for_types_only(node):
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        if node.name not in _TOLD:
            yield from _definition(source, node, f"{function}.{node.name}")
        return
    first, last = node.lineno, last_line(node)
    edits = _edits_of_statement(source, node, known)
    yield from ((edit, first, last, function) for edit in edits)
    for block in ("body", "orelse", "finalbody"):
        yield from _statements(source, getattr(node, block, []), function, known)
    for handler in getattr(node, "handlers", []):
        yield from _statements(source, handler.body, function, known)


def _definition(source: Source, node: ast.FunctionDef | ast.ClassDef, name: str) -> Found:
    known: set[str] = set()
    if isinstance(node, ast.FunctionDef):
        arguments = node.args
        known = {arg.arg for arg in (*arguments.args, *arguments.kwonlyargs)}
        defaults = [d for d in (*arguments.defaults, *arguments.kw_defaults) if d is not None]
        for default in defaults:
            for edit in _expression(source, default):
                yield edit, node.lineno, node.body[0].lineno - 1, name
    yield from _statements(source, node.body, name, known)


def _edits_of_statement(source: Source, node: ast.stmt, known: set[str]) -> Iterator[Edit]:
    """Yield edits of a statement itself, without nested statements."""
    if isinstance(node, ast.If) and all(isinstance(inner, ast.Raise) for inner in node.body):
        yield source.replaced("branch", node.test, f"not ({source.of(node.test)})")
        return
    if type(node) in OPERATORS:
        yield from OPERATORS[type(node)](source, node)
    yield from _assignment(source, node, known)
    if _is_duration(node):
        yield from duration(source, node.value)
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) and child is not getattr(node, "annotation", None):
            for edit in _expression(source, child):
                if (
                    edit.operator != "order"
                    or not isinstance(node, ast.For)
                    or _has_carried_state(node)
                ):
                    yield edit
    for item in getattr(node, "items", []):
        yield from _expression(source, item.context_expr)


def _assignment(source: Source, node: ast.stmt, known: set[str]) -> Iterator[Edit]:
    """Yield the loss of a reassignment: a stale tile, a forgotten clamp."""
    if not isinstance(node, ast.Assign):
        return
    names = {t.id for target in node.targets for t in ast.walk(target) if isinstance(t, ast.Name)}
    if names and names <= known:
        yield source.replaced("stale", node, "pass")
    known |= names


def _expression(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, _SKIPPED) or (isinstance(node, ast.Call) and _makes_message(node)):
        return
    if type(node) in OPERATORS and not _is_target(node):
        yield from OPERATORS[type(node)](source, node)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.keyword):
            if child.arg not in SPEED:
                yield from _expression(source, child.value)
        elif isinstance(child, ast.comprehension):
            for inner in (child.iter, *child.ifs):
                yield from _expression(source, inner)
        elif not (isinstance(node, ast.UnaryOp) and isinstance(child, ast.Constant)):
            yield from _expression(source, child)


def _has_carried_state(loop: ast.For) -> bool:
    """Return whether an iteration may read what an earlier one wrote, so that order matters."""
    inner = [n for statement in loop.body for n in ast.walk(statement)]
    if any(isinstance(n, _LEAVES) or _called_on(n) in _GROWS for n in inner):
        return True
    assigned = {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    known = set[str]()
    statements = [n for n in inner if isinstance(n, ast.stmt)]
    for statement in sorted(statements, key=lambda n: (n.lineno, n.col_offset)):
        names = list(names_in(statement))
        if {n.id for n in names if isinstance(n.ctx, ast.Load)} & assigned - known:
            return True
        known |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
    return False


def _called_on(node: ast.AST) -> str:
    called = node.func if isinstance(node, ast.Call) else None
    return called.attr if isinstance(called, ast.Attribute) else ""


def _is_duration(node: ast.stmt) -> TypeGuard[ast.Assign]:
    """Return whether a statement assigns a constant to names in _S, a duration in seconds."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and all(isinstance(t, ast.Name) and t.id.endswith("_S") for t in node.targets)
    )


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_target(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)


def _is_for_types_only(node: ast.stmt) -> bool:
    """Return whether a statement is a TYPE_CHECKING block, `__all__`, or a union of types."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    if isinstance(node, ast.Assign):
        is_all = any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
        return is_all or (isinstance(node.value, ast.BinOp) and _is_union(node.value))
    return False


def _is_union(node: ast.expr) -> bool:
    """Return whether an expression is types joined by "|": classes or None."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.BitOr) and _is_union(node.left) and _is_union(node.right)
    if isinstance(node, ast.Subscript):
        return _is_union(node.value)
    named = node.id if isinstance(node, ast.Name) else ""
    return _is_none(node) or named in dir(builtins) or (named[:1].isupper() and not named.isupper())


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _makes_message(node: ast.Call) -> bool:
    """Return whether a call only makes a message."""
    called = node.func
    word = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return str(word).endswith(_TEXTS)


__all__ = ["Placed", "mutants_of"]
