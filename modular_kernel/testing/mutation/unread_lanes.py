"""Find `other=` values of masked loads that cannot affect any result.

    headers = tl.load(row, mask=mask, other=0)
    tl.store(words, headers, mask=mask)

    slot = tl.load(numbers, mask=has_pair, other=-1) - first
    is_local = has_pair & (slot >= 0)
    tl.store(slots, tl.where(is_local, slot, -1), mask=in_bounds)

Lanes in which the mask is false get the value of `other`. A mutant of this value is equivalent by
construction, and is not made, if each use of the loaded value is one of the following. A condition
implies the mask if it is a conjunction (`&`) that contains all terms of the mask.

- an operand of a conjunction whose other operands imply the mask;
- the second argument of `tl.where`, if its condition implies the mask;
- the pointer or the value of a load, store or atomic operation whose mask implies the mask;
- an operand of an elementwise expression that is used only in these ways, also after an assignment.

The analysis follows only names that are assigned exactly once in their function.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

_MEMORY_OPERATIONS = ("load", "store", "atomic_add", "atomic_xchg", "atomic_or", "atomic_max")
_ELEMENTWISE = (ast.BinOp, ast.UnaryOp, ast.Compare)


@lru_cache(maxsize=64)
def find_unread_values(tree: ast.Module) -> frozenset[ast.expr]:
    """Return the values of `other` that cannot affect any result."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return frozenset(value for function in functions for value in _Function(function).find_unread())


class _Function:
    """The names of a function, and the uses of each."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self._parents = {
            child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)
        }
        # The blocks (lists of statements, by identity) that contain a node, the outermost first.
        self._blocks_of_node: dict[ast.AST, tuple[int, ...]] = {}
        self._record_blocks(function.body, ())
        names = [node for node in self._blocks_of_node if isinstance(node, ast.Name)]
        stored = [name for name in names if isinstance(name.ctx, ast.Store)]
        self._num_assigned = Counter(name.id for name in stored)
        self._num_assigned.update(arg.arg for arg in ast.walk(function) if isinstance(arg, ast.arg))
        self._lines = {name.id: name.lineno for name in stored}
        self._block_of_name = {name.id: self._blocks_of_node[name][-1] for name in stored}
        self._uses: dict[str, list[ast.Name]] = {}
        for name in names:
            if isinstance(name.ctx, ast.Load):
                self._uses.setdefault(name.id, []).append(name)
        assigns = [node for node in self._blocks_of_node if isinstance(node, ast.Assign)]
        self._values = {
            node.targets[0].id: node.value
            for node in assigns
            if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
        }

    def _record_blocks(self, block: list[ast.stmt], blocks: tuple[int, ...]) -> None:
        blocks = (*blocks, id(block))
        for statement in block:
            for node in _walk_statement(statement):
                self._blocks_of_node[node] = blocks
            for name in ("body", "orelse", "finalbody"):
                self._record_blocks(getattr(statement, name, []), blocks)

    def find_unread(self) -> Iterator[ast.expr]:
        for node in self._blocks_of_node:
            if isinstance(node, ast.Call) and _get_operation(node) == "load":
                keywords = {keyword.arg: keyword.value for keyword in node.keywords}
                mask, other = keywords.get("mask"), keywords.get("other")
                if mask is None or other is None or not self._is_constant(mask, node.lineno):
                    continue
                if self._is_unread(node, self._list_terms(mask)):
                    yield other

    def _is_constant(self, mask: ast.expr, line: int) -> bool:
        """Return whether all names in a mask are assigned once at most, and before `line`."""
        names = {node.id for node in ast.walk(mask) if isinstance(node, ast.Name)}
        return all(
            self._num_assigned[name] <= 1 and self._lines.get(name, 0) < line for name in names
        )

    def _list_terms(self, condition: ast.expr) -> set[str]:
        """Return the terms of a conjunction, with names replaced by what they are assigned."""
        if isinstance(condition, ast.BinOp) and isinstance(condition.op, ast.BitAnd):
            return self._list_terms(condition.left) | self._list_terms(condition.right)
        terms = {ast.dump(condition)}
        if isinstance(condition, ast.Name) and self._num_assigned[condition.id] == 1:
            value = self._values.get(condition.id)
            if (
                value is not None
                and self._is_constant(value, self._lines[condition.id])
                and self._follows(condition)
            ):
                terms |= self._list_terms(value)
        return terms

    def _follows(self, use: ast.Name) -> bool:
        """Return whether a name is assigned whenever the block of the use is entered."""
        return (
            self._lines[use.id] < use.lineno
            and self._block_of_name[use.id] in self._blocks_of_node[use]
        )

    def _implies(self, condition: ast.expr | None, mask: set[str]) -> bool:
        return condition is not None and mask <= self._list_terms(condition)

    def _is_unread(self, node: ast.expr, mask: set[str]) -> bool:
        """Return whether the masked-off lanes of an expression cannot affect any result."""
        parent = self._parents[node]
        if isinstance(parent, ast.keyword):
            call = self._parents[parent]
            return False if not isinstance(call, ast.Call) else self._call_ignores(call, node, mask)
        if isinstance(parent, ast.Attribute) and parent.attr == "to":  # (expression).to(dtype)
            call = self._parents[parent]
            return isinstance(call, ast.Call) and self._is_unread(call, mask)
        if isinstance(parent, ast.Call):
            return self._call_ignores(parent, node, mask)
        if isinstance(parent, ast.Assign):
            return self._is_name_unread(parent, mask)
        if not isinstance(parent, _ELEMENTWISE):
            return False
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.BitAnd):
            other_operand = parent.left if parent.right is node else parent.right
            if self._implies(other_operand, mask):
                return True
        return self._is_unread(parent, mask)

    def _call_ignores(self, call: ast.Call, node: ast.expr, mask: set[str]) -> bool:
        operation = _get_operation(call)
        if operation == "where" and len(call.args) == 3 and call.args[1] is node:
            return self._implies(call.args[0], mask) or self._is_unread(call, mask)
        if operation in _MEMORY_OPERATIONS and node in call.args:
            condition = {keyword.arg: keyword.value for keyword in call.keywords}.get("mask")
            return self._implies(condition, mask)
        return False

    def _is_name_unread(self, assign: ast.Assign, mask: set[str]) -> bool:
        """Return whether the masked-off lanes of an assigned name cannot affect any result."""
        (target, *other_targets) = assign.targets
        if other_targets or not isinstance(target, ast.Name) or self._num_assigned[target.id] != 1:
            return False
        uses = self._uses.get(target.id, [])
        return all(self._follows(use) and self._is_unread(use, mask) for use in uses)


def _walk_statement(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield a statement and its expressions, without nested statements."""
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        yield node
        pending += [n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.stmt)]


def _get_operation(call: ast.Call) -> str:
    """Return NAME if a call is `tl.NAME(...)`, otherwise ""."""
    function = call.func
    is_triton = (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "tl"
    )
    return function.attr if is_triton else ""  # type: ignore[attr-defined]
