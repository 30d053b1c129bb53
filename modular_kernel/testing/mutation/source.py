"""The text of one module, by bytes, and the changes that can be made to it."""

import ast
import difflib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

# Every node that an operator looks at is an expression, a statement or a keyword.
Placed = ast.expr | ast.stmt | ast.keyword


@dataclass(frozen=True)
class Edit:
    """Bytes [start, end) of a module become `new`; `operator` names the kind of change."""

    operator: str
    start: int
    end: int
    new: str


class Source:
    """A module's text as the syntax tree counts it: in bytes of UTF-8, from line 1."""

    def __init__(self, module: str, path: Path) -> None:
        self.module, self.path = module, path
        self.data = path.read_bytes()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.data)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(len(line) for line in self.data.splitlines(keepends=True))]

    def start(self, node: Placed) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: Placed) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, start: int, end: int) -> str:
        return self.data[start:end].decode()

    def of(self, node: Placed) -> str:
        """What the node is written as."""
        return self.text(self.start(node), self.end(node))

    def replaced(self, operator: str, node: Placed, new: str) -> Edit:
        """The edit that writes `new` for the node."""
        return Edit(operator, self.start(node), self.end(node), new)

    def changed(self, edit: Edit) -> str:
        """The whole text with one edit."""
        return (self.data[: edit.start] + edit.new.encode() + self.data[edit.end :]).decode()

    def line(self, offset: int) -> int:
        """The line of a byte, from 1."""
        return self.data.count(b"\n", 0, offset) + 1


@dataclass(frozen=True)
class Mutant:
    """One change of one module. first, last: the lines of the statement that it is part of; it is
    executed where one of them is. ident: the same as long as the changed lines are the same."""

    ident: str
    module: str
    path: Path
    edit: Edit
    first: int
    last: int

    @property
    def place(self) -> str:
        return f"{self.module}:{self.first}"

    def text(self) -> str:
        """The module's text with the change."""
        return Source(self.module, self.path).changed(self.edit)

    def diff(self) -> str:
        """The change as a unified diff without context."""
        old = self.path.read_text(encoding="utf-8").splitlines()
        name = self.module.replace(".", "/") + ".py"
        lines = difflib.unified_diff(old, self.text().splitlines(), name, name, n=0, lineterm="")
        return "\n".join(lines)


def named(source: Source, edits: Iterator[tuple[Edit, int, int, str]]) -> Iterator[Mutant]:
    """Mutants from (edit, first line, last line, function), each with an identity of its own."""
    seen: set[str] = set()
    lines = source.data.splitlines()
    for edit, first, last, function in edits:
        text = source.changed(edit)
        if text.encode() == source.data:
            continue
        line = source.line(edit.start)
        old = lines[line - 1].strip().decode()
        column = edit.start - (source.data.rfind(b"\n", 0, edit.start) + 1)
        column -= len(lines[line - 1]) - len(lines[line - 1].lstrip())
        what = (source.module, function, edit.operator, old, str(column), edit.new)
        ident = _digest("|".join(what))
        count = 1
        while ident in seen:
            count += 1
            ident = _digest("|".join((*what, str(count))))
        seen.add(ident)
        yield Mutant(ident, source.module, source.path, edit, first, last)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
