"""Options that name files and folders: what is wrong with one is found before a verb starts.

An option states its use as metadata of its annotation, beside `typer.Option`:

    html: Annotated[Path | None, typer.Option(help=...), FileUse.WRITE] = None

`modular_kernel.cli.parsing.converted` checks every such option, so no verb does.
"""

import os
import tempfile
from enum import Enum
from pathlib import Path

from modular_kernel.errors import ConfigurationError

STDOUT = "-"
_LONGEST_NAME = 255  # bytes of a component, where the file system does not say


class FileUse(Enum):
    """What a verb does with the path of an option."""

    READ = "a file that can be read"
    WRITE = "a file that can be written"
    WRITE_OR_STDOUT = "a file that can be written, or - for stdout"
    WRITE_FOLDER = "a folder that files can be written to"
    READ_FOLDER = "a folder"


def check_path(option: str, path: Path, use: FileUse) -> None:
    """Raise ConfigurationError where `path` cannot serve its use. Nothing is left behind.

    option: its name, such as "--json".
    """
    if use is FileUse.WRITE_OR_STDOUT and str(path) == STDOUT:
        return
    try:
        _check_name(path)
        if use is FileUse.READ:
            _check_readable(path)
        elif use is not FileUse.READ_FOLDER:
            _check_writable(path, folder=use is FileUse.WRITE_FOLDER)
    except _Unusable as error:
        need = error.need or use.value
        raise ConfigurationError(option, got=error.got, need=need) from None
    except OSError as error:
        got = f"{_shown(path)}: {error.strerror or error}"
        raise ConfigurationError(option, got=got, need=use.value) from None


def exists(path: str | Path) -> bool:
    """Return whether there is such a file; False too for what no file can be named."""
    try:
        Path(path).stat()
    except (OSError, ValueError):
        return False
    return True


def is_folder(path: str | Path) -> bool:
    """Return whether there is such a folder; False too for what no folder can be named."""
    return exists(path) and Path(path).is_dir()


class _Unusable(Exception):
    """What is wrong with a path, and what is needed instead; "" means what its use says."""

    def __init__(self, got: str, need: str = "") -> None:
        super().__init__(got)
        self.got, self.need = got, need


def _check_name(path: Path) -> None:
    """Raise the error of a path that no file can have, or that output could not name."""
    text = str(path)
    if "\0" in text:
        raise _Unusable(_shown(path), "a path without NUL bytes")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _Unusable(_shown(path), "a path in UTF-8") from None
    most = _longest_name(path)
    if any(len(os.fsencode(part)) > most for part in path.parts):
        raise _Unusable(f"{_shown(path)}: a name is too long", f"names of at most {most} bytes")
    if path.is_symlink() and not exists(path):
        raise _Unusable(f"{_shown(path)}: a symbolic link to nothing")


def _longest_name(path: Path) -> int:
    there = next((at for at in path.absolute().parents if exists(at)), None)
    if there is None or not hasattr(os, "pathconf"):
        return _LONGEST_NAME
    try:
        return os.pathconf(there, "PC_NAME_MAX")
    except OSError:
        return _LONGEST_NAME


def _check_readable(path: Path) -> None:
    if is_folder(path):
        raise _Unusable(f"the folder {_shown(path)}")
    path.stat()
    if not os.access(path, os.R_OK):
        raise _Unusable(f"{_shown(path)}: no permission to read it")


def _check_writable(path: Path, *, folder: bool) -> None:
    if folder:
        _check_new_file_in(path)
    elif is_folder(path):
        raise _Unusable(f"the folder {_shown(path)}")
    elif not exists(path):
        _check_new_file_in(path.parent, path)
    elif not os.access(path, os.W_OK):
        raise _Unusable(f"{_shown(path)}, which is read-only")


def _check_new_file_in(folder: Path, path: Path | None = None) -> None:
    """Raise the error of a folder, made or not, that takes no new file."""
    for at in (folder, *folder.parents):
        if exists(at) and not at.is_dir():
            raise _Unusable(f"{_shown(folder)}: {at} is a file", "a folder")
        if at.is_symlink() and not exists(at):
            raise _Unusable(f"{_shown(at)}: a symbolic link to nothing")
    there = next(at for at in (folder.absolute(), *folder.absolute().parents) if exists(at))
    shown = _shown(path or folder)
    if not os.access(there, os.W_OK | os.X_OK):
        raise _Unusable(f"{shown}: {there} is read-only")
    # Permissions do not say it all: /proc takes no file, whatever they are.
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise _Unusable(f"{shown}: {there} takes no file: {error.strerror or error}") from None


def _shown(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-60:]}"
