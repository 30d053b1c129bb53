"""Whether a defect had an effect: one that changes nothing is neither found nor missed.

What is put into arguments, rows or results always counts as one. A problem, a handle or tokens may
come out as they went in, and of a handle nobody may read what is changed.
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
    """What became of a defect, the strongest last."""

    NONE = 0
    UNREAD = 1
    USED = 2


_WHY = {
    Effect.NONE: "what it would change is not there",
    Effect.UNREAD: "nobody reads what it changes",
}
_noted: dict[str, Effect] = {}  # by the name of a defect; of this process


def note(name: str, effect: Effect) -> None:
    """Remember an effect, unless a stronger one is known."""
    _noted[name] = max(effect, _noted.get(name, Effect.NONE))


def take(name: str) -> Effect:
    """Return what is known of a defect, and forget it; USED where nothing is."""
    return _noted.pop(name, Effect.USED)


def take_over_ranks(name: str, pool: AnyRanks) -> Effect:
    """Return the strongest effect on any rank. A rank that was lost may have had one: USED."""
    try:
        return max(pool.run(_take_on_rank, name))
    except RankError:
        return Effect.USED


def _take_on_rank(_rank: int, _world_size: int, _group: object, name: str) -> Effect:
    return take(name)


def why_nothing(effect: Effect) -> str | None:
    """Say why a defect changes nothing; None if it changes something."""
    return _WHY.get(effect)


def watched_handle(name: str, given: Handle, changed: Handle) -> Handle:
    """Return the handle that a defect made of `given`, which notes that what differs is read."""
    if _same(given, changed):
        return given
    note(name, Effect.UNREAD)
    told: Handle = _watched(given, changed, lambda: note(name, Effect.USED))
    return told


def _watched(given: Any, changed: Any, read: Callable[[], None]) -> Any:
    """Return a copy of `changed` that calls `read` where one of its other fields is looked at."""
    if type(given) is not type(changed) or not is_dataclass(changed):
        read()  # nothing tells who looks into it
        return changed
    names, inner = set[str](), dict[str, Any]()
    for field in fields(changed):
        old, new = getattr(given, field.name), getattr(changed, field.name)
        if _same(old, new):
            continue
        if is_dataclass(new) and type(old) is type(new):
            inner[field.name] = _watched(old, new, read)
        else:
            names.add(field.name)

    def look(self: Any, name: str) -> Any:
        if name in names:
            read()
        return object.__getattribute__(self, name)

    made, kind = copy.copy(changed), type(changed)
    for name, value in inner.items():
        object.__setattr__(made, name, value)
    # Still of its own type for who asks, and with all that this can do.
    object.__setattr__(made, "__class__", type(kind.__name__, (kind,), {"__getattribute__": look}))
    return made


def _same(one: Any, other: Any) -> bool:
    """Whether two values hold the same; those that nothing is known of are, if they are one."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and one.stride() == other.stride() and torch.equal(one, other)
    if is_dataclass(one):
        names = [field.name for field in fields(one)]
        return all(_same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
