"""Read hand-written defects from a JSON file. Each replaces some text, and is run like a mutant.

tools/source_defects.py and the test suite run them. Example of a file:

    [{"file": "my_moe/kernels.py", "old": "row < rows", "new": "row <= rows", "what": "off by one"}]
"""

import ast
import json
from dataclasses import dataclass
from pathlib import Path

from modular_kernel.errors import ConfigurationError
from modular_kernel.testing.mutation.source import Edit, Mutant, Source, get_last_line


@dataclass(frozen=True)
class Defect:
    """A defect as a mutant, with a description."""

    description: str
    mutant: Mutant


def read_defects(path: Path, root: Path) -> tuple[Defect, ...]:
    """Read a list of defects for the checkout at `root`.

    Raises ConfigurationError for an entry whose file does not exist, or does not contain the old
    text exactly once.
    """
    return tuple(
        _make_defect(record, root) for record in json.loads(path.read_text(encoding="utf-8"))
    )


def _make_defect(record: dict[str, str], root: Path) -> Defect:
    path = root / record["file"]
    if not path.is_file():
        raise ConfigurationError(record["what"], got=f"no {path}", need="a file of the checkout")
    source = Source(".".join(Path(record["file"]).with_suffix("").parts), path)
    old_bytes = record["old"].encode()
    count = source.data.count(old_bytes)
    if count != 1:
        need = f"{record['old']!r} once in {record['file']}"
        raise ConfigurationError(record["what"], got=f"{count} times", need=need)
    start = source.data.index(old_bytes)
    edit = Edit("defect", start, start + len(old_bytes), record["new"])
    first, last = _extend_lines(source, source.line(start), source.line(start + len(old_bytes) - 1))
    return Defect(record["what"], Mutant(record["what"], source.module, path, edit, first, last))


def _extend_lines(source: Source, first: int, last: int) -> tuple[int, int]:
    """Extend lines [first, last] to the statements that contain them."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef | ast.ClassDef):
            start, end = node.lineno, get_last_line(node)
            if start <= last and first <= end:
                first, last = min(first, start), max(last, end)
    return first, last
