"""The check of an engine's experts classes, with a toy engine instead of vLLM."""

import os
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from toy_engine import ToyEngine

from modular_kernel.cli import engine as engine_cli
from modular_kernel.errors import ConfigurationError, UnsupportedError
from modular_kernel.integrations import engine_process
from modular_kernel.integrations.engine import EngineCase, Kind, Outcome, Promise
from modular_kernel.integrations.engine_process import EnginePackage
from modular_kernel.settings import make_child_environment
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.engines import judge as judge_module
from modular_kernel.testing.engines.cases import Selection, select_cases
from modular_kernel.testing.engines.processes import (
    EngineProgram,
    TimeLimits,
    describe_engine,
    run_cases,
    run_reproducer,
)
from modular_kernel.testing.engines.rows import Row, make_rows

BASE = Problem(tokens=17, hidden=64, intermediate=32, experts=4, top_k=2)
LIMITS = TimeLimits(first_call=8, call=8)
PACKAGE = EnginePackage(
    "toy", "Toy", {"0.26": "old", "0.33": "new", "0.5.23": "long"}, lambda: None
)
NOT_RUN = Outcome(Kind.NOT_JUDGED, "not run: time limit", was_run=False)


@pytest.fixture(scope="module")
def program() -> EngineProgram:
    """Return a program that checks the toy engine in a child process.

    The child imports `toy_engine` from the folders in sys.path, to which pytest adds tests/helpers.
    """
    environment = make_child_environment(interpreted=False)
    return EngineProgram(
        "toy_engine", environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    )


def run_engine_cases(program: EngineProgram, *cases: EngineCase, **limits: float) -> list[Outcome]:
    outcomes = dict(run_cases(cases, program, replace(LIMITS, **limits), 1))
    return [outcomes[case] for case in cases]


def make_case(class_name: str, tokens: int = 17, promise: Promise | None = None) -> EngineCase:
    return EngineCase(class_name, "silu", BASE.with_tokens(tokens), promise=promise)


def test_outcomes_of_one_process(program: EngineProgram) -> None:
    right, doubled, raising, refused, missing, not_built, no_kernel = run_engine_cases(
        program,
        make_case("Right"),
        make_case("Doubled"),
        make_case("Raising"),
        make_case("Refusing"),
        make_case("Unavailable"),
        make_case("NotBuilt"),
        make_case("MissingKernel"),
    )
    assert right.kind is Kind.RIGHT
    assert right.detail == ""
    assert right.error is not None
    assert right.bound is not None
    assert 0 < right.error < right.bound
    assert len(right.seconds) == 2
    assert doubled.kind is Kind.WRONG
    assert doubled.error == pytest.approx(1, rel=0.05)
    assert doubled.detail.startswith("relative RMS error 9.98e-01 > ")
    assert (raising.kind, raising.is_fatal) == (Kind.CRASHED, False)
    assert raising.detail.startswith("RuntimeError: no such luck (toy_engine.py:")
    assert refused == Outcome(Kind.REFUSED, "kernel does not support Tuesdays")
    assert missing == Outcome(Kind.UNAVAILABLE, "no compiled operator 'toy'")
    assert not_built == Outcome(Kind.NOT_JUDGED, "Toy(): missing argument")
    assert (no_kernel.kind, no_kernel.is_fatal) == (Kind.MISSING_KERNEL, False)
    assert "no kernel image is available" in no_kernel.detail


class PendingErrors:
    """CUDA errors that the next kernel launches of torch raise: one launch, or all if sticky."""

    def __init__(self, messages: list[str], *, sticky: bool = False) -> None:
        self.messages, self.sticky = messages, sticky

    def raise_first(self, device: torch.device) -> None:
        if self.messages:
            message = self.messages[0] if self.sticky else self.messages.pop(0)
            raise torch.AcceleratorError(f"CUDA error: {message}")


