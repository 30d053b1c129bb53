"""Find the Triton and Gluon kernels that the installed experts and exchange classes define.

`mk compile` uses this list to report kernels that none of its calls compiled. Kernels are in
packages called `kernels`, anywhere below the package of such a class (a "part") or below
modular_kernel.ops. The names of kernels end in `_kernel`. Other jit functions are device functions
that kernels call. A package or module may define `TARGETS`, the GPU architectures that its kernels
support. A module may define `LEFT_OUT`, which maps names of kernels to the reason why no call of
`mk compile` launches them.
"""

import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from triton.runtime.jit import JITFunction

from modular_kernel.catalog import load_catalog


@dataclass(frozen=True)
class DefinedKernel:
    """A kernel that a part can launch.

    Attributes:
        name: name of the kernel.
        module: name of the module that defines it.
        targets: the GPU architectures that it supports; () for all.
        left_out_reason: why no case launches it; "" if a case should launch it.
    """

    name: str
    module: str
    targets: tuple[str, ...]
    left_out_reason: str


def defined_kernels(name_filter: str = "") -> dict[str, DefinedKernel]:
    """Return every Triton kernel of the installed parts and of the operations, by name.

    name_filter: a substring; only kernels whose name contains it are returned.
    """
    return {name: kernel for name, kernel in _find_kernels().items() if name_filter in name}


@cache
def _find_kernels() -> dict[str, DefinedKernel]:
    roots = {part.cls.__module__.partition(".")[0] for part in load_catalog().parts}
    packages = (
        name for root in (*roots, "modular_kernel.ops") for name in _find_kernel_packages(root)
    )
    kernels = {}
    for package in map(import_module, sorted(packages)):
        if getattr(package, "LANGUAGE", "triton") != "triton":
            continue  # compilers of other languages may not be installed
        for module, targets in _walk_modules(package, ()):
            for name, value in vars(module).items():
                is_local = isinstance(value, JITFunction) and value.module == module.__name__
                if is_local and name.endswith("_kernel"):
                    reason = getattr(module, "LEFT_OUT", {}).get(name, "")
                    kernels[name] = DefinedKernel(name, module.__name__, targets, reason)
    return kernels


def _find_kernel_packages(root: str) -> Iterator[str]:
    """Yield the name of every package called `kernels` below `root`, without importing it."""
    for folder in map(Path, getattr(import_module(root), "__path__", ())):
        for path in folder.rglob("kernels/__init__.py"):
            yield ".".join((root, *path.parent.relative_to(folder).parts))


def _walk_modules(
    module: ModuleType, targets: tuple[str, ...]
) -> Iterator[tuple[ModuleType, tuple[str, ...]]]:
    """Yield a module and all modules below it, each with the TARGETS that apply to it.

    These are the TARGETS of the module or, if it has none, of the nearest package above it.
    """
    targets = tuple(getattr(module, "TARGETS", targets))
    yield module, targets
    for info in pkgutil.iter_modules(getattr(module, "__path__", ())):
        yield from _walk_modules(import_module(f"{module.__name__}.{info.name}"), targets)
