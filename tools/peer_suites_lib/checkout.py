"""Extracts parameter grids and reference functions from the tests of another project.

Files are parsed, but never imported or executed as a whole. The requested functions are compiled
individually, without decorators and annotations, in a namespace that this module provides. Nothing
is copied into this project.
"""

import ast
import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import torch

Params = dict[str, object]


class UnreadableError(Exception):
    """A grid or a function cannot be extracted from a file."""


class EnumMember(str):
    """A stand-in for an enumeration member: its name, which is also its custom_op_name."""

    __slots__ = ()

    @property
    def custom_op_name(self) -> str:
        return str(self)


class EnumStandIn:
    """A stand-in for an enumeration in a grid: `EnumStandIn().SILU` is "SILU"."""

    def __getattr__(self, name: str) -> EnumMember:
        if name.startswith("__"):
            raise AttributeError(name)
        return EnumMember(name)


def _get_param_values(*values: object, **_: object) -> object:
    return values[0] if len(values) == 1 else values


class _StripAnnotations(ast.NodeTransformer):
    """Removes decorators and annotations, which refer to names that are not available."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list, node.returns = [], None
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.Pass()
        return ast.Assign([node.target], node.value)


class Source:
    """A file of a checkout: its constants, and its functions on request.

    names: additional names in the namespace.

    Raises UnreadableError if the file does not exist.
    """

    def __init__(self, root: Path, name: str, names: Mapping[str, object] | None = None) -> None:
        self.name = name
        path = root / name
        if not path.is_file():
            raise UnreadableError(f"{path} does not exist")
        self._tree = ast.parse(path.read_text(encoding="utf-8"))
        defaults = {"torch": torch, "F": torch.nn.functional, "itertools": itertools, "math": math}
        defaults |= {"pytest": SimpleNamespace(param=_get_param_values), "range": range}
        self.namespace: dict[str, object] = {**defaults, **(names or {})}
        self._evaluate_constants(self._tree.body, self.namespace)

    def _evaluate_constants(self, body: list[ast.stmt], namespace: dict[str, object]) -> None:
        """Evaluate constants, and skip those that need unavailable names."""
        defined = set(namespace)
        for node in body:
            if not isinstance(node, ast.Assign | ast.AnnAssign | ast.If):
                continue
            names = [name for name in ast.walk(node) if isinstance(name, ast.Name)]
            stored = {name.id for name in names if isinstance(name.ctx, ast.Store)}
            if stored & defined or any(name.id == "__name__" for name in names):
                continue
            with contextlib.suppress(NameError, AttributeError, TypeError, KeyError):
                self._run([node], namespace)

    def _run(self, body: list[ast.stmt], namespace: dict[str, object]) -> None:
        module = ast.Module([_StripAnnotations().visit(node) for node in body], type_ignores=[])
        code = compile(ast.fix_missing_locations(module), self.name, "exec")
        exec(code, namespace)

    def define(self, *names: str) -> None:
        """Define functions of the file in its namespace."""
        for name in names:
            self._run([self._find(self._tree.body, name, ast.FunctionDef)], self.namespace)

    def function(self, name: str) -> object:
        """Return a function of the file, and define it if necessary."""
        if name not in self.namespace:
            self.define(name)
        return self.namespace[name]

    def method(self, owner: str, name: str) -> object:
        """Return a method as a plain function that takes `self` as its first argument."""
        class_node = self._find(self._tree.body, owner, ast.ClassDef)
        assert isinstance(class_node, ast.ClassDef)
        node = self._find(class_node.body, name, ast.FunctionDef)
        namespace = dict(self.namespace)
        self._run([node], namespace)
        return namespace[name]

    def _find(self, body: list[ast.stmt], name: str, kind: type) -> ast.stmt:
        for node in ast.walk(ast.Module(body, [])):
            if isinstance(node, kind) and getattr(node, "name", None) == name:
                return node  # type: ignore[return-value]
        raise UnreadableError(f"{self.name} has no {name}")

    def evaluate(self, expression: ast.expr, namespace: dict[str, object]) -> object:
        """Evaluate an expression of the file."""
        code = compile(ast.Expression(expression), self.name, "eval")
        try:
            return eval(code, namespace)
        except (NameError, AttributeError, TypeError, KeyError) as error:
            raise UnreadableError(f"{self.name}: {ast.unparse(expression)[:60]}: {error}") from None

    def grid(self, test: str) -> Iterator[Params]:
        """Yield all parameter combinations of a test with `pytest.mark.parametrize` decorators."""
        node = self._find(self._tree.body, test, ast.FunctionDef)
        assert isinstance(node, ast.FunctionDef)
        axes = []
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("parametrize"):
                names = self.evaluate(mark.args[0], self.namespace)
                parameters = names.split(",") if isinstance(names, str) else list(names)
                is_single = isinstance(names, str) and len(parameters) == 1
                values = self.evaluate(mark.args[1], self.namespace)
                axes.append(
                    _make_axis([name.strip() for name in parameters], values, is_single=is_single)
                )
        if not axes:
            raise UnreadableError(f"{self.name}::{test} has no grid")
        for choice in itertools.product(*axes):
            yield {key: value for axis_params in choice for key, value in axis_params.items()}

    def class_grid(self, owner: str, *names: str) -> Iterator[Params]:
        """Yield the product of the named lists in a `unittest` class or in its methods."""
        node = self._find(self._tree.body, owner, ast.ClassDef)
        assert isinstance(node, ast.ClassDef)
        namespace = dict(self.namespace)
        for item in names:
            namespace.pop(item, None)
        self._evaluate_constants(node.body, namespace)
        for item in ast.walk(node):  # lists inside methods
            target = item.targets[0] if isinstance(item, ast.Assign) else None
            if isinstance(target, ast.Name) and target.id in names and target.id not in namespace:
                namespace[target.id] = self.evaluate(item.value, namespace)
        missing = [name for name in names if name not in namespace]
        if missing:
            raise UnreadableError(f"{self.name}::{owner} has no {', '.join(missing)}")
        for choice in itertools.product(*(namespace[name] for name in names)):
            yield dict(zip(names, choice, strict=True))


def _make_axis(names: list[str], values: object, *, is_single: bool) -> list[Params]:
    if is_single:
        return [{names[0]: value} for value in values]
    return [dict(zip(names, value, strict=True)) for value in values]
