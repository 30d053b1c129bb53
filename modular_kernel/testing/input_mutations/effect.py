"""Effect of a defect: one that changes nothing is neither killed nor a survivor.

Changes of arguments, rows or results always count. A changed problem, handle or tokens may be equal
to the original, and a changed field of a handle may never be read.
"""

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import IntEnum
from typing import Any

import torch

from modular_kernel.tensors import Handle
from modular_kernel.testing.ranks.external_launcher import AnyRanks
from modular_kernel.testing.ranks.pool import RankError


class Effect(IntEnum):
    """Effect of a defect, the strongest last."""

    NONE = 0
    UNREAD = 1
    USED = 2


_WHY = {
    Effect.NONE: "the tensors it changes are absent",
    Effect.UNREAD: "what it changes is never read",
}
_noted: dict[str, Effect] = {}  # strongest effect by name of the defect, in this process


def note(name: str, effect: Effect) -> None:
    """Record an effect, unless a stronger one is recorded."""
    _noted[name] = max(effect, _noted.get(name, Effect.NONE))


def take(name: str) -> Effect:
    """Return and clear the recorded effect of a defect; USED if none is recorded."""
    return _noted.pop(name, Effect.USED)


def take_over_ranks(name: str, pool: AnyRanks) -> Effect:
    """Return and clear the strongest effect on any rank.

    USED if a rank fails, since it may have had an effect.
    """
    try:
        return max(pool.run(_take_on_rank, name))
    except RankError:
        return Effect.USED


def _take_on_rank(_rank: int, _world_size: int, _group: object, name: str) -> Effect:
    return take(name)


def why_nothing(effect: Effect) -> str | None:
    """Return why a defect has no effect, or None if it has one."""
    return _WHY.get(effect)


def watched_handle(name: str, given: Handle, changed: Handle) -> Handle:
    """Return the changed handle, which records when a changed field is read."""
    if _same(given, changed):
        return given
    note(name, Effect.UNREAD)
    handle: Handle = _watched(given, changed, lambda: note(name, Effect.USED))
    return handle


def _watched(given: Any, changed: Any, read: Callable[[], None]) -> Any:
    """Return a copy of `changed` that calls `read` when a field that differs is accessed."""
    if type(given) is not type(changed) or not is_dataclass(changed):
        read()  # accesses cannot be detected
        return changed
    changed_names, inner = set[str](), dict[str, Any]()
    for field in fields(changed):
        old, new = getattr(given, field.name), getattr(changed, field.name)
        if _same(old, new):
            continue
        if is_dataclass(new) and type(old) is type(new):
            inner[field.name] = _watched(old, new, read)
        else:
            changed_names.add(field.name)

    def look(self: Any, name: str) -> Any:
        if name in changed_names:
            read()
        return object.__getattribute__(self, name)

    watched, kind = copy.copy(changed), type(changed)
    for name, value in inner.items():
        object.__setattr__(watched, name, value)
    # A subclass, so that isinstance checks and methods still work.
    object.__setattr__(
        watched, "__class__", type(kind.__name__, (kind,), {"__getattribute__": look})
    )
    return watched


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal; tensors must also agree in dtype, shape and stride."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        same_layout = one.shape == other.shape and one.dtype == other.dtype
        return same_layout and one.stride() == other.stride() and torch.equal(one, other)
    if is_dataclass(one):
        names = [field.name for field in fields(one)]
        return all(_same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
