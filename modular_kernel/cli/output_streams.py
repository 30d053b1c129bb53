"""Output streams of a verb, with handling of full disks, closed streams and broken pipes.

If stdout cannot be written, the command prints one line on stderr, and exits with the status
LOST_OUTPUT, which no verb uses for its result. After a broken pipe (`mk list | head -1`), it exits
with the same status, but without that line. Notes that cannot be written to stderr are dropped.

With `--json`, stdout contains only the JSON. All other output, including that of imported packages
and of child processes, goes to stderr.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast

LOST_OUTPUT = 74  # EX_IOERR of sysexits.h: neither 1 (refused) nor 2 (bad usage)


class _Stream:
    """A wrapper of a text stream that passes write errors to `_handle_write_error`.

    stream: None if it was closed when the process started.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def is_closed(self) -> bool:
        """Whether the stream was closed or its reader is gone."""
        return self._stream is None

    def write(self, text: str) -> int:
        try:
            if self._stream is None:
                raise OSError("it is closed")
            return self._stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: it was closed in the meantime
            self._handle_write_error(error)
        return len(text)

    def flush(self) -> None:
        if self._stream is None:
            return
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._handle_write_error(error)

    def isatty(self) -> bool:
        return self._stream is not None and not self._stream.closed and self._stream.isatty()

    def _handle_write_error(self, error: Exception) -> None:
        """Ignore that a note could not be written."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Stdout(_Stream):
    def _handle_write_error(self, error: Exception) -> None:
        if self._stream is not None:
            _discard(self._stream)
            self._stream = None
            why = getattr(error, "strerror", None) or error
            if not isinstance(error, BrokenPipeError):
                with suppress(Exception):
                    sys.stderr.write(f"error: output was lost: stdout: {why}\n")
        raise SystemExit(LOST_OUTPUT)


@contextmanager
def only_json_on_stdout() -> Iterator[list[str]]:
    """Redirect stdout to stderr inside the context.

    Yields a list of documents, which are printed on stdout at the end of the context. File
    descriptor 1 is redirected, too, because C libraries and child processes write to it.
    """
    documents, stdout = list[str](), sys.stdout
    if stdout is not None:
        stdout.flush()
    # If stdout was closed at startup, file descriptor 1 may now belong to another file.
    saved_fd = None if isinstance(stdout, _Stream) and stdout.is_closed else _to_stderr()
    try:
        with redirect_stdout(sys.stderr):
            yield documents
    finally:
        _flush_c()
        if saved_fd is not None:
            os.dup2(saved_fd, 1)
            os.close(saved_fd)
        for text in documents:
            print(text)


def divert_stdout() -> None:
    """Redirect file descriptor 1 to stderr permanently, because some packages print at exit."""
    saved_fd = _to_stderr()
    if saved_fd is not None:
        os.close(saved_fd)


def _to_stderr() -> int | None:
    """Redirect file descriptor 1 to stderr; return a duplicate of the original, None if closed."""
    try:
        saved_fd = os.dup(1)
    except OSError:
        return None
    try:
        os.dup2(2, 1)
    except OSError:  # stderr is closed
        null_fd = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_fd, 1)
        os.close(null_fd)
    return saved_fd


def _flush_c() -> None:
    """Flush the stdio buffers of C libraries."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


def _discard(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, so that Python's flush at exit does not fail."""
    with suppress(OSError, ValueError):
        fd = stream.fileno()
        null_fd = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_fd, fd)
        os.close(null_fd)


@contextmanager
def guard_streams() -> Iterator[None]:
    """Replace sys.stdout and sys.stderr by the wrappers of this module, and flush them at the end.

    Raises SystemExit with LOST_OUTPUT if stdout cannot be written.
    """
    stderr = sys.stderr
    out, err = _Stdout(sys.stdout), _Stream(stderr)
    try:
        with redirect_stdout(cast("TextIO", out)), redirect_stderr(cast("TextIO", err)):
            try:
                yield
            finally:
                out.flush()  # raises in place of the verb's own status
                err.flush()
    finally:
        if stderr is not None:
            _flush_or_discard(stderr)


def _flush_or_discard(stream: TextIO) -> None:
    try:
        stream.flush()
    except (OSError, ValueError):
        _discard(stream)
