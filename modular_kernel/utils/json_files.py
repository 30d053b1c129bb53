"""Files of JSON: read whole or refused, and written so that no reader meets half of one.

What is wrong with a file is a ValueError in a few words; whoever reads knows what it is for and
raises a typed error.
"""

import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Never
from uuid import uuid4

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
    """Write a file as a whole; where that fails, the file is as it was before."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, and move what was written there to `path` at the end.

    It has the suffix of `path` and lies beside it. On an error it is removed, and `path` stays as
    it was. A pipe or a device is written to directly, and so is a file in a folder that takes no
    new one.
    """
    path = path.resolve()
    if path.exists() and not (path.is_file() and os.access(path.parent, os.W_OK)):
        yield path
        return
    part = path.with_name(f".{uuid4().hex}.part{path.suffix[:16]}")
    try:
        yield part
        if path.exists():
            shutil.copymode(path, part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name twice in one object")
    return made


def _no_constant(name: str) -> Never:
    raise ValueError(f"{name} is no number")
