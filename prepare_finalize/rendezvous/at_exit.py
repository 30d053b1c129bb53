"""Communicators and threads that end before the interpreter is finalized.

A thread that requests the GIL while the interpreter is finalized is terminated in the middle of C++
code. This aborts the process, or leaves a lock held forever. Two kinds of threads may request the
GIL: gloo threads when they free the tensors of a finished exchange, and threads that return to
Python after a wait for a store. Exit hooks therefore end both kinds first.
"""

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import _unregister_process_group

from modular_kernel.utils import forks

_JOIN_TIMEOUT_S = 1.0  # a thread may wait for a store that never answers
_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def run_in_thread(function: Callable[[], object]) -> threading.Thread:
    """Start `function` in a daemon thread, which the exit hook joins with a short timeout."""
    thread = threading.Thread(target=function, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


class Communicator:
    """The only reference to the backend of `owner`, released when `owner` is garbage collected.

    device: "cpu" for a gloo backend, "cuda" for NCCL. A gloo backend is also released at process
        exit. This joins its threads, which takes no longer than an exchange in flight. An NCCL
        backend is left to torch at exit, because peers may still be reading from it.
    """

    def __init__(self, owner: object, *, device: str) -> None:
        self._generation = forks.generation()
        self.group: Any = None  # the backend; None before it is connected and after `close`
        self.name: Any = None  # name under which the group is registered with torch, or None
        release = self.close if device == "cpu" else self._release_later
        weakref.finalize(owner, release).atexit = device == "cpu"

    def close(self) -> Any:
        """Drop the reference to the group and return it.

        Returns None if the group was released before, and in a forked child. A child keeps the
        group forever, because freeing it would wait for threads that exist only in the parent.
        """
        group, name = self.group, self.name
        self.group = self.name = None
        if self._generation != forks.generation():
            forks.leak(group)
            return None
        if name is not None:
            _unregister_process_group(name)
        return group

    def _release_later(self) -> None:
        """Shut down an NCCL backend in a thread, because this waits for CUDA graphs that use it."""
        if (group := self.close()) is not None:
            run_in_thread(group.shutdown)


@atexit.register
def _join_threads() -> None:
    for thread in tuple(_threads):
        thread.join(_JOIN_TIMEOUT_S)
