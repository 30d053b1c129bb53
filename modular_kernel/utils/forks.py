"""What a forked child does with the state that it inherits: locks, thread pools, GPUs, groups.

`os.fork` copies the memory of the parent but only the thread that called it. A lock that another
thread held stays locked in the child for ever, what that thread had half written stays half
written, and neither a CUDA context nor a connection to other ranks can be used. Each object that
has such state is either registered with `on_fork`, which calls its `after_fork` in the child, or
records `generation()` when it is made and calls `check_process` before it is used.
"""

import ctypes
import os
import sys
import weakref
from functools import cache, cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol

import torch

from modular_kernel.errors import StateError

_PACKAGES = ("modular_kernel", "prepare_finalize", "experts", "topk_reduce")
_LOCKED_PROPERTIES = sys.version_info < (3, 12)  # functools.cached_property held a lock until 3.12


class Forkable(Protocol):
    """An object whose state must be repaired in a forked child."""

    def after_fork(self) -> None:
        """Repair the state, in the child, before anything else runs there. Must not raise."""


_generation = [0]
_registered: set["weakref.ref[Forkable]"] = set()


def generation() -> int:
    """Return how many forks, seen by Python, lie between this process and its first ancestor."""
    return _generation[0]


def on_fork(owner: Forkable) -> None:
    """Call `owner.after_fork()` in every forked child, as long as `owner` lives."""
    _registered.add(weakref.ref(owner, _registered.discard))


def renew(lock: Any) -> bool:
    """Unlock an RLock in a child, unless the forking thread itself holds it; whether it does.

    A thread that forks within its own `with lock` block leaves that block in the child as well.
    """
    if lock._is_owned():
        return True
    lock._at_fork_reinit()
    return False


def check_process(made_in: int, what: str, need: str) -> None:
    """Raise StateError if `what` was made by a process that this one was forked from.

    made_in: `generation()` when it was made. need: what to do instead.
    """
    if made_in != _generation[0]:
        raise StateError(what, got="a use in a forked child", need=need)


class Barred:
    """Stands in for the lock of an object that cannot be used in a forked child.

    Entering it raises StateError, so that the object needs no check of its own in each call.
    """

    def __init__(self, what: str, need: str) -> None:
        self._what, self._need = what, need

    def __enter__(self) -> NoReturn:
        raise StateError(self._what, got="a use in a forked child", need=self._need)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        raise AssertionError("never entered")


def use_one_thread() -> None:
    """Have torch compute on one thread in a child, as DataLoader does in its workers.

    For what has computed on the CPU in the parent: GNU's OpenMP would wait for ever for the threads
    that computed there. Other runtimes start threads of the child's own.
    """
    if torch.get_num_threads() > 1 and _runs_on_gnu_openmp():
        torch.set_num_threads(1)


@cache
def _runs_on_gnu_openmp() -> bool:
    try:
        return "libgomp" in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def never_free(value: object) -> None:
    """Keep `value` until the process ends, its C++ destructor included, which never runs.

    The destructor of a process group joins threads that a forked child does not have.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _in_child() -> None:
    _generation[0] += 1
    if _LOCKED_PROPERTIES:
        _renew_cached_properties()
    for reference in tuple(_registered):
        owner = reference()
        if owner is not None:
            owner.after_fork()


def _renew_cached_properties() -> None:
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] not in _PACKAGES:
            continue
        for owner in tuple(vars(module).values()):
            for each in tuple(vars(owner).values()) if isinstance(owner, type) else ():
                if isinstance(each, cached_property):
                    renew(vars(each)["lock"])


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_in_child)
