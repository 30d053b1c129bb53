"""Temporary files in /dev/shm, through which the ranks of a host share memory.

`hosts` uses them to detect which ranks share a host, and `symm_mem.shared_files` to share buffers.
A killed process leaves its files behind. Each file is therefore locked by its process, and later
processes remove files without a lock.
"""

import fcntl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

SHARED_MEMORY_DIR = Path("/dev/shm")
_KINDS = ("host", "block")
_MIN_STALE_AGE_S = 60.0  # a younger file may not be locked yet


@contextmanager
def memory_file(kind: Literal["host", "block"]) -> Iterator[IO[bytes]]:
    """Yield a new, locked file in /dev/shm, and delete it at the end.

    If there is no folder /dev/shm, the file is in the temporary folder. Stale files are removed
    first.
    """
    folder = SHARED_MEMORY_DIR if SHARED_MEMORY_DIR.is_dir() else Path(tempfile.gettempdir())
    remove_stale_files(folder)
    with tempfile.NamedTemporaryFile(prefix=f"modular_kernel-{kind}-", dir=folder) as file:
        with suppress(OSError):  # without locks, only the age of the file protects it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


def remove_stale_files(folder: Path) -> None:
    """Remove this user's memory files that are not locked, because their process has ended.

    Processes in other containers may share the folder, so process ids cannot be compared.
    """
    for path in (path for kind in _KINDS for path in folder.glob(f"modular_kernel-{kind}-*")):
        with suppress(OSError):  # another user owns the file, or another rank has removed it
            if time.time() - path.stat().st_mtime < _MIN_STALE_AGE_S:
                continue
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
