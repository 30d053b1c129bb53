"""Fuzzing finds nothing in the unmodified code, and finds defects that tests patch in."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase
from shares import tree_hash

from experts.triton.configs import files as tile_files
from experts.triton.launch_config import LaunchConfig
from modular_kernel import validate
from modular_kernel.catalog import make_kernel
from modular_kernel.checkpoints import (
    expert_names,
    loading,
    matrix_layout,
    packed_words,
    safetensors_files,
    slices,
)
from modular_kernel.errors import InputError
from modular_kernel.models import config_file
from modular_kernel.ops import mlp
from modular_kernel.select import autotune, cache_file
from modular_kernel.spec import problem
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tensors import Routing
from modular_kernel.testing.stress.fuzz import (
    call_changes,
    command_line,
    isolated_runs,
    random_problems,
    specs,
)
from modular_kernel.testing.stress.fuzz.__main__ import format_summary, main
from modular_kernel.testing.stress.fuzz.independent_reference import IndependentReference
from modular_kernel.testing.stress.fuzz.outcome import (
    CORRECT,
    CRASH,
    FAILURE_KINDS,
    HANG,
    INVALID_ACCEPTED,
    LATE_ERROR,
    UNTYPED_ERROR,
    WRONG_RESULT,
    FuzzOutcome,
)
from modular_kernel.testing.stress.fuzz.properties import TargetProperty
from modular_kernel.testing.stress.fuzz.random_problems import InputChoices
from modular_kernel.testing.stress.fuzz.target import Target
from modular_kernel.testing.stress.fuzz.targets import NAMES, TARGETS, run_configuration
from modular_kernel.utils import tensor_checks
from prepare_finalize import MoEPrepareAndFinalizeNoEP

pytestmark = pytest.mark.cpu

PLAIN_COUNT, INTERPRETED_COUNT = 1880, 120


def test_docs_have_the_number_of_changes() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "fuzz.md"
    assert f"with one of {len(call_changes.ALL)} changes to the call" in page.read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("interpreted", [False, True], ids=["plain", "interpreted"])
def test_fuzzing_finds_no_errors(interpreted: bool) -> None:
    count = INTERPRETED_COUNT if interpreted else PLAIN_COUNT
    report = isolated_runs.run(tree_hash(), range(-1, count), interpreted=interpreted)
    assert not report.findings, "\n".join(report.lines())
    assert sum(report.counts.values()) == count
    # Enough configurations must be accepted and computed.
    assert report.counts[CORRECT] > count // 10
    # Targets that are drawn rarely may be missing, so run them separately.
    drawn_targets = {target for target, _ in report.by_target}
    expected = {target.name for target in TARGETS if target.launches or not interpreted}
    assert drawn_targets <= expected
    for name in sorted(expected - drawn_targets):
        rare_report = isolated_runs.run(tree_hash(), range(3), interpreted=interpreted, only=name)
        assert not rare_report.findings, "\n".join(rare_report.lines())
        assert sum(rare_report.counts.values()) == 3


def test_every_field_of_a_problem_has_junk_values() -> None:
    assert set(specs.FIELDS) == {field.name for field in fields(Problem)}


@pytest.fixture(autouse=True)
def _draw_problems_as_if_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw problems as if kernels were compiled, because interpreted kernels are slow."""
    monkeypatch.setattr(random_problems, "current_machine", lambda: Machine("cpu"))


def _collect_outcome_kinds(name: str, limit: int = 400) -> set[str]:
    """Return the outcome kinds of `limit` configurations, or of all up to the first failure."""
    target_property = TargetProperty(TARGETS[NAMES.index(name)])
    kinds = set[str]()
    for number in range(limit):
        outcome = target_property.run(Random(f"planted/{number}"))
        kinds.add(outcome.kind)
        if outcome.kind in FAILURE_KINDS:
            return kinds
    return kinds


def _accept(*_: Any, **__: Any) -> None:
    """A check that accepts everything."""


def _raise_input_error(*_: Any, **__: Any) -> Any:
    raise InputError("x", got="something", need="something else")


