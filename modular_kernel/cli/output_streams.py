"""Where a verb prints to: what happens when that is full, closed, or nobody reads it any more.

Output that is lost ends the command with LOST_OUTPUT, which no verdict has, and one line on stderr;
without that line where its reader has read enough (`mk list | head -1`).
Notes that cannot be written are dropped: they are not what was asked for.

Of a verb with `--json` stdout has the JSON alone: whatever else is printed, by packages that it
imports and by processes that it starts, goes to stderr.
"""

import ctypes
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

    @property
    def absent(self) -> bool:
        """Whether there is none: it was closed, or its reader is gone."""
        return self._stream is None

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


class JsonOutput:
    """The JSON of a verb, printed once nothing else can be printed any more."""

    def __init__(self) -> None:
        self.documents: list[str] = []

    def print(self, text: str) -> None:
        self.documents.append(text)


@contextmanager
def json_alone() -> Iterator[JsonOutput]:
    """Within it file descriptor 1 and sys.stdout are stderr; at its end the JSON is on stdout.

    The file descriptor, too, for libraries in C print there, and child processes.
    """
    found, stdout = JsonOutput(), sys.stdout
    if stdout is not None:
        stdout.flush()
    # What was closed from the start may be the number of another file by now.
    kept = None if isinstance(stdout, _Stream) and stdout.absent else _to_stderr()
    sys.stdout = sys.stderr
    try:
        yield found
    finally:
        _flush_c()
        sys.stdout = stdout
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)
        for text in found.documents:
            print(text)


def divert_stdout() -> None:
    """Have whatever is printed from here on go to stderr: packages print as the process ends."""
    kept = _to_stderr()
    if kept is not None:
        os.close(kept)


def _to_stderr() -> int | None:
    """Make file descriptor 1 a copy of 2; returns a copy of what it was, None if it was closed."""
    try:
        kept = os.dup(1)
    except OSError:
        return None
    try:
        os.dup2(2, 1)
    except OSError:  # stderr is closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
    return kept


def _flush_c() -> None:
    """Write what C libraries have printed and hold back."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


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
