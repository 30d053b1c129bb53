"""Serve a module from a changed text, in this process: what depends on it is imported again.

Only for a forked child: modules that were imported before lose their place in sys.modules.
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
from modular_kernel.testing.mutation.scope import imports_of
from modular_kernel.testing.mutation.source import Mutant, Source

# Finds parts at run time, so it depends on every one of them.
_FINDS_PARTS = "modular_kernel.catalog"


def serve(*mutants: Mutant) -> None:
    """From here on every import of the mutants' modules, and of what uses them, sees the changes.

    Raises SyntaxError if a change is none that Python can read.
    """
    for module, (file, text) in texts_of(mutants).items():
        ast.parse(text)
        # Triton reads the source of a kernel here; an entry without a time is never renewed.
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        sys.meta_path.insert(0, _Finder(module, file, text))
    forget({mutant.module for mutant in mutants})


def texts_of(mutants: Sequence[Mutant]) -> dict[str, tuple[str, str]]:
    """Return module -> its file and text with every change; ConfigurationError if two overlap."""
    found: dict[str, tuple[str, str]] = {}
    for module in dict.fromkeys(mutant.module for mutant in mutants):
        mine = [mutant for mutant in mutants if mutant.module == module]
        mine.sort(key=lambda mutant: mutant.edit.start, reverse=True)
        if any(one.edit.start < two.edit.end for one, two in pairwise(mine)):
            raise ConfigurationError("mutants", got="two of one place", need="places of their own")
        source = Source(module, mine[0].path)
        data = source.data
        for mutant in mine:
            edit = mutant.edit
            data = data[: edit.start] + edit.new.encode() + data[edit.end :]
        found[module] = str(source.path), data.decode()
    return found


def forget(modules: set[str]) -> None:
    """Have `modules`, and all that depends on them, imported again when they are next asked for."""
    gone = dependents(modules)
    for name in gone:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    for name in sorted(gone):
        parent, _, last = name.rpartition(".")
        kept = sys.modules.get(parent)
        if kept is not None and hasattr(kept, last):
            delattr(kept, last)


def reattach() -> None:
    """Give packages that were imported again the modules below them that were not."""
    for name, module in list(sys.modules.items()):
        parent, _, last = name.rpartition(".")
        package = sys.modules.get(parent)
        if package is not None and not hasattr(package, last):
            setattr(package, last, module)


def part_packages() -> tuple[str, ...]:
    """Return the import packages that offer parts."""
    return tuple(dict.fromkeys(entry.value.split(":")[0] for entry in entry_points(group=GROUP)))


def dependents(modules: set[str]) -> set[str]:
    """Every loaded module that imports one of `modules`, directly or through others; and they."""
    roots = {name.split(".", maxsplit=1)[0] for name in (*part_packages(), __name__)}
    loaded = [name for name in sys.modules if name.split(".", maxsplit=1)[0] in roots]
    users: dict[str, set[str]] = {}
    for name in loaded:
        for used in imports_of(name):
            users.setdefault(used, set()).add(name)
    reached: set[str] = set()
    waiting = [*modules, _FINDS_PARTS]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += users.get(name, ())
    return reached


class _Finder(MetaPathFinder):
    """Finds one module, whose text is given."""

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
    """Runs a given text as if it were the file's."""

    def __init__(self, fullname: str, path: str, text: str) -> None:
        super().__init__(fullname, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        code = compile(self._text, self.path, "exec", dont_inherit=True)
        assert isinstance(code, CodeType)
        return code
