"""Files in memory that the ranks of a host share, and removal of those that killed ranks left."""

import fcntl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

IN_MEMORY = Path("/dev/shm")
_KINDS = ("host", "block")
_MIN_STALE_AGE_S = 60.0  # a younger file may not be locked yet


@contextmanager
def memory_file(kind: Literal["host", "block"]) -> Iterator[IO[bytes]]:
    """Yield a new file in /dev/shm, or else in the temporary folder; delete it at the end.

    The file is locked as long as this process lives, so a file without a lock was left by a killed
    rank. Such files are removed first.
    """
    folder = IN_MEMORY if IN_MEMORY.is_dir() else Path(tempfile.gettempdir())
    remove_stale(folder)
    with tempfile.NamedTemporaryFile(prefix=f"modular_kernel-{kind}-", dir=folder) as file:
        with suppress(OSError):  # without lock support, the file's low age protects it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


def remove_stale(folder: Path) -> None:
    """Remove this user's memory files whose process has ended, in any container."""
    for path in (path for kind in _KINDS for path in folder.glob(f"modular_kernel-{kind}-*")):
        with suppress(OSError):  # of another user, or removed by another rank
            if time.time() - path.stat().st_mtime < _MIN_STALE_AGE_S:
                continue
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
