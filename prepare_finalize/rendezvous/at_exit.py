"""Cleanup that must happen before the interpreter is finalized.

Two kinds of threads acquire the GIL late: gloo threads, when they free the tensors of a finished
exchange, and threads that return to Python from waiting for a store. A thread that requests the GIL
during finalization is terminated in the middle of C++ code, which aborts the process or leaves a
lock held forever. An exit hook therefore ends these threads first.
"""

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import _unregister_process_group

from modular_kernel.utils import forks

_PATIENCE_S = 1.0  # timeout of joining a thread, whose store may never answer
_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def run_in_thread(function: Callable[[], object]) -> threading.Thread:
    """Run `function` in a daemon thread that the caller may abandon."""
    thread = threading.Thread(target=function, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


class Communicator:
    """Holds the process group of `owner`, and releases it together with `owner`.

    A gloo group is also released at process exit. Closing it joins its threads, which takes no
    longer than an exchange in flight. An NCCL group is left to torch at exit, because peers may
    still be reading from it.
    """

    def __init__(self, owner: object, *, device: str) -> None:
        self._generation = forks.generation()
        self.group: Any = None  # None before it is connected, and after `close`
        self.name: Any = None  # name under which torch has registered it, if any
        release = self.close if device == "cpu" else self._release_later
        weakref.finalize(owner, release).atexit = device == "cpu"

    def close(self) -> Any:
        """Release and return the group.

        Return None if it was released before, or in a forked child. A child keeps the group
        forever, because freeing it would wait for threads that the child does not have.
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
        """Release an NCCL group in a thread: that waits for CUDA graphs with its exchanges."""
        if (group := self.close()) is not None:
            run_in_thread(group.shutdown)


@atexit.register
def _join() -> None:
    for thread in tuple(_threads):
        thread.join(_PATIENCE_S)
