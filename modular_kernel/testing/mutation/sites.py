"""Find the places in a module to mutate: every expression and statement that affects results.

`mutants_of` applies the mutation operators of `operators` there.

Strings, docstrings, annotations, imports, assertions and arguments of raised errors are not
mutated. A condition that only guards a `raise` is negated, but not changed in other ways, because
it rejects invalid input and the cases have valid input.

Some places are left out because a change there has no effect on any valid call:

- `strict=True` of `zip`, which is an assertion that the lengths are equal;
- the order of a loop that only combines values with `|=`, `&=` or `^=`, or with `a = a | b` and the
  like;
- whether a wait ends at its deadline or one reading of the clock later (`<` or `<=`);
- `+` and `-` with a constant of the module whose value is 0, such as the first of several indices;
- rounding up instead of down where a power of two is divided by the size of a dtype, because the
  division is exact;
- `other=` of a load whose masked lanes affect nothing (`unread_lanes`);
- the stride 0 of a tensor that is None (`absent_strides`);
- constants that only divide work among programs. They are listed in `verify.lowered_limits`, and
  the cases run with two values of each.
"""

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from modular_kernel.testing.mutation.absent_strides import find_absent_strides
from modular_kernel.testing.mutation.operators import (
    OPERATORS,
    PERFORMANCE_OPTIONS,
    mutate_duration,
)
from modular_kernel.testing.mutation.source import (
    Edit,
    Mutant,
    Source,
    get_last_line,
    iter_names,
    make_mutants,
)
from modular_kernel.testing.mutation.unread_lanes import find_unread_values
from modular_kernel.testing.verify.lowered_limits import LOWERED_LIMITS

_SKIPPED_NODES = (ast.Import, ast.ImportFrom, ast.Assert, ast.Raise, ast.JoinedStr, ast.Global)
_MESSAGE_CALLS = ("Error", "Rejection", "TypeVar", "cast", "rejection", "note", "warn")
# Statements by which a loop iteration affects a later one or the result.
_LOOP_EFFECTS = (ast.AugAssign, ast.Yield, ast.YieldFrom, ast.Return, ast.Break)
_LIST_METHODS = ("append", "extend", "insert")
_UNORDERED = (ast.BitOr, ast.BitAnd, ast.BitXor)  # operations whose order does not matter
_DISPLAY_METHODS = frozenset({"__str__", "__repr__"})

# (edit, first line, last line, qualified name of the function)
LocatedEdits = Iterator[tuple[Edit, int, int, str]]


def mutants_of(module: str, path: Path) -> tuple[Mutant, ...]:
    """Return every mutant of a module, in the order of its lines."""
    source = Source(module, path)
    mutants = make_mutants(source, _find_block_edits(source, source.tree.body, "", set()))
    return tuple(sorted(mutants, key=lambda mutant: (mutant.edit.start, mutant.ident)))


def _find_block_edits(
    source: Source, body: list[ast.stmt], qualified_name: str, assigned: set[str]
) -> LocatedEdits:
    """Yield the edits of a block.

    assigned: names that are assigned earlier in the function.
    """
    for node in body:
        yield from _find_statement_edits(source, node, qualified_name, assigned)


def _find_statement_edits(
    source: Source, node: ast.stmt, qualified_name: str, assigned: set[str]
) -> LocatedEdits:
    if isinstance(node, _SKIPPED_NODES) or _is_docstring(node) or _is_for_types_only(node):
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        if node.name not in _DISPLAY_METHODS:
            yield from _find_definition_edits(source, node, f"{qualified_name}.{node.name}")
        return
    first, last = node.lineno, get_last_line(node)
    edits = _find_own_edits(source, node, assigned)
    yield from ((edit, first, last, qualified_name) for edit in edits)
    for block in ("body", "orelse", "finalbody"):
        yield from _find_block_edits(source, getattr(node, block, []), qualified_name, assigned)
    for handler in getattr(node, "handlers", []):
        yield from _find_block_edits(source, handler.body, qualified_name, assigned)


def _find_definition_edits(
    source: Source, node: ast.FunctionDef | ast.ClassDef, qualified_name: str
) -> LocatedEdits:
    assigned: set[str] = set()
    if isinstance(node, ast.FunctionDef):
        arguments = node.args
        assigned = {arg.arg for arg in (*arguments.args, *arguments.kwonlyargs)}
        defaults = [d for d in (*arguments.defaults, *arguments.kw_defaults) if d is not None]
        for default in defaults:
            for edit in _find_expression_edits(source, default):
                yield edit, node.lineno, node.body[0].lineno - 1, qualified_name
    yield from _find_block_edits(source, node.body, qualified_name, assigned)


def _find_own_edits(source: Source, node: ast.stmt, assigned: set[str]) -> Iterator[Edit]:
    """Yield the edits of a statement, without those of statements nested in it."""
    if _is_limit(source, node):
        return
    if isinstance(node, ast.If) and _is_guard(node):
        yield source.replace_node("branch", node.test, f"not ({source.text_of(node.test)})")
        return
    if type(node) in OPERATORS:
        yield from OPERATORS[type(node)](source, node)
    yield from _find_stale_assignment(source, node, assigned)
    if _is_duration(node):
        yield from mutate_duration(source, node.value)
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) and child is not getattr(node, "annotation", None):
            for edit in _find_expression_edits(source, child):
                if (
                    edit.operator != "order"
                    or not isinstance(node, ast.For)
                    or _has_carried_state(node)
                ):
                    yield edit
    for item in getattr(node, "items", []):
        yield from _find_expression_edits(source, item.context_expr)


