"""Cache of compiled code that this process executes, kept across processes.

A file is trusted only if nobody else can have written it: folder and file belong to this user and
are not writable by others. Its name contains the hash of its bytes, which is verified before use.
Any other file is removed and built again. Files are written atomically.
"""

import atexit
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from glob import escape
from pathlib import Path

from modular_kernel.settings import read_settings
from modular_kernel.utils import forks

DIGITS = 32  # of each hash in a file name


def key_of(*facts: object, files: tuple[Path, ...] = ()) -> str:
    """Return the hash of a file's inputs: facts as strings, and names and bytes of files."""
    sources = [(path.name, _digest(path.read_bytes())) for path in files]
    return _digest(repr(([*map(str, facts)], sources)).encode())


def find_cached(stem: str, suffix: str) -> Path | None:
    """Return the cached file of `stem` and `suffix`; None if there is none.

    Files with this stem whose bytes do not match their name are removed.

    stem: a name and the `key_of` the file's inputs.
    """
    for path in sorted(_folder().glob(f"{escape(stem)}-*{suffix}")):
        # Only regular files are opened: opening a pipe would block.
        if _is_private(path, stat.S_ISREG):
            with suppress(OSError):
                if path.name == f"{stem}-{_digest(path.read_bytes())}{suffix}":
                    return path
        with suppress(OSError):
            path.unlink()
    return None


def build_cached(stem: str, suffix: str, make: Callable[[Path], None]) -> Path:
    """Return the file that `make` writes, cached in MK_CACHE_DIR.

    Its name contains the hash of its bytes. If it cannot be cached, it is placed in a temporary
    folder of this process. Exceptions of `make` propagate, and nothing is kept. Raise OSError if
    the file cannot be written anywhere.

    stem: a name and the `key_of` the file's inputs.
    make: writes the file to the path that it is given.
    """
    temporary = _own_process_folder()
    with tempfile.TemporaryDirectory(dir=temporary) as temporary_folder:
        output = Path(temporary_folder) / f"made{suffix}"
        make(output)
        content = output.read_bytes()
    name = f"{stem}-{_digest(content)}{suffix}"
    try:
        return _write_atomically(content, _folder() / name)
    except OSError:  # disk full, folder removed, or the name is taken by something else
        return _write_atomically(content, temporary / name)


def _write_atomically(content: bytes, path: Path) -> Path:
    """Write a file atomically."""
    with tempfile.TemporaryDirectory(
        prefix=".part-", dir=path.parent
    ) as temporary_folder:  # mode 0700
        written = Path(temporary_folder) / "written"
        with written.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # the name must not reach the disk before the bytes
        written.chmod(0o600)
        return written.replace(path)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def _folder() -> Path:
    """Return the folder of cached files, which only this user can have written."""
    cache_dir = read_settings().cache_dir
    if cache_dir is not None:
        # Per user: a cache may be shared, and nobody may run another user's code.
        folder = cache_dir / f"built-{os.geteuid()}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            pass
        else:
            if _is_private(folder, stat.S_ISDIR) and os.access(folder, os.W_OK | os.X_OK):
                return folder
    return _own_process_folder()


def _own_process_folder() -> Path:
    return _process_folder(forks.generation())


@cache
def _process_folder(generation: int) -> Path:
    """Make a folder that is removed when this process ends, but not when a forked child does."""
    folder = Path(tempfile.mkdtemp(prefix="modular_kernel-built-"))
    atexit.register(_remove, folder, generation)
    return folder


def _remove(folder: Path, generation: int) -> None:
    if generation == forks.generation():
        shutil.rmtree(folder, ignore_errors=True)


def _is_private(path: Path, kind: Callable[[int], bool]) -> bool:
    """Return whether `path` has this kind, is no link, and only this user owns and can write it."""
    try:
        status = path.lstat()
    except OSError:
        return False
    is_private = status.st_uid == os.geteuid() and not status.st_mode & (
        stat.S_IWGRP | stat.S_IWOTH
    )
    return is_private and kind(status.st_mode)
