"""Reads a user's file of peers: Python with a function that returns a list of new objects."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modular_kernel.errors import BrokenPartError, ConfigurationError


def load_file(path: Path, name: str, kind: type) -> tuple[Callable[[], list[Any]], list[Any]]:
    """Return the file's function `name`, and what it returned once: a list of `kind`.

    Raise an error that names the file if there is no such list to be had.
    """
    what = f"--peer {path}"
    spec = importlib.util.spec_from_file_location(f"mk_peer_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigurationError(what, got="no such Python file", need="FILE.py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        make: Callable[[], list[Any]] = getattr(module, name)
        made: object = make()
    # A foreign file can fail in any way; it is named, and nothing is measured.
    except (Exception, SystemExit) as error:
        raise BrokenPartError(what, got=repr(error), need=f"a file with {name}()") from error
    if not isinstance(made, list) or not all(isinstance(each, kind) for each in made):
        need = f"a list of {kind.__module__}.{kind.__qualname__}"
        raise ConfigurationError(f"{what}: {name}()", got=repr(made), need=need)
    return make, made
