"""Validation of arguments against their type annotations.

    @dataclass(frozen=True)
    class Layer:
        tokens: Annotated[int, Between(0, 2**31 - 1)]
        precision: Literal["ieee", "tf32"] = "ieee"

        def __post_init__(self) -> None:
            check_fields(self)      # tokens: got 2.5, need an int >= 0 and < 2^31

The annotation alone defines the allowed values. A bool is not an int, an int is accepted as a
float, and a float must be finite. Checks are skipped while torch.compile traces a caller.
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

MAX_INT32 = 2**31 - 1  # kernels index rows, columns, experts and a token's pairs with 32 bits

Test = Callable[[object], bool]


@dataclass(frozen=True)
class Between:
    """Annotation: inclusive bounds of a value."""

    low: int
    high: int

    def __str__(self) -> str:
        high = f"< 2^{self.high.bit_length()}" if self.high > 9999 else f"<= {self.high}"
        return f">= {self.low} and {high}"


@dataclass(frozen=True)
class OneOf:
    """Annotation: the allowed values."""

    values: tuple[object, ...]


Count = Annotated[int, Between(1, MAX_INT32)]


def check_fields(record: Any, of: str = "") -> None:
    """Check every field of a dataclass instance against its annotation.

    of: prefix of the field name in messages. Raises ConfigurationError for the first invalid field.
    """
    if is_compiling():
        return
    values, cls = vars(record), cast("Any", type(record))
    for name, test, need in _declared(cls):
        value = values[name]
        if not test(value):
            raise ConfigurationError(of + name, got=format_value(value), need=need)


def expect(what: str, value: object, kind: Any) -> None:
    """Raise ConfigurationError unless `value` matches the annotation `kind`."""
    if is_compiling():
        return
    test, need = _test(kind)
    if not test(value):
        raise ConfigurationError(what, got=format_value(value), need=need)


def expect_each(what: str, values: object, kind: Any) -> tuple[Any, ...]:
    """Return `values` as a tuple if each matches the annotation `kind`; else ConfigurationError.

    The error shows the first invalid value, or the type of a non-iterable.
    """
    test, need = _test(kind)
    listed = isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping)
    # A 0-d tensor is an instance of Iterable too.
    if not listed or getattr(values, "ndim", 1) == 0:
        raise ConfigurationError(what, got=format_value(values), need=f"a sequence, each {need}")
    items = tuple(cast("Iterable[object]", values))
    for value in items:
        if not test(value):
            raise ConfigurationError(
                what, got=f"{format_value(value)} among them", need=f"each {need}"
            )
    return items


def parse_device(device: object) -> torch.device:
    """Return a device, available or not; ConfigurationError if `device` does not name one."""
    if isinstance(device, torch.device):
        return device
    try:
        if isinstance(device, str | int):
            return torch.device(device)
    except (RuntimeError, TypeError, ValueError):  # unknown name, bool, or index out of range
        pass
    need = "a torch device, such as 'cuda'"
    raise ConfigurationError("device", got=format_value(device), need=need)


def available_device(device: object, *, meta: bool = False, what: str = "device") -> torch.device:
    """Return a device on which torch can allocate tensors, with its index.

    meta: accept the meta device, whose tensors have no memory. Raises ConfigurationError if
    `device` does not name a device, and DeviceError if the device is not available.
    """
    parsed = parse_device(device)
    try:
        actual = torch.empty(0, device=parsed).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0][:160]
        raise DeviceError(
            what, got=f"{parsed}: {why}", need="a device available to torch"
        ) from None
    if actual.type == "meta" and not meta:
        raise DeviceError(what, got="meta", need="a device whose tensors have memory")
    return actual


def format_value(value: object) -> object:
    """Format `value` for a message: short, and without reading tensor values."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float | Enum):
        return value
    if isinstance(value, str):
        return repr(value[:80])
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value)
    # A dtype's text is informative and short; that of a tensor or a list need not be.
    return str(value) if kind.__module__ == "torch" and kind.__name__ == "dtype" else kind.__name__


@cache
def _declared(cls: Any) -> tuple[tuple[str, Test, str], ...]:
    hints = get_type_hints(cls, include_extras=True)
    return tuple((field.name, *_test(hints[field.name])) for field in fields(cls))


@cache
def _test(kind: Any) -> tuple[Test, str]:
    """Return a predicate for values of `kind`, and its description for messages."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _limited(*args)
    if origin in (Union, UnionType):
        return _any_of(args)
    if origin is Literal:
        return lambda value: isinstance(value, str) and value in args, " or ".join(args)
    if origin is tuple:
        return _tuple_of(args)
    if origin is list:
        test_item, item = _test(args[0])
        return (
            lambda value: isinstance(value, list) and all(map(test_item, value)),
            f"a list, each {item}",
        )
    if origin is frozenset:
        return _frozenset_of(args[0])
    if origin is Callable:
        return callable, "a function"
    return _plain(kind)


def _any_of(kinds: tuple[Any, ...]) -> tuple[Test, str]:
    tests, words = zip(*map(_test, kinds), strict=True)
    either, other = tests[0], tests[1] if len(tests) == 2 else _any_of(kinds[1:])[0]
    return lambda value: either(value) or other(value), " or ".join(words)


def _plain(kind: type) -> tuple[Test, str]:
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


def _limited(kind: Any, limit: Between | OneOf) -> tuple[Test, str]:
    test, words = _test(kind)
    if isinstance(limit, OneOf):
        allowed = limit.values
        return lambda value: test(value) and value in allowed, " or ".join(map(str, allowed))
    low, high = limit.low, limit.high
    return lambda value: test(value) and low <= value <= high, f"{words} {limit}"


def _frozenset_of(kind: Any) -> tuple[Test, str]:
    test, words = _test(kind)

    def fits(value: object) -> bool:
        return isinstance(value, frozenset) and all(map(test, value))

    return fits, f"a frozenset, each {words}"


def _tuple_of(kinds: tuple[Any, ...]) -> tuple[Test, str]:
    if kinds[-1] is Ellipsis:
        test_item, item = _test(kinds[0])
        return (
            lambda value: isinstance(value, tuple) and all(map(test_item, value)),
            f"a tuple of {item}",
        )
    tests, words = zip(*map(_test, kinds), strict=True)

    def fits(value: object) -> bool:
        if not isinstance(value, tuple) or len(value) != len(tests):
            return False
        return all(test(item) for test, item in zip(tests, value, strict=True))

    return fits, f"a tuple of {' and '.join(words)}"
