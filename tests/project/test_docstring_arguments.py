"""Docstrings describe only arguments that the function has, and fields that the class has.

A description is `name: what it is`, or `first, second: what they are`, at the start of a sentence,
a paragraph or a list item, but not of the docstring. A function may also describe, in the same
form,

- a tensor whose argument has a suffix: `x` for the argument `x_TH` or `x_ptr`;
- what a sentence with "Return", "Yield" or "Print" names: `rows` after "Returns (rows, ends)."; and
- anything, if it has no arguments and returns something: the keys or fields of its result.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    *("modular_kernel", "experts", "prepare_finalize", "topk_reduce", "tools"),
    "tests/helpers",
)
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef

# Classes whose docstring explains the values of a field in the form of descriptions.
DESCRIBED_VALUES = {"Family": {"plain", "ungated", "oai", "clamp_before", "clamp_after"}}

# Lower case, or a constexpr in upper case. Words such as `Raises` are prose.
_NAME = r"`?(?:[a-z_][a-z0-9_]*|[A-Z][A-Z0-9_]+)`?"
_NAMES = rf"({_NAME}(?:(?:, and |, | and ){_NAME})*): (?=\S)"
_AT_SENTENCE_START = re.compile(rf"(?:^|(?<=[.?!] )|(?<=[.?!]\) )){_NAMES}")
_ITEM = re.compile(r"(?:[-*] )")
_RESULT = re.compile(r"\b(?i:returns?|yields?|prints?)\b([^.]*)")


def split_paragraphs(docstring: str) -> Iterator[str]:
    """Yield the paragraphs and list items of a docstring as single lines, without code."""
    for block in re.split(r"\n\s*\n", docstring):
        lines: list[str] = []
        for line in block.splitlines():
            starts_item = _ITEM.match(line.lstrip())
            if lines and starts_item:
                yield " ".join(lines)
                lines = []
            lines.append(_ITEM.sub("", line.strip(), count=1) if starts_item else line.strip())
        if not block.startswith("    "):  # an indented block is code or a table
            yield " ".join(lines)


def list_described_names(docstring: str) -> list[str]:
    """Return the names that a docstring describes."""
    return [
        name.strip("`")
        for index, paragraph in enumerate(split_paragraphs(docstring))
        for match in _AT_SENTENCE_START.finditer(paragraph)
        if index or match.start()
        for name in re.split(r", and |, | and ", match[1])
    ]


def list_arguments(function: Function) -> set[str]:
    args = function.args
    all_arguments = (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg)
    return {arg.arg for arg in all_arguments if arg is not None} - {"self", "cls"}


def find_unknown_arguments(function: Function) -> list[str]:
    """Return the described names that are not arguments of the function."""
    docstring = ast.get_docstring(function) or ""
    arguments = list_arguments(function)
    returns_value = not (
        isinstance(function.returns, ast.Constant) and function.returns.value is None
    )
    if not arguments and returns_value:
        return []
    results = set(re.findall(r"\w+", " ".join(_RESULT.findall(docstring))))

    def is_known(name: str) -> bool:
        with_suffix = any(argument.startswith(f"{name}_") for argument in arguments)
        return name in arguments or with_suffix or name in results

    return [name for name in list_described_names(docstring) if not is_known(name)]


def list_attributes(cls: ast.ClassDef) -> set[str]:
    """Return the fields, methods and attributes of a class, and the arguments of `__init__`."""
    names: set[str] = set()
    for node in ast.walk(cls):
        if isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            for target in targets:
                for child in ast.walk(target):
                    if isinstance(child, ast.Name):
                        names.add(child.id)
                    elif isinstance(child, ast.Attribute):
                        names.add(child.attr)
        elif isinstance(node, Function):
            names.add(node.name)
            if node.name in ("__init__", "__new__", "__call__"):
                names |= list_arguments(node)
    return names


@cache
def list_definitions(path: Path) -> tuple[Function | ast.ClassDef, ...]:
    """Return all functions and classes of a file."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return tuple(node for node in nodes if isinstance(node, Function | ast.ClassDef))


def index_classes(sources: list[Path]) -> dict[str, list[ast.ClassDef]]:
    classes: dict[str, list[ast.ClassDef]] = {}
    for node in (node for path in sources for node in list_definitions(path)):
        if isinstance(node, ast.ClassDef):
            classes.setdefault(node.name, []).append(node)
    return classes