@pytest.mark.parametrize("sticky", [False, True])
def test_an_error_that_a_call_leaves_is_its_own(
    monkeypatch: pytest.MonkeyPatch, *, sticky: bool
) -> None:
    """A launch that fails without a check leaves an error that the next case would raise."""
    errors = PendingErrors([], sticky=sticky)
    monkeypatch.setattr(judge_module, "raise_pending_error", errors.raise_first)
    engine = ToyEngine()
    build = engine.build

    def build_unchecked(case: EngineCase, weights: ExpertWeights) -> Any:
        call = build(case, weights)

        def launch(x_TH: torch.Tensor, routing: Routing, poisoned: bool) -> torch.Tensor:
            if not len(x_TH):
                errors.messages.append("invalid argument")
            output: torch.Tensor = call(x_TH, routing, poisoned)
            return output

        return launch

    monkeypatch.setattr(engine, "build", build_unchecked)
    judge = judge_module.Judge(engine, torch.device("cpu"), lambda phase: None)
    empty = judge.judge(make_case("Right", promise=Promise.NO_TOKENS))
    assert (empty.kind, empty.is_fatal) == (Kind.CRASHED, sticky)
    assert empty.detail.startswith("AcceleratorError: CUDA error: invalid argument (")
    if not sticky:
        assert judge.judge(make_case("Right")).kind is Kind.RIGHT


def test_a_process_that_ends_does_not_hide_other_cases(program: EngineProgram) -> None:
    aborted, right = run_engine_cases(program, make_case("Aborting"), make_case("Right"))
    assert (aborted.kind, right.kind) == (Kind.CRASHED, Kind.RIGHT)
    assert aborted.detail.startswith("SIGABRT in its first call: ")
    assert "toy: about to abort" in aborted.detail


def test_a_call_that_hangs_is_ended(program: EngineProgram) -> None:
    hanging, right = run_engine_cases(
        program, make_case("Hanging"), make_case("Right"), first_call=0.5
    )
    assert (hanging.kind, right.kind) == (Kind.TIMEOUT, Kind.RIGHT)
    assert hanging.detail == "first call took more than 0.5 s"


def test_similar_cases_are_not_run_after_two_ended_their_process(program: EngineProgram) -> None:
    cases = [make_case("Aborting", tokens) for tokens in (1, 2, 3, 4)]
    outcomes = run_engine_cases(program, *cases)
    kinds = [outcome.kind for outcome in outcomes]
    assert kinds == [Kind.CRASHED, Kind.CRASHED, Kind.NOT_JUDGED, Kind.NOT_JUDGED]
    assert outcomes[2].detail == "not run: similar cases ended their process"


def test_no_case_begins_after_the_time_limit(program: EngineProgram) -> None:
    (outcome,) = run_engine_cases(program, make_case("Right"), total=0)
    assert outcome == NOT_RUN


@pytest.mark.parametrize("promise", Promise)
def test_promises(program: EngineProgram, promise: Promise) -> None:
    """The class Careless breaks every promise. If no promise is checked, its result is right."""
    right, careless, careless_without_promise = run_engine_cases(
        program,
        make_case("Right", promise=promise),
        make_case("Careless", promise=promise),
        make_case("Careless"),
    )
    assert careless_without_promise.kind is Kind.RIGHT
    assert right.kind is Kind.RIGHT, right.detail
    if promise is Promise.UNUSED_WEIGHTS:  # Careless does not read unused weights.
        assert careless.kind is Kind.RIGHT
    elif promise is Promise.NAN:
        assert careless.detail == "the output of a token with NaN has finite values"
    else:
        assert careless.detail.startswith("RuntimeError: careless")


def test_an_engine_that_cannot_be_loaded_is_refused(program: EngineProgram) -> None:
    with pytest.raises(UnsupportedError, match="no_such_engine"):
        describe_engine(replace(program, module="no_such_engine"), LIMITS)


