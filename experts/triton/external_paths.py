"""Load and validate the paths of TritonExperts that other packages provide.

A path is an implementation of the layer (`experts.triton.path.Path`). A package registers a tuple
of `Path` subclasses in the entry-point group modular_kernel.triton_paths:

    entry_points={"modular_kernel.triton_paths": ["mine = my_package:PATHS"]}

If an entry point or a class cannot be used, a warning is logged and the path is ignored.
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
from modular_kernel.text import escape_nonprintable
from modular_kernel.utils.optional_imports import describe_error, load_with_timeout

GROUP = "modular_kernel.triton_paths"
_LOG = logging.getLogger("modular_kernel.parts")
_MAX_ORIGIN_CHARS = 200


@dataclass(frozen=True)
class ExternalPath:
    """A path class of another package.

    path: the class.
    origin: the distribution and the entry point that provide it.
    """

    path: type[Path]
    origin: str


@dataclass(frozen=True)
class BrokenPath:
    """An entry point, or one of its path classes, that cannot be used.

    name: the name of the path or, if its class could not be loaded, of the entry point.
    origin: the distribution and the entry point.
    error: the reason.
    """

    name: str
    origin: str
    error: str


@dataclass(frozen=True)
class ExternalPaths:
    """The external paths of the installed packages.

    usable: paths that can be used, in the order of their entry points.
    broken: paths and entry points that cannot be used.
    """

    usable: tuple[ExternalPath, ...] = ()
    broken: tuple[BrokenPath, ...] = ()


def load_external_paths(built_in_names: Collection[str]) -> ExternalPaths:
    """Load the paths of all installed packages.

    If several external paths have the same name, none of them is used, so that the result does not
    depend on the order of installation. An external path cannot have a name in built_in_names.
    """
    sorted_entry_points = sorted(
        entry_points(group=GROUP), key=lambda entry_point: (entry_point.name, entry_point.value)
    )
    # An editable and a regular install of one distribution list the same entry point twice.
    unique_entry_points = {
        (entry_point.name, entry_point.value): entry_point for entry_point in sorted_entry_points
    }
    usable, broken = list[ExternalPath](), list[BrokenPath]()
    for entry_point in unique_entry_points.values():
        origin = _describe_origin(entry_point)
        try:
            paths = list(_check_paths(_load_entry_point(entry_point, origin)))
        except (Exception, SystemExit) as error:  # noqa: BLE001  another package's code
            name = escape_nonprintable(entry_point.name, max_chars=_MAX_ORIGIN_CHARS)
            broken.append(BrokenPath(name, origin, describe_error(error)))
            continue
        usable += [ExternalPath(path, origin) for path in paths]
    loaded = _remove_name_conflicts(usable, broken, built_in_names)
    for failure in loaded.broken:
        _LOG.warning(
            "ignoring path %s of TritonExperts from %s: %s",
            failure.name, failure.origin, failure.error,
        )  # fmt: skip
    return loaded


def _describe_origin(entry_point: EntryPoint) -> str:
    distribution = entry_point.dist.name if entry_point.dist else "unknown"
    return escape_nonprintable(f"{distribution} ({entry_point.value})", max_chars=_MAX_ORIGIN_CHARS)


def _load_entry_point(entry_point: EntryPoint, origin: str) -> object:
    return load_with_timeout(entry_point.load, read_settings().import_timeout_s, origin)


def _check_paths(value: object) -> Iterator[type[Path]]:
    """Yield the path classes in `value`, the object that an entry point refers to.

    Raise ConfigurationError if `value` is not a tuple of classes, or if a class does not define
    everything that a path needs.
    """
    if not isinstance(value, tuple) or not all(isinstance(cls, type) for cls in value):
        raise ConfigurationError("entry point", got=repr(value)[:200], need="a tuple of classes")
    for cls in value:
        what = f"path {cls.__name__}"
        if not issubclass(cls, Path):
            need = "a subclass of experts.triton.path.Path"
            raise ConfigurationError(what, got="a class with other bases", need=need)
        if inspect.isabstract(cls):
            missing_methods = ", ".join(sorted(cls.__abstractmethods__))
            need = "definitions of all abstract methods of Path"
            raise ConfigurationError(what, got=f"no definition of {missing_methods}", need=need)
        name = getattr(cls, "name", None)
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigurationError(f"{what}: name", got=repr(name), need="an identifier")
        if not is_dataclass(cls.launch):
            raise ConfigurationError(f"{what}: launch", got=repr(cls.launch), need="a dataclass")
        yield cls


def _remove_name_conflicts(
    paths: Iterable[ExternalPath], broken: list[BrokenPath], built_in_names: Collection[str]
) -> ExternalPaths:
    """Move the paths whose name is already taken to `broken`, with the reason."""
    paths = list(paths)
    name_counts, usable = Counter(external.path.name for external in paths), list[ExternalPath]()
    for external in paths:
        name = external.path.name
        if name in built_in_names:
            need = "another name, because TritonExperts has a built-in path with this name"
        elif name_counts[name] > 1:
            origins = (conflicting.origin for conflicting in paths if conflicting.path.name == name)
            need = f"a unique name, but {' and '.join(origins)} provide paths with this name"
        else:
            usable.append(external)
            continue
        error = ConfigurationError("path", got=repr(name), need=need)
        broken.append(BrokenPath(name, external.origin, describe_error(error)))
    return ExternalPaths(tuple(usable), tuple(broken))
