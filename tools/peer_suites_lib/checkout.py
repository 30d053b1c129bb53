"""Grids and reference functions out of a checkout of somebody else's tests, which is not imported.

A file is read, never executed as a whole: what is wanted of it is compiled alone, without its
decorators and annotations, among names that are given here. Nothing is copied into this project.
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
    """A grid or a function that cannot be taken out of a file."""


class Word(str):
    """A member of an enumeration by its name, which is also the name of its operation."""

    __slots__ = ()

    @property
    def custom_op_name(self) -> str:
        return str(self)


class Words:
    """`Words().SILU` is "SILU": stands for an enumeration that a grid names."""

    def __getattr__(self, word: str) -> Word:
        if word.startswith("__"):
            raise AttributeError(word)
        return Word(word)


def _param(*values: object, **_: object) -> object:
    return values[0] if len(values) == 1 else values


class _Bare(ast.NodeTransformer):
    """Take decorators and annotations away: they name what is not there."""

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
    """One file of a checkout: its constants, and its functions on request."""

    def __init__(self, root: Path, name: str, given: Mapping[str, object] | None = None) -> None:
        self.name = name
        path = root / name
        if not path.is_file():
            raise UnreadableError(f"{path} is not there")
        self._tree = ast.parse(path.read_text(encoding="utf-8"))
        known = {"torch": torch, "F": torch.nn.functional, "itertools": itertools, "math": math}
        known |= {"pytest": SimpleNamespace(param=_param), "range": range}
        self.space: dict[str, object] = {**known, **(given or {})}
        self._constants(self._tree.body, self.space)

    def _constants(self, body: list[ast.stmt], space: dict[str, object]) -> None:
        """Evaluate what can be: a constant that needs more is not there, and who asks is told."""
        given = set(space)
        for node in body:
            if not isinstance(node, ast.Assign | ast.AnnAssign | ast.If):
                continue
            names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
            stored = {each.id for each in names if isinstance(each.ctx, ast.Store)}
            if stored & given or any(each.id == "__name__" for each in names):
                continue
            with contextlib.suppress(NameError, AttributeError, TypeError, KeyError):
                self._run([node], space)

    def _run(self, body: list[ast.stmt], space: dict[str, object]) -> None:
        module = ast.Module([_Bare().visit(node) for node in body], type_ignores=[])
        code = compile(ast.fix_missing_locations(module), self.name, "exec")
        exec(code, space)

    def take(self, *names: str) -> None:
        """Define functions of the file, by their names, among its constants."""
        for name in names:
            self._run([self._find(self._tree.body, name, ast.FunctionDef)], self.space)

    def function(self, name: str) -> object:
        """Return a function that was taken, or take it."""
        if name not in self.space:
            self.take(name)
        return self.space[name]

    def method(self, owner: str, name: str) -> object:
        """Return a method as a function, its `self` an argument like any other."""
        found = self._find(self._tree.body, owner, ast.ClassDef)
        assert isinstance(found, ast.ClassDef)
        node = self._find(found.body, name, ast.FunctionDef)
        space = dict(self.space)
        self._run([node], space)
        return space[name]

    def _find(self, body: list[ast.stmt], name: str, kind: type) -> ast.stmt:
        for node in ast.walk(ast.Module(body, [])):
            if isinstance(node, kind) and getattr(node, "name", None) == name:
                return node  # type: ignore[return-value]
        raise UnreadableError(f"{self.name} has no {name}")

    def value(self, expression: ast.expr, space: dict[str, object]) -> object:
        """Evaluate an expression of the file."""
        code = compile(ast.Expression(expression), self.name, "eval")
        try:
            return eval(code, space)
        except (NameError, AttributeError, TypeError, KeyError) as error:
            raise UnreadableError(f"{self.name}: {ast.unparse(expression)[:60]}: {error}") from None

    def grid(self, test: str) -> Iterator[Params]:
        """Yield the parameters of a test that `pytest.mark.parametrize` decorates, all of them."""
        node = self._find(self._tree.body, test, ast.FunctionDef)
        assert isinstance(node, ast.FunctionDef)
        axes = []
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("parametrize"):
                names = self.value(mark.args[0], self.space)
                split = names.split(",") if isinstance(names, str) else list(names)
                alone = isinstance(names, str) and len(split) == 1
                values = self.value(mark.args[1], self.space)
                axes.append(_axis([name.strip() for name in split], values, alone=alone))
        if not axes:
            raise UnreadableError(f"{self.name}::{test} has no grid")
        for choice in itertools.product(*axes):
            yield {key: value for part in choice for key, value in part.items()}

    def class_grid(self, owner: str, *names: str) -> Iterator[Params]:
        """Yield the product of lists that a `unittest` class or its methods have."""
        node = self._find(self._tree.body, owner, ast.ClassDef)
        assert isinstance(node, ast.ClassDef)
        space = dict(self.space)
        for each in names:
            space.pop(each, None)
        self._constants(node.body, space)
        for each in ast.walk(node):  # lists of a method
            target = each.targets[0] if isinstance(each, ast.Assign) else None
            if isinstance(target, ast.Name) and target.id in names and target.id not in space:
                space[target.id] = self.value(each.value, space)
        lacking = [name for name in names if name not in space]
        if lacking:
            raise UnreadableError(f"{self.name}::{owner} has no {', '.join(lacking)}")
        for choice in itertools.product(*(space[name] for name in names)):
            yield dict(zip(names, choice, strict=True))


def _axis(names: list[str], values: object, *, alone: bool) -> list[Params]:
    if alone:
        return [{names[0]: value} for value in values]
    return [dict(zip(names, value, strict=True)) for value in values]