@pytest.mark.parametrize(
    ("installed", "expected_module"),
    [("0.26.0", "old"), ("0.33.1.dev2+cpu", "new"), ("0.5.23", "long"), ("0.5.23+cu130", "long")],
)
def test_the_module_depends_on_the_installed_version(
    installed: str, expected_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "version", lambda name: installed)
    assert PACKAGE.find_module() == expected_module


@pytest.mark.parametrize("installed", ["0.3", "0.330", "0.5.2", "0.5.24", "1.0", "main"])
def test_other_versions_are_refused_in_one_line(
    installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "version", lambda name: installed)
    with pytest.raises(UnsupportedError) as exc_info:
        PACKAGE.load()
    assert str(exc_info.value) == f"Toy: got {installed}, need Toy 0.26 or 0.33 or 0.5.23"


def test_an_incomplete_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "version", lambda name: "0.33.0")
    with pytest.raises(UnsupportedError, match="Toy: got not importable"):
        PACKAGE.load()
    monkeypatch.setattr(engine_process, "find_spec", lambda name: object())
    with pytest.raises(UnsupportedError, match="No module named 'new'"):
        PACKAGE.load()


def test_a_reproducer_is_run_with_the_engine(program: EngineProgram) -> None:
    engine = ToyEngine()
    reproducer = engine.make_reproducer(make_case("Doubled"), 0.5)
    assert run_reproducer(program, reproducer, 60) == (1, "relative RMS error 1.0, allowed 0.5")
    status, message = run_reproducer(program, "import time; time.sleep(60)", 1)
    assert (status, message) == (-1, "no result after 1 s")


# ----------------------------------------------------------------------------------- cases


def test_cases_of_a_class() -> None:
    description = ToyEngine().describe()
    cases = select_cases(description, Selection(experts="Right", scheme="fp8_w8a8_channel"))
    problems = [case.problem for case in cases]
    assert {case.experts for case in cases} == {"Right"}
    assert {problem.quant for problem in problems} == {"fp8_w8a8_channel"}
    assert {1, 2, 17} <= {problem.tokens for problem in problems}
    assert {1, 2, 8} <= {problem.top_k for problem in problems}
    assert {8, 16, 64} <= {problem.experts for problem in problems}
    assert {case.activation for case in cases} == {"silu", "gelu"}
    assert any(problem.expert_map for problem in problems)
    assert any(problem.apply_router_weight_on_input for problem in problems)
    assert any(problem.bias for problem in problems)
    assert "all_to_one" in {case.routing for case in cases}
    assert {case.promise for case in cases} == {None, *Promise}
    assert all(problem.hidden % 16 == 0 for problem in problems)
    assert any(problem.hidden % 64 for problem in problems)
    full = select_cases(description, Selection("full", "Right", "fp8_w8a8_channel"))
    assert set(cases) < set(full)


def test_cases_of_a_model_have_its_sizes_but_few_experts() -> None:
    model = Problem(1, hidden=7168, intermediate=2048, experts=256, top_k=8, activation="gelu")
    cases = select_cases(ToyEngine().describe(), Selection(experts="Right", model=model))
    sizes = {(c.problem.hidden, c.problem.intermediate, c.problem.experts) for c in cases}
    assert sizes == {(7168, 2048, 8)}
    assert {case.activation for case in cases} == {"gelu"}
    selection = Selection(model=replace(model, activation="relu2"))
    with pytest.raises(ConfigurationError, match="activation: got relu2"):
        select_cases(ToyEngine().describe(), selection)


def test_an_unknown_class_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--experts-type: got Wrong"):
        select_cases(ToyEngine().describe(), Selection(experts="Wrong"))


# ------------------------------------------------------------------------------------ rows


