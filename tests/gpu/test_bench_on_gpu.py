"""`mk bench` on a GPU: times with a cold L2 cache, and counts of launches and allocations."""

from dataclasses import replace

import torch

from modular_kernel.bench.candidates import (
    Candidate,
    Layer,
    baseline_candidates,
    pairing_candidates,
)
from modular_kernel.bench.run import BenchJob, run
from modular_kernel.catalog import load_catalog, this_machine
from modular_kernel.measure.cases import LayerCase
from modular_kernel.measure.roofline import measure_peaks
from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.measure.timing import l2_bytes, time_calls
from modular_kernel.reference import rounded_reference
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing

PROBLEM = Problem(tokens=64, hidden=512, intermediate=1024, experts=8, top_k=2)
CASE = LayerCase("small", PROBLEM, RoutingKind("uniform"))


def test_pairs_and_baseline_are_replayed() -> None:
    machine = this_machine()
    pairs = pairing_candidates(None, None, [replace(PROBLEM, graph=True)], machine)
    assert {"TritonExperts", "BatchedTritonExperts"} <= {pair.name for pair in pairs}
    parts = map(load_catalog().experts, load_catalog().names("experts"))
    allocating_parts = [part.__name__ for part in parts if part.requires.library_allocates]
    report = run(BenchJob((CASE,), (*pairs, *baseline_candidates()), machine, target_ms=5.0))
    for row in report.rows:
        assert row.status == "ok", row.note
        assert row.mode in ("graph", "graph+flush")
        # over_floor is the time divided by the roofline time.
        assert row.over_floor is not None
        assert row.over_floor > 0.9
        assert row.launches is not None
        assert 1 <= row.launches < 40
        assert row.host_us is not None
        assert row.host_us > 1
        assert row.eager_us is not None
        assert row.eager_us > 1
        assert row.weight_sets is not None
        # The 25 MB of weights would stay in a large L2 cache. For a cold cache, the benchmark
        # either uses several copies of the weights (weight_sets > 1), or flushes the cache.
        assert row.weight_sets > 1 or row.mode == "graph+flush"
        if row.origin == "ours" and not any(name in row.layer for name in allocating_parts):
            assert row.allocations == 0


class _UncapturableLayer(Layer):
    """A layer that copies the routing to the host, so that a graph cannot capture its calls."""

    name = "uncapturable"

    def setup(self, problem: Problem, weights: ExpertWeights) -> None:
        self.problem, self.weights = problem, weights

    def call(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        return rounded_reference(x_TH, self.weights, routing, self.problem).to(x_TH.dtype)


def test_layer_that_cannot_be_captured_is_timed_eagerly() -> None:
    uncapturable = Candidate("uncapturable", quant="none", origin="peer", make=_UncapturableLayer)
    candidates = (uncapturable, *baseline_candidates())
    eager, captured = run(BenchJob((CASE,), candidates, this_machine(), target_ms=1.0)).rows
    assert (eager.status, eager.note) == ("ok", "not captured")
    assert eager.mode.startswith("eager")
    assert eager.eager_us == eager.us
    assert captured.status == "ok"
    assert captured.mode.startswith("graph")


def test_a_failed_capture_does_not_change_the_random_state() -> None:
    device = torch.device("cuda")
    torch.manual_seed(3)
    expected = torch.rand(8, device=device)
    torch.manual_seed(3)

    def copy_to_host() -> torch.Tensor:
        count = int(torch.zeros(1, device=device).item())
        return torch.zeros(8, device=device) + count

    timing = time_calls([copy_to_host], device, target_ms=0.1)
    assert timing.mode == "eager"
    assert torch.equal(torch.rand(8, device=device), expected)


def test_measured_peaks_are_plausible_for_a_gpu() -> None:
    device = torch.device("cuda")
    peaks = measure_peaks(device, ["bfloat16", "float8_e4m3fn", "int8"], size=4096, nbytes=1 << 30)
    assert peaks.flops["bfloat16"] > 20e12
    assert peaks.copy > 2e11
    assert peaks.read > 2e11
    assert l2_bytes(device) > 0
