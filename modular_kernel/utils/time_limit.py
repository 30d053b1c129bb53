"""A time limit for a block of code in the main thread."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# The timer fires repeatedly, because code that ignores exceptions, such as a finalizer, may ignore
# the first TimeLimitReached.
_REPEAT_INTERVAL_S = 1.0


class TimeLimitReached(BaseException):
    """Raised inside `time_limit` when the time is over. Not caught by `except Exception`."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TimeLimitReached inside the block after `seconds`; None sets no limit.

    An operation outside Python, such as a matrix product, finishes before the error is raised.
    Outside the main thread, and on systems without SIGALRM, there is no limit. An active timer of
    the caller is restored after the block.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if seconds is None or not in_main_thread or not hasattr(signal, "SIGALRM"):
        yield
        return
    start = time.perf_counter()
    handler = signal.signal(signal.SIGALRM, _raise_time_limit)
    remaining, interval = signal.setitimer(
        signal.ITIMER_REAL, max(seconds, 1e-6), _REPEAT_INTERVAL_S
    )
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:
            seconds_left = max(remaining - (time.perf_counter() - start), 1e-6)
            signal.setitimer(signal.ITIMER_REAL, seconds_left, interval)


def _raise_time_limit(_signal: int, _frame: FrameType | None) -> None:
    raise TimeLimitReached
