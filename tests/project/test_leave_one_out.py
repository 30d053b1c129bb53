"""Tests of tools/leave_one_out.py, which measures the launches of a layer if its tuned file is
missing.

The tool compares three launches: "tuned" is from the layer's file, "neighbors" from the files of
similar layers, and "heuristics" from the heuristics.
"""

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from experts.triton.launch_config import LaunchConfig, MoEConfig
from modular_kernel.spec.problem import Problem
from modular_kernel.tuning.search import Refusal

FILE = Path(__file__).parents[2] / "tools" / "leave_one_out.py"
BLOCK_NS = (128, 256, 64)  # block_n of GEMM 2 in three launches, see FakeBench
LAYERS = ("mixtral", "mixtral_tp2", "dsv3_tp8")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("leave_one_out", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def configs(tool: ModuleType, tmp_path: Path) -> Path:
    """Copy the tuned files of three layers to a temporary folder, and return the folder."""
    version_folder = tmp_path / "triton_3_6_0"
    version_folder.mkdir()
    for sizes in ("E=8,N=14336", "E=8,N=7168", "E=256,N=256"):
        name = f"{sizes},device_name=NVIDIA_H200.json"
        shutil.copy(tool.CONFIGS / version_folder.name / name, version_folder / name)
    return tmp_path


def test_layer_without_a_file_uses_the_nearest_layer(tool: ModuleType, configs: Path) -> None:
    timed_cases = tool.cases(LAYERS, ["none"], [1, 4096], configs)
    assert [(case.layer, case.problem.tokens) for case in timed_cases] == [
        (layer, tokens) for layer in LAYERS for tokens in (1, 4096)
    ]
    tuned = {(case.layer, case.problem.tokens): case.tuned for case in timed_cases}
    case_by_key = {(case.layer, case.problem.tokens): case for case in timed_cases}
    assert case_by_key["mixtral", 1].origin == "E=8, K=2, H=4096, I=7168, 1 token"
    assert case_by_key["mixtral", 1].neighbors == tuned["mixtral_tp2", 1]
    assert case_by_key["mixtral_tp2", 4096].origin == "E=8, K=2, H=4096, I=14336, 4096 tokens"
    (skewed_case,) = tool.cases(["mixtral"], ["none"], [16], configs)  # 4 rows per expert
    assert skewed_case.origin == "heuristics", "its launch depends on the skew of the routing"
    assert skewed_case.neighbors == skewed_case.heuristics
    assert case_by_key["dsv3_tp8", 1].origin == "heuristics", "no tuned layer is similar enough"
    assert (
        case_by_key["dsv3_tp8", 1].neighbors
        == case_by_key["dsv3_tp8", 1].heuristics
        != tuned["dsv3_tp8", 1]
    )
    assert tool.cases(LAYERS, ["fp8_w8a8_block"], [1], configs) == [], (
        "no layer has a tuned file for this scheme"
    )
    with_all_files = tool.cases(["mixtral"], ["none"], [1])
    assert with_all_files[0].tuned == tuned["mixtral", 1], "the tuned files in the package"


def test_equal_launches_share_a_time(tool: ModuleType, configs: Path) -> None:
    case = tool.cases(["dsv3_tp8"], ["none"], [16], configs)[0]
    assert case.choices == [case.tuned, case.heuristics]
    row = json.loads(json.dumps(case.record({case.tuned: 1e-5, case.heuristics: 1.5e-5})))
    assert row["us"] == {"tuned": 10.0, "neighbors": 15.0, "heuristics": 15.0}
    (result,) = tool.compute_results([row])
    assert (result.neighbors, result.heuristics) == (1.5, 1.5)
    equal_case = tool.TileCase(
        case.layer, case.problem, case.tuned, case.tuned, case.tuned, "heuristics"
    )
    assert equal_case.choices == [case.tuned]
    (result,) = tool.compute_results([equal_case.record({})])
    assert (result.neighbors, result.heuristics) == (1.0, 1.0)


class FakeBench:
    """A launch takes `gemm2.block_n` microseconds. With block_n = 64, its output is wrong."""

    def __init__(self, *_: object, tokens: list[int], target_ms: float) -> None:
        self.tokens = tokens

    def compare(self, tokens: int, choices: list[MoEConfig]) -> dict[MoEConfig, float | Refusal]:
        assert tokens in self.tokens
        microseconds = {choice: choice.gemm2.block_n for choice in choices}
        return {
            c: Refusal("wrong") if times_us == 64 else times_us * 1e-6
            for c, times_us in microseconds.items()
        }


class FakeCompiler:
    submitted: list[MoEConfig] = []  # noqa: RUF012 (shared by all instances; the test clears it)

    def __init__(self, workers: int) -> None:
        pass

    def __enter__(self) -> "FakeCompiler":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(
        self, pair: object, space: object, problem: Problem, choices: list[MoEConfig]
    ) -> None:
        FakeCompiler.submitted += choices


def test_only_different_launches_are_timed(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(tool, "DeviceBenchmarker", FakeBench)
    monkeypatch.setattr(tool, "Compiler", FakeCompiler)
    FakeCompiler.submitted.clear()
    problem = Problem(16, 4096, 14336, 8, 2)
    first, second, incorrect = (
        MoEConfig(LaunchConfig(16, 32, 64, 1, 4, 4), LaunchConfig(16, n, 64, 1, 4, 4), "aligned")
        for n in BLOCK_NS
    )
    timed_cases = [
        tool.TileCase("a", problem, first, second, first, "x"),
        tool.TileCase("a", problem.with_tokens(64), first, first, first, "x"),
        tool.TileCase("b", problem, first, incorrect, first, "x"),
        tool.TileCase("c", problem, second, second, second, "x"),
    ]
    saved: list[list[dict[str, object]]] = []
    num_missing = tool.time_cases(timed_cases, 1e9, lambda rows: saved.append(list(rows)))
    assert num_missing == 1, "the case with a wrong output has no time"
    assert "wrong" in capsys.readouterr().err
    times_us = {(row["layer"], row["tokens"]): row["us"] for row in saved[-1]}
    expected_us = {"tuned": 128.0, "neighbors": 256.0, "heuristics": 128.0}
    assert times_us == {("a", 16): expected_us, ("a", 64): {}, ("c", 16): {}}
    assert FakeCompiler.submitted == [first, second, first, incorrect]
    assert tool.time_cases(timed_cases, -1.0, saved.append) == 3, (
        "after the time limit, layers with different launches are skipped"
    )
    assert [row["layer"] for row in saved[-1]] == ["c"]


def make_row(layer: str, tokens: int, neighbors: float, heuristics: float) -> dict[str, object]:
    times_us = {"tuned": 10.0, "neighbors": 10.0 * neighbors, "heuristics": 10.0 * heuristics}
    return {"layer": layer, "quant": "none", "tokens": tokens, "origin": "E=8, K=2", "us": times_us}


def test_report_has_totals_and_slowest_cases(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    # The tool writes cases with equal launches first, without times.
    row_without_times = {**make_row("one", 4096, 1.0, 1.0), "us": {}}
    rows = [
        row_without_times,
        make_row("two", 16, 1.21, 1.0),
        make_row("two", 1, 1.3, 1.0),
        make_row("one", 16, 0.9, 1.44),
    ]
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"measured": "today with this", "rows": rows}))
    assert tool.main(["report", str(record)]) == 0
    report_lines = capsys.readouterr().out.splitlines()
    assert report_lines[0].startswith("# Tiles without a tuned file")
    assert any("The tiles differ in 3 of 4 cases" in line for line in report_lines)
    assert any(line.endswith("Measured today with this.") for line in report_lines)
    assert "Raw rows: `record.json`." in report_lines
    total_line = next(line for line in report_lines if line.startswith("| all |"))
    assert total_line == "| all | 4 | 2 of 4, 50.0% | 1.091 | 1.30 | 3 of 4, 75.0% | 1.095 | 1.44 |"
    row_index = report_lines.index("| one | none |  | 0.90 | 1.00 |")
    assert report_lines[row_index + 1] == "| two | none | 1.30 | 1.21 |  |"
    assert report_lines[-2:] == [
        "- two none, 1 token: 1.30 x, tiles of E=8, K=2",
        "- two none, 16 tokens: 1.21 x, tiles of E=8, K=2",
    ]
