"""The selection table: its pairings are valid and fit in memory, and its pages are current."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from run_mk import Mk, make_mk_fixture

from modular_kernel.models.registry import MODELS
from modular_kernel.perf_model import selection_table
from modular_kernel.perf_model.machines import parse_machine
from modular_kernel.perf_model.recommend import PHASE_TOKENS
from modular_kernel.perf_model.selection_table import (
    CLUSTERS,
    ERROR_LIMIT,
    MOE_LAYERS,
    Selection,
    compare_with_records,
    format_layer_times,
    format_record_errors,
    select_all_pairings,
    select_pairing,
)

mk = make_mk_fixture()
DOCS = Path(__file__).resolve().parents[2] / "docs"
# Models whose weights of all MoE layers exceed the memory of four H200.
TOO_LARGE = {"deepseek-v3", "kimi-k2", "glm-4.5", "qwen3-coder-480b-a35b"}
WITHOUT_RECOMMENDATION = {(model, "4xh200") for model in TOO_LARGE} | {("mixtral-8x7b", "2x8xh200")}
# Bytes of a weight, including its share of scales.
WEIGHT_BYTES = {"none": 2.0, "fp8_w8a8_block": 1 + 4 / 128**2, "mxfp4_w4a16": 0.5 + 1 / 32}


def test_every_selection_has_a_pairing_or_a_reason() -> None:
    assert len(MOE_LAYERS) * len(CLUSTERS) == 40
    selections = select_all_pairings()
    assert len(selections) == 40 * len(PHASE_TOKENS)
    assert {
        (selection.model, selection.cluster_name)
        for selection in selections
        if selection.best is None
    } == WITHOUT_RECOMMENDATION
    for selection in selections:
        expected = ""
        if selection.best is None:
            expected = (
                "8 experts, too few for 16 ranks"
                if "2x8" in selection.cluster_name
                else "no pairing fits"
            )
        assert expected in selection.reason
        assert bool(expected) is bool(selection.reason)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("model", MOE_LAYERS)
def test_recommended_pairing_is_valid_and_fits_in_memory(mk: Mk, model: str, cluster: str) -> None:
    for selection in select_all_pairings():
        if (selection.model, selection.cluster_name) != (model, cluster):
            continue
        tokens = str(PHASE_TOKENS[selection.phase])
        options = ("--model", model, "--machine", cluster, "--packages", "all", "--tokens", tokens)
        if selection.best is None:
            plan = mk("plan", *options, "--layers", str(MOE_LAYERS[model]), "--json")
            assert plan.code == (2 if "2x8" in cluster else 1)
            continue
        pair = selection.best.prepare_finalize, selection.best.experts_part
        result = mk("check", *options, "--pf-type", pair[0], "--experts-type", pair[1])
        assert result.code == 0, result.out
        _assert_memory(selection)


def _assert_memory(selection: Selection) -> None:
    assert selection.best is not None
    model, cluster = MODELS[selection.model], parse_machine(selection.cluster_name)
    memory = selection.best.memory
    weights = 3 * model.hidden * model.intermediate * WEIGHT_BYTES[model.quant]
    expected = MOE_LAYERS[selection.model] * model.experts / cluster.gpus * weights
    assert memory.weights == pytest.approx(expected, rel=0.01)
    assert memory.total <= cluster.gpu.memory
    assert memory.total > memory.weights


@pytest.mark.parametrize(
    ("model", "cluster"), [("deepseek-v3", "2x8xh200"), ("qwen3-30b-a3b", "4xh200")]
)
def test_selection_equals_the_recommendation_of_mk_plan(mk: Mk, model: str, cluster: str) -> None:
    options = ("--model", model, "--machine", cluster, "--packages", "all")
    plan = mk("plan", *options, "--layers", str(MOE_LAYERS[model]), "--json").json
    planned_pairings = {row["phase"]: row["pairing"] for row in plan["recommendations"]}
    selections = [s for s in select_all_pairings() if (s.model, s.cluster_name) == (model, cluster)]
    assert planned_pairings == {s.phase: s.best.pairing for s in selections if s.best is not None}


def test_alternatives_differ_in_one_part() -> None:
    for selection in select_all_pairings():
        best, exchange, experts = selection.best, selection.other_exchange, selection.other_experts
        if best is not None:
            assert exchange is not None
            assert experts is not None
            assert exchange.prepare_finalize != best.prepare_finalize
            assert experts.experts_part != best.experts_part


def test_memory_counts_the_weights_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(selection_table.MOE_LAYERS, "qwen3-30b-a3b", 2000)
    selection = select_pairing("qwen3-30b-a3b", "4xh200", "decode")
    assert selection.best is None
    match = re.fullmatch(
        r"no pairing fits: ([\d.]+) GB or more are needed, a GPU has 141\.0 GB", selection.reason
    )
    assert match is not None
    assert float(match[1]) == pytest.approx(2000 * 128 / 4 * 3 * 2048 * 768 * 2 / 1e9, rel=0.01)


def test_records_are_of_the_recommended_parts() -> None:
    errors = compare_with_records()
    parts = {
        (selection.model, part)
        for selection in select_all_pairings()
        if selection.best is not None and "h200" in selection.cluster_name
        for part in (selection.best.prepare_finalize, selection.best.experts_part)
    }
    assert {(e.model, e.part) for e in errors} <= parts
    assert {
        ("deepseek-v3", "DeepEPHTPrepareAndFinalize", 16),
        ("qwen3-30b-a3b", "TritonExperts", 1),
    } <= {(e.model, e.part, e.ranks) for e in errors}
    assert any(e.error for e in errors), "every error is 0, as if each record were its own estimate"


def test_estimates_of_recommended_parts_are_near_every_record() -> None:
    errors = compare_with_records()
    assert len(errors) == 54
    assert [error for error in errors if abs(error.error) > ERROR_LIMIT] == []


def test_an_error_beyond_the_limit_would_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = compare_with_records()
    worst = max(errors, key=lambda error: abs(error.error))
    monkeypatch.setattr(selection_table, "ERROR_LIMIT", abs(worst.error) - 1e-9)
    listed = format_record_errors().partition(f"1 of {len(errors)} records")[2]
    line = f"| {worst.model} | `{worst.part}` | {worst.ranks} | {worst.label} | {worst.tokens} |"
    assert line in listed


def test_models_without_a_record_are_named() -> None:
    with_records = {error.model for error in compare_with_records()}
    models_without_records = set(MOE_LAYERS) - with_records
    assert models_without_records == {
        "glm-4.5",
        "minimax-m2.5",
        "qwen3-235b-a22b",
        "qwen3-coder-480b-a35b",
    }
    page = (DOCS / "sizing.md").read_text(encoding="utf-8")
    page_text = " ".join(page.split())
    assert "GLM-4.5, MiniMax-M2.5 and the two larger Qwen3 have none of their sizes" in page_text


@pytest.fixture
def tables() -> list[tuple[str, str, Callable[[], str]]]:
    return list(runpy.run_path(str(DOCS.parent / "tools" / "plan_tables.py"))["TABLES"])


def test_tables_of_pages_are_current(tables: list[tuple[str, str, Callable[[], str]]]) -> None:
    """If this fails, run `python tools/plan_tables.py`."""
    assert len(tables) == 7
    for page, marker, table in tables:
        page_text = (DOCS / page).read_text(encoding="utf-8")
        section = f"<!-- {marker}:begin -->\n\n{table()}\n\n<!-- {marker}:end -->"
        assert section in page_text, f"{page}, {marker}"


def test_each_model_with_recorded_times_shows_them(
    tables: list[tuple[str, str, Callable[[], str]]],
) -> None:
    """Pages of other models say that no times were recorded."""
    pages_with_times = {Path(page).stem for page, marker, _ in tables if marker == "times"}
    for page in (DOCS / "recipes").glob("*.md"):
        if page.stem in MODELS:
            rows = format_layer_times(page.stem).splitlines()[2:]
            assert bool(rows) is (page.stem in pages_with_times)
            assert all(float(row.split("|")[6]) > 0 for row in rows)
