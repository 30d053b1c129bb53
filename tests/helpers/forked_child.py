"""Runs a function in a forked child of the test process, with a timeout."""

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

TIMEOUT_S = 60.0  # for a child or a thread on a busy machine


def run_in_child(function: Callable[[], Any], *, timeout_s: float = TIMEOUT_S) -> Any:
    """Run `function` in a forked child; return its result or the exception that it raised.

    If the child does not end in time, kill it and raise AssertionError.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():  # forking with running threads is intended
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _run_and_exit(function, writer)
    os.close(writer)
    data, deadline = b"", time.monotonic() + timeout_s
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            chunk = pipe.read(1 << 16)
            if not chunk:
                break
            data += chunk
        else:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"a forked child did not end within {timeout_s:g} s")
    os.waitpid(pid, 0)
    return pickle.loads(data)


def _run_and_exit(function: Callable[[], Any], writer: int) -> None:
    code = 1
    try:
        try:
            result = function()
        except Exception as error:  # noqa: BLE001  returned to the parent
            traceback.print_exc()
            result = error
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(pickle.dumps(result))
        code = 0
    finally:
        os._exit(code)


class Gate:
    """Blocks a thread inside the tested function until the test releases it."""

    def __init__(self) -> None:
        self._arrived, self._open = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None

    def pass_through(self) -> None:
        """Wait if this is the blocked thread."""
        if threading.current_thread() is self.thread:
            self._arrived.set()
            assert self._open.wait(TIMEOUT_S)

    @contextmanager
    def holding(self, function: Callable[[], Any]) -> Any:
        """Run `function` in a thread, which waits at the gate until the `with` statement ends."""
        errors: list[BaseException] = []

        def run() -> None:
            try:
                function()
            except BaseException as error:  # noqa: BLE001  raised below
                errors.append(error)
                self._arrived.set()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        try:
            assert self._arrived.wait(TIMEOUT_S)
            assert not errors, errors
            yield
        finally:
            self._open.set()
            self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive()
        assert not errors, errors
