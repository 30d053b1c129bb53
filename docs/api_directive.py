"""The Sphinx directive `{api}`, which documents the public classes and functions of a module.

    ```{api}
    modular_kernel.catalog: check, check_all
    ```

The directive parses the source and imports nothing, so the site is built without torch. Each name
becomes an object of Sphinx's Python domain, with an entry in the index, a link to its source, and
types that link to their documentation. Docstrings are Markdown: indented blocks are code, and names
are in backticks.
"""

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("modular_kernel", "experts", "prepare_finalize", "topk_reduce")
Function = ast.FunctionDef | ast.AsyncFunctionDef
# An example, from a prompt to the next empty line. Markdown would read `>>>` as nested quotations.
_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
_PARAGRAPH = re.compile(r"(?:^(?!```).+\n?)+", re.MULTILINE)
_ARGUMENT = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): ", re.MULTILINE)
_ENUMS = frozenset({"Enum", "IntEnum", "StrEnum"})


class Api(SphinxDirective):
    """A directive whose lines are `module: name, name`."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        pieces: list[str] = []
        for line in self.content:
            module, _, names = line.partition(":")
            path = source_of(module.strip())
            self.env.note_dependency(str(path))
            pieces += described(module.strip(), path, [name.strip() for name in names.split(",")])
        parsed: list[nodes.Node] = self.parse_text_to_nodes("\n\n".join(pieces))
        return parsed


def source_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(source_of(module).read_text(encoding="utf-8"))


@cache
def names_of(module: str) -> dict[str, str]:
    """Return the qualified name of every name that a module imports or defines."""
    names: dict[str, str] = {}
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    names.update({name: f"{module}.{name}" for name in definitions_of(module)})
    return names


def _origin(qualified: str) -> str:
    """Follow imports between modules of this checkout to the module that defines a name."""
    module, _dot, name = qualified.rpartition(".")
    while module.split(".")[0] in PACKAGES and source_of(module).is_file():
        if name in definitions_of(module) or name not in names_of(module):
            break
        module, _dot, name = names_of(module)[name].rpartition(".")
    return f"{module}.{name}" if module else name


@cache
def definitions_of(module: str) -> frozenset[str]:
    """Return the names that a module defines at its top level."""
    names: set[str] = set()
    for node in tree_of(module).body:
        if isinstance(node, ast.ClassDef | Function):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return frozenset(names)


def described(module: str, path: Path, names: list[str]) -> Iterator[str]:
    """Yield the Markdown for each name. Raises KeyError if the module does not define a name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    definitions = {
        node.name: node for node in tree.body if isinstance(node, ast.ClassDef | Function)
    }
    for name in names:
        node = definitions[name]
        if isinstance(node, ast.ClassDef):
            yield _class(module, node)
        else:
            yield _function(module, node, "function")


class _Qualifier(ast.NodeTransformer):
    """Replaces the names in an annotation with qualified names, and parses quoted types."""

    def __init__(self, module: str) -> None:
        self.names = names_of(module)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.parse(_origin(self.names.get(node.id, node.id)), mode="eval").body

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not isinstance(node.value, str):
            return node
        parsed: ast.expr = self.visit(ast.parse(node.value, mode="eval").body)
        return parsed

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        node.value = self.visit(node.value)
        if not ast.unparse(node.value).endswith("Literal"):  # its strings are values, not types
            node.slice = self.visit(node.slice)
        return node


def _annotation(module: str, node: ast.expr) -> str:
    copy = ast.parse(ast.unparse(node), mode="eval").body
    return ast.unparse(_Qualifier(module).visit(copy))


