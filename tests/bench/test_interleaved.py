"""`make bench`: sampled layers, interleaved timing, speedups of our layers, and the command."""

import importlib.util
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from modular_kernel.bench.candidates import (
    Candidate,
    ComposedLayer,
    DefaultLayer,
    Layer,
    PairingLayer,
    get_gemm_library,
)
from modular_kernel.bench.interleaved import CaseBlock, Comparison, run_interleaved
from modular_kernel.bench.run import format_error
from modular_kernel.bench.sampled_layers import SampledLayer, sample_layers
from modular_kernel.bench.speedups import (
    COMPOSED,
    DEFAULT,
    OTHER_LIBRARY,
    OWN_KERNELS,
    collect_case_times,
    get_column_name,
    layers_table,
    merge_reports,
    plot_speedups,
    render_markdown,
    replace_section,
    speedups_table,
    summarize_speedups,
    unmeasured_list,
)
from modular_kernel.catalog import this_machine
from modular_kernel.errors import ConfigurationError
from modular_kernel.measure.cases import LayerCase
from modular_kernel.measure.records import BASELINE, OURS, PEER, Report, Row
from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.reference import float64_reference
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing

TOOLS = Path(__file__).parents[2] / "tools"
PF = "MoEPrepareAndFinalizeNoEP"
LAYER = SampledLayer(4, 2, 128, 64)


def test_default_seed_samples_these_layers() -> None:
    names = [layer.name for layer in sample_layers()]
    assert names == [
        "E128-K2-H4096-I2816",
        "E16-K4-H5120-I2048",
        "E96-K8-H7936-I1024",
        "E48-K4-H8192-I3072",
    ]


@pytest.mark.parametrize("seed", range(20))
def test_one_sampled_layer_is_large_and_one_small(seed: int) -> None:
    layers = sample_layers(seed)
    assert len(set(layers)) == 4
    assert layers[0].size > 1e9
    assert layers[1].size < 3e8
    for layer in layers:
        problem = layer.problem(16)
        assert problem.hidden % 128 == problem.intermediate % 128 == 0
        assert problem.top_k <= problem.experts


def test_fewer_than_two_layers_cannot_be_sampled() -> None:
    with pytest.raises(ConfigurationError, match="got 1"):
        sample_layers(count=1)


