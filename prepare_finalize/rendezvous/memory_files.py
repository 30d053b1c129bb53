"""Files in memory that ranks of a host exchange, and those that killed ranks have left."""

import fcntl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

IN_MEMORY = Path("/dev/shm")
_KINDS = ("host", "block")
_LEAST_AGE_S = 60.0  # a younger file may not have its lock yet


@contextmanager
def memory_file(kind: Literal["host", "block"]) -> Iterator[IO[bytes]]:
    """Yield a new file in memory, or in the temporary folder without /dev/shm; gone at the end.

    It is locked as long as this process lives, so files without a lock were left by killed ranks.
    Those are removed first.
    """
    folder = IN_MEMORY if IN_MEMORY.is_dir() else Path(tempfile.gettempdir())
    remove_stale(folder)
    with tempfile.NamedTemporaryFile(prefix=f"modular_kernel-{kind}-", dir=folder) as file:
        with suppress(OSError):  # a file system without locks: it is young, and so it stays
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


def remove_stale(folder: Path) -> None:
    """Remove this user's files of `memory_file` whose process is gone, of any container."""
    for path in (path for kind in _KINDS for path in folder.glob(f"modular_kernel-{kind}-*")):
        with suppress(OSError):  # another user's, or another rank was faster
            if time.time() - path.stat().st_mtime < _LEAST_AGE_S:
                continue
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
