"""Cache of measurements on disk: one file per identity, shared by processes.

The identity of a measurement is the device, the problem and the distribution of its input
(`cache_keys`). `select.search` loads and saves the measurements of one identity. `cache_file`
defines the format of a file.

A writer acquires a lock, reads the file, adds its measurements, and replaces the file atomically.
Readers therefore always see complete files, and concurrent writers lose no measurements. On a
system without file locks, a writer may overwrite the measurements of another writer.
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
from modular_kernel.select import cache_file
from modular_kernel.select.cache_file import CacheRecord
from modular_kernel.select.cache_keys import KeyFields, file_stem
from modular_kernel.select.selection import Bucket
from modular_kernel.utils import json_files

try:
    import fcntl as _fcntl
except ImportError:  # a system without file locks, such as Windows
    fcntl: Any = None
else:
    fcntl = _fcntl

FOLDER = "choices"
NO_CACHE_FOLDER = "choices are not cached: no home directory; set MK_CACHE_DIR"
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class CacheLookup:
    """The result of `Cache.load`.

    record: the measurements with the current versions, or None.
    notes: warnings for the user about an invalid file or changed versions.
    """

    record: CacheRecord | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cache:
    """The cached measurements of one identity.

    folder: the cache folder, which is created when needed; None disables the cache. Files have the
        permissions that the umask allows, so that several users can share a folder.
    identity: see `cache_keys.make_identity_fields`.
    versions: see `cache_keys.version_fields`.
    """

    folder: Path | None
    identity: KeyFields
    versions: KeyFields

    @property
    def path(self) -> Path:
        assert self.folder is not None
        return self.folder / FOLDER / f"{file_stem(self.identity)}.json"

    def load(self) -> CacheLookup:
        """Return the cached measurements, or a note if the file is not valid."""
        if self.folder is None:
            return CacheLookup(None, (NO_CACHE_FOLDER,))
        try:
            records = self._read()
        except ConfigurationError as error:
            return CacheLookup(
                None, (f"{self.path} is not used and will be replaced: it holds {error.got}",)
            )
        except OSError as error:
            return CacheLookup(None, (f"{self.path} is not used: {error.strerror or error}",))
        current_record = next((r for r in records if r.versions == self.versions), None)
        if current_record is not None or not records:
            return CacheLookup(current_record)
        return CacheLookup(
            None, (f"ignoring cached timings: {self._describe_changes(records[0])}",)
        )

    def save(self, buckets: Sequence[Bucket]) -> tuple[str, ...]:
        """Add new measurements to the file. Returns notes if the file cannot be written."""
        if self.folder is None:
            return ()  # `load` has returned a note about the missing folder
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.lock(wait_s=10.0):
                self._merge(buckets)
        except OSError as error:
            return (f"not cached: {self.path}: {error.strerror or error}",)
        return ()

    @contextmanager
    def lock(self, *, wait_s: float, name: str = "lock") -> Iterator[bool]:
        """Hold a file lock of this identity inside the context. Yield whether it was acquired.

        The system releases the lock if the process ends.

        wait_s: seconds to wait for the lock.
        name: suffix of the lock file. Locks with different names are independent.
        """
        if self.folder is None:  # no other process can use this cache
            yield True
            return
        if fcntl is None:
            yield False
            return
        path = self.path.with_suffix(f".{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            yield _acquire_lock(fd, time.monotonic() + wait_s)
        finally:
            # A process that was forked inside the context has a copy of the descriptor, so closing
            # our descriptor would not release the lock.
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _merge(self, buckets: Sequence[Bucket]) -> None:
        """Add buckets to the file. The caller must hold the lock."""
        try:
            records = self._read()
        except (ConfigurationError, OSError):
            records = ()
        current_record = next((r for r in records if r.versions == self.versions), None)
        current_record = (current_record or CacheRecord(self.versions, 0.0)).with_buckets(buckets)
        other_records = [r for r in records if r.versions != self.versions]
        updated = CacheRecord(current_record.versions, time.time(), current_record.buckets)
        _write_atomically(
            self.path, cache_file.to_text(self.identity, [updated, *other_records]) + "\n"
        )

    def _read(self) -> tuple[CacheRecord, ...]:
        """Return the records of the file; () if there is no file.

        Raises ConfigurationError if the file is invalid, and OSError if it cannot be read.
        """
        try:
            content = json_files.read_file(self.path, cache_file.MAX_BYTES, follow_links=False)
        except FileNotFoundError:
            return ()
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _make_invalid_file_error("a link") from None
            raise
        except ValueError as error:
            raise _make_invalid_file_error(str(error)) from None
        return cache_file.from_text(content, self.identity)

    def _describe_changes(self, record: CacheRecord) -> str:
        """Describe up to three versions that have changed since a record was made."""
        names = sorted({*record.versions, *self.versions})
        changed = [
            f"{name} {record.versions.get(name, 'none')[:60]} -> {self.versions.get(name, 'none')}"
            for name in names
            if record.versions.get(name) != self.versions.get(name)
        ]
        return "; ".join(changed[:3])


def _acquire_lock(fd: int, deadline: float) -> bool:
    """Acquire an exclusive lock. Returns False if the deadline passes."""
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


def _write_atomically(path: Path, text: str) -> None:
    """Write a file atomically."""
    temporary = path.with_name(f"{path.stem}{uuid4().hex}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o666)  # the umask removes permissions
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _make_invalid_file_error(got: str) -> ConfigurationError:
    return ConfigurationError("cached choices", got=got, need=cache_file.SCHEMA)
