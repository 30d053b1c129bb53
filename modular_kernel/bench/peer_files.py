"""Loads --peer files.

A --peer file is a Python file that defines `layers()` for `mk bench` (bench.candidates), or
`transports()` for `mk exchange` (bench.all2all.cases).
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modular_kernel.errors import BrokenPartError, ConfigurationError


def load_peer_file(
    path: Path, function_name: str, item_type: type
) -> tuple[Callable[[], list[Any]], list[Any]]:
    """Import a file and call its function `function_name`. Returns the function and the result.

    Raises BrokenPartError if the import or the call fails, and ConfigurationError if the file does
    not exist or the result is not a list of `item_type`. Both messages name the file.
    """
    option = f"--peer {path}"
    spec = importlib.util.spec_from_file_location(f"mk_peer_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigurationError(option, got="no such Python file", need="FILE.py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        function: Callable[[], list[Any]] = getattr(module, function_name)
        items: object = function()
    # The user's file can raise any exception. The error names the file.
    except (Exception, SystemExit) as error:
        raise BrokenPartError(
            option, got=repr(error), need=f"a file with {function_name}()"
        ) from error
    if not isinstance(items, list) or not all(isinstance(item, item_type) for item in items):
        need = f"a list of {item_type.__module__}.{item_type.__qualname__}"
        raise ConfigurationError(f"{option}: {function_name}()", got=repr(items), need=need)
    return function, items