def find_unknown_fields(cls: ast.ClassDef, classes: dict[str, list[ast.ClassDef]]) -> list[str]:
    """Return the described names that are not attributes of the class.

    classes: definitions by name, used to look up base classes.
    """
    names = list_attributes(cls) | DESCRIBED_VALUES.get(cls.name, set())
    pending, seen = list(cls.bases), {cls.name}
    while pending:
        base = pending.pop()
        base = base.value if isinstance(base, ast.Subscript) else base
        base_name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        if base_name in seen:
            continue
        seen.add(base_name)
        for definition in classes.get(base_name, []):
            names |= list_attributes(definition)
            pending += definition.bases
    docstring = ast.get_docstring(cls) or ""

    def is_known(name: str) -> bool:
        return name in names or any(other.startswith(f"{name}_") for other in names)

    return [name for name in list_described_names(docstring) if not is_known(name)]


def parse_function(source: str) -> Function:
    (node,) = ast.parse(source).body
    assert isinstance(node, Function)
    return node


def test_functions_describe_their_arguments() -> None:
    unknown = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has no {', '.join(names)}"
        for path in SOURCES
        for node in list_definitions(path)
        if isinstance(node, Function) and (names := find_unknown_arguments(node))
    ]
    assert not unknown, "\n".join(unknown)


def test_classes_describe_their_fields() -> None:
    classes = index_classes(SOURCES)
    unknown = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has no {', '.join(names)}"
        for path in SOURCES
        for node in list_definitions(path)
        if isinstance(node, ast.ClassDef) and (names := find_unknown_fields(node, classes))
    ]
    assert not unknown, "\n".join(unknown)


@pytest.mark.parametrize(
    ("signature", "docstring", "unknown"),
    [
        ("f(seed)", "Draw. seed: of the generator.", []),
        ("f(seed)", "Draw. sed: of the generator.", ["sed"]),
        ("f(seed)", "Draw.\n\nsed, seed: numbers.", ["sed"]),
        ("f(seed)", "Draw.\n\n- sed: a number.", ["sed"]),
        ("f(seed)", "Draw (twice). `sed`: a number.", ["sed"]),
        ("f(*seeds, **more)", "Draw. seeds: numbers. more: other numbers.", []),
        ("f(x_TH, w_ptr)", "Multiply. x: (T, H). w: (H, N).", []),
        ("f(x_TH)", "Return (rows, ends). rows: (T,). ends: (e,).", []),
        ("f(x_TH)", "Count rows. rows: (T,).", ["rows"]),
        ("f(BLOCK)", "Load. BLOCK: rows. TILE: columns.", ["TILE"]),
        ("f(x)", "Compute\nthe sum of two\nnumbers: x and another one.", []),
        ("f(x)", "Compute x.\n\nA table:\n\n    y: a row", []),
        ("f(x)", "sums: those of x.", []),
        ("f(x)", "Return one; NVFP4: (K / 16,). Sums of (R, N) rows: those of x.", []),
        ("f()", "Return the counters. calls: their number.", []),
        ("f() -> None", "Count. calls: their number.", ["calls"]),
    ],
)
def test_unknown_arguments_are_detected(signature: str, docstring: str, unknown: list[str]) -> None:
    function = parse_function(f"def {signature}:\n    {docstring!r}")
    assert find_unknown_arguments(function) == unknown


@pytest.mark.parametrize(
    ("bases", "body", "docstring", "unknown"),
    [
        ("", "size: int", "A layer. size: of it.", []),
        ("", "size: int", "A layer. sizes: of it.", ["sizes"]),
        ("", "size: int", "A layer.\n\n- width: of it.", ["width"]),
        ("Base", "size: int", "A layer. depth: of the base.", []),
        ("", "def __init__(self, size): self.area = size", "C. size: of it. area: of it.", []),
        ("", "def width(self): ...", "A layer. width: a method. height: none.", ["height"]),
    ],
)
def test_unknown_fields_are_detected(
    bases: str, body: str, docstring: str, unknown: list[str]
) -> None:
    source = f"class Base:\n    depth: int\n\nclass C({bases}):\n    {docstring!r}\n    {body}"
    base, cls = ast.parse(source).body
    assert isinstance(base, ast.ClassDef)
    assert isinstance(cls, ast.ClassDef)
    assert find_unknown_fields(cls, {"Base": [base]}) == unknown
