"""All names in docs/names.md exist in the modules that the page states."""

import re
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest

PAGE_TEXT = (Path(__file__).parents[2] / "docs/names.md").read_text()
PATHS = sorted(set(re.findall(r"`((?:modular_kernel|experts)(?:\.\w+)+)", PAGE_TEXT)))


def test_the_page_has_rows() -> None:
    assert len(PATHS) >= 9


@pytest.mark.parametrize("path", PATHS)
def test_names_exist(path: str) -> None:
    assert resolve_name(path) is not None


@pytest.mark.parametrize(
    "row", re.findall(r"^\| (.+?) \| the same, in `([\w.]+)`", PAGE_TEXT, re.M)
)
def test_unchanged_names_exist_in_the_stated_module(row: tuple[str, str]) -> None:
    names, module = row
    for name in re.findall(r"`(\w+)`", names):
        assert hasattr(import_module(module), name)
