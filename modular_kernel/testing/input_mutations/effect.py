"""Record whether an injected defect had any effect.

In mutation testing, a defect is killed if a check fails, and survives otherwise. A defect without
any effect does neither. Changes of arguments, rows or results always have an effect. A changed
problem, handle or set of tokens may equal the original, and a changed field of a handle may never
be read. (A handle is the data that `prepare` passes to `finalize`.)
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
    """Effect of a defect, in ascending order of strength."""

    NONE = 0  # nothing was changed
    UNREAD = 1  # something was changed, but nothing read it
    USED = 2


_NO_EFFECT_REASONS = {
    Effect.NONE: "the tensors it changes are absent",
    Effect.UNREAD: "what it changes is never read",
}
_strongest_effect: dict[str, Effect] = {}  # by the name of the defect, in this process


def record_effect(name: str, effect: Effect) -> None:
    """Record an effect of the defect `name`, unless a stronger effect is already recorded."""
    _strongest_effect[name] = max(effect, _strongest_effect.get(name, Effect.NONE))


def pop_effect(name: str) -> Effect:
    """Return and clear the recorded effect of a defect; USED if no effect is recorded."""
    return _strongest_effect.pop(name, Effect.USED)


def pop_effect_on_ranks(name: str, pool: AnyRanks) -> Effect:
    """Return and clear the strongest effect of a defect on any rank; USED if a rank fails."""
    try:
        return max(pool.run(_pop_on_rank, name))
    except RankError:
        return Effect.USED


def _pop_on_rank(_rank: int, _world_size: int, _group: object, name: str) -> Effect:
    return pop_effect(name)


def find_no_effect_reason(effect: Effect) -> str | None:
    """Return why a defect has no effect, or None if it has an effect."""
    return _NO_EFFECT_REASONS.get(effect)


def record_reads(name: str, original: Handle, changed: Handle) -> Handle:
    """Return a copy of the changed handle that records when a changed field is read.

    Returns `original` if both handles are equal.

    name: the name of the defect.
    """
    if _is_equal(original, changed):
        return original
    record_effect(name, Effect.UNREAD)
    handle: Handle = _add_read_callback(original, changed, lambda: record_effect(name, Effect.USED))
    return handle


def _add_read_callback(original: Any, changed: Any, on_read: Callable[[], None]) -> Any:
    """Return a copy of `changed` that calls `on_read` when a changed field is read."""
    if type(original) is not type(changed) or not is_dataclass(changed):
        on_read()  # reads of such an object cannot be detected
        return changed
    changed_names, changed_children = set[str](), dict[str, Any]()
    for field in fields(changed):
        old_value, new_value = getattr(original, field.name), getattr(changed, field.name)
        if _is_equal(old_value, new_value):
            continue
        if is_dataclass(new_value) and type(old_value) is type(new_value):
            changed_children[field.name] = _add_read_callback(old_value, new_value, on_read)
        else:
            changed_names.add(field.name)

    def getattribute(self: Any, name: str) -> Any:
        if name in changed_names:
            on_read()
        return object.__getattribute__(self, name)

    recording_copy, cls = copy.copy(changed), type(changed)
    for name, value in changed_children.items():
        object.__setattr__(recording_copy, name, value)
    # Make the copy an instance of a subclass, so that isinstance checks and methods still work.
    object.__setattr__(
        recording_copy, "__class__", type(cls.__name__, (cls,), {"__getattribute__": getattribute})
    )
    return recording_copy


def _is_equal(left: Any, right: Any) -> bool:
    """Return whether two values are equal. Tensors must also agree in dtype, shape and strides."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        same_layout = left.shape == right.shape and left.dtype == right.dtype
        return same_layout and left.stride() == right.stride() and torch.equal(left, right)
    if is_dataclass(left):
        names = [field.name for field in fields(left)]
        return all(_is_equal(getattr(left, name), getattr(right, name)) for name in names)
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(_is_equal, left, right))
    return bool(left == right)
