"""docs/names.md points at what exists."""

import re
from importlib import import_module
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[1] / "docs/names.md").read_text()
PATHS = sorted(set(re.findall(r"`((?:modular_kernel|experts)(?:\.\w+)+)", TEXT)))


def test_the_page_was_read() -> None:
    assert len(PATHS) >= 9


@pytest.mark.parametrize("path", PATHS)
def test_it_points_at_what_exists(path: str) -> None:
    """A name in a module, or a name in a class of one."""
    module, _, name = path.rpartition(".")
    owner, _, inner = module.rpartition(".")
    found = getattr(import_module(owner), inner, None) or import_module(module)
    assert hasattr(found, name)


@pytest.mark.parametrize("row", re.findall(r"^\| (.+?) \| the same, in `([\w.]+)`", TEXT, re.M))
def test_the_same_name_is_the_same(row: tuple[str, str]) -> None:
    names, module = row
    for name in re.findall(r"`(\w+)`", names):
        assert hasattr(import_module(module), name)