class ScaledLayer(Layer):
    """A layer in plain torch whose output is multiplied by `factor`."""

    quant = "none"

    def __init__(self, name: str, factor: float = 1.0, log: list[str] | None = None) -> None:
        self.name, self.factor, self.log = name, factor, [] if log is None else log

    def refusal(self, problem: Problem) -> str | None:
        return "no calls of 3 tokens" if problem.tokens == 3 else None

    def setup(self, problem: Problem, weights: ExpertWeights) -> None:
        if self.name == "broken":
            raise RuntimeError("no such weights")
        self.problem, self.weights = problem, weights

    def tune(self, problem: Problem) -> None:
        self.log.append(f"tune {problem.tokens}")

    def call(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        self.log.append(self.name)
        y_TH = float64_reference(x_TH, self.weights, routing, self.problem.with_tokens(len(x_TH)))
        return (y_TH * self.factor).to(x_TH.dtype)


def make_candidate(name: str, origin: str = PEER, **options: Any) -> Candidate:
    return Candidate(name, "none", origin, partial(ScaledLayer, name, **options))


def make_cases(*tokens: int) -> tuple[LayerCase, ...]:
    kind = RoutingKind("uniform")
    return tuple(LayerCase(LAYER.name, LAYER.problem(count), kind) for count in tokens)


def run_comparison(
    *candidates: Candidate, tokens: tuple[int, ...] = (8,), **options: Any
) -> Report:
    blocks = (CaseBlock(make_cases(*tokens), candidates),)
    return run_interleaved(Comparison(blocks, this_machine(device="cpu"), **options))


def test_each_layer_has_a_row_with_its_outcome() -> None:
    candidates = [
        make_candidate("right"),
        make_candidate("wrong", factor=1.5),
        make_candidate("broken"),
    ]
    report = run_comparison(*candidates, tokens=(8, 3), rounds=3)
    outcomes = {(row.layer, row.tokens): row.status for row in report.rows}
    assert outcomes == {
        ("right", 8): "ok",
        ("wrong", 8): "wrong",
        ("broken", 8): "failed",
        ("right", 3): "refused",
        ("wrong", 3): "refused",
        ("broken", 3): "refused",
    }
    right, wrong, broken = report.rows[:3]
    assert right.us is not None
    assert right.us > 0
    assert right.replays == 3
    assert right.error is not None
    assert right.error_bound is not None
    assert right.error < right.error_bound
    assert wrong.us is None
    assert "relative error" in wrong.note
    assert "no such weights" in broken.note


def test_layers_are_timed_interleaved() -> None:
    log: list[str] = []
    run_comparison(make_candidate("a", log=log), make_candidate("b", log=log), rounds=20)
    rounds = [log[i : i + 2] for i in range(len(log) - 4 - 40, len(log) - 4, 2)]
    assert all(sorted(pair) == ["a", "b"] for pair in rounds)
    assert len({tuple(pair) for pair in rounds}) == 2  # both orders occur


def test_layers_are_tuned_for_the_tokens_of_each_case() -> None:
    log: list[str] = []
    run_comparison(make_candidate("a", log=log), tokens=(8, 4), rounds=1)
    assert [line for line in log if line.startswith("tune")] == ["tune 8", "tune 4"]


def test_cases_not_started_in_time_are_listed() -> None:
    report = run_comparison(make_candidate("a"), seconds=0.0)
    assert [row.status for row in report.rows] == ["skipped"]
    assert any("the time limit had passed" in line for line in unmeasured_list(report))


def test_report_is_passed_on_after_every_case() -> None:
    row_counts: list[int] = []
    blocks = (CaseBlock(make_cases(8, 4), (make_candidate("a"),)),)
    run_interleaved(
        Comparison(blocks, this_machine(device="cpu"), rounds=1),
        on_report=lambda report: row_counts.append(len(report.rows)),
    )
    assert row_counts == [1, 2]


def test_compiling_calls_each_layer_once_and_times_nothing() -> None:
    log: list[str] = []
    report = run_comparison(make_candidate("a", log=log), tokens=(8, 4), compile_only=True)
    assert log == ["a", "a"]
    assert report.rows == ()


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_block", "mxfp4_w4a16"])
def test_our_layers_pass_the_check(quant: str) -> None:
    machine = this_machine(device="cpu")
    layer = SampledLayer(4, 2, 128, 128)
    case = LayerCase(layer.name, layer.problem(8), RoutingKind("uniform"))
    candidates = (
        Candidate("FusedMoE", quant, OURS, partial(DefaultLayer, quant)),
        Candidate("compose", quant, OURS, partial(ComposedLayer, quant, machine, (8,), 0.0)),
        Candidate(
            "TorchExperts", quant, OURS, partial(PairingLayer, PF, "TorchExperts", quant, machine)
        ),
    )
    block = CaseBlock((case,), candidates)
    report = run_interleaved(Comparison((block,), machine, rounds=1))
    assert [row.status for row in report.rows] == ["ok"] * 3
    assert PF in report.rows[1].note


@pytest.mark.parametrize(
    ("experts", "library"),
    [
        ("TritonExperts", ""),
        ("CutlassExpertsFP8", ""),
        ("DeepGemmExperts", "deep_gemm"),
        ("TritonOrDeepGemmExperts", "deep_gemm"),
        ("TritonKernelsExperts", "triton_kernels"),
        ("FlashInferExperts", "flashinfer"),
        ("GroupedGemmExperts", "torch"),
    ],
)
def test_parts_name_the_library_of_their_gemms(experts: str, library: str) -> None:
    assert get_gemm_library(experts) == library


BASE_ROW = Row(
    shape="s",
    experts=4,
    top_k=2,
    hidden=128,
    intermediate=64,
    tokens=1,
    dtype="bfloat16",
    problem="p",
    routing="uniform",
    layer="TritonExperts",
    origin=OURS,
    quant="none",
    operands="bfloat16",
    status="ok",
    mode="graph",
)


def make_row(layer: str, us: float, origin: str = OURS, **changes: Any) -> Row:
    return replace(BASE_ROW, layer=layer, us=us, origin=origin, **changes)


ROWS = (
    make_row("FusedMoE", 10.0),
    make_row("compose", 8.0),
    make_row("TritonExperts", 12.0),
    make_row("CutlassExpertsFP8", 11.0),
    make_row("DeepGemmExperts", 5.0, library="deep_gemm"),
    make_row("vllm_triton", 9.0, PEER),
    make_row("torch_grouped_mm", 20.0, BASELINE),
    make_row("FusedMoE", 10.0, tokens=16),
    make_row("vllm_triton", 40.0, PEER, tokens=16),
    make_row("TritonExperts", 1.0, tokens=16, mode="interpreter"),
)


def make_report(*rows: Row, **options: Any) -> Report:
    return Report({"device": "gpu", "date": "2026-11-29"}, {}, rows, **options)


def test_parts_that_run_other_libraries_have_their_own_column() -> None:
    assert [get_column_name(row) for row in ROWS[:7]] == [
        DEFAULT,
        COMPOSED,
        OWN_KERNELS,
        OWN_KERNELS,
        OTHER_LIBRARY,
        None,
        None,
    ]
    first_case, second_case = collect_case_times(ROWS)
    assert first_case.ours == {DEFAULT: 10.0, COMPOSED: 8.0, OWN_KERNELS: 11.0, OTHER_LIBRARY: 5.0}
    assert (first_case.peer, first_case.peer_name) == (9.0, "vllm_triton")
    assert second_case.ours == {DEFAULT: 10.0}


def test_speedups_are_geometric_means_with_the_worst_case() -> None:
    by_column = {
        summary.column: summary for summary in summarize_speedups(collect_case_times(ROWS))
    }
    default = by_column[DEFAULT]
    assert default.cases == 2
    assert default.mean == pytest.approx((0.9 * 4.0) ** 0.5)
    assert default.num_slower == 1
    assert default.worst.tokens == 1
    assert default.min_speedup == pytest.approx(0.9)
    assert by_column[COMPOSED].num_slower == 0


def test_cases_within_the_margin_are_not_slower() -> None:
    rows = [make_row("FusedMoE", 100.9), make_row("vllm_triton", 100.0, PEER)]
    assert [summary.num_slower for summary in summarize_speedups(collect_case_times(rows))] == [0]
    rows[0] = make_row("FusedMoE", 101.1)
    assert [summary.num_slower for summary in summarize_speedups(collect_case_times(rows))] == [1]


def test_tables_name_each_layer_and_what_is_missing() -> None:
    failed = replace(BASE_ROW, layer="flashinfer", origin=PEER, status="failed", note="no module")
    report = make_report(*ROWS, failed, missing=("vllm_marlin (needs vllm)",))
    lines = layers_table(report)
    assert "| bf16 | DeepGemmExperts `none` | ours, GEMMs of deep_gemm | 1 | 0.56 |  |" in lines
    assert "| bf16 | flashinfer `none` | peer | 0 |  | 1 |" in lines
    assert "- not installed: vllm_marlin (needs vllm)" in unmeasured_list(report)
    assert "- bf16, flashinfer: failed in 1 cases: no module" in unmeasured_list(report)
    text = render_markdown(report)
    for line in [*speedups_table(report), *lines]:
        assert line in text


def test_records_round_trip_and_are_merged(tmp_path: Path) -> None:
    report = make_report(*ROWS[:2], missing=("a",))
    path = tmp_path / "record.json"
    report.write(path)
    loaded = Report.from_json(path.read_text(encoding="utf-8"))
    assert loaded == report
    merged = merge_reports([loaded, make_report(ROWS[2], missing=("a", "b"), stopped="x")])
    assert merged.rows == ROWS[:3]
    assert merged.missing == ("a", "b")
    assert merged.stopped == "x"


def test_merged_reports_have_one_row_per_layer_and_case() -> None:
    """A restarted run repeats cases. Of these, the first measured time is kept."""
    failed = replace(BASE_ROW, layer="FusedMoE", origin=OURS, status="failed", note="broke")
    reports = [
        make_report(failed, make_row("vllm_triton", 8.0, PEER), stopped="broke"),
        make_report(make_row("FusedMoE", 5.0), make_row("vllm_triton", 9.0, PEER), stopped="broke"),
        make_report(failed, stopped="broke"),
    ]
    merged = merge_reports(reports)
    assert [(row.layer, row.us) for row in merged.rows] == [("FusedMoE", 5.0), ("vllm_triton", 8.0)]
    assert merged.stopped == "broke"
    (summary,) = summarize_speedups(collect_case_times(merged.rows))
    assert summary.cases == 1
    assert summary.mean == pytest.approx(8.0 / 5.0)


def test_merged_reports_have_the_days_of_all_reports() -> None:
    dates = ("2026-12-02T01:00:00+00:00", "2026-12-01T23:00:00+00:00", "2026-12-02T02:00:00+00:00")
    reports = [replace(make_report(), environment={"date": date}) for date in dates]
    merged = merge_reports(reports)
    assert merged.environment["days"] == ["2026-12-01", "2026-12-02"]
    assert "2026-12-01 and 2026-12-02, " in render_markdown(merged)
    assert merge_reports([merged, *reports]).environment["days"] == merged.environment["days"]
    assert "days" not in merge_reports(reports[:1]).environment


def test_errors_without_a_message_include_the_source_line() -> None:
    with pytest.raises(AssertionError) as caught:
        raise AssertionError  # as an assertion in a library
    note = format_error(caught.value)
    assert "raise AssertionError" in note
    assert "test_interleaved.py" in note
    assert format_error(ValueError("x")) == "ValueError: x"


def test_plot_is_written(tmp_path: Path) -> None:
    path = tmp_path / "bench.svg"
    plot_speedups(make_report(*ROWS), path)
    assert "<svg" in path.read_text(encoding="utf-8")


def test_sections_are_replaced_between_their_markers() -> None:
    text = "a\n<!-- bench:begin -->\nold\n<!-- bench:end -->\nb\n"
    section = replace_section(text, "bench", ["new"], filename="README.md")
    assert section == "a\n<!-- bench:begin -->\nnew\n<!-- bench:end -->\nb\n"
    with pytest.raises(ValueError, match=r"README\.md: got no section"):
        replace_section("a", "bench", [], filename="README.md")


def test_readme_has_a_section_for_the_results() -> None:
    text = (TOOLS.parent / "README.md").read_text(encoding="utf-8")
    assert "new" in replace_section(text, "bench", ["new"], filename="README.md")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    spec = importlib.util.spec_from_file_location("bench_tool", TOOLS / "bench.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def invoke(tool: ModuleType, *arguments: str) -> Any:
    return CliRunner().invoke(tool.bench, list(arguments))


def test_dry_run_lists_layers_candidates_and_missing_libraries(tool: ModuleType) -> None:
    result = invoke(tool, "--dry-run", "--schemes", "fp8", "--layers", "1")
    assert result.exit_code == 0, result.output
    assert "E16-K4-H5120-I2048 fp8_w8a8_block" in result.output
    assert "12 cases" in result.output
    assert "FusedMoE fp8_w8a8_block (ours)" in result.output
    missing = [line for line in result.output.splitlines() if line.startswith("not installed")]
    listed = [line for line in result.output.splitlines() if "vllm_deepgemm" in line]
    assert listed  # as a candidate, or as missing
    if importlib.util.find_spec("vllm") is None:
        assert "not installed: vllm_deepgemm fp8_w8a8_block (needs vllm)" in missing


def test_tiny_run_writes_a_record_tables_and_a_plot(tool: ModuleType, tmp_path: Path) -> None:
    arguments = ["--tiny", "--layers", "1", "--tokens", "2", "--routing", "uniform"]
    arguments += ["--schemes", "bf16", "--rounds", "1", "--out", str(tmp_path / "a")]
    result = invoke(tool, *arguments)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "a" / "bench.json").read_text(encoding="utf-8"))
    outcomes = {row["layer"]: row["status"] for row in record["rows"]}
    assert outcomes["FusedMoE"] == outcomes["compose"] == outcomes["TritonExperts"] == "ok"
    assert (tmp_path / "a" / "bench.svg").is_file()
    assert "| bf16 | FusedMoE, defaults | 1 |" in result.output
    reloaded = invoke(
        tool, "--load", str(tmp_path / "a" / "bench.json"), "--out", str(tmp_path / "b")
    )
    assert reloaded.exit_code == 0, reloaded.output
    name = "bench.md"
    assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()


