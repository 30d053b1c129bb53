"""Where a verb prints to: what happens when that is full, closed, or nobody reads it any more.

Output that is lost ends the command with LOST_OUTPUT, which no verdict has, and one line on stderr;
without that line where its reader has read enough (`mk list | head -1`).
Notes that cannot be written are dropped: they are not what was asked for.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

LOST_OUTPUT = 74  # EX_IOERR of sysexits.h: neither 1 (refused) nor 2 (bad usage)


class _Stream:
    """A stream as it was, whose failures `_failed` answers. stream: None if it was closed."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            if self._stream is None:
                raise OSError("it is closed")
            return self._stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: closed since
            self._failed(error)
        return len(text)

    def flush(self) -> None:
        if self._stream is None:
            return
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._failed(error)

    def isatty(self) -> bool:
        return self._stream is not None and not self._stream.closed and self._stream.isatty()

    def _failed(self, error: Exception) -> None:
        """Drop a note that cannot be written."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Stdout(_Stream):
    def _failed(self, error: Exception) -> None:
        if self._stream is not None:
            _discard(self._stream)
            self._stream = None
            why = getattr(error, "strerror", None) or error
            if not isinstance(error, BrokenPipeError):
                with suppress(Exception):
                    sys.stderr.write(f"error: output was lost: stdout: {why}\n")
        raise SystemExit(LOST_OUTPUT)


def _discard(stream: TextIO) -> None:
    """Have the rest of a stream go nowhere, so that the interpreter finds nothing left to write."""
    with suppress(OSError, ValueError):
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


@contextmanager
def guarded() -> Iterator[None]:
    """Within it sys.stdout and sys.stderr are what this module says; at its end all is written.

    SystemExit with LOST_OUTPUT if stdout could not take what was printed.
    """
    stdout, stderr = sys.stdout, sys.stderr
    out, notes = _Stdout(stdout), _Stream(stderr)
    sys.stdout, sys.stderr = out, notes
    try:
        try:
            yield
        finally:
            out.flush()  # raises in place of the verb's own status
            notes.flush()
    finally:
        sys.stdout, sys.stderr = stdout, stderr
        if stderr is not None:
            _settle(stderr)


def _settle(stream: TextIO) -> None:
    try:
        stream.flush()
    except (OSError, ValueError):
        _discard(stream)
