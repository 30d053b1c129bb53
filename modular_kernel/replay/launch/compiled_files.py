"""Files of compiled code that this process will run, kept from one process to the next.

A file is believed only where nobody else can have written it: the folder and the file belong to
this user, and nobody else may write there. Its name has the hash of its bytes, which is compared
before the file is used: half a file, or another one, is made again. It appears in one step, whole.
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

DIGITS = 32  # of a hash in a name


def key_of(*facts: object, files: tuple[Path, ...] = ()) -> str:
    """Return the hash of what a file is made from: facts in words, names and bytes of files."""
    sources = [(path.name, _digest(path.read_bytes())) for path in files]
    return _digest(repr(([*map(str, facts)], sources)).encode())


def find(stem: str, suffix: str) -> Path | None:
    """Return a file kept before, its bytes as its name says; remove others of its stem.

    stem: a name and `key_of` what the file is made from.
    """
    for path in sorted(_folder().glob(f"{escape(stem)}-*{suffix}")):
        # What is no file is not opened: a pipe would wait for a writer.
        if _mine(path, stat.S_ISREG):
            with suppress(OSError):
                if path.name == f"{stem}-{_digest(path.read_bytes())}{suffix}":
                    return path
        with suppress(OSError):
            path.unlink()
    return None


def keep(stem: str, suffix: str, make: Callable[[Path], None]) -> Path:
    """Return the file that `make` writes, kept in MK_CACHE_DIR by a name that says what is in it.

    Where it cannot be kept, it is in a folder of this process that goes when that ends. What `make`
    raises is raised, and nothing is kept. OSError where there is no room for it anywhere.
    """
    own = _of_this_process()
    with tempfile.TemporaryDirectory(dir=own) as part:
        made = Path(part) / f"made{suffix}"
        make(made)
        content = made.read_bytes()
    name = f"{stem}-{_digest(content)}{suffix}"
    try:
        return _put(content, _folder() / name)
    except OSError:  # full, gone since, or something else has that name
        return _put(content, own / name)


def _put(content: bytes, path: Path) -> Path:
    """Write a file that appears in one step, whole."""
    with tempfile.TemporaryDirectory(prefix=".part-", dir=path.parent) as part:  # mode 0700
        written = Path(part) / "written"
        with written.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # the name may not come to the disk before the bytes
        written.chmod(0o600)
        return written.replace(path)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def _folder() -> Path:
    """Return a folder that only this user can have written."""
    cache_dir = read_settings().cache_dir
    if cache_dir is not None:
        # By user: several may share a cache, and none shall run another's code.
        folder = cache_dir / f"built-{os.geteuid()}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            pass
        else:
            if _mine(folder, stat.S_ISDIR) and os.access(folder, os.W_OK | os.X_OK):
                return folder
    return _of_this_process()


def _of_this_process() -> Path:
    return _of_process(forks.generation())


@cache
def _of_process(generation: int) -> Path:
    """Make a folder that goes when this process ends, and not when a forked child of it does."""
    folder = Path(tempfile.mkdtemp(prefix="modular_kernel-built-"))
    atexit.register(_remove, folder, generation)
    return folder


def _remove(folder: Path, generation: int) -> None:
    if generation == forks.generation():
        shutil.rmtree(folder, ignore_errors=True)


def _mine(path: Path, kind: Callable[[int], bool]) -> bool:
    """Whether `path` itself, no link, is of this kind and this user's, writable by no other."""
    try:
        status = path.lstat()
    except OSError:
        return False
    mine = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return mine and kind(status.st_mode)