def test_table_and_plot_are_written_to_the_readme(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_report(*ROWS).write(tmp_path / "bench.json")
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- bench:begin -->\nold\n<!-- bench:end -->\nafter\n")
    (tmp_path / "docs" / "benchmarks").mkdir(parents=True)
    monkeypatch.setattr(tool, "README", readme)
    monkeypatch.setattr(tool.in_checkout, "ROOT", tmp_path)
    arguments = ["--load", str(tmp_path / "bench.json"), "--out", str(tmp_path / "out")]
    result = invoke(tool, *arguments, "--readme")
    assert result.exit_code == 0, result.output
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("<!-- bench:end -->\nafter\n")
    assert "old" not in text
    assert "| bf16 | FusedMoE, defaults | 2 | 1.90 | 0.90 (s, 1 token, uniform;" in text
    image = text.partition("](")[2].partition(")")[0]
    assert (tmp_path / image).is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tiny", "--schemes", "fp7"], "got fp7"),
        (["--tiny", "--tokens", "0"], "got '0'"),
        (["--tiny", "--layers", "9"], "got '9'"),
    ],
)
def test_bad_options_name_what_is_needed(
    tool: ModuleType, arguments: list[str], message: str
) -> None:
    result = invoke(tool, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_full_run_needs_a_gpu(tool: ModuleType) -> None:
    result = invoke(tool)
    assert result.exit_code == 2
    assert "got no GPU" in " ".join(result.output.split())
