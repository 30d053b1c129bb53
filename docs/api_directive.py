"""The directive `{api}`: signatures and docstrings, read from the source without importing it.

    ```{api}
    modular_kernel.catalog: check, check_all
    ```

Docstrings are Markdown as they stand: indented blocks are code, names stand in backticks.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[1]
Function = ast.FunctionDef | ast.AsyncFunctionDef
_WIDTH = 80
# From a prompt to the next empty line; Markdown takes the prompt for quotations in quotations.
_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Api(SphinxDirective):
    """Each line of the content is `module: name, name`."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Parse what was read as Markdown of this page."""
        pieces: list[str] = []
        for line in self.content:
            module, _, names = line.partition(":")
            path = source_of(module.strip())
            self.env.note_dependency(str(path))
            pieces += described(module.strip(), path, [name.strip() for name in names.split(",")])
        found: list[nodes.Node] = self.parse_text_to_nodes(
            "\n\n".join(pieces), allow_section_headings=True
        )
        return found


def source_of(module: str) -> Path:
    """Return the file of a module of this checkout."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def described(module: str, path: Path, names: list[str]) -> Iterator[str]:
    """Yield the Markdown of each name; KeyError where the module has none of that name."""
    text = path.read_text(encoding="utf-8")
    found = {
        node.name: node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef | Function)
    }
    for name in names:
        node = found[name]
        yield f"### `{name}`\n\n`{module}.{name}`"
        if isinstance(node, ast.ClassDef):
            yield from _class(node, text.splitlines())
        else:
            yield from _function(node)


def _class(node: ast.ClassDef, lines: list[str]) -> Iterator[str]:
    fields = [
        line
        for each in node.body
        if isinstance(each, ast.AnnAssign | ast.Assign) and not _private(each)
        for line in lines[each.lineno - 1 : each.end_lineno]
    ]
    bases = ", ".join(map(ast.unparse, node.bases))
    yield _code(
        "\n".join([f"class {node.name}({bases}):" if bases else f"class {node.name}:", *fields])
    )
    yield from _text(node)
    for each in node.body:
        if isinstance(each, Function) and _shown(each):
            yield from _function(each)


def _function(node: Function) -> Iterator[str]:
    decorators = [f"@{ast.unparse(d)}\n" for d in node.decorator_list if _tells(d)]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    flat = f"def {node.name}({', '.join(_arguments(node.args))}){returns}"
    if len(flat) > _WIDTH:
        arguments = ",\n".join(indent(one, "    ") for one in _arguments(node.args))
        flat = f"def {node.name}(\n{arguments},\n){returns}"
    yield _code("".join(decorators) + flat)
    yield from _text(node)


def _arguments(given: ast.arguments) -> list[str]:
    """Each argument as it is written, one by one; commas within brackets do not part them."""
    pieces, depth, start, text = [], 0, 0, ast.unparse(given)
    for at, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            pieces.append(text[start:at].strip())
            start = at + 1
    pieces = [piece for piece in (*pieces, text[start:].strip()) if piece]
    return [re.sub(r"^(\w+: [^=]+)=", r"\1 = ", piece) for piece in pieces]


def _text(node: ast.ClassDef | Function) -> Iterator[str]:
    text = ast.get_docstring(node)
    if text:
        yield _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)


def _shown(node: Function) -> bool:
    return not node.name.startswith("_") and ast.get_docstring(node) is not None


def _private(node: ast.AnnAssign | ast.Assign) -> bool:
    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
    return ast.unparse(target).startswith("_")


def _tells(decorator: ast.expr) -> bool:
    return ast.unparse(decorator) in ("property", "cached_property", "classmethod", "staticmethod")


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("api", Api)
    return {"parallel_read_safe": True}
