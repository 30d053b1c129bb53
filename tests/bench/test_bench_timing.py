"""How `mk bench` times calls and detects wrong outputs."""

import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modular_kernel.bench.candidates import TorchGroupedMm
from modular_kernel.bench.launch_count import count_device_events, count_launches
from modular_kernel.errors import ConfigurationError
from modular_kernel.measure import timing as timing_module
from modular_kernel.measure.cases import Input, LayerCase, make_input, make_weights, quantize
from modular_kernel.measure.check import (
    CheckedCalls,
    CheckResult,
    ExpectedOutput,
    check_calls,
    check_unchanged,
    compute_expected_output,
)
from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.measure.timing import Rotation, choose_rotation, measure_host_cost, time_calls
from modular_kernel.reference import float64_reference, rounded_reference
from modular_kernel.spec.problem import Combine, Parallel, Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights

CPU = torch.device("cpu")
GPU = torch.device("cuda")
L2, MEMORY = 60 << 20, 140 << 30
SMALL = Problem(tokens=24, hidden=64, intermediate=96, experts=6, top_k=2)


@pytest.mark.parametrize(
    ("call_bytes", "weight_bytes", "tokens", "expected"),
    [
        (700e6, 2.8e9, 1, Rotation(8)),
        (5e9, 5e9, 1024, Rotation(4)),
        (5e9, 5e9, 1025, Rotation(2)),
        (76e6, 1.2e9, 1, Rotation(8, 2)),
        (16e6, 64e6, 16384, Rotation(8, 8)),
        (15e6, 64e6, 16384, Rotation(2, flush=True)),
        (40e6, 10e9, 1, Rotation(8, flush=True)),  # four sets of weights do not fit
    ],
)
def test_rotation_keeps_the_cache_cold(
    call_bytes: float, weight_bytes: float, tokens: int, expected: Rotation
) -> None:
    rotation = choose_rotation(call_bytes, weight_bytes, tokens, l2=L2, memory=MEMORY)
    assert rotation == expected
    assert rotation.flush or rotation.weight_sets * call_bytes >= 2 * L2
    assert choose_rotation(call_bytes, weight_bytes, tokens, l2=0, memory=0) == Rotation(1)


def test_cpu_calls_are_timed_with_the_host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, calls, out = iter(range(1000)), [], torch.zeros(3)
    monkeypatch.setattr(timing_module.time, "perf_counter", lambda: next(ticks) * 2e-3)

    def call() -> torch.Tensor:
        calls.append(1)
        return out.fill_(len(calls))

    timing = time_calls([call, call], CPU, target_ms=20)
    # Two calls run between ticks of 2 ms, so each takes 1000 us. The pair runs once to warm up,
    # once as a sample, ten times as replays, and once for the last output.
    assert (timing.us, timing.us_min, timing.spread) == pytest.approx((1000, 1000, 0))
    assert (timing.mode, timing.replays) == ("cpu", 10)
    assert len(calls) == 2 + 2 + 2 * 10 + 2
    assert timing.last_output.tolist() == [len(calls)] * 3
    assert measure_host_cost(call, CPU) is None
    assert count_launches(call, CPU) is None


