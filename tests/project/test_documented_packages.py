"""The packages, extras and parts that `mk doctor`, pyproject.toml and docs name exist in the
catalog and source.
"""

import ast
import re
from pathlib import Path

import pytest

from modular_kernel.catalog import collect_packages, load_catalog
from modular_kernel.cli import doctor

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("modular_kernel", "prepare_finalize", "experts", "topk_reduce")
TOOLS = {"test", "dev"}  # extras for those who work on this package
# Distribution -> what is imported, where they differ.
IMPORTED_AS = {
    "ml-dtypes": "ml_dtypes",
    "nvidia-cutlass-dsl": "nvidia_cutlass_dsl",
    "apache-tvm-ffi": "tvm_ffi",
}
PARTS = {part.name for part in load_catalog().parts if part.origin.startswith("modular-kernel ")}
ABSTRACT = {"PrepareAndFinalize", "TopKWeightAndReduce"}
# In the docs of this package, but another's: classes of the tutorial and of the projects compared.
THEIRS = {"MyExperts", "MyPrepare", "FP8Experts", "LoadedExperts"}
NAME = re.compile(
    r"`((?:[A-Z]\w*(?:\{[\w,]+\}\w*)?)(?:PrepareAndFinalize\w*|Experts)|TopKWeightAndReduce[\w{},]*)`"
)


def imported() -> set[str]:
    """Return the top-level names that the packages import anywhere."""
    found: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    found |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    found.add(node.module.split(".")[0])
    return found


def expanded(name: str) -> list[str]:
    """Expand braces: DeepEP{HT,LL}X -> DeepEPHTX, DeepEPLLX."""
    match = re.search(r"\{([\w,]+)\}", name)
    if match is None:
        return [name]
    return [name.replace(match[0], word) for word in match[1].split(",")]


def test_packages_of_doctor_are_needed_by_a_part_or_imported() -> None:
    """A package that no part needs must be imported somewhere, because doctor states what it is
    used for.
    """
    needed = collect_packages(load_catalog())
    extras = set(doctor._EXTRA_PACKAGES)
    assert extras & needed == set(), "the catalog says it already"
    assert extras <= imported()


def extras() -> dict[str, list[str]]:
    (call,) = (
        node
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setup"
    )
    (value,) = (word.value for word in call.keywords if word.arg == "extras_require")
    found: dict[str, list[str]] = ast.literal_eval(value)
    return found


@pytest.mark.share(2)
@pytest.mark.parametrize("extra", sorted(set(extras()) - TOOLS))
def test_packages_of_extras_are_needed_by_a_part_or_imported(extra: str) -> None:
    wanted = imported() | collect_packages(load_catalog())
    for requirement in extras()[extra]:
        name = re.split(r"[<>=;\s\[]", requirement)[0]
        assert IMPORTED_AS.get(name, name) in wanted


def test_extras_that_the_docs_name_exist() -> None:
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        named = set(re.findall(r"the `(\w+)` extra", text))
        named |= {
            w
            for words in re.findall(r"modular-kernel\[([\w,]+)\]|'?\.\[([\w,]+)\]", text)
            for each in words
            for w in each.split(",")
            if w
        }
        assert named <= set(extras()), path


def test_the_table_of_parts_is_the_catalog() -> None:
    text = (ROOT / "docs/parts.md").read_text(encoding="utf-8")
    table = text[text.index("\n| part |") :].split("\n\n")[0].lstrip()
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    named = [
        name for row in rows for word in re.findall(r"`([^`]+)`", row) for name in expanded(word)
    ]
    assert len(rows) > 10
    assert sorted(named) == sorted(PARTS)


def test_the_docs_name_parts_that_exist() -> None:
    seen = 0
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for word in NAME.findall(path.read_text(encoding="utf-8")):
            names = set(expanded(word))
            seen += len(names)
            assert names <= PARTS | ABSTRACT | THEIRS, f"{path.name}: {names - PARTS}"
    assert seen > 40
