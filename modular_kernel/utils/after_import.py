"""Call a function after a module is imported.

Integrations use this to register with a package, such as transformers, without importing it.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def call_after_import(name: str, function: Callable[[], None]) -> None:
    """Call `function` now if the module `name` has been imported.

    Otherwise, call it as soon as the module has been imported.
    """
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _Finder(name, function))


class _Finder(MetaPathFinder):
    """Finder that wraps the loader of one module, so that the function is called after the module
    has been executed. It removes itself when it is used.
    """

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name, self._function = name, function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)  # so that the other finders provide the spec
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._add_call(spec.loader)
        return spec

    def _add_call(self, loader: object) -> None:
        execute: Callable[[ModuleType], None] = loader.exec_module  # type: ignore[attr-defined]

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._function()

        loader.exec_module = exec_module  # type: ignore[attr-defined]
