"""Examples in docstrings run and return the values that they show."""

import doctest
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("modular_kernel", "prepare_finalize", "experts", "topk_reduce")


def list_modules_with_examples() -> list[str]:
    """Return the modules with a `>>>` prompt in a docstring."""
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if ">>> " in path.read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("name", list_modules_with_examples())
def test_examples_pass(name: str) -> None:
    failed, attempted = doctest.testmod(import_module(name))
    assert attempted > 0
    assert failed == 0


def test_public_functions_have_examples() -> None:
    with_examples = set(list_modules_with_examples())
    assert {
        "modular_kernel.catalog",
        "modular_kernel.spec.problem",
        "modular_kernel.spec.placement",
    } <= with_examples


def test_wrong_example_is_detected(capsys: pytest.CaptureFixture[str]) -> None:
    module = ModuleType("wrong", ">>> 1 + 1\n3\n")
    assert doctest.testmod(module) == (1, 1)
    assert "Expected:\n    3\nGot:\n    2" in capsys.readouterr().out
