"""Check whether mutants (single changes of source code) leave all compiled kernels unchanged.

    comparison = compare_code([mutant])  # a mutant of a kernel or of a device function
    assert comparison.differing == 0 and comparison.reached == (12,)

Mutants that leave all kernels unchanged are equivalent to the original (`bitwise_equivalence`
compares results instead). Kernels are compiled as real calls launch them
(`testing.compile.cases`), without and with the mutants, in processes that do not interpret kernels.
No GPU is needed.

Most kernels are only compiled to Triton's optimized IR, without line numbers: if it and the options
are equal, so is the machine code. Kernels whose IR differs are compiled to machine code.
"""

import ast
import importlib
import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from hashlib import sha256
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.replay.launch.runtime import HAS_TRITON
from modular_kernel.settings import make_child_environment
from modular_kernel.testing.mutation.mutant_outcome import MutantOutcome
from modular_kernel.testing.mutation.patched_module import (
    list_part_packages,
    patch_modules,
    restore_submodule_attributes,
)
from modular_kernel.testing.mutation.scope import list_imports
from modular_kernel.testing.mutation.source import Edit, Mutant, Source

# Replaces the mutant in a third compilation, in which exactly the kernels that contain the mutant's
# line fail to compile.
_UNDEFINED_NAME = "no_such_name_in_any_kernel"
_COMPILE_ERROR = "does not compile"


@dataclass(frozen=True)
class _Launch:
    """A compiled launch: the kernel's name, and digests of its IR and, if needed, machine code."""

    kernel: str
    ir: str
    code: str = ""


@dataclass(frozen=True)
class _Request:
    """What a child process compiles.

    mutants: the mutants that are applied.
    modules: only kernels that use one of these modules are compiled.
    target: an architecture, such as "sm_90".
    expected: the IR of each launch without mutants. A launch that differs is compiled to code.
    with_code: indices of further launches that are compiled to code.
    stop_after: the number of differing launches, or of those in `with_code`, after which to stop.
    """

    mutants: tuple[Mutant, ...]
    modules: frozenset[str]
    target: str
    expected: tuple[str, ...] = ()
    with_code: frozenset[int] = frozenset()
    stop_after: int = sys.maxsize


@dataclass(frozen=True)
class CodeComparison:
    """Result of a comparison of compiled kernels.

    reached: for each mutant, the number of compiled kernels that contain its line; 0 if the
        comparison stopped at the first difference, before these kernels were counted.
    differing: the number of compiled kernels that the mutants change.
    """

    reached: tuple[int, ...]
    differing: int

    @property
    def proven(self) -> bool:
        return self.differing == 0 and all(self.reached)


def compare_code(
    mutants: Sequence[Mutant], target: str = "sm_90", *, first_only: bool = False
) -> CodeComparison:
    """Compile all kernels that use the mutants' modules, without and with all mutants.

    first_only: whether to stop at the first kernel whose code differs.

    Raises ConfigurationError for a mutant outside of kernels, because it may change launch
    arguments, which compiled code does not show.
    """
    for mutant in mutants:
        if not is_in_kernel(mutant):
            need = "a mutant inside a @triton.jit function"
            raise ConfigurationError(
                "same code", got=f"{mutant.ident} at {mutant.location}", need=need
            )
    modules = frozenset(mutant.module for mutant in mutants)
    unchanged = _compile_unchanged(modules, target)
    expected = tuple(launch.ir for launch in unchanged)
    changed_request = _Request(tuple(mutants), modules, target, expected)
    if first_only:
        # Most mutants that change a kernel change the first one that contains their line.
        launches = _compile(replace(changed_request, stop_after=1))
        differing = _count_differing(changed_request, launches, unchanged)
        if differing:
            return CodeComparison(tuple(0 for _ in mutants), differing)
    if not first_only or _find_differing(unchanged, launches):
        differing = _count_differing(changed_request, _compile(changed_request), unchanged)
    reached = []
    for mutant in mutants:
        broken = replace(mutant, edit=replace(mutant.edit, new=_make_breaking_text(mutant.edit)))
        launches = _compile(replace(changed_request, mutants=(broken,)))
        reached.append(len(_distinct_launches(unchanged, _find_differing(unchanged, launches))))
    return CodeComparison(tuple(reached), differing)