def _find_stale_assignment(source: Source, node: ast.stmt, assigned: set[str]) -> Iterator[Edit]:
    """Yield the edit that removes a reassignment, so that a variable keeps its old value."""
    if not isinstance(node, ast.Assign):
        return
    names = {t.id for target in node.targets for t in ast.walk(target) if isinstance(t, ast.Name)}
    if names and names <= assigned:
        yield source.replace_node("stale", node, "pass")
    assigned |= names


def _find_expression_edits(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, _SKIPPED_NODES) or (isinstance(node, ast.Call) and _makes_message(node)):
        return
    if node in find_absent_strides(source.tree):
        return
    if type(node) in OPERATORS and not _is_target(node):
        yield from OPERATORS[type(node)](source, node)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.keyword):
            is_skipped = child.arg in PERFORMANCE_OPTIONS or _asserts_equal_lengths(node, child)
            if not is_skipped and child.value not in find_unread_values(source.tree):
                yield from _find_expression_edits(source, child.value)
        elif isinstance(child, ast.comprehension):
            for inner in (child.iter, *child.ifs):
                yield from _find_expression_edits(source, inner)
        elif not (isinstance(node, ast.UnaryOp) and isinstance(child, ast.Constant)):
            yield from _find_expression_edits(source, child)


def _is_guard(node: ast.If) -> bool:
    """Return whether a statement only rejects input: it raises, and assigns names for the error."""
    *preceding, last = node.body
    return isinstance(last, ast.Raise) and all(
        isinstance(inner, ast.Assign) and all(isinstance(t, ast.Name) for t in inner.targets)
        for inner in preceding
    )


def _is_limit(source: Source, node: ast.stmt) -> bool:
    """Return whether a statement assigns a constant in LOWERED_LIMITS."""
    limits = LOWERED_LIMITS.get(source.module, {})
    return isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id in limits for target in node.targets
    )


def _asserts_equal_lengths(node: ast.AST, keyword: ast.keyword) -> bool:
    """Return whether a keyword argument is `strict=True` of `zip`."""
    is_zip = (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "zip"
    )
    is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
    return is_zip and keyword.arg == "strict" and is_true


def _has_carried_state(loop: ast.For) -> bool:
    """Return whether the order of iterations may matter.

    It may matter if an iteration reads what another wrote, or appends, yields, returns or breaks.
    """
    inner = [n for statement in loop.body for n in ast.walk(statement)]
    if any(
        (isinstance(n, _LOOP_EFFECTS) and not _is_unordered_update(n, inner))
        or _get_method_name(n) in _LIST_METHODS
        for n in inner
    ):
        return True
    assigned = {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    assigned -= _find_names_with_commutative_updates(inner)
    written = set[str]()
    statements = [n for n in inner if isinstance(n, ast.stmt)]
    for statement in sorted(statements, key=lambda n: (n.lineno, n.col_offset)):
        names = list(iter_names(statement))
        if {n.id for n in names if isinstance(n.ctx, ast.Load)} & assigned - written:
            return True
        written |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
    return False


def _is_unordered_update(node: ast.AST, loop: list[ast.AST]) -> bool:
    """Return whether a node is `name |= value`, `&=` or `^=`, and the loop has no other `name`.

    The result is then the same in any order of the iterations.
    """
    return (
        isinstance(node, ast.AugAssign)
        and isinstance(node.op, _UNORDERED)
        and isinstance(node.target, ast.Name)
        and _count_names(node.target.id, loop) == 1
    )


def _find_names_with_commutative_updates(loop: list[ast.AST]) -> set[str]:
    """Return the names that a loop only combines with values: `name = name | value`, `&` or `^`."""
    names = set[str]()
    for node in loop:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.BinOp):
            continue
        target, left = node.targets[0], node.value.left
        if (
            isinstance(target, ast.Name)
            and isinstance(left, ast.Name)
            and left.id == target.id
            and isinstance(node.value.op, _UNORDERED)
            and _count_names(target.id, loop) == 2
        ):
            names.add(target.id)
    return names


def _count_names(name: str, nodes: list[ast.AST]) -> int:
    return sum(isinstance(node, ast.Name) and node.id == name for node in nodes)


def _get_method_name(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else ""


def _is_duration(node: ast.stmt) -> TypeGuard[ast.Assign]:
    """Return whether a statement assigns a constant to names that end in _S (seconds)."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and all(isinstance(t, ast.Name) and t.id.endswith("_S") for t in node.targets)
    )


def _is_docstring(node: ast.stmt) -> bool:
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
    """Return whether an expression consists of types (classes or None) that are joined by "|"."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.BitOr) and _is_union(node.left) and _is_union(node.right)
    if isinstance(node, ast.Subscript):
        return _is_union(node.value)
    name = node.id if isinstance(node, ast.Name) else ""
    return _is_none(node) or name in dir(builtins) or (name[:1].isupper() and not name.isupper())


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _makes_message(node: ast.Call) -> bool:
    """Return whether a call only creates a message or a type."""
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return str(name).endswith(_MESSAGE_CALLS)


__all__ = ["mutants_of"]
