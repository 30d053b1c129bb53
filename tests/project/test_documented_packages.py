"""The packages, extras and parts that `mk doctor`, setup.py and the documentation name exist."""

import ast
import re
from pathlib import Path

import pytest

from modular_kernel.catalog import collect_packages, load_catalog
from modular_kernel.cli import doctor

ROOT = Path(__file__).resolve().parents[2]
TRANSFORMERS_INTEGRATION = ROOT / "modular_kernel/integrations/transformers/__init__.py"
PACKAGES = ("modular_kernel", "prepare_finalize", "experts", "topk_reduce")
DEVELOPMENT_EXTRAS = {"test", "dev"}  # extras for development of this package
# Distribution -> name of the imported package, if they differ.
IMPORTED_AS = {
    "ml-dtypes": "ml_dtypes",
    "nvidia-cutlass-dsl": "nvidia_cutlass_dsl",
    "apache-tvm-ffi": "tvm_ffi",
}
PARTS = {part.name for part in load_catalog().parts if part.origin.startswith("modular-kernel ")}
ABSTRACT = {"PrepareAndFinalize", "TopKWeightAndReduce"}
# Parts that the documentation names but that are not in the catalog: classes of the tutorial and of
# other projects.
VLLM_CLASSES = {
    "Int4EmulationTritonExperts",
    "MarlinExperts",
    "Nvfp4QuantizationEmulationTritonExperts",
    "TritonOrCutlassExperts",
    "TritonWNA16Experts",
}
FOREIGN_PARTS = {"MyExperts", "MyPrepare", "FP8Experts", "LoadedExperts"} | VLLM_CLASSES
PART_NAME = re.compile(
    r"`((?:[A-Z]\w*(?:\{[\w,]+\}\w*)?)(?:PrepareAndFinalize\w*|Experts)|TopKWeightAndReduce[\w{},]*)`"
)


def list_imported_packages() -> set[str]:
    """Return the top-level names that the packages import anywhere."""
    names: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    names.add(node.module.split(".")[0])
    return names


def expand_braces(name: str) -> list[str]:
    """Expand braces, for example DeepEP{HT,LL}X to DeepEPHTX and DeepEPLLX."""
    match = re.search(r"\{([\w,]+)\}", name)
    if match is None:
        return [name]
    return [name.replace(match[0], word) for word in match[1].split(",")]


def test_packages_of_doctor_are_needed_by_a_part_or_imported() -> None:
    """Doctor lists the packages of parts, and further packages that this project imports."""
    needed = collect_packages(load_catalog())
    extra_packages = set(doctor._EXTRA_PACKAGES)
    assert extra_packages & needed == set(), "the catalog has these packages already"
    assert extra_packages <= list_imported_packages()


def read_extras() -> dict[str, list[str]]:
    (call,) = (
        node
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setup"
    )
    (value,) = (word.value for word in call.keywords if word.arg == "extras_require")
    extras_by_name: dict[str, list[str]] = ast.literal_eval(value)
    return extras_by_name


@pytest.mark.share(2)
@pytest.mark.parametrize("extra", sorted(set(read_extras()) - DEVELOPMENT_EXTRAS))
def test_packages_of_extras_are_needed_by_a_part_or_imported(extra: str) -> None:
    used_packages = list_imported_packages() | collect_packages(load_catalog())
    for requirement in read_extras()[extra]:
        name = re.split(r"[<>=;\s\[]", requirement)[0]
        assert IMPORTED_AS.get(name, name) in used_packages


def test_minimum_of_transformers_is_the_same_everywhere() -> None:
    """`mk demo` and the integration refuse the versions that the extra does not accept."""
    tree = ast.parse(TRANSFORMERS_INTEGRATION.read_text(encoding="utf-8"))
    (minimum,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MIN_VERSION"
    )
    version = ".".join(map(str, minimum))
    assert read_extras()["transformers"] == [f"transformers>={version}"]
    page = (ROOT / "docs/installation.md").read_text(encoding="utf-8")
    assert f"| `transformers` | transformers {version} or newer." in page


def test_extras_named_in_docs_exist() -> None:
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        page_text = path.read_text(encoding="utf-8")
        named_extras = set(re.findall(r"the `(\w+)` extra", page_text))
        named_extras |= {
            extra
            for words in re.findall(r"modular-kernel\[([\w,]+)\]|'?\.\[([\w,]+)\]", page_text)
            for names in words
            for extra in names.split(",")
            if extra
        }
        assert named_extras <= set(read_extras()), path


def test_table_of_parts_equals_the_catalog() -> None:
    page_text = (ROOT / "docs/parts.md").read_text(encoding="utf-8")
    table = page_text[page_text.index("\n| part |") :].split("\n\n")[0].lstrip()
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    named_parts = [
        name
        for row in rows
        for word in re.findall(r"`([^`]+)`", row)
        for name in expand_braces(word)
    ]
    assert len(rows) > 10
    assert sorted(named_parts) == sorted(PARTS)


def test_parts_named_in_docs_exist() -> None:
    num_names = 0
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for word in PART_NAME.findall(path.read_text(encoding="utf-8")):
            names = set(expand_braces(word))
            num_names += len(names)
            assert names <= PARTS | ABSTRACT | FOREIGN_PARTS, f"{path.name}: {names - PARTS}"
    assert num_names > 40
