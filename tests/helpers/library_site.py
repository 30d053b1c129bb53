"""A context in which a vendor's library is imported from a given folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from modular_kernel.utils.package_probes import unload


@contextmanager
def library_site(
    folder: Path, monkeypatch: pytest.MonkeyPatch, library: ModuleType, *names: str
) -> Iterator[Path]:
    """Import from `folder` first; afterwards reset `library.load` and unload `names`."""
    monkeypatch.syspath_prepend(str(folder))
    library.load.cache_clear()
    yield folder
    library.load.cache_clear()
    for name in names:
        unload(name)
