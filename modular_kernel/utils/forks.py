"""Fork safety: repair of locks, thread pools, CUDA contexts and process groups in a forked child.

`os.fork` copies the memory of the parent, but only the calling thread. In the child, locks of other
threads stay locked, data that other threads were writing stays incomplete, and CUDA contexts and
connections to other ranks cannot be used. An object that owns such a resource registers with
`on_fork`, which calls its `after_fork` in the child. Alternatively, it stores `generation()` when
it is created, and calls `check_process` before each use.
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
_CACHED_PROPERTY_HAS_LOCK = sys.version_info < (3, 12)


class Forkable(Protocol):
    """An object whose state must be repaired in a forked child."""

    def after_fork(self) -> None:
        """Repair the state, before any other code runs in the child. Must not raise."""


_generation = [0]  # in a list, so that it can be changed without `global`
_forkables: set["weakref.ref[Forkable]"] = set()


def generation() -> int:
    """Return the number of forks between the first process with this module and this process."""
    return _generation[0]


def on_fork(owner: Forkable) -> None:
    """Call `owner.after_fork()` in every forked child, as long as `owner` is alive."""
    _forkables.add(weakref.ref(owner, _forkables.discard))


def reset_lock(lock: Any) -> bool:
    """Reset an RLock in a forked child. Return whether the forking thread holds it.

    If the forking thread holds the lock, the lock is not reset, because the thread also releases it
    in the child.
    """
    if lock._is_owned():
        return True
    lock._at_fork_reinit()
    return False


def check_process(created_in: int, what: str, need: str) -> None:
    """Raise StateError if `what` was created before this process was forked.

    created_in: the result of `generation()` when `what` was created.
    need: what to use instead, for the message.
    """
    if created_in != _generation[0]:
        raise StateError(what, got="a call in a forked child process", need=need)


class UnusableLock:
    """Replacement for the lock of an object that cannot be used in a forked child.

    Entering the lock raises StateError, so that calls need no additional check.
    """

    def __init__(self, what: str, need: str) -> None:
        self._what, self._need = what, need

    def __enter__(self) -> NoReturn:
        raise StateError(self._what, got="a call in a forked child process", need=self._need)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        raise AssertionError("never entered")


def use_one_thread() -> None:
    """Run torch on one thread in a forked child, as DataLoader does in its workers.

    GNU OpenMP would wait forever for the threads of the parent. Other OpenMP runtimes start new
    threads in the child.
    """
    if torch.get_num_threads() > 1 and _uses_gnu_openmp():
        torch.set_num_threads(1)


@cache
def _uses_gnu_openmp() -> bool:
    try:
        return "libgomp" in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def leak(value: object) -> None:
    """Keep `value` alive until the process ends, so that its C++ destructor never runs.

    The destructor of a process group joins threads that do not exist in a forked child.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _after_fork_in_child() -> None:
    _generation[0] += 1
    if _CACHED_PROPERTY_HAS_LOCK:
        _reset_cached_property_locks()
    for reference in tuple(_forkables):
        owner = reference()
        if owner is not None:
            owner.after_fork()


def _reset_cached_property_locks() -> None:
    """Reset the lock of every cached_property in classes of this distribution."""
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] not in _PACKAGES:
            continue
        for owner in tuple(vars(module).values()):
            for attribute in tuple(vars(owner).values()) if isinstance(owner, type) else ():
                if isinstance(attribute, cached_property):
                    reset_lock(vars(attribute)["lock"])


if hasattr(os, "register_at_fork"):  # absent on Windows, which cannot fork
    os.register_at_fork(after_in_child=_after_fork_in_child)
