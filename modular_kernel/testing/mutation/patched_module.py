"""Import modules from changed source text, together with all modules that depend on them.

This is how a mutant is applied. It is only for forked child processes, because it removes imported
modules from sys.modules.
"""

import ast
import importlib
import linecache
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import entry_points
from importlib.util import spec_from_file_location
from itertools import pairwise
from types import CodeType, ModuleType

from modular_kernel.catalog import GROUP
from modular_kernel.errors import ConfigurationError
from modular_kernel.testing.mutation.scope import list_imports
from modular_kernel.testing.mutation.source import Mutant, Source

# This module loads all experts and exchange classes ("parts") from entry points at run time, so it
# depends on each of them, although it does not import them by name.
_PART_LOADER = "modular_kernel.catalog"


def patch_modules(*mutants: Mutant) -> None:
    """Make later imports of the mutants' modules use the changed source.

    Modules that depend on them are also imported again. Raises SyntaxError if a changed text is not
    valid Python, and ConfigurationError if changes overlap.
    """
    for module, (file, text) in changed_texts(mutants).items():
        ast.parse(text)
        # Triton reads the source of kernels from linecache. An entry without a time stamp is never
        # refreshed from the file.
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        sys.meta_path.insert(0, _Finder(module, file, text))
    unload({mutant.module for mutant in mutants})


def changed_texts(mutants: Sequence[Mutant]) -> dict[str, tuple[str, str]]:
    """Return {module: (file, changed text)}. Raises ConfigurationError if two changes overlap."""
    texts: dict[str, tuple[str, str]] = {}
    for module in dict.fromkeys(mutant.module for mutant in mutants):
        module_mutants = [mutant for mutant in mutants if mutant.module == module]
        module_mutants.sort(key=lambda mutant: mutant.edit.start, reverse=True)
        if any(first.edit.start < second.edit.end for first, second in pairwise(module_mutants)):
            raise ConfigurationError(
                "mutants", got="two at the same place", need="different places"
            )
        source = Source(module, module_mutants[0].path)
        content = source.data
        for mutant in module_mutants:
            edit = mutant.edit
            content = content[: edit.start] + edit.new.encode() + content[edit.end :]
        texts[module] = str(source.path), content.decode()
    return texts


def unload(modules: set[str]) -> None:
    """Remove `modules` and the modules that depend on them from sys.modules.

    The next import of each of these modules executes its source again.
    """
    removed = find_dependents(modules)
    for name in removed:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    for name in sorted(removed):
        parent, _, attribute = name.rpartition(".")
        package = sys.modules.get(parent)
        if package is not None and hasattr(package, attribute):
            delattr(package, attribute)


def restore_submodule_attributes() -> None:
    """Make loaded submodules attributes of their packages again.

    A package that was imported again lacks the attributes for submodules that were not.
    """
    for name, module in list(sys.modules.items()):
        parent, _, attribute = name.rpartition(".")
        package = sys.modules.get(parent)
        if package is not None and not hasattr(package, attribute):
            setattr(package, attribute, module)


def list_part_packages() -> tuple[str, ...]:
    """Return the names of the import packages that provide parts."""
    return tuple(dict.fromkeys(entry.value.split(":")[0] for entry in entry_points(group=GROUP)))


def find_dependents(modules: set[str]) -> set[str]:
    """Return `modules` and every loaded module that imports one of them, also indirectly."""
    roots = {name.split(".", maxsplit=1)[0] for name in (*list_part_packages(), __name__)}
    loaded = [name for name in sys.modules if name.split(".", maxsplit=1)[0] in roots]
    importers: dict[str, set[str]] = {}
    for name in loaded:
        for imported in list_imports(name):
            importers.setdefault(imported, set()).add(name)
    reached: set[str] = set()
    pending = [*modules, _PART_LOADER]
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += importers.get(name, ())
    return reached


class _Finder(MetaPathFinder):
    """Finds one module, whose source is the given text."""

    def __init__(self, module: str, file: str, text: str) -> None:
        self._module, self._file, self._text = module, file, text

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        loader = _Loader(fullname, self._file, self._text)
        return spec_from_file_location(fullname, self._file, loader=loader)


class _Loader(SourceFileLoader):
    """Loads the given text instead of the text of the file."""

    def __init__(self, fullname: str, path: str, text: str) -> None:
        super().__init__(fullname, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        code = compile(self._text, self.path, "exec", dont_inherit=True)
        assert isinstance(code, CodeType)
        return code
