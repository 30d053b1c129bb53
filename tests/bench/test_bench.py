"""`mk bench` verifies layers before it times them, and compares them with peers and baselines."""

import json
import math
import signal
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from modular_kernel.bench import run as run_module
from modular_kernel.bench import tables as table
from modular_kernel.bench.candidates import (
    Candidate,
    Layer,
    baseline_candidates,
    pairing_candidates,
)
from modular_kernel.bench.run import BenchJob, run
from modular_kernel.catalog import this_machine
from modular_kernel.errors import ConfigurationError, IncompatibleError
from modular_kernel.measure.cases import LayerCase
from modular_kernel.measure.records import Report, Row, add_peer_ratios, min_time_us
from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.reference import rounded_reference
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.utils.time_limit import TimeLimitReached, time_limit

CPU = this_machine(device="cpu")
SMALL = Problem(tokens=12, hidden=32, intermediate=48, experts=4, top_k=2)
CASE = LayerCase("small", SMALL, RoutingKind("uniform"))
PAIR = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
PAIR_OPTIONS = ("--pf-type", PAIR[0], "--experts-type", PAIR[1])


class Reference(Layer):
    """A layer in plain torch, with an optional defect."""

    def __init__(self, name: str = "peer", defect: Callable[..., Any] | None = None) -> None:
        self.name, self.defect, self.calls = name, defect, 0

    def setup(self, problem: Problem, weights: ExpertWeights) -> None:
        self.problem, self.weights = problem, weights

    def call(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        self.calls += 1
        out = rounded_reference(x_TH, self.weights, routing, self.problem).to(x_TH.dtype)
        defective_out = self.defect(out, x_TH) if self.defect else None
        return out if defective_out is None else defective_out


def make_candidate(layer: Layer, origin: str = "peer") -> Candidate:
    return Candidate(layer.name, layer.quant, origin, lambda: layer)


def run_bench(
    *candidates: Candidate, cases: tuple[LayerCase, ...] = (CASE,), **options: Any
) -> Report:
    return run(BenchJob(cases, candidates, CPU, target_ms=0.01, **options))


@pytest.fixture(autouse=True)
def _small_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure peaks with small sizes. The full measurement takes a second and has its own test."""
    measure_peaks = run_module.measure_peaks
    monkeypatch.setattr(
        run_module, "measure_peaks", lambda *a, **k: measure_peaks(*a, **k, size=64, nbytes=1 << 16)
    )


# ---------------------------------------------------------------------------------------- a run


def test_correct_layers_are_timed_and_compared() -> None:
    (ours,) = pairing_candidates(*PAIR, [SMALL], CPU)
    report = run_bench(ours, *baseline_candidates(), make_candidate(Reference()))
    our_row, baseline_row, peer_row = report.rows
    assert [row.layer for row in report.rows] == ["TorchExperts", "torch_grouped_mm", "peer"]
    assert [row.origin for row in report.rows] == ["ours", "baseline", "peer"]
    best_peer_us = min(baseline_row.us or math.inf, peer_row.us or math.inf)
    for row in report.rows:
        assert (row.status, row.mode, row.note) == ("ok", "cpu", "")
        assert row.us is not None
        assert row.us_min is not None
        assert row.floor_us is not None
        assert 0 < row.us_min <= row.us
        assert row.over_floor == pytest.approx(row.us / row.floor_us)
        assert row.over_best_peer == pytest.approx(row.us / best_peer_us)
        assert (row.launches, row.host_us, row.allocations) == (None, None, None)
        assert row.error is not None
        assert row.error_bound is not None
        assert 0 < row.error < row.error_bound < 0.02
    assert our_row.floor_us == baseline_row.floor_us == peer_row.floor_us
    assert our_row.flops == 2 * 24 * 3 * 32 * 48
    assert report.environment["torch"] == torch.__version__
    assert set(report.peaks["flops"]) == {"bfloat16"}


DEFECTS: dict[str, Callable[..., Any]] = {
    "values too large by 2%": lambda out, _x: out * 1.02,
    "zeros": lambda out, _x: torch.zeros_like(out),
    "a row of zeros": lambda out, _x: out.index_fill_(0, torch.tensor([11]), 0.0),
    "a row of NaN": lambda out, _x: out.index_fill_(0, torch.tensor([5]), math.nan),
    "another dtype": lambda out, _x: out.float(),
    "overwrites x": lambda out, x: x.copy_(out),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_wrong_layers_are_reported_and_not_timed(
    defect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[object] = []
    time_calls = run_module.time_calls
    monkeypatch.setattr(
        run_module,
        "time_calls",
        lambda calls, *a, **k: timed.append(calls) or time_calls(calls, *a, **k),
    )
    wrong = Reference("wrong", DEFECTS[defect])
    good = Reference("good")
    first, second = run_bench(make_candidate(wrong), make_candidate(good)).rows
    assert (first.status, second.status) == ("wrong", "ok")
    assert (first.us, first.over_floor, first.over_best_peer) == (None, None, None)
    assert first.note
    assert len(timed) == 1
    assert wrong.calls <= 3
    assert second.over_best_peer == 1.0
    assert "WRONG" in table.format_row(first)


@pytest.mark.parametrize("tokens", [1, 3, 12])
def test_small_layers_are_checked_in_several_calls(tokens: int) -> None:
    """The errors of small layers vary, so that a single call does not suffice."""
    case = replace(CASE, problem=SMALL.with_tokens(tokens))
    for kind in ("uniform", "hot1"):
        report = run_bench(
            *baseline_candidates(), cases=(replace(case, routing=RoutingKind.parse(kind)),)
        )
        (row,) = report.rows
        assert (row.status, row.note) == ("ok", "")
        assert row.error is not None
        assert row.error_bound is not None
        assert row.error < 0.8 * row.error_bound, "the error is close to the bound"
    inaccurate_layer = Reference("slightly", lambda out, _x: out * 1.01)
    (row,) = run_bench(make_candidate(inaccurate_layer), cases=(case,)).rows
    assert row.status == "wrong"


def test_layers_that_become_wrong_while_timed_have_no_time() -> None:
    late_defect = Reference("tired")
    late_defect.defect = lambda out, _x: out * (1.5 if late_defect.calls > 6 else 1.0)
    (row,) = run_bench(make_candidate(late_defect)).rows
    assert (row.status, row.us) == ("wrong", None)
    assert "after cpu calls" in row.note


class _PartialOutput(Reference):
    """A layer that returns its own buffer. Calls after the first do not write the last row."""

    def call(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        out = super().call(x_TH, routing)
        if self.calls == 1:
            self.buffer = out
        self.buffer[:-1] = out[:-1]
        return self.buffer


def test_unwritten_output_is_detected() -> None:
    (row,) = run_bench(make_candidate(_PartialOutput("stale"))).rows
    assert (row.status, row.us) == ("wrong", None)
    assert "not finite" in row.note


class _FailingSetup(Reference):
    def setup(self, problem: Problem, weights: ExpertWeights) -> None:
        raise RuntimeError("no such engine")


class _OddTokensOnly(Reference):
    def refusal(self, problem: Problem) -> str | None:
        return "odd numbers only" if problem.tokens % 2 == 0 else None


def test_failed_and_refused_layers_have_rows() -> None:
    cases = (CASE, replace(CASE, problem=SMALL.with_tokens(3)))
    layers = (_FailingSetup("broken"), _OddTokensOnly("odd"), Reference("good"))
    rows = run_bench(*map(make_candidate, layers), cases=cases).rows
    assert [row.status for row in rows] == ["failed", "failed", "refused", "ok", "ok", "ok"]
    assert "no such engine" in rows[0].note
    assert "no such engine" in rows[1].note
    assert rows[2].note == "odd numbers only"


def test_no_row_starts_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(run_module.time, "monotonic", lambda: clock[0])
    slow = Reference("slow", lambda _out, _x: clock.__setitem__(0, clock[0] + 100.0))
    rows = run_bench(make_candidate(slow), make_candidate(Reference("late")), deadline=50.0).rows
    assert [row.status for row in rows] == ["ok", "skipped"]
    assert rows[1].note == "after the deadline"


def test_rows_are_stopped_at_the_deadline() -> None:
    """The layer ignores one exception, as a finalizer does."""
    ignored: list[BaseException] = []

    def run_for_long(_out: torch.Tensor, _x: torch.Tensor) -> None:
        for _ in range(2):
            try:
                for _ in range(600):
                    time.sleep(0.05)
            except BaseException as error:
                if ignored:
                    raise
                ignored.append(error)

    start = time.perf_counter()
    layers = Reference("slow", run_for_long), Reference("late")
    rows = run_bench(*map(make_candidate, layers), deadline=0.5).rows
    assert time.perf_counter() - start < 10
    assert [(row.status, row.note) for row in rows] == [
        ("skipped", "stopped at the deadline"),
        ("skipped", "after the deadline"),
    ]
    assert [type(error) for error in ignored] == [TimeLimitReached]
    assert rows[0].us is None


def test_time_limit_restores_the_outer_timer() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    before = signal.getitimer(signal.ITIMER_REAL)[0]
    with pytest.raises(TimeLimitReached), time_limit(0.01):
        time.sleep(5)
    with time_limit(30), time_limit(None):
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 30
    assert signal.getsignal(signal.SIGALRM) == handler
    assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(before, abs=5)
    results: list[str] = []

    def run_in_thread() -> None:
        with time_limit(0.01):
            time.sleep(0.1)
        results.append("no limit")

    thread = threading.Thread(target=run_in_thread)
    thread.start()
    thread.join()
    assert results == ["no limit"]


def test_interpreted_rows_are_not_compared_with_peers() -> None:
    slow, fast = Reference("interpreted"), Reference("fast")
    slow.interpreted = True
    first, second = run_bench(make_candidate(slow, "ours"), make_candidate(fast)).rows
    assert (first.mode, first.status) == ("interpreter", "ok")
    assert (first.over_floor, first.over_best_peer) == (None, None)
    assert min_time_us([first, second], ours=True) is None
    assert second.over_best_peer == 1.0


def test_reports_are_updated_after_each_row() -> None:
    row_counts: list[int] = []
    job = BenchJob(
        (CASE,),
        (make_candidate(Reference("a")), make_candidate(Reference("b"))),
        CPU,
        target_ms=0.01,
    )
    report = run(job, lambda so_far: row_counts.append(len(so_far.rows)))
    assert row_counts == [1, 2, 2]
    assert len(report.rows) == 2


def test_weights_of_a_shape_are_shared_and_then_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    references: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    make_weights = run_module.make_weights

    def count_weights(_report: object = None) -> None:
        alive.append(sum(weights() is not None for weights in references))

    def make_and_count(problem: Problem, device: torch.device, index: int) -> ExpertWeights:
        count_weights()
        weights = make_weights(problem, device, index)
        references.append(weakref.ref(weights.w1))
        return weights

    monkeypatch.setattr(run_module, "make_weights", make_and_count)
    wide_case = LayerCase("wide", replace(SMALL, hidden=64), RoutingKind("hot", 1))
    cases = (CASE, replace(CASE, routing=RoutingKind("zipf", 1.2)), wide_case)
    candidates = [Candidate(name, "none", "peer", partial(Reference, name)) for name in ("a", "b")]
    rows = run(BenchJob(cases, tuple(candidates), CPU, target_ms=0.01), count_weights).rows
    assert [(row.shape, row.routing) for row in rows] == [
        *[("small", "uniform"), ("small", "zipf1.2")] * 2,
        *[("wide", "hot1")] * 2,
    ]
    assert alive == [0, 1, 1, 1, 1, 0, 1, 1, 0]


# ------------------------------------------------------------------------------- pairs and peers


def test_candidates_are_the_valid_pairs() -> None:
    names = [candidate.name for candidate in pairing_candidates(None, None, [SMALL], CPU)]
    assert "TorchExperts" in names
    assert "NaiveBatchedExperts" in names
    problems = [replace(SMALL, quant=quant) for quant in ("none", "fp8_w8a8_channel")]
    candidates = pairing_candidates(*PAIR, problems, CPU)
    assert [(candidate.name, candidate.quant) for candidate in candidates][:1] == [
        ("TorchExperts", "none")
    ]
    with pytest.raises(IncompatibleError) as exception_info:
        pairing_candidates("BatchedPrepareAndFinalize", "TorchExperts", [SMALL], CPU)
    assert len(exception_info.value.rejections) > 1
    assert pairing_candidates("BatchedPrepareAndFinalize", None, [SMALL], CPU)


@pytest.mark.parametrize("quant", ["fp8_w8a8_channel", "int4_w4a16_group:group=16"])
def test_quantized_pairs_are_compared_with_equal_operands(quant: str) -> None:
    candidates = pairing_candidates(*PAIR, [replace(SMALL, quant=quant)], CPU)
    quantized_row, baseline_row = run_bench(*candidates, *baseline_candidates()).rows
    assert (quantized_row.status, quantized_row.quant, quantized_row.over_best_peer) == (
        "ok",
        str(QuantScheme.parse(quant)),
        None,
    )
    assert quantized_row.operands in ("fp8/fp8", "int4/bfloat16")
    assert quantized_row.error is not None
    assert quantized_row.error > 0.01
    assert baseline_row.over_best_peer == 1.0


# ------------------------------------------------------------------------- records and documents


def make_row(layer: str, us: float | None, origin: str = "peer", **changes: Any) -> Row:
    sizes = {"experts": 4, "top_k": 2, "hidden": 32, "intermediate": 48, "tokens": 12}
    names = {"shape": "small", "dtype": "bfloat16", "problem": "p", "routing": "uniform"}
    status = "wrong" if us is None else "ok"
    values = {**sizes, **names, "quant": "none", "operands": "bfloat16", "status": status}
    timed = {"us": us, "floor_us": 10.0, "over_floor": None if us is None else us / 10}
    return Row(layer=layer, origin=origin, **{**values, **timed, **changes})


PEAKS = {"flops": {"bfloat16": 8e14}, "copy": 4e12, "read": 4.4e12, "bandwidth": 4.8e12,
         "source": "given"}  # fmt: skip
ENVIRONMENT = {
    "date": "2026-01-01",
    "device": "a GPU",
    "torch": "2",
    "version": "0",
    "command": "mk bench",
}


def test_best_peer_has_the_same_case_and_operands() -> None:
    rows = add_peer_ratios(
        [
            make_row("A", 30.0, "ours"),
            make_row("p", 20.0),
            make_row("q", 15.0, "baseline"),
            make_row("wrong", None),
            make_row("zipf", 1.0, routing="zipf1.2"),
            make_row("fp8", 1.0, operands="fp8/fp8"),
            make_row("other", 1.0, tokens=13),
            make_row("B", 40.0, "ours", tokens=14),
        ]
    )
    ratios = [r.over_best_peer for r in rows]
    assert ratios == [2.0, pytest.approx(20 / 15), 1.0, None, 1.0, 1.0, 1.0, None]


def test_reports_survive_a_json_round_trip(tmp_path: Path) -> None:
    report = Report(
        ENVIRONMENT,
        PEAKS,
        add_peer_ratios([make_row("A", 30.0, "ours"), make_row("bad", None, error=0.5)]),
    )
    path = tmp_path / "report.json"
    report.write(path)
    assert Report.from_json(path.read_text(encoding="utf-8")) == report
    assert list(tmp_path.iterdir()) == [path]
    report_of_run = run_bench(
        make_candidate(Reference()), make_candidate(Reference("nan", lambda out, _x: out / 0))
    )
    assert Report.from_json(report_of_run.to_json()) == report_of_run
    assert json.loads(report_of_run.to_json())["rows"][1]["error"] is None
    assert {f.name for f in fields(Row)} == set(json.loads(report_of_run.to_json())["rows"][0])
    for invalid_text in ('{"schema": "mk-bench/0"}', "[]", "{}"):
        with pytest.raises(ConfigurationError, match="mk-bench/1"):
            Report.from_json(invalid_text)


def test_markdown_has_a_line_per_case_and_a_column_per_layer() -> None:
    rows = [
        make_row("A", 30.0, "ours"),
        make_row("p", 20.0),
        make_row("bad", None, note="relative error 2"),
        make_row("r", None, status="refused"),
        make_row("A", 24.0, "ours", tokens=16),
        make_row("p", 48.0, tokens=16),
        make_row("F", 9.0, "ours", quant="fp8_w8a8_block", operands="fp8/fp8"),
    ]
    lines = table.markdown(Report(ENVIRONMENT, PEAKS, add_peer_ratios(rows))).splitlines()
    assert lines[0] == "# Layers on a GPU"
    header = "| shape | T | floor | A | p | bad | best of ours / floor | best of ours / best peer |"
    header_line = lines.index(header)
    assert lines[header_line + 2] == "| small | 12 | 10.0 | 30.0 | 20.0 | WRONG | 3.00 | 1.50 |"
    assert lines[header_line + 3] == "| small | 16 | 10.0 | 24.0 | 48.0 |  | 2.40 | 0.50 |"
    assert "## fp8/fp8, uniform routing" in lines
    assert "| small | 12 | 10.0 | 9.0 | 0.90 |  |" in lines
    assert "- small T=12 uniform bad: WRONG, relative error 2" in lines
    assert any("4.8," in line for line in lines)


def test_text_table_and_summary_have_the_ratios() -> None:
    ours = make_row("A", 30.0, "ours"), make_row("A", 40.0, "ours", tokens=16)
    peers = make_row("p", 20.0), make_row("p", 20.0, tokens=16), make_row("bad", None)
    rows = add_peer_ratios([*ours, *peers])
    columns, cells = table.make_terminal_table(rows)
    assert columns == ["shape", "T", "routing", "layer", "us", "floor us", "/ floor", "/ best peer"]
    assert [line[1] for line in cells] == ["12", "12", "12", "16", "16"]
    assert ["small", "12", "uniform", "A", "30.0", "10.0", "3.00", "1.50"] in cells
    assert [line[4] for line in cells if line[3] == "bad"] == ["WRONG"]
    (line,) = table.summary(Report(ENVIRONMENT, PEAKS, rows))
    assert "3.46 x the floor in geometric mean over 2 cases (3.00 to 4.00)" in line
    assert "1.73 x the best peer's time" in line
