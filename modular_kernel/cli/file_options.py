"""Option types for files and folders, which are checked before a verb starts.

A measurement may take hours, and must not fail at its end because the output file cannot be
written. `click.Path` checks only paths that exist. `FilePath` also rejects names that the file
system does not accept, and outputs that cannot be created.
"""

import os
import tempfile
from enum import Enum
from pathlib import Path
from typing import Any

import click

from modular_kernel.errors import ConfigurationError

STDOUT = "-"
_DEFAULT_MAX_NAME_BYTES = 255  # of a path component, if the file system does not report a limit


class FileUse(Enum):
    """How a verb uses the path of an option. The value describes a valid path in messages."""

    READ = "a file that can be read"
    WRITE = "a file that can be written, in an existing folder"
    WRITE_OR_STDOUT = "a file that can be written, in an existing folder, or - for stdout"
    WRITE_FOLDER = "a folder that files can be written to"
    READ_FOLDER = "a folder"


class FilePath(click.Path):
    """The type of an option for a file or folder. Its values are Paths.

    use: how the verb uses the path.
    as_text: whether values are str instead, which may be `STDOUT`.
    """

    def __init__(self, use: FileUse, *, as_text: bool = False) -> None:
        super().__init__(path_type=None if as_text else Path)
        self.use = use
        is_folder = use in (FileUse.WRITE_FOLDER, FileUse.READ_FOLDER)
        self.name = "folder" if is_folder else "file"  # in the help

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Raises ConfigurationError if it is not valid for `use`."""
        assert param is not None
        check_path(param.opts[0], Path(value), self.use)
        return self.coerce_path_result(value)


def check_path(option: str, path: Path, use: FileUse) -> None:
    """Raise ConfigurationError if `path` is not valid for `use`. Leaves no file behind.

    option: name of the option in the message, such as "--json".
    """
    if use is FileUse.WRITE_OR_STDOUT and str(path) == STDOUT:
        return
    try:
        _check_name(path)
        if use is FileUse.READ:
            _check_readable(path)
        elif use is not FileUse.READ_FOLDER:
            _check_writable(path, folder=use is FileUse.WRITE_FOLDER)
    except _UnusablePathError as error:
        raise ConfigurationError(option, got=error.got, need=error.need or use.value) from None
    except OSError as error:
        got = f"{_shorten(path)}: {error.strerror or error}"
        raise ConfigurationError(option, got=got, need=use.value) from None


def exists(path: str | Path) -> bool:
    """Return whether the path exists. Unlike `Path.exists`, returns False for an invalid path."""
    try:
        Path(path).stat()
    except (OSError, ValueError):
        return False
    return True


def is_directory(path: str | Path) -> bool:
    """Return whether the path is a folder; False for an invalid path."""
    return exists(path) and Path(path).is_dir()


class _UnusablePathError(Exception):
    """Raised for a path that cannot be used.

    got: description of the path.
    need: what is needed instead. "" stands for the value of the FileUse.
    """

    def __init__(self, got: str, need: str = "") -> None:
        super().__init__(got)
        self.got, self.need = got, need


def _check_name(path: Path) -> None:
    """Raise _UnusablePathError for an invalid name, a name that is not UTF-8, or a broken link."""
    text = str(path)
    if "\0" in text:
        raise _UnusablePathError(_shorten(path), "a path without NUL bytes")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _UnusablePathError(_shorten(path), "a path in UTF-8") from None
    limit = _get_max_name_bytes(path)
    if any(len(os.fsencode(part)) > limit for part in path.parts):
        raise _UnusablePathError(
            f"{_shorten(path)}: a name is too long", f"names of at most {limit} bytes"
        )
    if path.is_symlink() and not exists(path):
        raise _UnusablePathError(f"{_shorten(path)}: a broken symbolic link")


def _get_max_name_bytes(path: Path) -> int:
    parent = next((folder for folder in path.absolute().parents if exists(folder)), None)
    if parent is None or not hasattr(os, "pathconf"):
        return _DEFAULT_MAX_NAME_BYTES
    try:
        return os.pathconf(parent, "PC_NAME_MAX")
    except OSError:
        return _DEFAULT_MAX_NAME_BYTES


def _check_readable(path: Path) -> None:
    if is_directory(path):
        raise _UnusablePathError(f"the folder {_shorten(path)}")
    path.stat()
    if not os.access(path, os.R_OK):
        raise _UnusablePathError(f"{_shorten(path)}: no permission to read it")


def _check_writable(path: Path, *, folder: bool) -> None:
    if folder:
        _check_can_create_file(path)
    elif is_directory(path):
        raise _UnusablePathError(f"the folder {_shorten(path)}")
    elif not exists(path):
        _check_can_create_file(path.parent, path)
    elif not os.access(path, os.W_OK):
        raise _UnusablePathError(f"{_shorten(path)}, which is read-only")


def _check_can_create_file(folder: Path, path: Path | None = None) -> None:
    """Raise _UnusablePathError if no file can be created in a folder, which may not exist yet.

    path: the file that the error message names. None stands for the folder.
    """
    for ancestor in (folder, *folder.parents):
        if exists(ancestor) and not ancestor.is_dir():
            raise _UnusablePathError(f"{_shorten(folder)}: {ancestor} is a file", "a folder")
        if ancestor.is_symlink() and not exists(ancestor):
            raise _UnusablePathError(f"{_shorten(ancestor)}: a broken symbolic link")
    existing = next(
        ancestor for ancestor in (folder.absolute(), *folder.absolute().parents) if exists(ancestor)
    )
    subject = _shorten(path or folder)
    if path is not None:
        _check_missing_folders(path, existing)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise _UnusablePathError(f"{subject}: {existing} is read-only")
    # Checking permissions is not enough: /proc, for example, is writable but accepts no files.
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise _UnusablePathError(
            f"{subject}: cannot create a file in {existing}: {error.strerror or error}"
        ) from None


def _check_missing_folders(path: Path, existing: Path) -> None:
    """Raise _UnusablePathError unless the folder of a file exists or is a new one in a folder.

    A folder such as out/ is created. Several missing folders, or a folder in the root folder, are
    more likely a mistake.

    existing: the last existing folder of `path`.
    """
    folder = path.parent.absolute()
    is_root = existing == existing.parent
    if folder != existing and (folder.parent != existing or is_root):
        missing = folder if is_root else folder.parent
        raise _UnusablePathError(f"{_shorten(path)}: there is no folder {_shorten(missing)}")


def _shorten(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-60:]}"
