"""Quantization schemes that other packages provide: their declaration, loading and validation.

A package offers a tuple of `TableScheme` in the entry-point group modular_kernel.schemes:

    entry_points={"modular_kernel.schemes": ["mine = my_package.scheme:SCHEMES"]}

An entry point or scheme that cannot be used is recorded and logged once. All others are used.
"""

import logging
import math
import re
import struct
import sys
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.settings import read_settings
from modular_kernel.text import escape_nonprintable
from modular_kernel.utils import forks
from modular_kernel.utils.argument_checks import expect
from modular_kernel.utils.optional_imports import describe_error, load_with_timeout

GROUP = "modular_kernel.schemes"
_LOG = logging.getLogger("modular_kernel.parts")
_MAX_ORIGIN_CHARS = 200
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", re.ASCII)
_MAX_NAME_CHARS = 60
# Number of sizes in `group`, by granularity.
_GROUP_SIZES = {"tensor": 0, "channel": 0, "block": 2, "group": 1}
_MAX_GROUP = 1 << 20
# Number of values of a table -> bits of a code.
_BITS = {16: 4, 256: 8}


@dataclass(frozen=True)
class TableScheme:
    """A weight-only scheme. Each weight is stored as a code, and a table holds the value of a code.

    A weight is `values[code]` times its scale. Activations are not quantized. w1 and w2 are uint8.
    If the table has 16 values, a byte holds two codes, with the code of the even column in the low
    nibble. w1_scale and w2_scale are float32 or have the problem's dtype. A scale is the largest
    magnitude of the weights that share it, divided by the largest magnitude of the table. Weights
    are rounded to the nearest value.

    name: lowercase words joined by "_", such as "pot4_w4a16_group".
    values: 16 or 256 finite numbers, one of which is 0, for padding. They are rounded to float32.
    granularity: the weights that share a scale: "tensor" (all weights of an expert's matrix),
        "channel" (a row of the matrix), "block" (group[0] rows by group[1] columns) or "group"
        (group[0] columns of a row).
    group: sizes of a block or a group; () for the other granularities.
    cases: test cases of the scheme, in addition to the cases of every scheme. Each is a mapping
        from `Problem` fields to values, for example sizes around a tile, a dtype, or one token.
    """

    name: str
    values: tuple[float, ...]
    granularity: str
    group: tuple[int, ...] = ()
    cases: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        expect("name of a scheme", self.name, str)
        what = f"scheme {escape_nonprintable(self.name, max_chars=_MAX_NAME_CHARS)}"
        if not _NAME.fullmatch(self.name):
            raise ConfigurationError(f"{what}: name", got=repr(self.name)[:80], need=_NEED_NAME)
        if len(self.name) > _MAX_NAME_CHARS:
            got, need = f"{len(self.name)} characters", f"at most {_MAX_NAME_CHARS}"
            raise ConfigurationError(f"{what}: name", got=got, need=need)
        _check_values(what, self.values)
        object.__setattr__(self, "values", tuple(map(_round_to_float32, self.values)))
        _check_granularity(what, self.granularity, self.group)
        _check_cases(what, self.cases)

    @property
    def bits(self) -> int:
        """Number of bits of a code: 4 or 8."""
        return _BITS[len(self.values)]


_NEED_NAME = 'lowercase words joined by "_", such as pot4_w4a16_group'


def _check_values(what: str, values: object) -> None:
    if not isinstance(values, tuple) or not all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    ):
        need = "a tuple of numbers"
        raise ConfigurationError(f"{what}: values", got=repr(values)[:80], need=need)
    if len(values) not in _BITS:
        need = f"{' or '.join(map(str, _BITS))} values, one for each code"
        raise ConfigurationError(f"{what}: values", got=len(values), need=need)
    rounded = [_round_to_float32(value) for value in values]
    if not all(map(math.isfinite, rounded)):
        need = "values that are finite in float32"
        raise ConfigurationError(f"{what}: values", got=repr(values)[:80], need=need)
    if 0.0 not in rounded or not any(rounded):
        need = "0 and other values: padding of a rank's share is 0"
        raise ConfigurationError(f"{what}: values", got=repr(values)[:80], need=need)


def _round_to_float32(value: float) -> float:
    """Round to float32. Values out of range become inf."""
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", value))
    except (OverflowError, struct.error):  # struct.error: an int beyond float64
        return math.inf
    return float(rounded)


def _check_granularity(what: str, granularity: object, group: object) -> None:
    if granularity not in _GROUP_SIZES:
        need = f"one of {', '.join(_GROUP_SIZES)}"
        raise ConfigurationError(f"{what}: granularity", got=repr(granularity)[:80], need=need)
    count = _GROUP_SIZES[str(granularity)]
    is_valid = (
        isinstance(group, tuple)
        and len(group) == count
        and all(type(size) is int and 0 < size <= _MAX_GROUP for size in group)
        and (not group or group[-1] % 2 == 0)
    )
    if not is_valid:
        sizes = ("()", "(columns,)", "(rows, columns)")[count]
        need = f"{sizes} for granularity {granularity}" + (", even columns" if count else "")
        raise ConfigurationError(f"{what}: group", got=repr(group)[:80], need=need)


def _check_cases(what: str, cases: object) -> None:
    if not isinstance(cases, tuple) or not all(isinstance(case, Mapping) for case in cases):
        need = "a tuple of mappings from Problem fields to values"
        raise ConfigurationError(f"{what}: cases", got=repr(cases)[:80], need=need)
    if not cases:
        need = "at least one: a mapping from Problem fields to values"
        raise ConfigurationError(f"{what}: cases", got="none", need=need)


