"""Suppression of log lines that torch's profiler prints on stderr."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_OWN = b"USDT:"  # prefix of kineto's lines for process tracing tools, since torch 2.13


@contextmanager
def suppress_profiler_lines() -> Iterator[None]:
    """Buffer stderr inside the context, then print all lines but those of the profiler.

    The lines come from C++, so file descriptor 2 is redirected, not `sys.stderr`.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as buffered:
        saved_fd = os.dup(2)
        os.dup2(buffered.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved_fd, 2)
            os.close(saved_fd)
            buffered.seek(0)
            for line in buffered:
                if not line.startswith(_OWN):
                    os.write(2, line)
