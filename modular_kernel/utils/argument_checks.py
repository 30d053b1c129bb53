"""Validation of arguments against their type annotations.

    @dataclass(frozen=True)
    class Layer:
        tokens: Annotated[int, Between(0, 2**31 - 1)]
        precision: Literal["ieee", "tf32"] = "ieee"

        def __post_init__(self) -> None:
            check_fields(self)      # tokens: got 2.5, need an int >= 0 and < 2^31

Annotations define the allowed values. A bool is not an int, an int is accepted as a float, and a
float must be finite. Checks are skipped while torch.compile traces a caller.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache
from sys import float_info
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import torch
from torch.compiler import is_compiling

from modular_kernel.errors import ConfigurationError, DeviceError

# Kernels index rows, columns, experts and the top-k of a token with 32-bit integers.
MAX_INT32 = 2**31 - 1

Predicate = Callable[[object], bool]


@dataclass(frozen=True)
class Between:
    """Annotation: inclusive bounds of a value."""

    low: int
    high: int

    def __str__(self) -> str:
        is_power = self.high > 9999 and self.high & (self.high + 1) == 0
        high = f"< 2^{self.high.bit_length()}" if is_power else f"<= {self.high}"
        return f">= {self.low} and {high}"


@dataclass(frozen=True)
class OneOf:
    """Annotation: the allowed values."""

    values: tuple[object, ...]


Count = Annotated[int, Between(1, MAX_INT32)]


def check_fields(record: Any, prefix: str = "") -> None:
    """Check every field of a dataclass instance against its annotation.

    Raises ConfigurationError for the first invalid field.

    prefix: text before the name of the field in messages.
    """
    if is_compiling():
        return
    values, cls = vars(record), cast("Any", type(record))
    for name, test, need in _make_field_tests(cls):
        value = values[name]
        if not test(value):
            raise ConfigurationError(prefix + name, got=format_value(value), need=need)


def expect(what: str, value: object, kind: Any) -> None:
    """Raise ConfigurationError unless `value` matches the annotation `kind`.

    what: name of the value in messages.
    """
    if is_compiling():
        return
    test, need = _make_test(kind)
    if not test(value):
        raise ConfigurationError(what, got=format_value(value), need=need)


def expect_each(what: str, values: object, kind: Any) -> tuple[Any, ...]:
    """Return `values` as a tuple. Raises ConfigurationError for the first invalid value.

    what: name of the values in messages.
    kind: annotation of a value.
    """
    test, need = _make_test(kind)
    is_sequence = isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping)
    # A 0-d tensor is an instance of Iterable, but cannot be iterated.
    if not is_sequence or getattr(values, "ndim", 1) == 0:
        raise ConfigurationError(what, got=format_value(values), need=f"a sequence, each {need}")
    items = tuple(cast("Iterable[object]", values))
    for value in items:
        if not test(value):
            raise ConfigurationError(
                what, got=f"{format_value(value)} among them", need=f"each {need}"
            )
    return items


def parse_device(device: object) -> torch.device:
    """Return `device` as a torch.device. The device may be unavailable.

    Raises ConfigurationError if `device` does not name a device.
    """
    if isinstance(device, torch.device):
        return device
    try:
        if isinstance(device, str | int):
            return torch.device(device)
    except (RuntimeError, TypeError, ValueError):  # unknown name, bool, or index out of range
        pass
    need = "a torch device, such as 'cuda'"
    raise ConfigurationError("device", got=format_value(device), need=need)


def resolve_device(device: object, *, meta: bool = False, what: str = "device") -> torch.device:
    """Return `device` as a torch.device with an index, after allocating an empty tensor on it.

    Raises ConfigurationError if `device` does not name a device, and DeviceError if torch cannot
    allocate tensors on it.

    meta: accept the meta device, whose tensors have no memory.
    what: name of the argument in messages.
    """
    parsed = parse_device(device)
    try:
        actual = torch.empty(0, dtype=torch.float32, device=parsed).device
    # ImportError: the package of a backend, such as hpu, is not installed.
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).splitlines()[0][:160]
        raise DeviceError(
            what, got=f"{parsed}: {reason}", need="a device available to torch"
        ) from None
    if actual.type == "meta" and not meta:
        raise DeviceError(what, got="meta", need="a device whose tensors have memory")
    return actual


def format_value(value: object) -> object:
    """Return `value` in a short form for a message, without reading tensor values."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float | Enum):
        return value
    if isinstance(value, str):
        return repr(value[:80])
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ == "dtype":
        return str(value)
    return kind.__name__  # tensors and lists could be long


