"""Names and prose use the terms of PyTorch, Triton, CUTLASS and vLLM.

The terms below were replaced throughout; CONTRIBUTING.md lists the terms to use instead. Ordinary
words of the field, such as `stage`, `fields` or `serve`, are not among them.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("modular_kernel", "experts", "prepare_finalize", "topk_reduce", "tools", "examples")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PAGES = [path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if path.name[0] != "."]
# Made by `mk report --write`, or a record of released versions.
RECORDS = {"CHANGELOG.md", "mutation-scores.md", "support-matrix.md", "h200-layers.md"}

# A part of the name of a module, class or function -> the term to use.
NAMES = {
    "apart": "isolated, separate",
    "battery": "input mutations",
    "boosted": "prescale",
    "choosing": "autotune",
    "composer": "random inputs",
    "fate": "outcome",
    "heard": "received",
    "joined": "merge",
    "lack": "missing",
    "lasts": "last tokens",
    "lends": "transferable",
    "live": "valid, in use",
    "middle": "zero point",
    "requantized": "quantize",
    "rooms": "workspace sizes",
    "scene": "scenario",
    "scenes": "scenarios",
    "shifted": "has offset",
    "team": "warps per pair",
    "told": "sent",
    "took": "times",
    "turns": "breakpoints, schedule",
    "twin": "bitwise reference",
    "twins": "bitwise references",
    "whoever": "any rank that",
}
# Constants of kernels -> the term to use.
KERNEL_CONSTANTS = {
    "ASSEMBLE": "USE_INLINE_ASM",
    "COMPUTED": "DYNAMIC_SCALE",
    "FROM_ZERO": "WITHOUT_OFFSET",
    "LARGEST": "QMAX",
    "LOOPED": "HAS_LOOP",
    "PLAIN": "LINEAR",
    "SCALED": "HAS_SCALES",
    "WHOLE": "GROUP_FITS_BLOCK",
}
COMPOUNDS = ("call_mutants", "known_launches", "near_first", "own_products", "short_accesses",
             "short_cuts")  # fmt: skip
PHRASES = (
    r"\bwhoever\b",
    r"\bby turns\b",
    r"\bbut for (?:a|an|the|its)\b",
    r"\b(?:is|are|be|been|was|were) told\b",
    r"\bwhat is more\b",
    r"\bthe way of the\b",
    r"\blies? (?:beside|behind)\b",
    r"\bis asked\b",
    r"\bmay be asked\b",
)


def wrong_names(name: str) -> list[str]:
    """The parts of a name that are not the field's, and what to use."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    wrong = [f"{part}: use {NAMES[part]}" for part in snake.split("_") if part in NAMES]
    if name in KERNEL_CONSTANTS:
        wrong.append(f"{name}: use {KERNEL_CONSTANTS[name]}")
    return wrong + [compound for compound in COMPOUNDS if compound in snake]


def wrong_phrases(text: str) -> list[str]:
    flat = re.sub(r"\s+", " ", text)
    return [match.group() for phrase in PHRASES for match in re.finditer(phrase, flat, re.I)]


def names_of(path: Path) -> Iterator[str]:
    """Names of the module, its classes and functions, and the constants that kernels take."""
    yield path.stem
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        if isinstance(node, ast.arg) and node.arg.isupper():
            yield node.arg


def prose_of(path: Path) -> Iterator[str]:
    """Docstrings and comments of a module."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_names_of_files_classes_functions_and_kernel_constants() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}": wrong
        for path in SOURCES
        for name in names_of(path)
        if (wrong := wrong_names(name))
    }
    assert found == {}


def test_docstrings_and_comments() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {prose[:60]}": wrong
        for path in SOURCES
        for prose in prose_of(path)
        if (wrong := wrong_phrases(prose))
    }
    assert found == {}


def test_pages() -> None:
    found = {
        str(path.relative_to(ROOT)): wrong
        for path in PAGES
        if path.name not in RECORDS and (wrong := wrong_phrases(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "name",
    ["StagedTwin", "_told", "scene_of", "known_launches", "fate", "live_rows", "TEAM", "LARGEST"],
)
def test_a_wrong_name_is_rejected(name: str) -> None:
    assert wrong_names(name)


@pytest.mark.parametrize("name", ["stage", "fields_of", "serve", "stored", "returns", "Outcome"])
def test_ordinary_words_are_allowed(name: str) -> None:
    assert wrong_names(name) == []


@pytest.mark.parametrize(
    "text",
    ["Whoever raised first.", "times them by\nturns", "the part is told so", "but for a bias"],
)
def test_a_wrong_phrase_is_rejected(text: str) -> None:
    assert wrong_phrases(text)
