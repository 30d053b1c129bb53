"""`compose` on a GPU: pairings are timed as graphs; a warm plan neither compiles nor allocates."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modular_kernel.catalog import this_machine
from modular_kernel.measure.routing_patterns import RoutingKind, draw_routing
from modular_kernel.select.autotune import BUDGET_S, MeasurementOptions, choose, compose
from modular_kernel.select.inputs import make_weights
from modular_kernel.spec.problem import Problem

PROBLEM = Problem(tokens=256, hidden=1024, intermediate=512, experts=16, top_k=4)


# The shipped record was measured with uniform routing. With zipf, every pairing is timed.
OPTIONS = MeasurementOptions(tokens=(1, 16, 256), budget=120, routing="zipf")


def test_pairings_are_timed_as_graphs_and_reused(tmp_path: Path) -> None:
    options = replace(OPTIONS, folder=tmp_path)
    first = choose(PROBLEM, options=options)
    assert (first.num_timed, first.untimed_tokens) == (3, ())
    modes = {o.mode for b in first.buckets for o in b.outcomes if o.us is not None}
    assert "graph" in modes
    for bucket in first.buckets:
        wrong = [o for o in bucket.outcomes if o.why.startswith("wrong")]
        assert wrong == []
        default = bucket.find_outcome(bucket.default)
        assert default is not None
        assert default.ratio == 1
    second = choose(PROBLEM, options=options)
    assert (second.num_timed, second.segments) == (0, first.segments)


def test_a_warm_plan_compiles_and_allocates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    plan = compose(PROBLEM, options=replace(OPTIONS, folder=tmp_path)).plan()
    device = torch.device(this_machine().device, torch.cuda.current_device())
    weights = make_weights(PROBLEM, device)
    plan.warm_up(weights)

    def fail_on_compilation(*_: object, **__: object) -> None:
        raise AssertionError("a kernel was compiled")

    generator = torch.Generator(device).manual_seed(3)
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "_do_compile", fail_on_compilation)
    for tokens in (1, 2, 7, 16, 33, 100, 177, 255, 256):
        x_TH = torch.randn(tokens, 1024, device=device, generator=generator).bfloat16()
        routing = draw_routing(PROBLEM.with_tokens(tokens), RoutingKind("uniform"), generator)
        plan(x_TH, weights, routing)  # records the launches of calls with this number of tokens
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
        plan(x_TH, weights, routing)
        assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before


def test_a_cold_layer_takes_no_longer_than_its_budget(tmp_path: Path) -> None:
    start = time.monotonic()
    choice = choose(PROBLEM, options=MeasurementOptions(folder=tmp_path, routing="zipf"))
    assert time.monotonic() - start <= BUDGET_S + 1
    assert choice.segments[-1].last == PROBLEM.tokens


def test_the_shipped_record_answers_without_timing(tmp_path: Path) -> None:
    """On the architecture of the record, an unquantized bfloat16 layer needs no measurement."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the record was measured on compute capability 9.0")
    choice = choose(
        PROBLEM, options=MeasurementOptions(folder=tmp_path, budget=0, tokens=(1, 16, 256))
    )
    assert choice.summary == "3 token counts: 3 from the shipped record"
