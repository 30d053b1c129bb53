"""Files of JSON: read whole or refused, and written so that no reader meets half of one.

What is wrong with a file is a ValueError in a few words; whoever reads knows what it is for and
raises a typed error.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, Never

from modular_kernel.errors import ConfigurationError


def content(path: Path, most: int, *, links: bool = True) -> bytes:
    """Read a regular file of at most `most` bytes; ValueError for another, OSError for none.

    links: whether the path may be a symbolic link. A pipe is not waited for.
    """
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(path, flags if links else flags | getattr(os, "O_NOFOLLOW", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError("no regular file")
    with os.fdopen(handle, "rb") as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise ValueError(f"more than {most} bytes")
    return found


def parse(text: str | bytes, *, constants: bool = False) -> Any:
    """Parse JSON in UTF-8 with each name once in its object; ValueError says what is wrong.

    constants: take NaN and Infinity, which JSON has not.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError("no UTF-8") from None
    constant = float if constants else _no_constant
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def record(text: str, schema: str, what: str) -> dict[str, Any]:
    """Return the object of `text` whose "schema" is `schema`; ConfigurationError for another."""
    found = parse(text, constants=True)
    told = found.get("schema") if isinstance(found, dict) else None
    if told != schema:
        raise ConfigurationError(what, got=told, need=schema)
    kept: dict[str, Any] = found
    return kept


def write(path: Path, text: str) -> None:
    """Write through a file beside it: a run that is killed leaves the last whole one."""
    path = path.resolve()
    if path.exists() and not path.is_file():  # a pipe or a device is written to, not replaced
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name twice in one object")
    return made


def _no_constant(name: str) -> Never:
    raise ValueError(f"{name} is no number")
