"""Wraps stdout and stderr to handle full disks, closed streams and broken pipes.

If stdout cannot be written, `mk` prints an error to stderr and exits with EXIT_OUTPUT_LOST, which
no verb uses for its result. A broken pipe (`mk list | head -1`) is not an error: the reader has all
that it wants. The remaining output is dropped, and the verb ends with its own exit status, so that
`mk check ... | grep -q valid` can be used with `set -o pipefail`. Notes that cannot be written to
stderr are dropped.

With `--json`, stdout contains only the JSON. All other output, including that of imported packages
and of child processes, goes to stderr.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast

EXIT_OUTPUT_LOST = 74  # EX_IOERR of sysexits.h, which differs from 1 (refused) and 2 (bad usage)


class _Stream:
    """Wrapper of a text stream that passes write errors to `_handle_write_error`.

    stream: the text stream; None if it was closed when the process started.
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
        except (OSError, ValueError) as error:  # ValueError: the stream has been closed
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
        """Ignore a write error. Subclasses may override this."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Stdout(_Stream):
    """Wrapper of stdout that exits with EXIT_OUTPUT_LOST on a write error.

    After a broken pipe, it drops the output instead.
    """

    _has_reader = True

    def _handle_write_error(self, error: Exception) -> None:
        if isinstance(error, BrokenPipeError):
            self._has_reader = False
        if self._stream is not None:
            _redirect_to_devnull(self._stream)
            self._stream = None
            reason = getattr(error, "strerror", None) or error
            if self._has_reader:
                with suppress(Exception):
                    sys.stderr.write(f"error: output was lost: stdout: {reason}\n")
        if self._has_reader:
            raise SystemExit(EXIT_OUTPUT_LOST)


@contextmanager
def reserve_stdout() -> Iterator[list[str]]:
    """Redirect stdout to stderr inside the context.

    Yields a list. At the end of the context, the documents that were appended to the list are
    printed to stdout. File descriptor 1 is redirected, too, because C libraries and child processes
    write to it.
    """
    documents, stdout = list[str](), sys.stdout
    if stdout is not None:
        stdout.flush()
    # If stdout was closed at startup, file descriptor 1 may now belong to another file.
    saved_fd = None if isinstance(stdout, _Stream) and stdout.is_closed else _redirect_stdout_fd()
    try:
        with redirect_stdout(sys.stderr):
            yield documents
    finally:
        _flush_c_stdio()
        if saved_fd is not None:
            os.dup2(saved_fd, 1)
            os.close(saved_fd)
        for document in documents:
            print(document)


def redirect_stdout_to_stderr() -> None:
    """Redirect file descriptor 1 to stderr until the process exits.

    Some packages print at exit.
    """
    saved_fd = _redirect_stdout_fd()
    if saved_fd is not None:
        os.close(saved_fd)


def _redirect_stdout_fd() -> int | None:
    """Redirect file descriptor 1 to stderr.

    Returns a duplicate of the original descriptor, or None if it was closed.
    """
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


def _flush_c_stdio() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


def _redirect_to_devnull(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, so that Python's flush at exit does not fail."""
    with suppress(OSError, ValueError):
        fd = stream.fileno()
        null_fd = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_fd, fd)
        os.close(null_fd)


@contextmanager
def guard_streams() -> Iterator[None]:
    """Wrap sys.stdout and sys.stderr inside the context, and flush them at its end.

    Raises SystemExit with EXIT_OUTPUT_LOST if stdout cannot be written.
    """
    stderr = sys.stderr
    out, err = _Stdout(sys.stdout), _Stream(stderr)
    try:
        with redirect_stdout(cast("TextIO", out)), redirect_stderr(cast("TextIO", err)):
            try:
                yield
            finally:
                out.flush()  # on an error, EXIT_OUTPUT_LOST replaces the exit status of the verb
                err.flush()
    finally:
        if stderr is not None:
            _flush_or_redirect(stderr)


def _flush_or_redirect(stream: TextIO) -> None:
    try:
        stream.flush()
    except (OSError, ValueError):
        _redirect_to_devnull(stream)
