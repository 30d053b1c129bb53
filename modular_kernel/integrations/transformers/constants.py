"""Passes objects to functions with `torch._dynamo.assume_constant_result`.

Since torch 2.12, such functions accept modules. Earlier releases accept only constants, so
`constant_argument` returns the object's id, and `object_of` looks the object up. In both cases the
graph is guarded by the identity of the object.
"""

from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch._dynamo.comptime import ComptimeContext, comptime

T = TypeVar("T")

_ACCEPTS_OBJECTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
_objects = WeakValueDictionary[int, Any]()  # by id


def constant_argument(value: T) -> T | int:
    """Return an argument that stands for an object in `assume_constant_result` functions.

    value: an object that supports weak references, such as a module.
    """
    if _ACCEPTS_OBJECTS:
        return value
    if torch.compiler.is_dynamo_compiling():
        comptime(_keep_value)
    else:
        _objects[id(value)] = value
    return id(value)


def object_of(argument: T | int) -> T:
    """Return the object that `constant_argument` was called with."""
    value: T = _objects[argument] if isinstance(argument, int) else argument
    return value


def _keep_value(context: ComptimeContext) -> None:
    """Store the real object behind the traced local variable `value` for `object_of`."""
    variable: Any = context.get_local("value")._i_will_not_complain_if_bc_breaks_VariableTracker()
    value = variable.realize().value
    _objects[id(value)] = value
