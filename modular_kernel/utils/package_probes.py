"""Optional packages that are told by what is in them, because their names prove nothing.

An index may hold somebody else's package of a name, or one too old; another project may ship a
copy inside its own. What is looked at are files: nothing is imported before it is chosen.
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
_MOST_BYTES = 1 << 20  # of a file that is looked at
# What the import of a package for another torch, GPU or toolkit was seen to raise.
_FAILURES = (ImportError, AssertionError, OSError, RuntimeError, AttributeError)


@dataclass(frozen=True)
class Provider:
    """An optional package of a given interface.

    name: as `Requirements.packages` has it. places: folders that may hold it, the first one wins,
    each an importable package and what lies below it: "deep_gemm", "vllm/third_party/deep_gemm".
    signs: (file of such a folder, word in it), all of which must be there. need: what they stand
    for. source: how to get it. version_file: where its `__version__` is stated.
    """

    name: str
    places: tuple[str, ...]
    signs: tuple[tuple[str, str], ...]
    need: str
    source: str
    version_file: str = "__init__.py"


@dataclass(frozen=True)
class Found:
    """Where a provider is; or why what was found there is not it: "" if nothing was found."""

    folder: Path | None = None
    version: str = ""
    why: str = ""


def find(provider: Provider) -> Found:
    """Look for a provider, in its places in order; nothing is imported."""
    why = []
    for place in provider.places:
        for folder in _folders(place):
            lacks = next(filter(None, (_lacks(folder, *sign) for sign in provider.signs)), "")
            stated = version_in(folder, provider.version_file)
            if not lacks:
                return Found(folder, stated)
            why.append(f"another {f'{place} {stated}'.strip()}: {lacks}")
    return Found(why="; ".join(why))


@contextmanager
def importing(provider: Provider, *, need: str) -> Iterator[Path]:
    """Yield the folder that holds a provider, to import it from there.

    need: a copy that can be imported, in words. ConfigurationError where the provider is not there,
    or where its import raises what one for another machine does.
    """
    found = find(provider)
    if found.folder is None:
        raise ConfigurationError(provider.name, got=found.why or "nothing", need=provider.need)
    try:
        yield found.folder
    except _FAILURES as error:
        got = f"{type(error).__name__}: {error}"[:300]
        what = f"{provider.places[0]} in {found.folder}"
        raise ConfigurationError(what, got=got, need=need) from error


def module_of(folder: Path, name: str) -> ModuleType:
    """Import the package of a folder under a name; nothing is left of one that fails."""
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
        forget(name)
        raise
    return module


def forget(name: str) -> None:
    """Take a package and all below it out of sys.modules."""
    for known in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
        del sys.modules[known]


def sort_out(providers: Iterable[Provider]) -> tuple[frozenset[str], dict[str, str]]:
    """Return the names of those that are here, and why others that seem to be are not."""
    found = {provider.name: find(provider) for provider in providers}
    here = frozenset(name for name, one in found.items() if one.folder is not None)
    return here, {name: one.why for name, one in found.items() if one.why}


def version_in(folder: Path, file: str = "__init__.py") -> str:
    """Return the version that a file of a package states, "" if it does not."""
    stated = _VERSION.search(_text(folder / file) or "")
    return stated[1] if stated else ""


def version_of(distribution: str) -> str | None:
    """Return the version of a distribution that is installed, without importing it; else None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _folders(place: str) -> Iterator[Path]:
    top, _, below = place.partition("/")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # a stub in sys.modules, or a broken finder
        return
    for root in (spec and spec.submodule_search_locations) or ():
        folder = Path(root, below)
        if folder.is_dir():
            yield folder


def _lacks(folder: Path, file: str, word: str) -> str:
    text = _text(folder / file)
    if text is None:
        return f"no {file}"
    return "" if word in text else f"no {word} in {file}"


def _text(path: Path) -> str | None:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return None
