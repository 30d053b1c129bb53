"""Tests of tools/check_choice.py: the layers that it draws, and its report on the choices of
`compose`.
"""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from modular_kernel.cli.presets import SHAPES
from modular_kernel.select.timing import PairingTimer

FILE = Path(__file__).parents[2] / "tools" / "check_choice.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_choice", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_seed_determines_the_drawn_layers(tool: ModuleType) -> None:
    first = tool.random_layers(4, 1)
    assert first == tool.random_layers(4, 1)
    assert first != tool.random_layers(4, 2)
    for sizes in tool.random_layers(100, 3).values():
        experts, top_k, hidden, intermediate = sizes.values()
        assert sizes not in SHAPES.values()
        assert 4 * top_k <= experts
        assert (hidden % 256, intermediate % 128) == (0, 0)
        assert 3e8 <= 6 * experts * hidden * intermediate <= 16e9


@pytest.mark.parametrize("slow", ["TorchExperts", "NaiveBatchedExperts"])
def test_report_compares_the_choice_with_the_default_and_the_best(
    tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    slow: str,
) -> None:
    """The clock is simulated: one of the two experts parts takes 1.3 times as long as the other."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")

    def compare_with_default(plan, _default, inputs, _device):
        kernel = plan.kernel.kernel(inputs.problem.tokens)
        return 1.0, 1.0 if type(kernel.experts).__name__ == "TorchExperts" else ratio, 0.0

    ratio = 1 / 1.3 if slow == "TorchExperts" else 1.3
    monkeypatch.setattr(PairingTimer, "_time_once", lambda _, r: 1.3 if r.pair[1] == slow else 1.0)
    monkeypatch.setattr(tool, "_compare_with_default", compare_with_default)
    out = tmp_path / "out.json"
    arguments = ["--layer", "4,2,64,32", "--tokens-list", "1,4", "--budgets", "0,default"]
    monkeypatch.setattr("sys.argv", ["check_choice.py", *arguments, "--json", str(out)])
    assert tool.main() == 0
    report = json.loads(out.read_text())
    assert [call["same_again"] for call in report["calls"]] == [True, True]
    ratios = {(c["budget"], c["tokens"]): (c["x_default"], c["x_best"]) for c in report["cells"]}
    assert set(ratios) == {(b, t) for b in (0.0, 20.0) for t in (1, 4)}
    timed_ratios = (ratio, 1.0) if slow == "TorchExperts" else (1.0, 1.0)
    untimed_ratios = (1.0, 1.3) if slow == "TorchExperts" else (1.0, 1.0)
    assert ratios[20.0, 4] == pytest.approx(timed_ratios)
    assert ratios[0.0, 4] == pytest.approx(untimed_ratios)
    assert "budget 20 s: 2 cells" in capsys.readouterr().out


def test_slower_choice_and_overrun_budget_are_errors(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = {"layer": "L", "quant": "none", "tokens": 4, "budget": 5.0, "x_best": 1.0}
    call = {"layer": "L", "quant": "none", "budget": 5.0, "first_s": 1.0, "same_again": True}

    def get_exit_code(x_default: float, noise: float, **changes: object) -> int:
        cells = [{**cell, "x_default": x_default, "noise": noise}]
        return tool._print_summary({"cells": cells, "calls": [{**call, **changes}]}, 1.02)

    assert get_exit_code(1.0, 0.0) == 0
    assert get_exit_code(1.05, 0.02) == 0  # within the noise
    assert get_exit_code(1.05, 0.01) == 1
    assert get_exit_code(1.0, 0.0, first_s=6.5) == 1
    assert get_exit_code(1.0, 0.0, same_again=False) == 1
    out = capsys.readouterr().out
    assert "slower than the default: L none at 4 tokens" in out
    assert "overrun: L none took 6.5 s with a budget of 5 s" in out
