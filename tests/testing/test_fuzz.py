"""Fuzzing finds nothing in this tree, and finds defects that are planted."""

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
from modular_kernel.checkpoints import expert_names, gptq_awq, loading, slices
from modular_kernel.checkpoints import matrix_layout as importers_stored
from modular_kernel.checkpoints import safetensors_files as importers_files
from modular_kernel.errors import InputError
from modular_kernel.models import config_file
from modular_kernel.ops import mlp
from modular_kernel.select import autotune, saved_choices
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
from modular_kernel.testing.stress.fuzz.__main__ import main, summary
from modular_kernel.testing.stress.fuzz.oracle import Oracle
from modular_kernel.testing.stress.fuzz.outcome import (
    ACCEPTED,
    BAD,
    CRASH,
    HANG,
    LATE,
    RAW,
    RIGHT,
    WRONG,
    FuzzOutcome,
)
from modular_kernel.testing.stress.fuzz.properties import TargetProperty
from modular_kernel.testing.stress.fuzz.random_problems import InputChoices
from modular_kernel.testing.stress.fuzz.target import Target
from modular_kernel.testing.stress.fuzz.targets import NAMES, TARGETS, outcome_of
from modular_kernel.utils import tensor_checks
from prepare_finalize import MoEPrepareAndFinalizeNoEP

pytestmark = pytest.mark.cpu

PLAIN, INTERPRETED = 1880, 120


def test_the_page_says_how_many_things_are_changed() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "fuzz.md"
    assert f"with one of {len(call_changes.ALL)} things changed" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("interpreted", [False, True], ids=["plain", "interpreted"])
def test_nothing_is_found(interpreted: bool) -> None:
    count = INTERPRETED if interpreted else PLAIN
    report = isolated_runs.run(tree_hash(), range(-1, count), interpreted=interpreted)
    assert not report.findings, "\n".join(report.lines())
    assert sum(report.counts.values()) == count
    # Neither is a fuzz that is refused all the time.
    assert report.counts[RIGHT] > count // 10
    # Some targets have so small a share that few inputs of them are drawn.
    reached = {target for target, _ in report.by_target}
    launched = {target.name for target in TARGETS if target.launches or not interpreted}
    assert reached <= launched
    for name in sorted(launched - reached):
        rare = isolated_runs.run(tree_hash(), range(3), interpreted=interpreted, only=name)
        assert not rare.findings, "\n".join(rare.lines())
        assert sum(rare.counts.values()) == 3


def test_every_field_of_a_problem_gets_junk() -> None:
    assert set(specs.FIELDS) == {field.name for field in fields(Problem)}