def prove_by_code(outcome: MutantOutcome) -> MutantOutcome:
    """Return the outcome of a surviving mutant.

    Its status is "equivalent" if no kernel that contains the mutated line changes.
    The outcome of a mutant outside of kernels, or in no compiled kernel, is returned unchanged.
    """
    if not HAS_TRITON or not is_in_kernel(outcome.mutant):
        return outcome
    comparison = compare_code([outcome.mutant], first_only=True)
    if not comparison.proven:
        return outcome
    return replace(outcome, status="equivalent", forms=comparison.reached[0])


def _count_differing(
    changed_request: _Request, launches: Sequence[_Launch], unchanged: Sequence[_Launch]
) -> int:
    """Return the number of kernels with different code.

    launches: the launches of `changed_request`.
    """
    indices = _find_differing(unchanged, launches)
    if not indices:
        return 0
    originals = _compile(
        replace(
            changed_request, mutants=(), with_code=indices, expected=(), stop_after=len(indices)
        )
    )
    differing = frozenset(
        index for index in indices if launches[index].code != originals[index].code
    )
    return len(_distinct_launches(unchanged, differing))


def _distinct_launches(unchanged: Sequence[_Launch], indices: Iterable[int]) -> set[_Launch]:
    return {unchanged[index] for index in indices}


@cache
def _compile_unchanged(modules: frozenset[str], target: str) -> tuple[_Launch, ...]:
    launches = _compile(_Request((), modules, target))
    if any(launch.ir == _COMPILE_ERROR for launch in launches):
        raise ConfigurationError(
            "same code", got=_COMPILE_ERROR, need="kernels that compile unchanged"
        )
    return launches


@cache
def _get_cache_folder() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of compiled kernels, which is removed when this process exits."""
    return tempfile.TemporaryDirectory()


def _make_breaking_text(edit: Edit) -> str:
    """Return replacement text that breaks the compilation of every kernel that contains the line.

    The text is valid Python wherever `edit.new` is.
    """
    try:
        ast.parse(edit.new)
    except SyntaxError:
        return f"{edit.new} {_UNDEFINED_NAME} +"
    return _UNDEFINED_NAME


def is_in_kernel(mutant: Mutant) -> bool:
    """Return whether the mutant's line is in the body of a jit function."""
    for node in Source(mutant.module, mutant.path).tree.body:
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno <= mutant.first:
            is_jit = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            if mutant.last <= (node.end_lineno or 0):
                return is_jit
    return False


def _find_differing(expected: Sequence[_Launch], launches: Sequence[_Launch]) -> frozenset[int]:
    """Return the indices of launches whose IR differs. `launches` may be shorter."""
    pairs = [*enumerate(zip(expected, launches, strict=False))]
    assert all(
        expected_launch.kernel == actual_launch.kernel
        for _, (expected_launch, actual_launch) in pairs
    )
    return frozenset(
        index
        for index, (expected_launch, actual_launch) in pairs
        if expected_launch.ir != actual_launch.ir
    )


def _compile(request: _Request) -> tuple[_Launch, ...]:
    """Compile each launch of a kernel that uses one of the modules."""
    # Line numbers must not affect the compiled code, and a cached kernel would hide its IR.
    settings = {
        "TRITON_ALWAYS_COMPILE": "1",
        "TRITON_CACHE_DIR": _get_cache_folder().name,
        "TRITON_DISABLE_LINE_INFO": "1",
    }
    process = subprocess.run(
        [sys.executable, "-m", __name__],
        input=pickle.dumps({f.name: getattr(request, f.name) for f in fields(request)}),
        env=make_child_environment(interpreted=False) | settings,
        stdout=subprocess.PIPE,
        check=True,
    )
    return tuple(_Launch(*launch_fields) for launch_fields in json.loads(process.stdout))


