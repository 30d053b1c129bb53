"""Passes objects to functions with `torch._dynamo.assume_constant_result`.

From torch 2.12 on, such functions accept modules. Earlier releases accept only constants, so
`constant_argument` passes a number instead of the object, and `object_of` looks the object up. In
both cases the graph is guarded by the identity of the object.
"""

from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch._dynamo.comptime import ComptimeContext, comptime

T = TypeVar("T")

_TAKES_OBJECTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
_objects = WeakValueDictionary[int, Any]()


def constant_argument(value: T) -> T | int:
    """Return an argument for `assume_constant_result` functions that stands for an object.

    value: an object with weak references, such as a module.
    """
    if _TAKES_OBJECTS:
        return value
    if torch.compiler.is_dynamo_compiling():
        comptime(_keep_value)
    else:
        _objects[id(value)] = value
    return id(value)


def object_of(argument: T | int) -> T:
    """Return the object that `constant_argument` was called with."""
    found: T = _objects[argument] if isinstance(argument, int) else argument
    return found


def _keep_value(context: ComptimeContext) -> None:
    """Make the real object behind the local variable `value` known to `object_of`."""
    variable: Any = context.get_local("value")._i_will_not_complain_if_bc_breaks_VariableTracker()
    value = variable.realize().value
    _objects[id(value)] = value
