"""Loading and validation of paths of TritonExperts that other packages provide.

A package offers a tuple of `Path` subclasses in the entry-point group modular_kernel.triton_paths:

    entry_points={"modular_kernel.triton_paths": ["mine = my_package:PATHS"]}

An entry point or class that fails is recorded and logged once; the others are used.
"""

import inspect
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from importlib.metadata import EntryPoint, entry_points

from experts.triton.path import Path
from modular_kernel.errors import ConfigurationError
from modular_kernel.settings import read_settings
from modular_kernel.text import printable
from modular_kernel.utils.optional_imports import describe_error, load_with_deadline

GROUP = "modular_kernel.triton_paths"
_LOG = logging.getLogger("modular_kernel.parts")
_MAX_ORIGIN_CHARS = 200


@dataclass(frozen=True)
class ExternalPath:
    """A path class of another package, and the distribution and entry point that provide it."""

    path: type[Path]
    origin: str


@dataclass(frozen=True)
class BrokenPath:
    """An entry point, or one of its classes, that cannot be used, and the reason.

    `name` is that of the entry point or, if its classes were loaded, that of the path.
    """

    name: str
    origin: str
    error: str


@dataclass(frozen=True)
class ExternalPaths:
    """The external paths of the installed packages.

    usable: in the order of their entry points.
    broken: those that cannot be used.
    """

    usable: tuple[ExternalPath, ...] = ()
    broken: tuple[BrokenPath, ...] = ()


def load_external_paths(built_in_names: Collection[str]) -> ExternalPaths:
    """Load the paths of all installed packages.

    `built_in_names` has the names of the built-in paths, which external paths may not use. If
    several external paths have the same name, none of them is used, so that the result does not
    depend on the order of installation.
    """
    entries = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))
    # An editable and a regular install of one distribution list the same entry point twice.
    unique = {(entry.name, entry.value): entry for entry in entries}
    usable, broken = list[ExternalPath](), list[BrokenPath]()
    for entry in unique.values():
        origin = _origin(entry)
        try:
            paths = list(_check_paths(_load(entry, origin)))
        except (Exception, SystemExit) as error:  # noqa: BLE001  another package's code
            name = printable(entry.name, max_chars=_MAX_ORIGIN_CHARS)
            broken.append(BrokenPath(name, origin, describe_error(error)))
            continue
        usable += [ExternalPath(path, origin) for path in paths]
    loaded = _without_conflicts(usable, broken, built_in_names)
    for failure in loaded.broken:
        _LOG.warning(
            "path %s of TritonExperts, from %s, is not used: %s",
            failure.name, failure.origin, failure.error,
        )  # fmt: skip
    return loaded


def _origin(entry: EntryPoint) -> str:
    distribution = entry.dist.name if entry.dist else "unknown"
    return printable(f"{distribution} ({entry.value})", max_chars=_MAX_ORIGIN_CHARS)


def _load(entry: EntryPoint, origin: str) -> object:
    return load_with_deadline(entry.load, read_settings().import_deadline_s, origin)


def _check_paths(value: object) -> Iterator[type[Path]]:
    """Yield the path classes of an entry point's value.

    Raise ConfigurationError if the value is not a tuple of classes, or a class is not a complete
    path.
    """
    if not isinstance(value, tuple) or not all(isinstance(cls, type) for cls in value):
        raise ConfigurationError("entry point", got=repr(value)[:200], need="a tuple of classes")
    for cls in value:
        what = f"path {cls.__name__}"
        if not issubclass(cls, Path):
            need = "a subclass of experts.triton.path.Path"
            raise ConfigurationError(what, got="another class", need=need)
        if inspect.isabstract(cls):
            missing = ", ".join(sorted(cls.__abstractmethods__))
            raise ConfigurationError(what, got=f"no {missing}", need="every abstract method")
        name = getattr(cls, "name", None)
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigurationError(f"{what}: name", got=repr(name), need="an identifier")
        if not is_dataclass(cls.launch):
            raise ConfigurationError(f"{what}: launch", got=repr(cls.launch), need="a dataclass")
        yield cls


def _without_conflicts(
    paths: Iterable[ExternalPath], broken: list[BrokenPath], built_in_names: Collection[str]
) -> ExternalPaths:
    paths = list(paths)
    counts, usable = Counter(offered.path.name for offered in paths), list[ExternalPath]()
    for offered in paths:
        name = offered.path.name
        if name in built_in_names:
            need = "another name: TritonExperts has a path of its own with this one"
        elif counts[name] > 1:
            origins = (other.origin for other in paths if other.path.name == name)
            need = f"one path with this name, not those of {' and '.join(origins)}"
        else:
            usable.append(offered)
            continue
        error = ConfigurationError("path", got=repr(name), need=need)
        broken.append(BrokenPath(name, offered.origin, describe_error(error)))
    return ExternalPaths(tuple(usable), tuple(broken))