class _StopAtIr(Exception):
    """Raised with the digest of the IR, to skip the compilation from IR to machine code."""


class _Compiler:
    """Compiles the launches of a request in the child process, and records them."""

    def __init__(self, request: _Request) -> None:
        self.launches: list[_Launch] = []
        self._request = request
        self._ir, self._num_compiled = "", 0
        self._known_ir: dict[tuple[int, object], str] = {}
        backend: Any = importlib.import_module("triton.backends.nvidia.compiler").CUDABackend
        self._jit: Any = importlib.import_module("triton.runtime.jit").JITFunction
        self._add_stages, backend.add_stages = backend.add_stages, self._make_add_stages()
        self._run, self._jit.run = self._jit.run, self._make_run()
        self._do_compile, self._jit._do_compile = self._jit._do_compile, self._make_do_compile()

    @property
    def is_done(self) -> bool:
        return self._num_compiled >= self._request.stop_after

    def _needs_code(self) -> bool:
        """Return whether the current launch is compiled to code, which depends on its IR."""
        index, request = len(self.launches), self._request
        if index in request.with_code:
            return True
        return bool(request.expected) and request.expected[index] != self._ir

    def _make_add_stages(self) -> Callable[..., None]:
        def add_stages(backend: Any, stages: dict[str, Any], options: Any, language: Any) -> None:
            self._add_stages(backend, stages, options, language)
            lower = stages["ttgir"]

            def lower_if_needed(module: Any, metadata: Any) -> Any:
                ir_text = f"{module.str_nodebug()}\n{options}"
                self._ir = sha256(ir_text.encode()).hexdigest()
                if self._needs_code():
                    return lower(module, metadata)
                raise _StopAtIr(self._ir)

            stages["ttgir"] = lower_if_needed

        return add_stages

    def _make_do_compile(self) -> Callable[..., Any]:
        def do_compile(kernel: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
            known_ir = self._known_ir.get((id(kernel), key))
            if known_ir is not None:  # a repeated launch
                self._ir = known_ir
                if not self._needs_code():
                    raise _StopAtIr(known_ir)
            try:
                return self._do_compile(kernel, key, *args, **kwargs)
            finally:
                self._known_ir[id(kernel), key] = self._ir

        return do_compile

    def _make_run(self) -> Callable[..., None]:
        def run(kernel: Any, *args: object, **kwargs: object) -> None:
            closure = _find_import_closure(kernel.fn.__module__)
            if self.is_done or self._request.modules.isdisjoint(closure):
                return
            code = self._ir = ""
            # A mutant may make the compiler raise any error, which counts as a difference.
            try:
                compiled = self._run(kernel, *args, **kwargs)
                code = sha256(compiled.asm["cubin"]).hexdigest()
                # A kernel that has been compiled in this process does not show its IR again.
                self._ir = self._ir or code
            except _StopAtIr:
                pass
            except Exception:  # noqa: BLE001
                code = self._ir = _COMPILE_ERROR
            self._num_compiled += bool(code)
            self.launches.append(_Launch(kernel.fn.__name__, self._ir, code))

        return run


def _main() -> None:
    """Write the launches of a request to stdout, in the child process."""
    request = _Request(**pickle.load(sys.stdin.buffer))
    if request.mutants:
        patch_modules(*request.mutants)
    cases: Any = importlib.import_module("modular_kernel.testing.compile.cases")
    restore_submodule_attributes()
    compiler = _Compiler(request)
    for _ in cases.iter_launches(request.target):
        if compiler.is_done:
            break
    json.dump([[x.kernel, x.ir, x.code] for x in compiler.launches], sys.stdout)


@cache
def _find_import_closure(module: str) -> frozenset[str]:
    """Return the module and all modules of this project that it imports, directly or indirectly."""
    project_roots = {"modular_kernel", *list_part_packages()}
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
