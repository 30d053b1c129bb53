"""Cache of compiled code on disk, which the processes of one user share.

Processes execute these files, so a file is trusted only if no other user can have written it. The
folder and the file must belong to this user, and must not be writable by others. The name of a file
contains the hash of its bytes, which is verified before use. A file that fails a check is removed
and built again. Files are written atomically.
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

HASH_DIGITS = 32  # hexadecimal digits of each hash in a file name


def make_cache_key(*versions: object, files: tuple[Path, ...] = ()) -> str:
    """Return the hash of everything that a compiled file depends on.

    versions: versions and options, which are hashed as strings.
    files: source files, whose names and bytes are hashed.
    """
    sources = [(path.name, _hash(path.read_bytes())) for path in files]
    return _hash(repr(([*map(str, versions)], sources)).encode())


def find_cached(stem: str, suffix: str) -> Path | None:
    """Return the cached file with `stem` and `suffix`, or None. Invalid files are removed.

    stem: a name and the `make_cache_key` of the file.
    """
    # Files can be loaded from a read-only folder, such as that of a container image.
    folders = dict.fromkeys((_find_folder(os.R_OK), _find_folder(os.W_OK)))
    pattern = f"{escape(stem)}-*{suffix}"
    for path in (path for folder in folders for path in sorted(folder.glob(pattern))):
        # Only regular files are opened: opening a pipe would block.
        if _is_private(path, stat.S_ISREG):
            with suppress(OSError):
                if path.name == f"{stem}-{_hash(path.read_bytes())}{suffix}":
                    return path
        with suppress(OSError):
            path.unlink()
    return None


def build_cached(stem: str, suffix: str, build: Callable[[Path], None]) -> Path:
    """Build a file with `build`, store it in MK_CACHE_DIR, and return its path.

    If the file cannot be stored in MK_CACHE_DIR, it is placed in a temporary folder of this
    process.

    stem: a name and the `make_cache_key` of the file.
    build: writes the file to the path that it is called with.

    Raises OSError if the file cannot be written anywhere, and all exceptions of `build`.
    """
    process_folder = _get_process_folder()
    with tempfile.TemporaryDirectory(dir=process_folder) as build_folder:
        output = Path(build_folder) / f"built{suffix}"
        build(output)
        content = output.read_bytes()
    name = f"{stem}-{_hash(content)}{suffix}"
    try:
        return _write_atomically(content, _find_folder(os.W_OK) / name)
    except OSError:  # disk full, folder removed, or `name` is a folder
        return _write_atomically(content, process_folder / name)


def _write_atomically(content: bytes, path: Path) -> Path:
    # A temporary folder has mode 0700, so no other user can replace the file before it is moved.
    with tempfile.TemporaryDirectory(prefix=".part-", dir=path.parent) as temporary_folder:
        temporary = Path(temporary_folder) / "written"
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # write the bytes to the disk before the name
        temporary.chmod(0o600)
        return temporary.replace(path)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:HASH_DIGITS]


def _find_folder(mode: int) -> Path:
    """Return a folder to which no other user can write.

    This is a temporary folder of this process if MK_CACHE_DIR is not set or not usable.

    mode: os.R_OK to read files, os.W_OK to write files.
    """
    cache_dir = read_settings().cache_dir
    if cache_dir is not None:
        # Users may share MK_CACHE_DIR, but must not run code of other users.
        folder = cache_dir / f"built-{os.geteuid()}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            pass
        else:
            if _is_private(folder, stat.S_ISDIR) and os.access(folder, mode | os.X_OK):
                return folder
    return _get_process_folder()


def _get_process_folder() -> Path:
    return _make_process_folder(forks.generation())


@cache
def _make_process_folder(generation: int) -> Path:
    """Make a temporary folder for this process, which is removed when the process exits.

    A forked child inherits the exit handlers of its parent, but has another `forks.generation`. It
    does not remove the folder of the parent.
    """
    folder = Path(tempfile.mkdtemp(prefix="modular_kernel-built-"))
    atexit.register(_remove, folder, generation)
    return folder


def _remove(folder: Path, generation: int) -> None:
    if generation == forks.generation():
        shutil.rmtree(folder, ignore_errors=True)


def _is_private(path: Path, kind: Callable[[int], bool]) -> bool:
    """Return whether `path` has this kind, and only this user owns it and can write to it.

    kind: stat.S_ISREG or stat.S_ISDIR. A symbolic link has neither kind.
    """
    try:
        status = path.lstat()
    except OSError:
        return False
    is_private = status.st_uid == os.geteuid() and not status.st_mode & (
        stat.S_IWGRP | stat.S_IWOTH
    )
    return is_private and kind(status.st_mode)