@pytest.fixture(autouse=True)
def _mostly_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn in this process is drawn as if no kernel were interpreted: faster."""
    monkeypatch.setattr(random_problems, "current_machine", lambda: Machine("cpu"))


def _kinds(name: str, limit: int = 400) -> set[str]:
    """The kinds of outcomes of configurations until one is bad, or of `limit`."""
    target_property = TargetProperty(TARGETS[NAMES.index(name)])
    kinds = set[str]()
    for number in range(limit):
        outcome = target_property.run(Random(f"planted/{number}"))
        kinds.add(outcome.kind)
        if outcome.kind in BAD:
            return kinds
    return kinds


def _nothing(*_: Any, **__: Any) -> None:
    """A check that checks nothing."""


def _late(*_: Any, **__: Any) -> Any:
    raise InputError("x", got="something", need="something else")


PLANTED: tuple[tuple[str, Any, str, Callable[..., Any], tuple[str, ...]], ...] = (
    ("changed_call", tensor_checks, "wants_gradient", lambda *_: False, (ACCEPTED,)),
    ("changed_call", validate, "check_strided", _nothing, (RAW, WRONG, ACCEPTED)),
    ("changed_call", validate, "check_routing", _nothing, (RAW, WRONG, ACCEPTED)),
    ("changed_call", validate, "check_weights", _nothing, (RAW, WRONG, ACCEPTED)),
    ("changed_call", validate, "check_no_overlap", _nothing, (ACCEPTED,)),
    ("problem_fields", problem, "check_fields", _nothing, (RAW, ACCEPTED)),
    (
        "stored_files",
        tile_files,
        "_launch",
        lambda *_: LaunchConfig(0, 1, 1, 1, 1, 1),
        (WRONG,),
    ),
    ("stored_files", saved_choices, "_is_line", lambda *_: True, (RAW, WRONG)),
    ("stored_files", config_file, "_find_model_config", lambda _, config: config, (RAW,)),
    ("composed_call", autotune, "expect", _nothing, (RAW, ACCEPTED)),
    ("checkpoints", slices.LayerSource, "check", lambda _: {}, (RAW, WRONG, ACCEPTED)),
    ("checkpoints", slices.LayerSource, "_check_extra", _nothing, (ACCEPTED,)),
    ("checkpoints", importers_stored.StoredTensor, "check", _nothing, (RAW, WRONG)),
    ("checkpoints", importers_files, "_library_errors", lambda: (KeyError,), (RAW,)),
)


@pytest.mark.parametrize(
    ("target", "module", "name", "instead", "kinds"),
    PLANTED,
    ids=[f"{planted[0]}-{planted[2]}" for planted in PLANTED],
)
def test_a_check_that_is_gone_is_found(
    target: str,
    module: Any,
    name: str,
    instead: Callable[..., Any],
    kinds: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, name, instead)
    limit = 4000 if target == "stored_files" else 400
    assert _kinds(target, limit) & set(kinds)


@pytest.mark.parametrize("nowhere", [1, 2**31 - 1])
def test_a_pair_whose_expert_is_mapped_to_no_row_is_skipped(nowhere: int) -> None:
    """A negated expert_map has such values: what they name is no row of the weights."""
    problem = Problem(2, 8, 8, 2, 1, dtype=torch.float32, local_experts=1, expert_map=True)
    given = random_problems.make_inputs(problem, InputChoices())
    ids = torch.tensor([[0], [1]], dtype=torch.int32)
    table = torch.tensor([0, nowhere], dtype=torch.int32)
    weights, x_TH = replace(given.weights, expert_map=table), torch.ones(2, 8)
    routing = Routing(torch.ones(2, 1), ids)
    found = make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", problem)(
        x_TH, weights, routing
    )
    assert Oracle(problem, x_TH, weights, routing).mismatch(found) == ""
    assert found[0].any()
    assert not found[1].any()


def test_weights_of_the_next_expert_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = mlp._matrix

    def next_one(weights: Any, name: str, expert: int, problem: Problem) -> torch.Tensor:
        return plain(weights, name, (expert + 1) % problem.e, problem)

    monkeypatch.setattr(mlp, "_matrix", next_one)
    assert WRONG in _kinds("right_call")


def test_a_zero_point_that_is_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gptq_awq.unpack_words

    def off(packed: torch.Tensor, dim: int, order: Any) -> torch.Tensor:
        return plain(packed, dim, order) - int(dim == -1)

    monkeypatch.setattr(gptq_awq, "unpack_words", off)
    assert WRONG in _kinds("importers")


def test_another_order_of_awq_s_columns_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq_awq, "_AWQ_ORDER", tuple(range(8)))
    assert WRONG in _kinds("importers")


def test_up_loaded_as_gate_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = expert_names.LayerLayout.projections

    def turned(layer: expert_names.LayerLayout, expert: int) -> Any:
        first, second = plain(layer, expert)
        return first[::-1], second

    monkeypatch.setattr(expert_names.LayerLayout, "projections", turned)
    assert WRONG in _kinds("checkpoints")


def test_another_rank_s_share_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = loading._reader

    def of_first_rank(source: Any, problem: Problem, request: Any, columns: Any) -> Any:
        return plain(source, problem, request, (0, columns[1] - columns[0]))

    monkeypatch.setattr(loading, "_reader", of_first_rank)
    assert WRONG in _kinds("checkpoints")


def test_a_composed_layer_that_ends_where_its_measurement_did_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = autotune.find_candidates

    def measured_alone(problem: Problem, machine: Machine, asked: Any, **options: Any) -> Any:
        return plain(problem, machine, asked[:-1] or asked, **options)

    monkeypatch.setattr(autotune, "find_candidates", measured_alone)
    assert {WRONG, RAW} & _kinds("composed_call")


def test_one_target_can_be_drawn_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "s", "--count", "30", "--target", "stored_files"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("seed s, plain: 30 configurations: ")
    assert [line.partition(":")[0] for line in lines[1:]] == ["stored_files"]


def test_an_error_behind_the_checks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MoEPrepareAndFinalizeNoEP, "prepare", _late)
    assert LATE in _kinds("right_call")


def test_an_exception_through_the_command_line_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem.Parallel, "place", lambda *_: 1 / 0)
    assert RAW in _kinds("command_line")


STUB = """
import json, os, sys, time
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    if number == 1:
        os.abort()
    if number == 3:
        time.sleep(600)
    print(json.dumps([number, "stub", "right", ""]), flush=True)
"""


def test_a_crash_and_a_hang_are_counted_and_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fuzz_stub.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(isolated_runs, "_WORKER", "fuzz_stub")
    monkeypatch.setattr(isolated_runs, "_START_TIMEOUT_S", 20.0)
    report = isolated_runs.run("s", range(5), deadline_s=1.0)
    assert report.counts == {RIGHT: 3, CRASH: 1, HANG: 1}
    assert [(found.number, found.kind) for found in report.findings] == [(1, CRASH), (3, HANG)]
    told = summary([report])
    assert "    python -m modular_kernel.testing.stress.fuzz --seed s --only 1" in told
    assert told[-1].startswith("stub: 3 right, 0 typed error")


def test_a_configuration_follows_from_seed_and_number(capsys: pytest.CaptureFixture[str]) -> None:
    first, again = (outcome_of("s", 7) for _ in range(2))
    assert first == again
    assert main(["--seed", "s", "--only", "7"]) == 0
    assert "seed s, plain: 1 configurations: " in capsys.readouterr().out


def test_a_command_line_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = command_line.command_line(["list", "--json", "named"])
    assert outcome.kind == RIGHT
    assert list(tmp_path.iterdir()) == []


def _above_ten(number: int) -> FuzzOutcome:
    return FuzzOutcome(WRONG if number > 10 else RIGHT, str(number))


def test_a_failure_is_saved_and_shrunk() -> None:
    database = InMemoryExampleDatabase()
    target = Target("above_ten", 1, st.integers(0, 1000), _above_ten)
    rng, found = Random(0), TargetProperty(target, database)
    while found.run(rng).kind == RIGHT:
        pass
    # A later run begins with what was saved.
    (smallest,) = TargetProperty(target, database).failures()
    assert smallest == FuzzOutcome(WRONG, "11")


def test_explicit_examples_run_first() -> None:
    target = Target("above_ten", 1, st.integers(0, 5), _above_ten, examples=(3, 12))
    (found,) = TargetProperty(target).failures()
    assert found == FuzzOutcome(WRONG, "12")


def test_a_target_without_failures_has_none_saved() -> None:
    target = Target("above_ten", 1, st.integers(0, 5), _above_ten, examples=(3,))
    assert list(TargetProperty(target, InMemoryExampleDatabase()).failures()) == []