@cache
def _make_field_tests(cls: Any) -> tuple[tuple[str, Predicate, str], ...]:
    hints = get_type_hints(cls, include_extras=True)
    return tuple((field.name, *_make_test(hints[field.name])) for field in fields(cls))


@cache
def _make_test(kind: Any) -> tuple[Predicate, str]:
    """Return (predicate, description) for the values that the annotation `kind` allows."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _make_annotated_test(*args)
    if origin in (Union, UnionType):
        return _make_union_test(args)
    if origin is Literal:
        return lambda value: isinstance(value, str) and value in args, " or ".join(args)
    if origin is tuple:
        return _make_tuple_test(args)
    if origin is list:
        test_item, item_description = _make_test(args[0])
        return (
            lambda value: isinstance(value, list) and all(map(test_item, value)),
            f"a list, each {item_description}",
        )
    if origin is frozenset:
        return _make_frozenset_test(args[0])
    if origin is Callable:
        return callable, "a function"
    return _make_class_test(kind)


def _make_union_test(kinds: tuple[Any, ...]) -> tuple[Predicate, str]:
    tests, descriptions = zip(*map(_make_test, kinds), strict=True)
    first_test, other_test = (
        tests[0],
        tests[1] if len(tests) == 2 else _make_union_test(kinds[1:])[0],
    )
    return lambda value: first_test(value) or other_test(value), " or ".join(descriptions)


def _make_class_test(kind: type) -> tuple[Predicate, str]:
    if kind is NoneType:
        return lambda value: value is None, "None"
    if kind is bool:
        return lambda value: value is True or value is False, "True or False"
    if kind is int:
        return lambda value: isinstance(value, int) and not isinstance(value, bool), "an int"
    if kind is float:
        return _is_finite, "a finite number"
    article = "an" if kind.__name__[0] in "AEIOUaeiou" else "a"
    return lambda value: isinstance(value, kind), f"{article} {kind.__name__}"


def _is_finite(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -float_info.max <= value <= float_info.max  # a huge int must not overflow in isfinite


def _make_annotated_test(kind: Any, limit: Between | OneOf) -> tuple[Predicate, str]:
    test, description = _make_test(kind)
    if isinstance(limit, OneOf):
        allowed = limit.values
        return lambda value: test(value) and value in allowed, " or ".join(map(str, allowed))
    low, high = limit.low, limit.high
    return lambda value: test(value) and low <= value <= high, f"{description} {limit}"


def _make_frozenset_test(kind: Any) -> tuple[Predicate, str]:
    test, description = _make_test(kind)

    def test_value(value: object) -> bool:
        return isinstance(value, frozenset) and all(map(test, value))

    return test_value, f"a frozenset, each {description}"


def _make_tuple_test(kinds: tuple[Any, ...]) -> tuple[Predicate, str]:
    if kinds[-1] is Ellipsis:
        test_item, item = _make_test(kinds[0])
        return (
            lambda value: isinstance(value, tuple) and all(map(test_item, value)),
            f"a tuple of {item}",
        )
    tests, descriptions = zip(*map(_make_test, kinds), strict=True)

    def test_value(value: object) -> bool:
        if not isinstance(value, tuple) or len(value) != len(tests):
            return False
        return all(test(item) for test, item in zip(tests, value, strict=True))

    return test_value, f"a tuple of {' and '.join(descriptions)}"
