"""Passes objects to functions that are decorated with `torch._dynamo.assume_constant_result`.

Since torch 2.12, such functions accept modules. Earlier releases accept only constants. For them,
`make_constant_argument` returns the id of an object, and `resolve_object` looks the object up. In
both cases, the graph is guarded by the identity of the object.
"""

from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch._dynamo.comptime import ComptimeContext, comptime

T = TypeVar("T")

_ACCEPTS_OBJECTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
_object_by_id = WeakValueDictionary[int, Any]()


def make_constant_argument(value: T) -> T | int:
    """Return the argument that represents an object in `assume_constant_result` functions.

    value: an object that supports weak references, such as a module.
    """
    if _ACCEPTS_OBJECTS:
        return value
    if torch.compiler.is_dynamo_compiling():
        comptime(_store_value)
    else:
        _object_by_id[id(value)] = value
    return id(value)


def resolve_object(argument: T | int) -> T:
    """Return the object that was passed to `make_constant_argument`."""
    value: T = _object_by_id[argument] if isinstance(argument, int) else argument
    return value


def _store_value(context: ComptimeContext) -> None:
    """Store the object that the traced local variable `value` represents, for `resolve_object`."""
    variable: Any = context.get_local("value")._i_will_not_complain_if_bc_breaks_VariableTracker()
    value = variable.realize().value
    _object_by_id[id(value)] = value
