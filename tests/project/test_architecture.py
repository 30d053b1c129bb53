"""Structure of the repository: imports, import cycles, packages and file lengths."""

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("modular_kernel", "prepare_finalize", "experts", "topk_reduce")
PARTS = PACKAGES[1:]
MAX_PUBLIC_NAMES = 22

# Libraries that a part imports in its constructor, never when its module is imported.
VENDOR_LIBRARIES = {
    "cutlass",
    "deep_ep",
    "deep_gemm",
    "flashinfer",
    "pplx_kernels",
    "triton_kernels",
}
OPTIONAL_LIBRARIES = {"transformers", "matplotlib", "vllm", "sglang"}


def list_loaded_modules(statement: str) -> set[str]:
    """Return the top-level modules that `statement` loads in a new interpreter."""
    program = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.parametrize("package", PACKAGES)
def test_import_loads_no_vendor_library(package: str) -> None:
    assert (
        list_loaded_modules(f"import {package}") & (VENDOR_LIBRARIES | OPTIONAL_LIBRARIES) == set()
    )


def test_core_loads_no_triton() -> None:
    modules_of_torch = list_loaded_modules("import torch")  # some builds of torch load triton
    import_all = "from modular_kernel import *"
    assert (list_loaded_modules(import_all) - modules_of_torch) & {
        "triton",
        "transformers",
    } == set()


def test_core_loads_no_part() -> None:
    assert list_loaded_modules("import modular_kernel") & set(PARTS) == set()


def test_command_line_loads_no_torch() -> None:
    """`mk --help` must be fast."""
    assert "torch" not in list_loaded_modules(
        "from modular_kernel.cli.main import make_application; make_application()"
    )


def test_public_names_exist_and_are_few() -> None:
    core = import_module("modular_kernel")
    assert len(core.__all__) == len(set(core.__all__)) <= MAX_PUBLIC_NAMES
    assert [name for name in core.__all__ if not hasattr(core, name)] == []


@pytest.mark.parametrize("package", PARTS)
def test_parts_list_their_components(package: str) -> None:
    components = import_module(package).COMPONENTS
    assert isinstance(components, tuple)
    assert components
    assert len({part.__name__ for part in components}) == len(components)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_every_folder_of_modules_is_a_package() -> None:
    """A folder without `__init__.py` would not be in the wheel."""
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").is_file()] == []


def test_test_folders_are_not_packages_and_file_names_are_unique() -> None:
    """`tests/experts/__init__.py` would shadow the package `experts`."""
    tests = ROOT / "tests"
    assert list(tests.rglob("__init__.py")) == []
    names = Counter(path.name for path in tests.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_setup_py_has_all_metadata_and_no_logic() -> None:
    statements = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body
    assert {type(s).__name__ for s in statements} <= {"Expr", "ImportFrom", "Import"}
    assert "project" not in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_triton_kernels_are_launched_only_by_launch() -> None:
    """Plans cannot replay launches that bypass `modular_kernel.replay.launch`."""
    launches = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            calls = (n.func for n in nodes if isinstance(n, ast.Call))
            kernels = (f.value for f in calls if isinstance(f, ast.Subscript))
            names = {ast.unparse(kernel) for kernel in kernels}
            launches += [(path.name, name) for name in names if name.endswith("kernel")]
    assert launches == [("launch.py", "kernel")]


def test_cute_kernels_do_not_postpone_annotations() -> None:
    """The CuTe DSL reads annotations as objects; postponed annotations are strings."""
    postponed = "from __future__ import " + "annotations"
    kernels = (p for p in (ROOT / "experts").rglob("*.py") if "kernels" in p.parts)
    assert [str(p) for p in kernels if postponed in p.read_text(encoding="utf-8")] == []


def test_public_names_differ_from_submodules() -> None:
    """`import modular_kernel.x` binds x in the package, and would hide a public name x."""
    import modular_kernel

    modules = {path.stem for path in (ROOT / "modular_kernel").iterdir()}
    assert not modules & set(modular_kernel.__all__)


def _list_imports() -> set[tuple[str, str]]:
    """Return pairs (module, imported module) of this repository's packages. Imports under
    TYPE_CHECKING are ignored.
    """
    files = {}
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        files[name] = file
    imports = set()
    for name, file in files.items():
        pending: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
        while pending:
            node = pending.pop()
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            pending += ast.iter_child_nodes(node)
            if isinstance(node, ast.Import):
                imports |= {(name, alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                candidates = {f"{node.module}.{alias.name}" for alias in node.names}
                imports |= {
                    (name, candidate if candidate in files else str(node.module))
                    for candidate in candidates
                }
    return {(user, used) for user, used in imports if used in files and used != user}


def _find_modules_in_cycles(pairs: set[tuple[str, str]]) -> set[str]:
    """Return the modules in import cycles.

    Remove imports of modules that import nothing, and imports by modules that are not imported,
    until none remain.
    """
    while True:
        users, used = {user for user, _ in pairs}, {used for _, used in pairs}
        remaining = {pair for pair in pairs if pair[1] in users and pair[0] in used}
        if remaining == pairs:
            return users
        pairs = remaining


def test_files_and_sibling_folders_have_no_import_cycles() -> None:
    """Imports inside functions count, too."""
    imports = _list_imports()
    assert _find_modules_in_cycles(imports) == set()
    imports_of_siblings: dict[str, set[tuple[str, str]]] = {}
    for user, used in imports:
        user_parts, used_parts = user.split("."), used.split(".")
        num_common = next(
            (i for i, (a, b) in enumerate(zip(user_parts, used_parts, strict=False)) if a != b),
            None,
        )
        # Compare folders, not two files in the same folder.
        if num_common is not None and min(len(user_parts), len(used_parts)) > num_common + 1:
            pair = ".".join(user_parts[: num_common + 1]), ".".join(used_parts[: num_common + 1])
            imports_of_siblings.setdefault(".".join(user_parts[:num_common]), set()).add(pair)
    assert {
        folder: _find_modules_in_cycles(pairs)
        for folder, pairs in imports_of_siblings.items()
        if _find_modules_in_cycles(pairs)
    } == {}


def test_files_have_at_most_1000_lines() -> None:
    """A longer file probably has more than one purpose. Tests are exempt."""
    non_tests = (path for path in ROOT.rglob("*.py") if "tests" not in path.relative_to(ROOT).parts)
    files = [
        p for p in non_tests if p.relative_to(ROOT).parts[0] in (*PACKAGES, "tools", "examples")
    ]
    lengths = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in files}
    assert {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > 1000} == {}
