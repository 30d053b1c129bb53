"""Edit the source text of a module: byte offsets of syntax nodes, edits, and mutants.

`operators` and `sites` use it. A mutant is one edit with an identifier that remains the same as
long as the changed line does, so that records and reviews can refer to it.
"""

import ast
import difflib
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

# The syntax nodes that operators change.
Positioned = ast.expr | ast.stmt | ast.keyword


@dataclass(frozen=True)
class Edit:
    """The replacement of bytes [start, end) by `new`; `operator` names the kind of change."""

    operator: str
    start: int
    end: int
    new: str


class Source:
    """The source text of a module, addressed by byte offsets in UTF-8 and by 1-based lines."""

    def __init__(self, module: str, path: Path) -> None:
        self.module, self.path = module, path
        self.data = path.read_bytes()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.data)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(len(line) for line in self.data.splitlines(keepends=True))]

    @cached_property
    def readers(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """The statements in functions that read a private constant, by the line that assigns it.

        Each statement is given as (first line, last line). Constants that are assigned more than
        once, or read during import, are not included.
        """
        return find_readers(self.tree)

    @cached_property
    def zeros(self) -> frozenset[str]:
        """The constants of the module that are `0` or `tl.constexpr(0)`."""
        values = self._constants.items()
        return frozenset(name for name, value in values if value in ("0", "tl.constexpr(0)"))

    @cached_property
    def powers_of_two(self) -> frozenset[str]:
        """The constants of the module that are a power of two, at least 16."""
        numbers = {n: int(value) for n, value in self._constants.items() if value.isdecimal()}
        return frozenset(
            n for n, value in numbers.items() if value >= 16 and value.bit_count() == 1
        )

    @cached_property
    def _constants(self) -> dict[str, str]:
        """The source text of each constant of the module, whose name is in capitals."""
        return {
            node.targets[0].id: ast.unparse(node.value)
            for node in self.tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id.isupper()
        }

    def is_in_kernel(self, node: Positioned) -> bool:
        """Return whether the node is in the body of a jit function."""
        return any(node.lineno in body for body in self._kernels)

    @cached_property
    def _kernels(self) -> list[range]:
        return [
            range(function.body[0].lineno, (function.end_lineno or 0) + 1)
            for function in self.tree.body
            if isinstance(function, ast.FunctionDef)
            and any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
        ]

    def start(self, node: Positioned) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: Positioned) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, start: int, end: int) -> str:
        return self.data[start:end].decode()

    def text_of(self, node: Positioned) -> str:
        """Return the source text of a node."""
        return self.text(self.start(node), self.end(node))

    def replace_node(self, operator: str, node: Positioned, new: str) -> Edit:
        """Return the edit that replaces the node with `new`."""
        return Edit(operator, self.start(node), self.end(node), new)

    def apply(self, edit: Edit) -> str:
        """Return the module's text with one edit applied."""
        return (self.data[: edit.start] + edit.new.encode() + self.data[edit.end :]).decode()

    def line(self, offset: int) -> int:
        """Return the 1-based line number of a byte offset."""
        return self.data.count(b"\n", 0, offset) + 1


@dataclass(frozen=True)
class Mutant:
    """One change of one module.

    Attributes:
        ident: a hash that identifies the mutant as long as the changed line stays the same.
        module, path: the module and its file.
        edit: the change.
        first, last: the lines of the changed statement. A case executes the mutant if it executes
            one of them.
        readers: if the mutant changes the value of a private constant that only functions read, the
            line spans of the statements that read it. A case executes the mutant if it executes one
            of these lines. None for any other mutant.
    """

    ident: str
    module: str
    path: Path
    edit: Edit
    first: int
    last: int
    readers: tuple[tuple[int, int], ...] | None = None

    @property
    def location(self) -> str:
        return f"{self.module}:{self.first}"

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(first, last) line spans. Executing any of these lines executes the mutant."""
        return ((self.first, self.last),) if self.readers is None else self.readers

    def text(self) -> str:
        """Return the module's text with the change."""
        return Source(self.module, self.path).apply(self.edit)

    def diff(self) -> str:
        """Return the change as a unified diff without context."""
        old = self.path.read_text(encoding="utf-8").splitlines()
        name = self.module.replace(".", "/") + ".py"
        lines = difflib.unified_diff(old, self.text().splitlines(), name, name, n=0, lineterm="")
        return "\n".join(lines)


def find_readers(tree: ast.Module) -> dict[int, tuple[tuple[int, int], ...]]:
    """Find the statements that read private constants; see `Source.readers`."""
    assigned: dict[str, list[int]] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id.startswith("_"):
            assigned.setdefault(target.id, []).append(node.lineno)
    reads: dict[str, list[tuple[int, int]]] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in (
                inner for body_statement in function.body for inner in ast.walk(body_statement)
            ):
                if isinstance(statement, ast.stmt):
                    for name in iter_names(statement):
                        reads.setdefault(name.id, []).append(
                            (statement.lineno, get_last_line(statement))
                        )
    module_reads = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name))
    for function in (f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)):
        names = (
            n
            for body_statement in function.body
            for n in ast.walk(body_statement)
            if isinstance(n, ast.Name)
        )
        module_reads.subtract(n.id for n in names)
    return {
        lines[0]: tuple(dict.fromkeys(reads.get(name, ())))
        for name, lines in assigned.items()
        if len(lines) == 1 and module_reads[name] <= 1
    }


def iter_names(statement: ast.stmt) -> Iterator[ast.Name]:
    """Yield the names in a statement, excluding nested statements."""
    pending: list[ast.AST] = [statement]
    while pending:
        for child in ast.iter_child_nodes(pending.pop()):
            if isinstance(child, ast.Name):
                yield child
            if not isinstance(child, ast.stmt):
                pending.append(child)


def get_last_line(node: ast.stmt) -> int:
    """Return the last line of a statement, or of its header if it has a body."""
    last = node.end_lineno or node.lineno
    body: list[ast.stmt] = getattr(node, "body", [])
    return max(node.lineno, body[0].lineno - 1) if body else last


def make_mutants(source: Source, edits: Iterator[tuple[Edit, int, int, str]]) -> Iterator[Mutant]:
    """Yield a mutant with a unique `ident` for each (edit, first line, last line, function)."""
    idents: set[str] = set()
    lines, readers = source.data.splitlines(), source.readers
    for edit, first, last, function in edits:
        text = source.apply(edit)
        if text.encode() == source.data:
            continue
        line = source.line(edit.start)
        old_line = lines[line - 1].strip().decode()
        column = edit.start - (source.data.rfind(b"\n", 0, edit.start) + 1)
        column -= len(lines[line - 1]) - len(lines[line - 1].lstrip())
        key = (source.module, function, edit.operator, old_line, str(column), edit.new)
        ident = _digest("|".join(key))
        count = 1
        while ident in idents:
            count += 1
            ident = _digest("|".join((*key, str(count))))
        idents.add(ident)
        yield Mutant(ident, source.module, source.path, edit, first, last, readers.get(first))


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:8]
