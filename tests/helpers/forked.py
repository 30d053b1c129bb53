"""Runs a function in a forked child of a test, and tells a child that hangs from one that ends."""

import os
import pickle
import select
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

PATIENCE_S = 60.0  # for a child, or a thread, of a busy machine


def in_child(function: Callable[[], Any], *, patience_s: float = PATIENCE_S) -> Any:
    """Return what `function` returns in a forked child; what it raises there is returned too.

    AssertionError if the child does not end in time; it is killed then.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():  # a fork beside threads is what is tested
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _run(function, writer)
    os.close(writer)
    told, until = b"", time.monotonic() + patience_s
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            part = pipe.read(1 << 16)
            if not part:
                break
            told += part
        else:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"a forked child did not end within {patience_s:g} s")
    os.waitpid(pid, 0)
    return pickle.loads(told)


def _run(function: Callable[[], Any], writer: int) -> None:
    code = 1
    try:
        try:
            found = function()
        except Exception as error:  # noqa: BLE001  the parent is told
            traceback.print_exc()
            found = error
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(pickle.dumps(found))
        code = 0
    finally:
        os._exit(code)


class Gate:
    """Holds up a thread in the midst of what a test is about, until the test lets it go on."""

    def __init__(self) -> None:
        self._arrived, self._open = threading.Event(), threading.Event()
        self.whose: threading.Thread | None = None

    def pass_through(self) -> None:
        """Wait if this is the thread that the gate is for, for the first time."""
        if threading.current_thread() is self.whose:
            self._arrived.set()
            assert self._open.wait(PATIENCE_S)

    @contextmanager
    def holding(self, function: Callable[[], Any]) -> Any:
        """Within it, a thread is in `function`, held up at the gate; afterwards it has ended."""
        failed: list[BaseException] = []

        def run() -> None:
            try:
                function()
            except BaseException as error:  # noqa: BLE001  raised below
                failed.append(error)
                self._arrived.set()

        self.whose = threading.Thread(target=run, daemon=True)
        self.whose.start()
        try:
            assert self._arrived.wait(PATIENCE_S)
            assert not failed, failed
            yield
        finally:
            self._open.set()
            self.whose.join(PATIENCE_S)
        assert not self.whose.is_alive()
        assert not failed, failed
