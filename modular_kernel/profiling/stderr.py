"""Keeps what torch's profiler says of itself off the screen."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_OWN = b"USDT:"  # kineto's, since torch 2.13, for tools that trace processes


@contextmanager
def without_own_lines() -> Iterator[None]:
    """Hold stderr back inside the block, then pass on what is not the profiler's own.

    The lines come from C++, so the file itself is exchanged, not `sys.stderr`.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        shown = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)
            held.seek(0)
            for line in held:
                if not line.startswith(_OWN):
                    os.write(2, line)
