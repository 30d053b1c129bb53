"""The cache folder of choices: one file per identity (`cache_keys`), shared by processes.

A writer takes a lock, reads the file, adds its records, and replaces the file atomically, so that
readers see complete files and no records are lost. On a system without file locks the last writer
wins, and its file is still complete.
"""

import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from modular_kernel.errors import ConfigurationError
from modular_kernel.select import saved_choices
from modular_kernel.select.cache_keys import KeyFields, digest
from modular_kernel.select.record import Bucket
from modular_kernel.select.saved_choices import StoredChoice
from modular_kernel.utils import json_files

try:
    import fcntl as _fcntl
except ImportError:  # not available on this system: the last writer wins
    fcntl: Any = None
else:
    fcntl = _fcntl

FOLDER = "choices"
NO_CACHE_FOLDER = "choices are not cached: no home directory; set MK_CACHE_DIR"
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class CachedRecord:
    """The result of a look-up in the cache.

    record: None if there is none for the identity and versions. notes: messages for the user about
    an invalid file or changed versions.
    """

    record: StoredChoice | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cache:
    """The cache of one identity.

    Files get the permissions that the umask allows, so that users who share a folder can share
    choices.

    folder: created on first use; None disables the cache. identity, versions: see `cache_keys`.
    """

    folder: Path | None
    identity: KeyFields
    versions: KeyFields

    @property
    def path(self) -> Path:
        assert self.folder is not None
        return self.folder / FOLDER / f"{digest(self.identity)}.json"

    def load(self) -> CachedRecord:
        """Return the cached record. An invalid or unreadable file is a note, not an error."""
        if self.folder is None:
            return CachedRecord(None, (NO_CACHE_FOLDER,))
        try:
            records = self._read()
        except ConfigurationError as error:
            return CachedRecord(
                None, (f"{self.path} is not used and will be replaced: it holds {error.got}",)
            )
        except OSError as error:
            return CachedRecord(None, (f"{self.path} is not used: {error.strerror or error}",))
        current = next((r for r in records if r.versions == self.versions), None)
        if current is not None or not records:
            return CachedRecord(current)
        return CachedRecord(
            None, (f"ignoring cached timings: {self._describe_changes(records[0])}",)
        )

    def save(self, buckets: Sequence[Bucket]) -> tuple[str, ...]:
        """Add new measurements to the file; return notes if that fails."""
        if self.folder is None:
            return ()  # `load` has returned the note
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.locked(wait_s=10.0):
                self._merge(buckets)
        except OSError as error:
            return (f"not cached: {self.path}: {error.strerror or error}",)
        return ()

    @contextmanager
    def locked(self, *, wait_s: float, name: str = "lock") -> Iterator[bool]:
        """Hold a lock of this identity inside the context; yield whether it was acquired.

        The system releases a process's locks when the process ends.

        wait_s: seconds to wait for the lock. name: tells apart several locks of one identity.
        """
        if self.folder is None:  # not shared with other processes
            yield True
            return
        if fcntl is None:
            yield False
            return
        path = self.path.with_suffix(f".{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            yield _acquire(fd, time.monotonic() + wait_s)
        finally:
            # A process forked in between shares the descriptor, so closing it would not unlock.
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _merge(self, buckets: Sequence[Bucket]) -> None:
        try:
            records = self._read()
        except (ConfigurationError, OSError):
            records = ()
        current = next((r for r in records if r.versions == self.versions), None)
        current = (current or StoredChoice(self.versions, 0.0)).with_buckets(buckets)
        others = [r for r in records if r.versions != self.versions]
        updated = StoredChoice(current.versions, time.time(), current.buckets)
        _replace(self.path, saved_choices.to_text(self.identity, [updated, *others]) + "\n")

    def _read(self) -> tuple[StoredChoice, ...]:
        """Return the records of the file; () if there is none.

        Raises ConfigurationError if the file is invalid, OSError if it cannot be read.
        """
        try:
            content = json_files.read_file(self.path, saved_choices.MAX_BYTES, follow_links=False)
        except FileNotFoundError:
            return ()
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _invalid_file("a link") from None
            raise
        except ValueError as error:
            raise _invalid_file(str(error)) from None
        return saved_choices.from_text(content, self.identity)

    def _describe_changes(self, record: StoredChoice) -> str:
        names = sorted({*record.versions, *self.versions})
        changed = [
            f"{name} {record.versions.get(name, 'none')[:60]} -> {self.versions.get(name, 'none')}"
            for name in names
            if record.versions.get(name) != self.versions.get(name)
        ]
        return "; ".join(changed[:3])


def _acquire(fd: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return False  # a file system without locks
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        else:
            return True


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically."""
    temporary = path.with_name(f"{path.stem}{uuid4().hex}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o666)  # less the umask
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _invalid_file(got: str) -> ConfigurationError:
    return ConfigurationError("cached choices", got=got, need=saved_choices.SCHEMA)