REMOVED_CHECKS: tuple[tuple[str, Any, str, Callable[..., Any], tuple[str, ...]], ...] = (
    ("changed_call", tensor_checks, "needs_gradient", lambda *_: False, (INVALID_ACCEPTED,)),
    (
        "changed_call",
        validate,
        "check_strided",
        _accept,
        (UNTYPED_ERROR, WRONG_RESULT, INVALID_ACCEPTED),
    ),
    (
        "changed_call",
        validate,
        "check_routing",
        _accept,
        (UNTYPED_ERROR, WRONG_RESULT, INVALID_ACCEPTED),
    ),
    (
        "changed_call",
        validate,
        "check_weights",
        _accept,
        (UNTYPED_ERROR, WRONG_RESULT, INVALID_ACCEPTED),
    ),
    ("changed_call", validate, "check_no_overlap", _accept, (INVALID_ACCEPTED,)),
    ("problem_fields", problem, "check_fields", _accept, (UNTYPED_ERROR, INVALID_ACCEPTED)),
    (
        "stored_files",
        tile_files,
        "_parse_launch",
        lambda *_: LaunchConfig(0, 1, 1, 1, 1, 1),
        (WRONG_RESULT,),
    ),
    ("stored_files", cache_file, "_is_line", lambda *_: True, (UNTYPED_ERROR, WRONG_RESULT)),
    ("stored_files", config_file, "_find_model_config", lambda _, config: config, (UNTYPED_ERROR,)),
    ("composed_call", autotune, "expect", _accept, (UNTYPED_ERROR, INVALID_ACCEPTED)),
    (
        "checkpoints",
        slices.LayerSource,
        "check",
        lambda _: {},
        (UNTYPED_ERROR, WRONG_RESULT, INVALID_ACCEPTED),
    ),
    ("checkpoints", slices.LayerSource, "_check_no_unexpected", _accept, (INVALID_ACCEPTED,)),
    (
        "checkpoints",
        matrix_layout.StoredTensor,
        "check",
        _accept,
        (UNTYPED_ERROR, WRONG_RESULT),
    ),
    (
        "checkpoints",
        safetensors_files,
        "_list_library_errors",
        lambda: (KeyError,),
        (UNTYPED_ERROR,),
    ),
)


@pytest.mark.parametrize(
    ("target", "module", "name", "replacement", "kinds"),
    REMOVED_CHECKS,
    ids=[f"{patch[0]}-{patch[2]}" for patch in REMOVED_CHECKS],
)
def test_a_removed_check_is_detected(
    target: str,
    module: Any,
    name: str,
    replacement: Callable[..., Any],
    kinds: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, name, replacement)
    limit = 4000 if target == "stored_files" else 400
    assert _collect_outcome_kinds(target, limit) & set(kinds)


@pytest.mark.parametrize("invalid_row", [1, 2**31 - 1])
def test_pairs_mapped_past_the_last_row_are_skipped(invalid_row: int) -> None:
    problem = Problem(2, 8, 8, 2, 1, dtype=torch.float32, local_experts=1, expert_map=True)
    inputs = random_problems.make_inputs(problem, InputChoices())
    ids = torch.tensor([[0], [1]], dtype=torch.int32)
    expert_map = torch.tensor([0, invalid_row], dtype=torch.int32)
    weights, x_TH = replace(inputs.weights, expert_map=expert_map), torch.ones(2, 8)
    routing = Routing(torch.ones(2, 1), ids)
    out = make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", problem)(x_TH, weights, routing)
    assert IndependentReference(problem, x_TH, weights, routing).find_mismatch(out) == ""
    assert out[0].any()
    assert not out[1].any()


def test_using_weights_of_the_next_expert_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    original = mlp._get_matrix

    def get_next_matrix(weights: Any, name: str, expert: int, problem: Problem) -> torch.Tensor:
        return original(weights, name, (expert + 1) % problem.e, problem)

    monkeypatch.setattr(mlp, "_get_matrix", get_next_matrix)
    assert WRONG_RESULT in _collect_outcome_kinds("right_call")


def test_zero_points_off_by_one_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    original = packed_words.interleave_nibbles

    def interleave_off_by_one(words: torch.Tensor) -> torch.Tensor:
        return original(words) ^ 0x11111111  # flips the lowest bit of every value

    monkeypatch.setattr(packed_words, "interleave_nibbles", interleave_off_by_one)
    assert WRONG_RESULT in _collect_outcome_kinds("importers")


def test_a_wrong_awq_column_order_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_words, "AWQ_ORDER", tuple(range(8)))
    assert WRONG_RESULT in _collect_outcome_kinds("importers")


def test_swapping_gate_and_up_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    original = expert_names.LayerLayout.projections

    def swap_projections(layer: expert_names.LayerLayout, expert: int) -> Any:
        first, second = original(layer, expert)
        return first[::-1], second

    monkeypatch.setattr(expert_names.LayerLayout, "projections", swap_projections)
    assert WRONG_RESULT in _collect_outcome_kinds("checkpoints")


def test_loading_the_slice_of_another_rank_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    original = loading._make_reader

    def read_first_rank(source: Any, problem: Problem, request: Any, columns: Any) -> Any:
        return original(source, problem, request, (0, columns[1] - columns[0]))

    monkeypatch.setattr(loading, "_make_reader", read_first_rank)
    assert WRONG_RESULT in _collect_outcome_kinds("checkpoints")


