"""A plugin of pytest for transformers' own tests: experts run on ours, each case is written down.

HF_SUITES_SIDE: "theirs" leaves everything as it is. "ours" makes our implementation the one that a
model takes where nothing else is asked for, and the second of the three that upstream compares with
eager (its name there stays "batched_mm"). HF_SUITES_INTO: the file that gets a line for each case.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.modeling_utils import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hf_suites.upstream import is_wanted
from modular_kernel.integrations.transformers import register, registration
from modular_kernel.operators.pairing import Pairing

_GIVEN = os.environ  # noqa: TID251 (pytest hands a plugin nothing else)
_CALLS = {"ran": 0}
_SEEN: dict[str, dict[str, Any]] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the cases in which experts compute."""
    items[:] = [item for item in items if is_wanted(item.name)]


def pytest_collection_finish() -> None:
    """Switch ours in, once upstream's modules are there."""
    if _GIVEN["HF_SUITES_SIDE"] == "ours":
        _switch_in()


def _switch_in() -> None:
    ours = register()
    served = registration(ours)
    asked = PreTrainedModel.get_correct_experts_implementation

    def chosen(model: PreTrainedModel, requested: str | None) -> str:
        name: str = asked(model, ours if requested is None else requested)
        return name

    setattr(PreTrainedModel, asked.__name__, chosen)
    for name, module in list(sys.modules.items()):
        if name.endswith("test_modeling_common"):
            module.batched_mm_experts_forward = served  # type: ignore[attr-defined]
    run = Pairing.run

    def counted(pairing: Pairing, *call: Any) -> Any:
        _CALLS["ran"] += 1
        return run(pairing, *call)

    setattr(Pairing, run.__name__, counted)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Count the calls that ours ran within a case."""
    before = _CALLS["ran"]
    yield
    line = _SEEN.pop(item.nodeid, {"outcome": "lost", "why": ""})
    line = {"case": item.nodeid, **line, "ran": _CALLS["ran"] - before}
    with Path(_GIVEN["HF_SUITES_INTO"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember how a case ended: the first part of it that did not pass counts."""
    if getattr(report, "context", None) is not None and report.passed:
        return  # a subtest that passed is no end
    kept = _SEEN.get(report.nodeid)
    if kept is None or kept["outcome"] == "passed":
        lines = str(report.longrepr or "").strip().splitlines()
        errors = [line for line in lines if line.startswith("E ")]
        why = " ".join((errors or lines[-1:])[0].split())[:240] if lines else ""
        _SEEN[report.nodeid] = {"outcome": report.outcome, "why": why}
