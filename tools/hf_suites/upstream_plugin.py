"""A pytest plugin for transformers' tests that runs experts on our parts and records each case.

It reads two environment variables. HF_SUITES_SIDE is "theirs", which changes nothing, or "ours",
which makes our implementation the default of models. With "ours", our implementation also replaces
"batched_mm", one of the implementations that the tests compare with eager, under the same name.
HF_SUITES_INTO is the file to which a line is appended for each case.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.modeling_utils import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hf_suites.upstream import is_included
from modular_kernel.integrations.transformers import register, registration
from modular_kernel.operators.pairing import Pairing

_ENVIRONMENT = os.environ  # noqa: TID251 (pytest passes no options to a plugin)
_CALLS = {"ran": 0}
_OUTCOMES: dict[str, dict[str, Any]] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the cases that run experts."""
    items[:] = [item for item in items if is_included(item.name)]


def pytest_collection_finish() -> None:
    """Install our implementation, after upstream's modules are imported."""
    if _ENVIRONMENT["HF_SUITES_SIDE"] == "ours":
        _install()


def _install() -> None:
    ours = register()
    registered = registration(ours)
    original = PreTrainedModel.get_correct_experts_implementation

    def default_to_ours(model: PreTrainedModel, requested: str | None) -> str:
        name: str = original(model, ours if requested is None else requested)
        return name

    setattr(PreTrainedModel, original.__name__, default_to_ours)
    for name, module in list(sys.modules.items()):
        if name.endswith("test_modeling_common"):
            module.batched_mm_experts_forward = registered  # type: ignore[attr-defined]
    run = Pairing.run

    def count_and_run(pairing: Pairing, *call: Any) -> Any:
        _CALLS["ran"] += 1
        return run(pairing, *call)

    setattr(Pairing, run.__name__, count_and_run)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Record the outcome of a case and the number of calls that our implementation ran."""
    before = _CALLS["ran"]
    yield
    line = _OUTCOMES.pop(item.nodeid, {"outcome": "lost", "why": ""})
    line = {"case": item.nodeid, **line, "ran": _CALLS["ran"] - before}
    with Path(_ENVIRONMENT["HF_SUITES_INTO"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the outcome of a case, given by its first phase that did not pass."""
    if getattr(report, "context", None) is not None and report.passed:
        return  # ignore passed subtests
    previous = _OUTCOMES.get(report.nodeid)
    if previous is None or previous["outcome"] == "passed":
        lines = str(report.longrepr or "").strip().splitlines()
        errors = [line for line in lines if line.startswith("E ")]
        why = " ".join((errors or lines[-1:])[0].split())[:240] if lines else ""
        _OUTCOMES[report.nodeid] = {"outcome": report.outcome, "why": why}
