"""Find the modules whose source mutation testing of a part (an experts or exchange class) changes.

These are the package of the part, its kernels, and the operations that it uses. The search starts
at the module of the part, reads import statements, including those inside functions, and follows
imports of the part's package, of topk_reduce and of modular_kernel.ops.
"""

import ast
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from modular_kernel.catalog import Catalog
from modular_kernel.errors import ConfigurationError

_SHARED_PACKAGES = ("modular_kernel.ops", "topk_reduce")

# Imported modules that are not mutated, with the reason.
NOT_MUTATED: tuple[tuple[str, str], ...] = (
    ("experts.triton.configs*", "chooses configurations: every choice must give right numbers"),
    ("experts.triton.tuning*", "tries configurations: every choice must give right numbers"),
    ("experts.triton*candidates", "tries configurations: every choice must give right numbers"),
    ("experts.triton.launch_config", "bounds configurations: every choice must give right numbers"),
    ("experts.triton.*_config", "bounds configurations: every choice must give right numbers"),
    ("modular_kernel.interpreter.patch", "interpreter of GPU kernels, part of the test harness"),
    ("modular_kernel.interpreter.builder", "interpreter of GPU kernels, part of the test harness"),
    (
        "modular_kernel.interpreter.block_types",
        "interpreter of GPU kernels, part of the test harness",
    ),
    ("modular_kernel.interpreter.dtypes", "interpreter of GPU kernels, part of the test harness"),
    ("modular_kernel.interpreter.bounds", "finds overruns, part of the harness"),
    ("modular_kernel.interpreter.races", "finds races, part of the harness"),
    ("modular_kernel.interpreter.access_log", "finds races, part of the harness"),
    ("prepare_finalize.*compile_cases", "launches kernels to compile them, part of the harness"),
    ("prepare_finalize.*operation_cases", "runs operations to compare them, part of the harness"),
    ("modular_kernel.replay.launch.runtime", "selects the implementation of operations"),
    ("modular_kernel.replay.launch.launch", "launches kernels and reports why replay is off"),
    ("modular_kernel.replay.launch.record", "records for replay, which needs a GPU"),
    ("modular_kernel.replay.launch.cuda_replay", "replay, which needs a GPU"),
)


def modules_of(part: str, catalog: Catalog) -> dict[str, Path]:
    """Return {module: file} of all modules of `part`.

    Raises ConfigurationError for an unknown part.
    """
    parts = [p for p in catalog.parts if p.name == part]
    if not parts:
        need = f"one of {', '.join(sorted({p.name for p in catalog.parts}))}"
        raise ConfigurationError("--mutate", got=repr(part), need=need)
    part_module = inspect.getmodule(parts[0].cls)
    assert part_module is not None
    roots = (part_module.__name__.split(".", maxsplit=1)[0], *_SHARED_PACKAGES)
    reached: dict[str, Path] = {}
    pending = [part_module.__name__]
    while pending:
        module = pending.pop()
        path = find_file(module)
        if path is None or module in reached or is_not_mutated(module):
            continue
        reached[module] = path
        pending += [name for name in list_imports(module) if _is_below(name, roots)]
    return dict(sorted(reached.items()))


def is_not_mutated(module: str) -> bool:
    return any(fnmatch(module, pattern) for pattern, _ in NOT_MUTATED)


def _is_below(module: str, roots: Iterable[str]) -> bool:
    return any(module == root or module.startswith(f"{root}.") for root in roots)


@cache
def find_file(module: str) -> Path | None:
    """Return the source file of a module, without importing it, or None if there is none."""
    root, *submodule_names = module.split(".")
    package = sys.modules.get(root) or importlib.import_module(root)
    package_file = getattr(package, "__file__", None)
    if package_file is None:
        return None
    init_file = Path(package_file)
    if not submodule_names:
        return init_file
    file_stem = init_file.parent.joinpath(*submodule_names)
    return next(
        (p for p in (file_stem.with_suffix(".py"), file_stem / "__init__.py") if p.exists()), None
    )


# Cached imports of each module, because reading all modules takes seconds.
_IMPORTS: dict[str, tuple[str, ...]] = {}


def list_imports(module: str) -> tuple[str, ...]:
    """Return the modules that a module imports anywhere in its source.

    For `from package import name`, this is the submodule `package.name` if it exists, and otherwise
    `package`.
    """
    if module not in _IMPORTS:
        _IMPORTS[module] = _read_imports(module)
    return _IMPORTS[module]


def get_known_imports() -> dict[str, tuple[str, ...]]:
    """Return a copy of the cache of `list_imports`, for `add_known_imports` in another process."""
    return dict(_IMPORTS)


def add_known_imports(imports: Mapping[str, tuple[str, ...]]) -> None:
    """Add `imports` of another process, which has the same source, to the cache."""
    _IMPORTS.update(imports)


def _read_imports(module: str) -> tuple[str, ...]:
    path = find_file(module)
    if path is None or path.suffix != ".py":
        return ()
    tree = ast.parse(path.read_bytes())
    return tuple(dict.fromkeys(_find_imports(tree, module, is_package=path.name == "__init__.py")))


def _find_imports(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _import_base(node, module, is_package=is_package)
            candidates = [f"{base}.{alias.name}" for alias in node.names]
            submodules = [name for name in candidates if _is_module(name)]
            yield from submodules
            if len(submodules) < len(candidates):
                yield base


def _import_base(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """Return the absolute name of the module after `from`."""
    if not node.level:
        return node.module or ""
    parents = module.split(".")
    parents = parents[: len(parents) - node.level + (1 if is_package else 0)]
    return ".".join([*parents, node.module] if node.module else parents)


def _is_module(name: str) -> bool:
    root = name.split(".", maxsplit=1)[0]
    return root in sys.modules and find_file(name) is not None
