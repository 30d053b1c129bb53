"""Watchdog: a thread that closes a manager if a call on the GPU does not end in time.

The host does not wait for calls in which ranks agree on the device, and takes no part in those that
a CUDA graph replays. NCCL waits for a missing rank forever.
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
    """Numbers of calls that began and that ended on the device, as the host sees them now."""

    def progress(self) -> tuple[int, int]: ...


class Expiring(Protocol):
    """What a watchdog watches: a manager."""

    deadline_s: float

    def expire(self, waited_s: float) -> None: ...


class Watchdog:
    """Calls `manager.expire` once if a call has begun and does not end within its deadline.

    The time of a call includes its experts, and whatever runs between its start and its finish. The
    thread ends with the manager.
    """

    def __init__(self, manager: Expiring, status: Progress) -> None:
        self._manager, self._status = weakref.ref(manager), status
        self._deadline_s = manager.deadline_s
        self._stopped = threading.Event()
        self._thread = run_in_thread(self._run)
        _watchdogs.add(self)

    def stop(self) -> None:
        """End the thread; wait for it unless it is the caller."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        last_progress, changed_at = self._status.progress(), time.monotonic()
        while not self._stopped.wait(min(_MAX_POLL_S, self._deadline_s / 4)):
            progress, now = self._status.progress(), time.monotonic()
            begun, ended = progress
            if progress != last_progress or begun == ended:
                last_progress, changed_at = progress, now
            elif now - changed_at > self._deadline_s:
                if (manager := self._manager()) is not None:
                    manager.expire(now - changed_at)
                return
            if self._manager() is None:
                return


@atexit.register  # before the hook of `at_exit`, which joins the threads
def _stop_all() -> None:
    for watchdog in tuple(_watchdogs):
        watchdog._stopped.set()
