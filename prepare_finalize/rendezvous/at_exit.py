"""What must end before the interpreter does.

A thread of gloo's frees the tensors of an exchange that is over, and a thread that asked a store
comes back to Python: for both it takes the GIL. One that asks for the GIL while the interpreter is
being finalized is ended in the midst of C++, which aborts the process or leaves a lock held for
good. So they end in an exit hook, before that.
"""

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import _unregister_process_group

from modular_kernel.utils import forks

_PATIENCE_S = 1.0  # for a thread whose store may never answer
_aside: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def run_aside(function: Callable[[], object]) -> threading.Thread:
    """Run `function` in a thread of its own, which may be left to itself."""
    thread = threading.Thread(target=function, daemon=True)
    _aside.add(thread)
    thread.start()
    return thread


class Communicator:
    """Holds the process group of `owner`; let go with it, or as the process exits if it is gloo's.

    A gloo group that is closed has joined its threads, which takes no longer than an exchange
    under way may. NCCL's is left to torch at exit, because peers may still be reading from it.
    """

    def __init__(self, owner: object, *, device: str) -> None:
        self._made_in = forks.generation()
        self.group: Any = None  # until it is connected, and after `close`
        self.name: Any = None  # under which torch knows it, where it does
        weakref.finalize(owner, self.close).atexit = device == "cpu"

    def close(self) -> Any:
        """Give the group up; returns it, or None if that was done before, or in a forked child.

        A child keeps the group for good: to free it would wait for threads that it does not have.
        """
        group, name = self.group, self.name
        self.group = self.name = None
        if self._made_in != forks.generation():
            forks.never_free(group)
            return None
        if name is not None:
            _unregister_process_group(name)
        return group


@atexit.register
def _join() -> None:
    for thread in tuple(_aside):
        thread.join(_PATIENCE_S)
