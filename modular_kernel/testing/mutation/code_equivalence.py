"""Check whether mutants (single changes of source code) leave all compiled kernels unchanged.

    comparison = compare_code([mutant])  # a mutant of a kernel or of a device function
    assert comparison.differing == 0 and comparison.reached == (12,)

If they do, they are equivalent to the original (`bitwise_equivalence` compares results instead).
Kernels are compiled as real calls launch them (`testing.compile.cases`), first without and then
with the mutants, in processes that do not interpret kernels. No GPU is needed.
"""

import ast
import importlib
import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.settings import make_child_environment
from modular_kernel.testing.mutation.patched_module import (
    part_packages,
    patch_modules,
    restore_submodule_attributes,
)
from modular_kernel.testing.mutation.scope import list_imports
from modular_kernel.testing.mutation.source import Edit, Mutant, Source

# Replaces the mutant in a third compilation, in which exactly the kernels that contain the mutant's
# line fail to compile.
_UNDEFINED_NAME = "no_such_name_in_any_kernel"
_COMPILE_ERROR = "does not compile"

Code = list[tuple[str, str]]  # (kernel name, digest of its machine code) per launch


@dataclass(frozen=True)
class CodeComparison:
    """Result of a comparison of compiled kernels.

    reached: for each mutant, the number of compiled kernels that contain its line.
    differing: the number of compiled kernels that the mutants change.
    """

    reached: tuple[int, ...]
    differing: int

    @property
    def proven(self) -> bool:
        return self.differing == 0 and all(self.reached)


def compare_code(mutants: Sequence[Mutant], target: str = "sm_90") -> CodeComparison:
    """Compile all kernels that use the mutants' modules, without and with all mutants.

    Raises ConfigurationError for a mutant outside of kernels, because it may change launch
    arguments, which compiled code does not show.
    """
    for mutant in mutants:
        if not _is_in_kernel(mutant):
            need = "a mutant inside a @triton.jit function"
            raise ConfigurationError(
                "same code", got=f"{mutant.ident} at {mutant.location}", need=need
            )
    modules = frozenset(mutant.module for mutant in mutants)
    unchanged = _compile_unchanged(modules, target)
    num_reached = []
    for mutant in mutants:
        broken = replace(mutant, edit=replace(mutant.edit, new=_make_breaking_text(mutant.edit)))
        num_reached.append(
            len(_find_differing_launches(unchanged, _compile((broken,), modules, target)))
        )
    differing = _find_differing_launches(unchanged, _compile(mutants, modules, target))
    return CodeComparison(tuple(num_reached), len(differing))


@cache
def _compile_unchanged(modules: frozenset[str], target: str) -> Code:
    code = _compile((), modules, target)
    if any(digest == _COMPILE_ERROR for _, digest in code):
        raise ConfigurationError(
            "same code", got=_COMPILE_ERROR, need="kernels that compile unchanged"
        )
    return code


@cache
def _get_cache_folder() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of compiled kernels, which is removed when this process exits."""
    return tempfile.TemporaryDirectory()


def _make_breaking_text(edit: Edit) -> str:
    """Make a replacement text with which kernels that contain the line do not compile.

    The text is valid Python wherever `edit.new` is.
    """
    try:
        ast.parse(edit.new)
    except SyntaxError:
        return f"{edit.new} {_UNDEFINED_NAME} +"
    return _UNDEFINED_NAME


def _is_in_kernel(mutant: Mutant) -> bool:
    """Return whether the mutant's line is in the body of a jit function."""
    for node in Source(mutant.module, mutant.path).tree.body:
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno <= mutant.first:
            is_jit = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            if mutant.last <= (node.end_lineno or 0):
                return is_jit
    return False


def _find_differing_launches(expected: Code, actual: Code) -> set[tuple[str, str]]:
    """Return the entries of `expected` that differ in `actual`, which lists the same launches."""
    assert [kernel for kernel, _ in expected] == [kernel for kernel, _ in actual]
    return {before for before, after in zip(expected, actual, strict=True) if before != after}


def _compile(mutants: Sequence[Mutant], modules: frozenset[str], target: str) -> Code:
    """Compile each launch of a kernel that uses one of `modules`; return the code."""
    # Line numbers must not affect the compiled code.
    settings = {"TRITON_CACHE_DIR": _get_cache_folder().name, "TRITON_DISABLE_LINE_INFO": "1"}
    process = subprocess.run(
        [sys.executable, "-m", __name__],
        input=pickle.dumps((tuple(mutants), modules, target)),
        env=make_child_environment(interpreted=False) | settings,
        stdout=subprocess.PIPE,
        check=True,
    )
    return [(kernel, code) for kernel, code in json.loads(process.stdout)]


def _main() -> None:
    """Write the code of each launch to stdout, in the child process."""
    mutants, modules, target = pickle.load(sys.stdin.buffer)
    if mutants:
        patch_modules(*mutants)
    cases: Any = importlib.import_module("modular_kernel.testing.compile.cases")
    restore_submodule_attributes()
    jit: Any = importlib.import_module("triton.runtime.jit").JITFunction
    original_run, launches = jit.run, list[tuple[str, str]]()

    def record_run(self: Any, *args: object, **kwargs: object) -> None:
        if modules.isdisjoint(_find_import_closure(self.fn.__module__)):
            return
        # A mutant may make the compiler raise any error, which counts as a difference.
        try:
            kernel = original_run(self, *args, **kwargs)
            code = sha256(kernel.asm["cubin"]).hexdigest()
        except Exception:  # noqa: BLE001
            code = _COMPILE_ERROR
        launches.append((self.fn.__name__, code))

    jit.run = record_run
    for _ in cases.iter_launches(target):
        pass
    json.dump(launches, sys.stdout)


@cache
def _find_import_closure(module: str) -> frozenset[str]:
    """Return the module and all modules of this project that it imports, directly or indirectly."""
    project_roots = {"modular_kernel", *part_packages()}
    reached, pending = set[str](), [module]
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += [
                n for n in list_imports(name) if n.split(".", maxsplit=1)[0] in project_roots
            ]
    return frozenset(reached)


if __name__ == "__main__":
    _main()
