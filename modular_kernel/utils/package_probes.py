"""Identification of optional packages by the content of their files.

The name of a package is not sufficient: a package index may have an unrelated package with the same
name, the installed version may be too old, and another project may contain a copy. A probe searches
for text in files, and imports nothing.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from modular_kernel.errors import ConfigurationError

_VERSION = re.compile(r"""^__version__\s*=\s*['"]([^'"]{1,40})['"]""", re.MULTILINE)
_MAX_BYTES = 1 << 20  # maximum number of bytes read from a file
# Exceptions that the import of a package raises if it was built for another torch, GPU or toolkit.
_IMPORT_ERRORS = (
    *(ImportError, AssertionError, OSError, RuntimeError),
    *(AttributeError, TypeError, ValueError, LookupError),
)
Markers = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class PackageProbe:
    """An optional package, identified by its content.

    name: name of the package in `Requirements.packages`.
    locations: candidate folders in order of preference. A location is an importable package,
        optionally with a subfolder, such as "deep_gemm" or "vllm/third_party/deep_gemm".
    markers: pairs (file in the folder, text in this file), all of which must be present. The file
        may be a glob pattern, such as "_C*.so", for files whose names depend on the platform; one
        of the matching files must contain the text. An empty text requires only the file.
    alternatives: further sets of markers, for example of releases with another layout. A folder
        matches if it has all markers of one set.
    need: description of the package that the markers identify, for messages.
    source: how to install the package, for messages.
    version_file: the file that defines `__version__`.
    """

    name: str
    locations: tuple[str, ...]
    markers: Markers
    need: str
    source: str
    version_file: str = "__init__.py"
    alternatives: tuple[Markers, ...] = ()


@dataclass(frozen=True)
class ProbeResult:
    """The location of a package.

    folder: the folder of the package; None if no candidate matches.
    version: version of the package; "" if unknown.
    reason: why no candidate matches; "" if a candidate matches or if there are no candidates.
    """

    folder: Path | None = None
    version: str = ""
    reason: str = ""


def find_package(probe: PackageProbe) -> ProbeResult:
    """Return the first folder among the locations of a probe that has all markers of a set."""
    reasons = []
    for location in probe.locations:
        for folder in _iter_folders(location):
            missing_by_set = [
                _find_first_missing(folder, markers)
                for markers in (probe.markers, *probe.alternatives)
            ]
            package_version = read_version(folder, probe.version_file)
            if "" in missing_by_set:
                return ProbeResult(folder, package_version)
            missing = " and ".join(dict.fromkeys(missing_by_set))
            reasons.append(f"unsupported {f'{location} {package_version}'.strip()}: {missing}")
    return ProbeResult(reason="; ".join(reasons))


@contextmanager
def import_context(probe: PackageProbe, *, need: str) -> Iterator[Path]:
    """Yield the folder of a package to a block that imports it.

    Raises ConfigurationError if the package is missing, or if its import fails, for example because
    it was built for another machine.

    need: description of a usable build, for messages.
    """
    result = find_package(probe)
    if result.folder is None:
        raise ConfigurationError(probe.name, got=result.reason or "nothing", need=probe.need)
    try:
        yield result.folder
    except _IMPORT_ERRORS as error:
        got = f"{type(error).__name__}: {error}"[:300]
        what = f"{probe.locations[0]} in {result.folder}"
        raise ConfigurationError(what, got=got, need=need) from error


def import_from_folder(folder: Path, name: str) -> ModuleType:
    """Import the package in `folder` under `name`. On an error, remove it from sys.modules."""
    spec = spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        unload(name)
        raise
    return module


def unload(name: str) -> None:
    """Remove a package and its submodules from sys.modules."""
    for module in [
        module for module in sys.modules if module == name or module.startswith(f"{name}.")
    ]:
        del sys.modules[module]


def find_packages(probes: Iterable[PackageProbe]) -> tuple[frozenset[str], dict[str, str]]:
    """Return the names of available packages, and for other names why no package matches."""
    results = {probe.name: find_package(probe) for probe in probes}
    available = frozenset(name for name, result in results.items() if result.folder is not None)
    return available, {name: result.reason for name, result in results.items() if result.reason}


def read_version(folder: Path, file: str = "__init__.py") -> str:
    """Return the `__version__` in a file of a package, or ""."""
    match = _VERSION.search(_read_text(folder / file) or "")
    return match[1] if match else ""


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _iter_folders(location: str) -> Iterator[Path]:
    top, _, subfolder = location.partition("/")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # a stub in sys.modules, or a faulty finder
        return
    for root in (spec and spec.submodule_search_locations) or ():
        folder = Path(root, subfolder)
        if folder.is_dir():
            yield folder


def _find_first_missing(folder: Path, markers: Markers) -> str:
    """Return a description of the first marker that the folder lacks, or ""."""
    missing = (_find_missing_marker(folder, *marker) for marker in markers)
    return next(filter(None, missing), "")


def _find_missing_marker(folder: Path, file: str, marker_text: str) -> str:
    # A path relative to the parent, for a file that is installed beside the package.
    root, pattern = (folder.parent, file[3:]) if file.startswith("../") else (folder, file)
    try:
        paths = [path for path in root.glob(pattern) if path.is_file()]
    except OSError:
        paths = []
    if not marker_text:
        return "" if paths else f"no {file}"
    texts = [text for text in map(_read_text, paths) if text is not None]
    if not texts:
        return f"no {file}"
    is_found = any(marker_text in text for text in texts)
    return "" if is_found else f"no {marker_text} in {file}"


def _read_text(path: Path) -> str | None:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_BYTES)
    except OSError:
        return None