@dataclass(frozen=True)
class ExternalScheme:
    """A scheme of another package. `origin` describes the entry point that provides it."""

    scheme: TableScheme
    origin: str

    @property
    def name(self) -> str:
        return self.scheme.name


@dataclass(frozen=True)
class BrokenScheme:
    """An entry point, or one of its schemes, that cannot be used.

    name: name of the scheme, or of the entry point if its schemes could not be loaded.
    origin: description of the entry point.
    error: why it cannot be used.
    is_duplicate: whether several packages have a scheme with this name.
    """

    name: str
    origin: str
    error: str
    is_duplicate: bool = False


@dataclass(frozen=True)
class ExternalSchemes:
    """All schemes of installed packages: those that can be used, and those that cannot."""

    usable: tuple[ExternalScheme, ...] = ()
    broken: tuple[BrokenScheme, ...] = ()


class _LoadingLock:
    """A lock that a thread holds while it loads schemes. It is reset in a forked child."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        forks.on_fork(self)

    def after_fork(self) -> None:
        forks.reset_lock(self.lock)


_loading = _LoadingLock()
_thread = threading.local()  # `is_loading`: this thread imports a package that provides schemes


def external_schemes(built_in_names: Collection[str]) -> ExternalSchemes:
    """Return the schemes of all installed packages. Entry points are read once per process.

    If several packages have a scheme with the same name, none of these schemes is used, so that the
    result does not depend on the order of installation.

    While a module with schemes is being imported and has not defined them yet, no schemes are
    returned. Waiting for the import could deadlock, because the calling thread may run it. A later
    call loads the schemes.

    built_in_names: names of the built-in schemes, which other packages must not use.
    """
    if getattr(_thread, "is_loading", False):
        return ExternalSchemes()
    if any(map(_is_unfinished, _list_entries())):
        return ExternalSchemes()
    with _loading.lock:
        return _load_all(tuple(built_in_names))


@cache
def _list_entries() -> tuple[EntryPoint, ...]:
    entries = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))
    # An editable and a regular install of one distribution list the same entry point twice.
    return tuple({(entry.name, entry.value): entry for entry in entries}.values())


def _get_partial_module(entry: EntryPoint) -> object | None:
    """Return the module of an entry point if it is being imported now, or None."""
    module = sys.modules.get(entry.module)
    is_importing = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return module if is_importing else None


def _is_unfinished(entry: EntryPoint) -> bool:
    """Return whether the module of an entry point is being imported and has no schemes yet."""
    module = _get_partial_module(entry)
    return module is not None and not hasattr(module, entry.attr.partition(".")[0])


@cache
def _load_all(built_in_names: tuple[str, ...]) -> ExternalSchemes:
    usable, broken = list[ExternalScheme](), list[BrokenScheme]()
    for entry in _list_entries():
        origin = _describe_origin(entry)
        try:
            schemes = _check_schemes(_load(entry, origin))
        except (Exception, SystemExit) as error:  # noqa: BLE001  another package's code
            name = escape_nonprintable(entry.name, max_chars=_MAX_ORIGIN_CHARS)
            broken.append(BrokenScheme(name, origin, describe_error(error)))
            continue
        usable += [ExternalScheme(scheme, origin) for scheme in schemes]
    loaded = _exclude_conflicts(usable, broken, built_in_names)
    for failure in loaded.broken:
        _LOG.warning(
            "quantization scheme %s, from %s, is not used: %s",
            failure.name, failure.origin, failure.error,
        )  # fmt: skip
    return loaded


def _load(entry: EntryPoint, origin: str) -> object:
    def load() -> object:
        _thread.is_loading = True
        return entry.load()

    module = _get_partial_module(entry)
    if module is not None:  # entry.load() would wait for the thread that imports the module
        return attrgetter(entry.attr)(module)
    if entry.module in sys.modules:
        return entry.load()
    return load_with_timeout(load, read_settings().import_timeout_s, origin)


def _describe_origin(entry: EntryPoint) -> str:
    distribution = entry.dist.name if entry.dist else "unknown"
    return escape_nonprintable(f"{distribution} ({entry.value})", max_chars=_MAX_ORIGIN_CHARS)


def _check_schemes(value: object) -> tuple[TableScheme, ...]:
    """Return the value of an entry point. Raises ConfigurationError for any other type."""
    if not isinstance(value, tuple) or not all(isinstance(item, TableScheme) for item in value):
        need = "a tuple of TableScheme"
        raise ConfigurationError("entry point", got=repr(value)[:200], need=need)
    return value


def _exclude_conflicts(
    schemes: list[ExternalScheme], broken: list[BrokenScheme], built_in_names: Collection[str]
) -> ExternalSchemes:
    counts, usable = Counter(external.name for external in schemes), list[ExternalScheme]()
    for external in schemes:
        name, is_duplicate = external.name, counts[external.name] > 1
        if name in built_in_names:
            need = "another name: there is a built-in scheme with this one"
        elif is_duplicate:
            origins = (other.origin for other in schemes if other.name == name)
            need = f"one scheme with this name, not those of {' and '.join(origins)}"
        else:
            usable.append(external)
            continue
        error = ConfigurationError("scheme", got=repr(name), need=need)
        broken.append(BrokenScheme(name, external.origin, describe_error(error), is_duplicate))
    return ExternalSchemes(tuple(usable), tuple(broken))
