"""Watchdog: a thread that closes a manager if a call on the GPU does not end in time.

In layers with a device handshake (`device_handshake`), the host does not wait for calls, and does
not see the calls that a CUDA graph replays. If a rank is missing, NCCL's kernels would wait for it
forever. `TorchGroup` therefore starts a watchdog for these layers.
"""

import atexit
import threading
import time
import weakref
from typing import Protocol

from prepare_finalize.rendezvous.at_exit import run_in_thread

_MAX_POLL_S = 0.1
_watchdogs: "weakref.WeakSet[Watchdog]" = weakref.WeakSet()


class Progress(Protocol):
    """The part of `DeviceStatus` that a watchdog reads."""

    def progress(self) -> tuple[int, int]:
        """Return how many calls have begun and ended."""


class WatchedManager(Protocol):
    """The part of `TorchGroup` that a watchdog uses."""

    timeout_s: float

    def close_after_timeout(self, waited_s: float) -> None:
        """Close the manager because a call has not ended for `waited_s` seconds."""


class Watchdog:
    """Thread that closes a manager if a call has not ended within `manager.timeout_s`.

    The thread calls `manager.close_after_timeout` once, if a call is unfinished and no call has
    begun or ended for `timeout_s` seconds. The time of a call includes everything between its
    dispatch and its combine. The thread ends when the manager is garbage collected.
    """

    def __init__(self, manager: WatchedManager, status: Progress) -> None:
        self._manager, self._status = weakref.ref(manager), status
        self._timeout_s = manager.timeout_s
        self._stopped = threading.Event()
        self._thread = run_in_thread(self._run)
        _watchdogs.add(self)

    def stop(self) -> None:
        """Stop the thread. Wait for its end, unless it is the current thread."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        last_progress, changed_at = self._status.progress(), time.monotonic()
        while not self._stopped.wait(min(_MAX_POLL_S, self._timeout_s / 4)):
            progress, now = self._status.progress(), time.monotonic()
            begun, ended = progress
            if progress != last_progress or begun == ended:
                last_progress, changed_at = progress, now
            elif now - changed_at > self._timeout_s:
                if (manager := self._manager()) is not None:
                    manager.close_after_timeout(now - changed_at)
                return
            if self._manager() is None:
                return


# Exit hooks run in reverse order of registration, so this one runs before the hook of `at_exit`,
# which joins the threads.
@atexit.register
def _stop_all() -> None:
    for watchdog in tuple(_watchdogs):
        watchdog._stopped.set()