def test_the_worst_call_determines_a_row() -> None:
    right, wrong = Outcome(Kind.RIGHT, "", 1.0, 2.0), Outcome(Kind.WRONG, "off", 6.0, 2.0, "text")
    broken = Outcome(Kind.WRONG, "NaN lost")
    cases = (
        make_case("A", 1),
        make_case("A", 2),
        make_case("A", promise=Promise.NAN),
        make_case("B"),
    )
    rows = make_rows(zip(cases, (right, wrong, broken, right), strict=True))
    assert [(row.case.experts, row.kind) for row in rows] == [("A", Kind.WRONG), ("B", Kind.RIGHT)]
    row = rows[0]
    assert (row.worst_ratio, row.details, row.reproducer) == (3.0, ["off"], "text")
    record = row.make_record()
    assert [call["shape"] for call in record["calls"]] == [
        "T1 H64 I32 E4 K2",
        "T2 H64 I32 E4 K2",
    ]
    assert record["promises"] == {"NaN": {"kept": False, "detail": "NaN lost"}}
    row_with_refusal = Row(
        ((make_case("A"), Outcome(Kind.REFUSED, "no")), (make_case("A", 1), right))
    )
    assert row_with_refusal.kind is Kind.RIGHT


# ------------------------------------------------------------------------------------- CLI


@pytest.fixture
def toy_cli(monkeypatch: pytest.MonkeyPatch, program: EngineProgram) -> None:
    """Let the command judge the toy engine."""
    monkeypatch.setattr(engine_cli, "_make_program", lambda engine: program)


def test_the_reproducer_of_a_row_is_that_of_its_largest_error() -> None:
    small, large = (
        Outcome(Kind.WRONG, "", 6.0, 2.0, "small"),
        Outcome(Kind.WRONG, "", 9.0, 2.0, "large"),
    )
    infinite = Outcome(Kind.WRONG, "", float("inf"), 0.0, "not finite")
    cases = make_case("A", 1), make_case("A", 2), make_case("A", 3)
    (row,) = make_rows(zip(cases, (small, large, small), strict=True))
    assert row.reproducer == "large"
    (row,) = make_rows(zip(cases, (small, infinite, large), strict=True))
    assert row.reproducer == "not finite"


def judge_class(
    experts: str, capsys: pytest.CaptureFixture[str], time_limit: float | None = None
) -> tuple[bool, str]:
    options = engine_cli.EngineOptions(
        engine="vllm", call_limit=8, first_call_limit=8, time_limit=time_limit
    )
    problem = engine_cli.ProblemOptions(quant="none")
    ok = engine_cli.judge_engine(options, problem, experts, "smoke", 1, None)
    return ok, " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("toy_cli")
def test_report_of_a_right_class(capsys: pytest.CaptureFixture[str]) -> None:
    ok, report = judge_class("Right", capsys)
    assert ok
    assert "refused: Right, 2 combinations (none): kernel does not support gelu" in report
    assert report.endswith("6 combinations: 4 right, 2 refused")
    assert "all kept" in report


@pytest.mark.usefixtures("toy_cli")
@pytest.mark.parametrize("experts", ["Refusing", "Unavailable", "NotBuilt"])
def test_a_check_that_judges_nothing_fails(
    experts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ok, report = judge_class(experts, capsys)
    assert not ok
    assert report.endswith("incomplete: no call was judged right or wrong")


@pytest.mark.usefixtures("toy_cli")
def test_a_check_that_ends_at_its_time_limit_fails(capsys: pytest.CaptureFixture[str]) -> None:
    results = [(make_case("Right"), Outcome(Kind.RIGHT)), (make_case("Right", 2), NOT_RUN)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_cli, "_run_cases", lambda *_: results)
        ok, report = judge_class("Right", capsys)
    assert not ok
    assert report.endswith("incomplete: 1 call was not run")
    ok, report = judge_class("Right", capsys, time_limit=1e-9)
    assert not ok
    assert "calls were not run" in report


@pytest.mark.usefixtures("toy_cli")
def test_report_of_a_class_that_is_wrong_in_some_shapes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ok, report = judge_class("WrongAboveOneToken", capsys)
    assert not ok
    assert "wrong: WrongAboveOneToken, none, silu, bfloat16, in 7 of 9 calls" in report
    assert "T2 H128 I64 E8 K2: relative RMS error " in report
    assert "reproducer: not shown, its error is within the bound" in report