def test_a_composed_layer_without_candidates_beyond_its_measurement_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = autotune.find_candidates

    def find_without_last_size(
        problem: Problem, machine: Machine, sizes: Any, **options: Any
    ) -> Any:
        return original(problem, machine, sizes[:-1] or sizes, **options)

    monkeypatch.setattr(autotune, "find_candidates", find_without_last_size)
    assert {WRONG_RESULT, UNTYPED_ERROR} & _collect_outcome_kinds("composed_call")


def test_a_single_target_can_be_selected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "s", "--count", "30", "--target", "stored_files"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("seed s, plain: 30 configurations: ")
    assert [line.partition(":")[0] for line in lines[1:]] == ["stored_files"]


def test_an_input_error_after_validation_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MoEPrepareAndFinalizeNoEP, "prepare", _raise_input_error)
    assert LATE_ERROR in _collect_outcome_kinds("right_call")


def test_an_uncaught_exception_of_the_command_line_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(problem.Parallel, "place", lambda *_: 1 / 0)
    assert UNTYPED_ERROR in _collect_outcome_kinds("command_line")


STUB_WORKER = """
import json, os, sys, time
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    if number == 1:
        os.abort()
    if number == 3:
        time.sleep(600)
    print(json.dumps([number, "stub", "right", ""]), flush=True)
"""


def test_a_crash_and_a_hang_do_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fuzz_stub.py").write_text(STUB_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(isolated_runs, "_WORKER", "fuzz_stub")
    monkeypatch.setattr(isolated_runs, "_START_TIMEOUT_S", 20.0)
    report = isolated_runs.run("s", range(5), timeout_s=1.0)
    assert report.counts == {CORRECT: 3, CRASH: 1, HANG: 1}
    assert [(finding.number, finding.kind) for finding in report.findings] == [
        (1, CRASH),
        (3, HANG),
    ]
    lines = format_summary([report])
    assert "    python -m modular_kernel.testing.stress.fuzz --seed s --only 1" in lines
    assert lines[-1].startswith("stub: 3 right, 0 typed error")


def test_seed_and_number_determine_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (run_configuration("s", 7) for _ in range(2))
    assert first == second
    assert main(["--seed", "s", "--only", "7"]) == 0
    assert "seed s, plain: 1 configurations: " in capsys.readouterr().out


def test_checking_a_command_line_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = command_line.check_command_line(["list", "--json", "named"])
    assert outcome.kind == CORRECT
    assert list(tmp_path.iterdir()) == []


def _fail_above_ten(number: int) -> FuzzOutcome:
    return FuzzOutcome(WRONG_RESULT if number > 10 else CORRECT, str(number))


def test_a_failure_is_saved_and_shrunk() -> None:
    database = InMemoryExampleDatabase()
    target = Target("above_ten", 1, st.integers(0, 1000), _fail_above_ten)
    rng, target_property = Random(0), TargetProperty(target, database)
    while target_property.run(rng).kind == CORRECT:
        pass
    # A later run begins with the saved failures.
    (smallest,) = TargetProperty(target, database).failures()
    assert smallest == FuzzOutcome(WRONG_RESULT, "11")


def test_explicit_examples_run_first() -> None:
    target = Target("above_ten", 1, st.integers(0, 5), _fail_above_ten, examples=(3, 12))
    (failure,) = TargetProperty(target).failures()
    assert failure == FuzzOutcome(WRONG_RESULT, "12")


def test_a_target_without_failures_has_none_saved() -> None:
    target = Target("above_ten", 1, st.integers(0, 5), _fail_above_ten, examples=(3,))
    assert list(TargetProperty(target, InMemoryExampleDatabase()).failures()) == []


@pytest.mark.parametrize("quant", ["fp8_w8a8_tensor", "fp8_w8a8_channel"])
def test_the_tolerance_includes_the_error_of_scales_shared_by_rows(quant: str) -> None:
    """With one scale for all rows, the activations of a small row next to a large row are rounded
    to zero.
    """
    problem = Problem(2, 32, 32, 2, 1, dtype=torch.float32, quant=quant)
    inputs = random_problems.make_inputs(problem, InputChoices())
    x_TH, weights = torch.ones(2, 32), inputs.weights
    x_TH[0] *= 1e4
    routing = Routing(torch.ones(2, 1), torch.tensor([[0], [1]], dtype=torch.int32))
    out = make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", problem)(x_TH, weights, routing)
    float64_reference = IndependentReference(problem, x_TH, weights, routing)
    assert float64_reference.find_mismatch(out) == ""
    # The tolerance of the large row is not raised, nor the tolerance of a small row with its own
    # scale.
    out[0] *= 1.6
    assert "1 of 2 rows differ" in float64_reference.find_mismatch(out)
    if quant == "fp8_w8a8_channel":
        out[1] *= 1.6
        assert "2 of 2 rows differ" in float64_reference.find_mismatch(out)
