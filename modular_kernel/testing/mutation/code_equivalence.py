"""Is the code of every kernel the same with mutants? The first proof that one is equivalent.

    same = same_code([mutant])          # of a line inside a kernel, or a function that kernels call
    assert same.differing == 0 and same.reached == (12,)

Kernels are compiled for a GPU that need not be there, as the parts launch them (see
testing.compile_cases), without and with all of the mutants: in processes that do not interpret.
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
from modular_kernel.settings import environment_of_child
from modular_kernel.testing.mutation.patched_module import part_packages, reattach, serve
from modular_kernel.testing.mutation.scope import imports_of
from modular_kernel.testing.mutation.source import Edit, Mutant, Source

# Takes a mutant's place in a third compilation: who reaches the line does not compile.
_UNKNOWN = "no_such_name_in_any_kernel"
_FAILED = "does not compile"

Code = list[tuple[str, str]]  # a launch's kernel, and a digest of its machine code


@dataclass(frozen=True)
class SameCode:
    """reached: for each mutant, how many compiled forms of kernels have its line in them.
    differing: how many forms are other code with the mutants."""

    reached: tuple[int, ...]
    differing: int

    @property
    def proven(self) -> bool:
        return self.differing == 0 and all(self.reached)


def same_code(mutants: Sequence[Mutant], target: str = "sm_90") -> SameCode:
    """Compile what uses the mutants' modules without and with all of them.

    Raises ConfigurationError for a mutant outside of kernels: what a launch is given may change by
    it, and no code of a kernel says so.
    """
    for mutant in mutants:
        if not _in_a_kernel(mutant):
            need = "a mutant inside a @triton.jit function"
            raise ConfigurationError(
                "same code", got=f"{mutant.ident} at {mutant.place}", need=need
            )
    modules = frozenset(mutant.module for mutant in mutants)
    without = _unchanged(modules, target)
    reached = []
    for mutant in mutants:
        marked = replace(mutant, edit=replace(mutant.edit, new=_marked(mutant.edit)))
        reached.append(len(_other(without, _compiled((marked,), modules, target))))
    changed = _other(without, _compiled(mutants, modules, target))
    return SameCode(tuple(reached), len(changed))


@cache
def _unchanged(modules: frozenset[str], target: str) -> Code:
    """Return what launches compile to without mutants, once for all that are asked about."""
    code = _compiled((), modules, target)
    if any(one == _FAILED for _, one in code):
        raise ConfigurationError("same code", got=_FAILED, need="kernels that compile unchanged")
    return code


@cache
def _cache_folder() -> tempfile.TemporaryDirectory[str]:
    """Return where compiled kernels are kept, which goes with this process."""
    return tempfile.TemporaryDirectory()


def _marked(edit: Edit) -> str:
    """Return what no kernel that has it compiles with; an operator stays one."""
    try:
        ast.parse(edit.new)
    except SyntaxError:
        return f"{edit.new} {_UNKNOWN} +"
    return _UNKNOWN


def _in_a_kernel(mutant: Mutant) -> bool:
    """Whether its line is in the body of a jit function."""
    for node in Source(mutant.module, mutant.path).tree.body:
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno <= mutant.first:
            jit = any("jit" in ast.unparse(made) for made in node.decorator_list)
            if mutant.last <= (node.end_lineno or 0):
                return jit
    return False


def _other(without: Code, found: Code) -> set[tuple[str, str]]:
    """Return the forms of `without` that are others in `found`, launch by launch."""
    assert [kernel for kernel, _ in without] == [kernel for kernel, _ in found]
    return {form for form, now in zip(without, found, strict=True) if form != now}


def _compiled(mutants: Sequence[Mutant], modules: frozenset[str], target: str) -> Code:
    """Return what each launch of a kernel that uses one of `modules` compiles to."""
    # Where a line stands is no part of what it does.
    settings = {"TRITON_CACHE_DIR": _cache_folder().name, "TRITON_DISABLE_LINE_INFO": "1"}
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=pickle.dumps((tuple(mutants), modules, target)),
        env=environment_of_child(interpreted=False) | settings,
        stdout=subprocess.PIPE,
        check=True,
    )
    return [(kernel, code) for kernel, code in json.loads(done.stdout)]


def _main() -> None:
    """In the child: tells the code of each launch."""
    mutants, modules, target = pickle.load(sys.stdin.buffer)
    if mutants:
        serve(*mutants)
    cases: Any = importlib.import_module("modular_kernel.testing.compile.cases")
    reattach()
    jit: Any = importlib.import_module("triton.runtime.jit").JITFunction
    compile_one, found = jit.run, list[tuple[str, str]]()

    def run(self: Any, *args: object, **kwargs: object) -> None:
        if modules.isdisjoint(_used_by(self.fn.__module__)):
            return
        # Whatever a mutant makes the compiler raise is another outcome.
        try:
            kernel = compile_one(self, *args, **kwargs)
            code = sha256(kernel.asm["cubin"]).hexdigest()
        except Exception:  # noqa: BLE001
            code = _FAILED
        found.append((self.fn.__name__, code))

    jit.run = run
    for _ in cases.launched(target):
        pass
    json.dump(found, sys.stdout)


@cache
def _used_by(module: str) -> frozenset[str]:
    """Return the module and all of ours that it imports, directly or through others."""
    ours = {"modular_kernel", *part_packages()}
    reached, waiting = set[str](), [module]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += [n for n in imports_of(name) if n.split(".", maxsplit=1)[0] in ours]
    return frozenset(reached)


if __name__ == "__main__":
    _main()