class FakeGpu:
    """A stand-in for torch.cuda with a clock in microseconds and graphs that repeat their calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.graphs: list[Any] = []
        self.capturable, self.capturing, self.replays_write = True, False, True
        gpu = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.now

            def elapsed_time(self, end: "Event") -> float:
                return (end.at - self.at) / 1e3

        class Graph:
            def __enter__(self) -> None:
                self.calls: list[Callable[[], object]] = []
                gpu.capturing = True
                gpu.graphs.append(self)

            def __exit__(self, *_: object) -> None:
                gpu.capturing = False

            def replay(self) -> None:
                for call in self.calls if gpu.replays_write else ():
                    call()

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", lambda graph: graph)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: "usual")
        monkeypatch.setattr(torch.cuda, "set_stream", self.log.append)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.log.append("wait"))
        generator = SimpleNamespace(
            clone_state=lambda: "state", graphsafe_set_state=self.log.append
        )
        monkeypatch.setattr(timing_module, "_get_default_generator", lambda: generator)
        monkeypatch.setattr(
            timing_module, "make_l2_flush", lambda _: lambda: self.log.append("wipe")
        )

    def call(self, name: str, us: float) -> Callable[[], torch.Tensor]:
        """Return a call that advances the clock by `us` and fills its output with `us`."""
        out = torch.zeros(2)

        def work() -> torch.Tensor:
            self.now += us
            self.log.append(name)
            return out.fill_(us)

        def call() -> torch.Tensor:
            if self.capturing:
                if not self.capturable:
                    raise RuntimeError("operation not permitted when stream is capturing")
                self.graphs[-1].calls.append(work)
                return out
            return work()

        return call


def test_graph_has_all_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeGpu(monkeypatch)
    calls = [gpu.call("a", 300.0), gpu.call("b", 500.0)]
    timing = time_calls(calls, GPU, target_ms=8)
    assert (timing.us, timing.mode, timing.replays) == (400.0, "graph", 10)
    assert len(gpu.graphs) == 1
    assert timing.last_output.tolist() == [500.0, 500.0]
    gpu.replays_write = False  # outputs from before the graph must not be used
    assert time_calls(calls, GPU).last_output.isnan().all()


def test_slow_first_calls_on_a_gpu_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    slow_until = 13e3  # until this time in microseconds, a call takes 10% longer

    def call() -> torch.Tensor:
        return quick() if gpu.now >= slow_until else slow()

    quick, slow = gpu.call("quick", 100.0), gpu.call("slow", 110.0)
    timing = time_calls([call], GPU, graph=False, target_ms=20)
    assert (timing.us, timing.us_min, timing.spread) == (100.0, 100.0, 0.0)
    assert gpu.log.count("slow") == 119  # slow calls are detected and not timed


def test_graph_keeps_references_to_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)

    class Plan:
        def __call__(self) -> torch.Tensor:
            return work()

    work, plan = gpu.call("a", 300.0), Plan()
    alive = weakref.ref(plan)
    runs = timing_module.capture_graphs([[plan]])
    del plan
    gc.collect()
    assert alive() is not None, "the graph uses buffers of the plan"
    del runs
    gpu.graphs.clear()
    gc.collect()
    assert alive() is None


def test_flushed_calls_are_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    calls = [gpu.call("a", 300.0), gpu.call("b", 500.0)]
    timing = time_calls(calls, GPU, flush=True, target_ms=0)
    assert (timing.us, timing.us_min, timing.mode) == (400.0, 300.0, "graph+flush")
    assert len(gpu.graphs) == 2
    timed = gpu.log[gpu.log.index("wipe") :]
    assert timed[:4] == ["wipe", "a", "wipe", "b"]


def test_calls_that_cannot_be_captured_are_timed_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    call = gpu.call("a", 300.0)
    gpu.capturable = False
    assert time_calls([call], GPU).mode == "eager"
    assert "usual" in gpu.log
    assert "state" in gpu.log
    gpu.capturable = True
    assert time_calls([call], GPU, graph=False).mode == "eager"
    assert time_calls([call], GPU).mode == "graph"


def test_host_cost_counts_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, allocated = FakeGpu(monkeypatch), [0]

    def call() -> torch.Tensor:
        allocated[0] += 3
        return torch.zeros(1)

    stats = {"allocation.all.allocated": 0}
    monkeypatch.setattr(
        torch.cuda, "memory_stats", lambda _: stats | {"allocation.all.allocated": allocated[0]}
    )
    cost = measure_host_cost(call, GPU)
    assert cost is not None
    assert cost.allocations == 3
    assert cost.us > 0
    assert gpu.log.count("wait") > 10


def test_launches_are_counted_from_device_events() -> None:
    kinds = ("kernel", "kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "gpu_user_annotation")
    assert count_device_events([*({"cat": kind} for kind in kinds), {"ph": "M"}]) == 4


# ------------------------------------------------------------------------------------- the check


def make_case(routing: str = "uniform", **changes: Any) -> LayerCase:
    return LayerCase("small", replace(SMALL, **changes), RoutingKind.parse(routing))


def judge_output(out: torch.Tensor, expected: ExpectedOutput, problem: Problem) -> CheckResult:
    return check_calls([(out.clone, expected)], problem).result


def make_inputs(
    layer_case: LayerCase, quant: str = "none"
) -> tuple[Input, ExpertWeights, ExpectedOutput]:
    inputs, weights = make_input(layer_case, CPU, 0), make_weights(layer_case.problem, CPU)
    return (
        inputs,
        weights,
        compute_expected_output(layer_case, inputs, weights, QuantScheme.parse(quant)),
    )


@pytest.mark.parametrize("routing", ["uniform", "zipf", "hot1"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tokens": 1},
        {"tokens": 300, "top_k": 3, "dtype": torch.float16},
        {"dtype": torch.float32, "bias": True, "activation": "swiglu_oai"},
        {"expert_map": True, "local_experts": 3},
        {"combine": Combine.TOPK_WEIGHTED, "routed_scaling_factor": 2.5},
    ],
)
def test_plain_torch_passes_and_defects_fail(routing: str, changes: dict[str, Any]) -> None:
    layer_case = make_case(routing, **changes)
    inputs, weights, expected = make_inputs(layer_case)
    correct = rounded_reference(inputs.x_TH, weights, inputs.routing, layer_case.problem).to(
        layer_case.problem.dtype
    )
    result = judge_output(correct, expected, layer_case.problem)
    assert not result.failure
    assert result.error is not None
    assert result.error < result.bound < 0.02
    for wrong in (correct * 1.02, correct.roll(1, -1), torch.zeros_like(correct)):
        assert "relative error" in judge_output(wrong, expected, layer_case.problem).failure
    with_nan = correct.clone()
    with_nan[-1 if layer_case.problem.tokens < 4 else 3, ..., 5] = math.nan
    assert "not finite" in judge_output(with_nan, expected, layer_case.problem).failure
    assert "should be" in judge_output(correct.double(), expected, layer_case.problem).failure
    assert "should be" in judge_output(correct[:, ..., 1:], expected, layer_case.problem).failure


@pytest.mark.parametrize(
    ("quant", "min_error", "max_error"),
    [
        ("fp8_w8a8_tensor", 0.03, 0.10),
        ("fp8_w8a8_tensor:static=true", 0.03, 0.10),
        ("fp8_w8a8_channel", 0.03, 0.10),
        ("fp8_w8a8_block", 0.03, 0.10),
        ("int8_w8a8_channel", 0.005, 0.04),
        ("int8_w8a16_group", 0.002, 0.02),
        ("int4_w4a16_group:group=32,zero_points=true", 0.05, 0.3),
        ("mxfp4_w4a16", 0.08, 0.4),
    ],
)
def test_bound_depends_on_the_scheme(quant: str, min_error: float, max_error: float) -> None:
    """The reference is the unquantized layer. The bound is twice the error of the scheme itself."""
    layer_case = make_case(tokens=40)
    inputs, weights, expected = make_inputs(layer_case, quant)
    problem = replace(layer_case.problem, quant=quant)
    stored = quantize(weights, problem)
    out = rounded_reference(inputs.x_TH, stored, inputs.routing, problem).to(problem.dtype)
    result = judge_output(out, expected, problem)
    assert min_error < result.bound / 2 < max_error
    assert not result.failure
    swapped = replace(weights, w1=weights.w1.roll(problem.intermediate, 1))
    out = float64_reference(inputs.x_TH, swapped, inputs.routing, layer_case.problem).to(
        problem.dtype
    )
    assert judge_output(out, expected, problem).failure


def test_calls_are_checked_together() -> None:
    layer_case = make_case(tokens=40)
    inputs, weights, expected = make_inputs(layer_case)
    correct = rounded_reference(inputs.x_TH, weights, inputs.routing, layer_case.problem).to(
        torch.bfloat16
    )
    with_offset = correct + expected.exact.norm() / expected.exact.numel() ** 0.5 * 0.007

    def check_together(*outs: torch.Tensor) -> CheckedCalls:
        return check_calls([(out.clone, expected) for out in outs], layer_case.problem)

    assert check_together(with_offset).result.failure
    checked_calls = check_together(with_offset, correct)
    assert not checked_calls.result.failure, "the mean over both calls is within the bound"
    assert torch.equal(checked_calls.last_rows, correct[expected.rows].double())
    with_nan = correct.index_fill(0, torch.tensor([3]), math.nan)
    assert "not finite" in check_together(correct, with_nan).result.failure
    assert not check_unchanged(correct, expected, checked_calls, layer_case.problem).failure
    assert (
        "differs from the earlier output"
        in check_unchanged(correct * 1.02, expected, checked_calls, layer_case.problem).failure
    )
    assert (
        "not finite"
        in check_unchanged(with_nan, expected, checked_calls, layer_case.problem).failure
    )


def test_inputs_and_weights_are_reproducible_by_index() -> None:
    layer_case = make_case()
    first, repeated, other = (make_input(layer_case, CPU, index) for index in (0, 0, 1))
    assert torch.equal(first.x_TH, repeated.x_TH)
    assert not torch.equal(first.x_TH, other.x_TH)
    assert not torch.equal(first.routing.topk_ids_TK, other.routing.topk_ids_TK)
    weight_sets = [make_weights(layer_case.problem, CPU, index).w1 for index in (0, 0, 1)]
    assert torch.equal(weight_sets[0], weight_sets[1])
    assert not torch.equal(weight_sets[0], weight_sets[2])


@pytest.mark.parametrize(
    "changes",
    [{"tokens": 0}, {"inplace": True}, {"parallel": Parallel(2)}, {"quant": "mxfp4_w4a16"}],
)
def test_invalid_cases_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        make_case(**changes)


@pytest.mark.parametrize("changes", [{}, {"tokens": 1}, {"experts": 33, "top_k": 5, "tokens": 7}])
def test_grouped_mm_baseline_is_correct(changes: dict[str, Any]) -> None:
    layer_case, layer = make_case(**changes), TorchGroupedMm()
    assert layer.refusal(layer_case.problem) is None
    inputs, weights, expected = make_inputs(layer_case)
    layer.setup(layer_case.problem, weights)
    assert not judge_output(
        layer.call(inputs.x_TH, inputs.routing), expected, layer_case.problem
    ).failure


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "gelu"},
        {"bias": True},
        {"hidden": 60},
        {"dtype": torch.float16},
        {"routed_scaling_factor": 2.0},
        {"expert_map": True},
    ],
)
def test_grouped_mm_refuses_unsupported_layers(changes: dict[str, Any]) -> None:
    assert TorchGroupedMm().refusal(replace(SMALL, **changes))
