"""Kernels take no minimum or maximum that could drop a NaN, unless a comment states why no NaN
occurs.

`tl.maximum`, `tl.max`, their equivalents in Gluon, and `fmax` of CuTe return the operand that is a
number. Kernels use `modular_kernel.ops.kernels.extrema` instead, or have a comment `# NaN-free:
reason` on a line of the statement or on the line above it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("modular_kernel", "experts", "prepare_finalize", "topk_reduce")
DROPPING_FUNCTIONS = frozenset(
    {"max", "min", "maximum", "minimum", "clamp", "argmax", "argmin", "sort", "topk"}
)
DROPPING_FUNCTIONS |= {
    "fmax",
    "fmin",
    "fmaxf",
    "fminf",
    "atomic_max",
    "atomic_min",
    "red_max",
    "red_min",
}
DROPPING_FUNCTIONS |= {"atomic_fmax", "atomic_fmin"}
DROPPING_PTX: tuple[str, ...] = (
    "max.f32",
    "min.f32",
    "max.f16",
    "min.f16",
    "max.bf16",
    "min.bf16",
    "max.ftz",
    "min.ftz",
)
# A suffix of fma and cvt, with which some instructions turn NaN into 0.
DROPPING_PTX += (".relu",)
JIT_DECORATOR = re.compile(r"^@(triton|gluon|cute)\.(jit|kernel)", re.MULTILINE)
REASON_COMMENT = "# NaN-free: "


def list_kernel_modules() -> tuple[Path, ...]:
    """Return all kernel modules, and all other modules with a jitted function."""
    paths = (p for name in PACKAGES for p in sorted((ROOT / name).rglob("*.py")))
    return tuple(
        p for p in paths if "kernels" in p.parts[:-1] or JIT_DECORATOR.search(p.read_text())
    )


def _get_called_name(call: ast.Call) -> tuple[str, ...]:
    """Return the dotted name of the called function, or () if there is none."""
    parts, node = list[str](), call.func
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ("", *reversed(parts)) if parts else ()
    return (node.id, *reversed(parts))


def _find_dropping_operation(node: ast.AST) -> str:
    """Return the operation in `node` that can drop a NaN, or ""."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return next((code for code in DROPPING_PTX if code in node.value), "")
    if not isinstance(node, ast.Call):
        return ""
    name = _get_called_name(node)
    keeps_nan = any(
        k.arg == "propagate_nan" and ast.unparse(k.value).endswith("PropagateNan.ALL")
        for k in node.keywords
    )
    return (
        ".".join(name) if len(name) > 1 and name[-1] in DROPPING_FUNCTIONS and not keeps_nan else ""
    )


def find_statements_without_reason(source: str) -> Iterator[str]:
    """Yield the statements of a source that can drop a NaN without a comment."""
    lines = source.splitlines()
    tree = ast.parse(source)
    docstring_ids = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    parents = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        operation = "" if id(node) in docstring_ids else _find_dropping_operation(node)
        if not operation:
            continue
        statement: ast.AST = node
        while not isinstance(statement, ast.stmt):
            statement = parents[id(statement)]
        # For a loop or condition, only its header counts.
        body = getattr(statement, "body", None)
        last_line = body[0].lineno - 1 if isinstance(body, list) else statement.end_lineno
        assert last_line is not None
        nearby_lines = lines[statement.lineno - 1 : last_line]
        if statement.lineno > 1 and lines[statement.lineno - 2].lstrip().startswith("#"):
            nearby_lines.append(lines[statement.lineno - 2])
        if not any(
            REASON_COMMENT in line and line.split(REASON_COMMENT)[1].strip()
            for line in nearby_lines
        ):
            yield f"line {getattr(node, 'lineno', 0)}: {operation}"


@pytest.mark.parametrize(
    "path", list_kernel_modules(), ids=lambda path: str(path.relative_to(ROOT))
)
def test_every_extremum_keeps_nan_or_has_a_comment(path: Path) -> None:
    assert list(find_statements_without_reason(path.read_text())) == []


def test_kernels_are_found() -> None:
    names = {path.relative_to(ROOT).parts[0] for path in list_kernel_modules()}
    assert {"modular_kernel", "experts", "prepare_finalize"} <= names
    assert len(list_kernel_modules()) > 50


def test_a_removed_comment_is_detected() -> None:
    """If a comment can be removed without an error, it is not needed."""
    num_removed = 0
    for path in list_kernel_modules():
        lines = path.read_text().splitlines()
        for index, line in enumerate(lines):
            if REASON_COMMENT in line:
                lines_without_comment = [*lines[:index], line.split("#")[0], *lines[index + 1 :]]
                assert list(find_statements_without_reason("\n".join(lines_without_comment))), (
                    f"{path}:{index + 1}: comment is not needed"
                )
                num_removed += 1
    assert num_removed > 20


@pytest.mark.parametrize(
    "line",
    [
        "y = tl.maximum(a, b)",
        "y = tl.max(tl.abs(a), axis=1)",
        "y = gl.minimum(a, propagate_nan=tl.PropagateNan.NONE, other=b)",
        "y = cute.arch.fmax(a, b)",
        "tl.atomic_max(ptr, a)",
        "y = a.max(1)",
        "y = f(a).max(1)",
        "y = asm('max.f32 $0, $1, $2;')",
        "y = tl.maximum(a, b)  # NaN-free:",
        "# NaN-free: too far above\n\ny = tl.maximum(a, b)",
        "x = 1  # NaN-free: of another statement\ny = tl.maximum(a, b)",
        "for i in range(tl.max(a, 0)):\n    x = 1  # NaN-free: of another statement",
    ],
)
def test_operations_that_drop_nan_are_detected(line: str) -> None:
    assert list(find_statements_without_reason(line)) != []


@pytest.mark.parametrize(
    "line",
    [
        "y = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)",
        "y = tl.maximum(a, b)  # NaN-free: integers",
        "# NaN-free: integers\ny = tl.maximum(a, b)",
        "y = max_nan(a, 1)",
        "y = asm('max.NaN.f32 $0, $1, $2;')",
        "n = max(1, 2)",
    ],
)
def test_operations_that_keep_nan_are_accepted(line: str) -> None:
    assert list(find_statements_without_reason(line)) == []
