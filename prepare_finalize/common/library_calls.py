"""Comparison of the calls that a part makes with the interface of an installed library.

Releases of the libraries differ in names, arguments and results, and not all of them report their
version. A part lists its calls, and compares them with the signatures of the library's methods when
it loads the library. A release with another interface is then refused before any of its kernels
runs, on which other ranks would wait.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from modular_kernel.errors import ConfigurationError

# Errors of a library's checks, of Python, and of loading the library. A release that does not match
# its extension module, torch or NCCL also raises AttributeError, TypeError and LookupError.
LIBRARY_ERRORS = (
    *(RuntimeError, AssertionError, ImportError, OSError, ValueError),
    *(AttributeError, TypeError, LookupError),
)


@dataclass(frozen=True)
class LibraryCall:
    """A call of a class or method of a library.

    name: name of the method; "__init__" for the class itself.
    num_arguments: number of positional arguments, including self unless the method is static.
    keywords: names of the keyword arguments.
    """

    name: str
    num_arguments: int
    keywords: tuple[str, ...] = ()


def find_mismatch(owner: Any, calls: Iterable[LibraryCall]) -> str:
    """Return the first call that a class or module would not accept, and why, or ""."""
    for call in calls:
        mismatch = _find_call_mismatch(owner, call)
        if mismatch:
            return f"{getattr(owner, '__name__', owner)}.{call.name}: {mismatch}"
    return ""


def accepts_keyword(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter. Without a signature, return False."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def unpack(values: Any, number: int, method: str) -> tuple[Any, ...]:
    """Return the results of a method of a library. Raise ConfigurationError for another number.

    number: number of results of the supported releases.
    method: the library and the method, for messages.
    """
    if not isinstance(values, (tuple, list)) or len(values) != number:
        is_sequence = isinstance(values, (tuple, list))
        got = f"{len(values)} results" if is_sequence else type(values).__name__
        raise ConfigurationError(method, got=got, need=f"{number} results")
    return tuple(values)


def _find_call_mismatch(owner: Any, call: LibraryCall) -> str:
    function: Callable[..., Any] | None = getattr(owner, call.name, None)
    if not callable(function):
        return "no such method"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a method of an extension module may have no signature
        return ""
    try:
        signature.bind(*[None] * call.num_arguments, **dict.fromkeys(call.keywords))
    except TypeError as error:
        return str(error)
    return ""
