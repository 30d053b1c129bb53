"""Fork safety: repair of state that a forked child inherits (locks, thread pools, GPUs, groups).

`os.fork` copies the parent's memory but only the calling thread. In the child, a lock that another
thread held stays locked, data that it was writing stays incomplete, and a CUDA context or a
connection to other ranks cannot be used. Each object with such state is either registered with
`on_fork`, which calls its `after_fork` in the child, or records `generation()` when it is created
and calls `check_process` before use.
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
_PROPERTIES_HAVE_LOCKS = sys.version_info < (3, 12)  # cached_property holds a lock before 3.12


class Forkable(Protocol):
    """An object whose state must be repaired in a forked child."""

    def after_fork(self) -> None:
        """Repair the state, before any other code runs in the child. Must not raise."""


_generation = [0]
_registered: set["weakref.ref[Forkable]"] = set()


def generation() -> int:
    """Return the number of forks (by `os.fork`) between the first ancestor and this process."""
    return _generation[0]


def on_fork(owner: Forkable) -> None:
    """Call `owner.after_fork()` in every forked child, as long as `owner` is alive."""
    _registered.add(weakref.ref(owner, _registered.discard))


def reset_lock(lock: Any) -> bool:
    """Reset an RLock in a child, unless the forking thread holds it. Returns whether it does.

    A thread that forks inside its own `with lock` block exits that block in the child as well.
    """
    if lock._is_owned():
        return True
    lock._at_fork_reinit()
    return False


def check_process(created_in: int, what: str, need: str) -> None:
    """Raise StateError if `what` was created before this process was forked.

    created_in: `generation()` at creation. need: what to do instead.
    """
    if created_in != _generation[0]:
        raise StateError(what, got="a use in a forked child", need=need)


class UnusableLock:
    """Replacement for the lock of an object that cannot be used in a forked child.

    Entering it raises StateError, so that calls need no additional check.
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
    """Run torch on one thread in a child, as DataLoader does in its workers.

    Needed after the parent has computed on the CPU with GNU OpenMP, which would wait forever for
    the parent's threads. Other OpenMP runtimes start new threads in the child.
    """
    if torch.get_num_threads() > 1 and _runs_on_gnu_openmp():
        torch.set_num_threads(1)


@cache
def _runs_on_gnu_openmp() -> bool:
    try:
        return "libgomp" in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def leak(value: object) -> None:
    """Keep `value` alive until the process ends, without ever running its C++ destructor.

    The destructor of a process group joins threads that do not exist in a forked child.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _after_fork_in_child() -> None:
    _generation[0] += 1
    if _PROPERTIES_HAVE_LOCKS:
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
            for attribute in tuple(vars(owner).values()) if isinstance(owner, type) else ():
                if isinstance(attribute, cached_property):
                    reset_lock(vars(attribute)["lock"])


if hasattr(os, "register_at_fork"):  # absent on Windows, which cannot fork
    os.register_at_fork(after_in_child=_after_fork_in_child)