def _signature(module: str, arguments: ast.arguments, *, bound: bool) -> str:
    """Return the parameters as text, with qualified types. `bound` omits the first parameter."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults += arguments.defaults
    pieces = [
        _parameter(module, argument, default)
        for argument, default in zip(positional, defaults, strict=True)
    ][1 if bound else 0 :]
    if arguments.vararg:
        pieces.append("*" + _parameter(module, arguments.vararg, None))
    elif arguments.kwonlyargs:
        pieces.append("*")
    pieces += [
        _parameter(module, argument, default)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        pieces.append("**" + _parameter(module, arguments.kwarg, None))
    return ", ".join(pieces)


def _parameter(module: str, argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg
    if argument.annotation is not None:
        text += f": {_annotation(module, argument.annotation)}"
    return text if default is None else f"{text} = {ast.unparse(default)}"


def _class(module: str, node: ast.ClassDef) -> str:
    """Return a class with its constructor, and its documented methods and properties."""
    bases = [ast.unparse(base) for base in node.bases]
    is_enum = bool(_ENUMS & set(bases))
    kind = "exception" if module == "modular_kernel.errors" else "class"
    members = [_text(node)]
    if is_enum:
        values = [child for child in node.body if isinstance(child, ast.Assign)]
        members += [
            _block(
                "attribute", ast.unparse(value.targets[0]), [f":value: {ast.unparse(value.value)}"]
            )
            for value in values
        ]
    for child in node.body:
        if isinstance(child, Function) and _is_shown(child):
            members.append(_method(module, child))
    return _block(
        kind,
        f"{node.name}({'' if is_enum else _constructor(module, node)})",
        [f":module: {module}"],
        "\n\n".join(filter(None, members)),
    )


def _constructor(module: str, node: ast.ClassDef) -> str:
    for child in node.body:
        if isinstance(child, Function) and child.name == "__init__":
            return _signature(module, child.args, bound=True)
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if not any(text.split("(")[0] == "dataclass" for text in decorators):
        return ""
    fields = [
        child
        for child in node.body
        if isinstance(child, ast.AnnAssign)
        and isinstance(child.target, ast.Name)
        and "ClassVar" not in ast.unparse(child.annotation)
        and not (child.value and "init=False" in ast.unparse(child.value))
    ]
    pieces = ["*"] if fields and any("kw_only=True" in text for text in decorators) else []
    for field in fields:
        assert isinstance(field.target, ast.Name)
        text = f"{field.target.id}: {_annotation(module, field.annotation)}"
        pieces.append(text if field.value is None else f"{text} = {_default(field.value)}")
    return ", ".join(pieces)


def _default(value: ast.expr) -> str:
    """Return the text of a field's default value. A factory becomes "..."."""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "field"):
        return ast.unparse(value)
    default = next((k.value for k in value.keywords if k.arg == "default"), None)
    return "..." if default is None else ast.unparse(default)


def _method(module: str, node: Function) -> str:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    if decorators & {"property", "cached_property"}:
        types = [f":type: {_annotation(module, node.returns)}"] if node.returns else []
        return _block("property", node.name, types, _text(node))
    return _function(module, node, "method")


def _function(module: str, node: Function, kind: str) -> str:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    options = [f":{name}:" for name in ("classmethod", "staticmethod") if name in decorators]
    if kind == "function":
        options.append(f":module: {module}")
    bound = kind == "method" and "staticmethod" not in decorators
    returns = f" -> {_annotation(module, node.returns)}" if node.returns else ""
    signature = f"{node.name}({_signature(module, node.args, bound=bound)}){returns}"
    return _block(kind, signature, options, _text(node))


def _block(kind: str, argument: str, options: list[str], text: str = "") -> str:
    """Return a directive of the Python domain with a fence longer than any in its content."""
    longest = max((len(fence) for fence in re.findall(r"^`{3,}", text, re.MULTILINE)), default=2)
    fence = "`" * (longest + 1)
    head = "\n".join([f"{fence}{{py:{kind}}} {argument}", *options])
    return f"{head}\n\n{text}\n{fence}"


def _text(node: ast.ClassDef | Function) -> str:
    """Return the docstring, with examples as code and one list entry for each argument."""
    text = _EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", ast.get_docstring(node) or "")
    return _PARAGRAPH.sub(lambda match: _list_of_arguments(match[0]), text)


def _list_of_arguments(paragraph: str) -> str:
    """Return a paragraph of lines "name: text", with indented continuations, as a list."""
    starts = [line for line in paragraph.splitlines() if not line.startswith(" ")]
    if len(starts) < 2 or not all(map(_ARGUMENT.match, starts)):
        return paragraph
    return _ARGUMENT.sub(r"- `\1`: ", paragraph)


def _is_shown(node: Function) -> bool:
    return not node.name.startswith("_") and ast.get_docstring(node) is not None


def source_and_tags(_: Sphinx, module: str) -> tuple[str, dict[str, Any]] | None:
    """Return the source of a module for `sphinx.ext.viewcode`, which else would import it."""
    return _source_and_tags(module) if module.split(".")[0] in PACKAGES else None


@cache
def _source_and_tags(module: str) -> tuple[str, dict[str, Any]]:
    text = source_of(module).read_text(encoding="utf-8")
    return text, ModuleAnalyzer.for_string(text, module).find_tags()


def undocumented(
    _: Sphinx, __: object, node: nodes.Element, content: nodes.TextElement
) -> nodes.TextElement | None:
    """Show a type without a link if it exists in this package but has no entry in the reference.

    Other names without an entry stay unresolved, which fails the build.
    """
    if node.get("refdomain") != "py":
        return None
    target = str(node.get("reftarget"))
    module, _dot, name = target.rpartition(".")
    if target in vars(builtins) or (
        module.split(".")[0] in PACKAGES
        and source_of(module).is_file()
        and name in definitions_of(module)
    ):
        return content
    return None


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive and its handlers."""
    app.setup_extension("sphinx.ext.viewcode")
    app.add_directive("api", Api)
    app.connect("viewcode-find-source", source_and_tags)
    app.connect("missing-reference", undocumented)
    return {"parallel_read_safe": True}
