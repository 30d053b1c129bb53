"""Strict reading and atomic writing of JSON files.

An invalid file raises ValueError with a short reason. Callers convert it to a typed error that
names the file.
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


def read_file(path: Path, max_bytes: int, *, follow_links: bool = True) -> bytes:
    """Read a regular file of at most `max_bytes` bytes.

    follow_links: whether `path` may be a symbolic link.

    Raises OSError if the file cannot be opened, and ValueError if it is larger or is not a regular
    file. Opening a pipe does not block.
    """
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
    fd = os.open(path, flags if follow_links else flags | getattr(os, "O_NOFOLLOW", 0))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError("not a regular file")
    with os.fdopen(fd, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"more than {max_bytes} bytes")
    return data


def parse(text: str | bytes, *, allow_constants: bool = False) -> Any:
    """Parse JSON text in UTF-8. Raises ValueError for invalid text and for duplicate keys.

    allow_constants: accept NaN and Infinity, which are not standard JSON.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError("not UTF-8") from None
    parse_constant = float if allow_constants else _refuse_constant
    try:
        return json.loads(text, object_pairs_hook=_make_unique_dict, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_record(text: str, schema: str, what: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ConfigurationError unless its field "schema" equals `schema`.

    what: name of the record in messages.
    """
    parsed = parse(text, allow_constants=True)
    actual = parsed.get("schema") if isinstance(parsed, dict) else None
    if actual != schema:
        raise ConfigurationError(what, got=actual, need=schema)
    result: dict[str, Any] = parsed
    return result


def write(path: Path, text: str) -> None:
    """Write a file atomically. On an error, the file is unchanged."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path for the block to write to, then move the file to `path`.

    The temporary file has the suffix of `path` and is in the same folder. On an error, it is
    removed and `path` is unchanged. If `path` cannot be replaced, because it is a pipe, a device,
    or in a read-only folder, `path` itself is yielded.
    """
    path = path.resolve()
    if path.exists() and not (path.is_file() and os.access(path.parent, os.W_OK)):
        yield path
        return
    temporary = path.with_name(f".{uuid4().hex}.part{path.suffix[:16]}")
    try:
        yield temporary
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _make_unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a duplicate key in one object")
    return result


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is not a number")
