"""Identification of optional packages by their content, for names that are not unique.

A package index may hold an unrelated package of the same name, or an old version; another project
may vendor a copy. Only files are inspected; nothing is imported before a package is chosen.
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
_MAX_BYTES = 1 << 20  # read from each inspected file
# Exceptions seen when importing a package built for another torch, GPU or toolkit.
_FAILURES = (ImportError, AssertionError, OSError, RuntimeError, AttributeError)


@dataclass(frozen=True)
class PackageProbe:
    """An optional package, identified by its content.

    name: as in `Requirements.packages`. places: candidate folders in order of preference, each an
    importable package with an optional subfolder: "deep_gemm", "vllm/third_party/deep_gemm".
    signs: (file in the folder, text in the file); all must be present. need: what they indicate,
    for messages. source: how to install it. version_file: the file that defines `__version__`.
    """

    name: str
    places: tuple[str, ...]
    markers: tuple[tuple[str, str], ...]
    need: str
    source: str
    version_file: str = "__init__.py"


@dataclass(frozen=True)
class ProbeResult:
    """Location of a provider, or why candidates do not qualify ("" if there are none)."""

    folder: Path | None = None
    version: str = ""
    why: str = ""


def find(provider: PackageProbe) -> ProbeResult:
    """Search a provider's places in order, without importing anything."""
    reasons = []
    for place in provider.places:
        for folder in _folders(place):
            missing = next(
                filter(None, (_missing_sign(folder, *sign) for sign in provider.markers)), ""
            )
            stated = version_in(folder, provider.version_file)
            if not missing:
                return ProbeResult(folder, stated)
            reasons.append(f"another {f'{place} {stated}'.strip()}: {missing}")
    return ProbeResult(why="; ".join(reasons))


@contextmanager
def importing(provider: PackageProbe, *, need: str) -> Iterator[Path]:
    """Yield the folder that holds a provider, to import it from there.

    need: description of a usable copy, for messages. Raises ConfigurationError if the provider is
    missing, or if importing it fails as a build for another machine does.
    """
    location = find(provider)
    if location.folder is None:
        raise ConfigurationError(provider.name, got=location.why or "nothing", need=provider.need)
    try:
        yield location.folder
    except _FAILURES as error:
        got = f"{type(error).__name__}: {error}"[:300]
        what = f"{provider.places[0]} in {location.folder}"
        raise ConfigurationError(what, got=got, need=need) from error


def import_from_folder(folder: Path, name: str) -> ModuleType:
    """Import the package in a folder under `name`; remove it from sys.modules if that fails."""
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


def probe_all(providers: Iterable[PackageProbe]) -> tuple[frozenset[str], dict[str, str]]:
    """Return the names of available providers, and why similar packages do not qualify."""
    locations = {provider.name: find(provider) for provider in providers}
    available = frozenset(
        name for name, location in locations.items() if location.folder is not None
    )
    return available, {name: location.why for name, location in locations.items() if location.why}


def version_in(folder: Path, file: str = "__init__.py") -> str:
    """Return the `__version__` in a file of a package, "" if it has none."""
    match = _VERSION.search(_text(folder / file) or "")
    return match[1] if match else ""


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution, without importing it; else None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _folders(place: str) -> Iterator[Path]:
    top, _, below = place.partition("/")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # a stub in sys.modules, or a faulty finder
        return
    for root in (spec and spec.submodule_search_locations) or ():
        folder = Path(root, below)
        if folder.is_dir():
            yield folder


def _missing_sign(folder: Path, file: str, word: str) -> str:
    text = _text(folder / file)
    if text is None:
        return f"no {file}"
    return "" if word in text else f"no {word} in {file}"


def _text(path: Path) -> str | None:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_BYTES)
    except OSError:
        return None
