"""Host time of eager calls of a plan, and bitwise equality of replays to the parts' host code.

The measured calls do not wait for the device. A sample has 30 calls, which is far fewer than a
stream accepts before launches block the host.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from experts import TritonExperts
from modular_kernel.catalog import make_kernel, this_machine
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.plan import Plan
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import Routing
from modular_kernel.testing.random_inputs import Inputs, random_inputs
from prepare_finalize import MoEPrepareAndFinalizeNoEP

pytestmark = pytest.mark.alone

MAX_HOST_US = 25.0
CALLS, REPEATS, ROUNDS = 30, 10, 30
PAUSE_S = 0.02
DEVICE = torch.device("cuda")
PAIR = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
BATCHED = ("BatchedPrepareAndFinalize", "BatchedTritonExperts")
SHAPES = {
    "mixtral": Problem(16, hidden=4096, intermediate=14336, experts=8, top_k=2),
    "qwen3_30b": Problem(16, hidden=2048, intermediate=768, experts=128, top_k=8),
    "dsv3_ep8": Problem(16, 7168, 2048, experts=256, top_k=8, local_experts=32, expert_map=True),
    "gptoss": Problem(16, 2880, 2880, experts=32, top_k=4, bias=True, activation="swiglu_oai"),
}
QUANTS = ("none", "fp8_w8a8_channel", "fp8_w8a8_block")


def copy_tokens(inputs: Inputs, start: int, count: int) -> Inputs:
    """Return copies of `count` tokens and their routing, with the same weights."""
    x_TH, weights, routing = inputs
    token_slice = slice(start, start + count)
    few_routing = Routing(
        routing.topk_weights_TK[token_slice].clone(), routing.topk_ids_TK[token_slice].clone()
    )
    return x_TH[token_slice].clone(), weights, few_routing


def measure_host_us(call: Callable[[], object]) -> float:
    """Return the microseconds of host time of one call.

    The result is the minimum of 30 medians, each over 10 means of 30 calls. The minimum is used
    because other load, or a virtual machine, may slow down the host for tens of milliseconds.
    """
    call()
    samples_us = []
    for _ in range(ROUNDS):
        samples_us.append(_measure_median_us(call))
        time.sleep(PAUSE_S)
    return min(samples_us)


def _measure_median_us(call: Callable[[], object]) -> float:
    samples_us = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        samples_us.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(samples_us)


def read_allocation_count() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def make_plan(problem: Problem, pair: tuple[str, str] = PAIR) -> Plan:
    return make_kernel(*pair, problem).plan()


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_planned_calls_take_little_host_time(shape: str, quant: str) -> None:
    """The limit holds for repeated and for changing addresses of tokens and routing."""
    problem = replace(SHAPES[shape], quant=quant)
    inputs = random_inputs(problem, DEVICE)
    plan = make_plan(problem)
    calls_with_new_addresses = [copy_tokens(inputs, start, 1) for start in range(5)]
    call_inputs = calls_with_new_addresses[0]
    for _ in range(3):
        plan(*call_inputs)
    allocations_before = read_allocation_count()
    for call in calls_with_new_addresses:
        plan(*call)
    assert read_allocation_count() == allocations_before
    assert measure_host_us(lambda: plan(*call_inputs)) <= MAX_HOST_US
    calls = itertools.cycle(calls_with_new_addresses)
    assert measure_host_us(lambda: plan(*next(calls))) <= MAX_HOST_US


def test_large_calls_take_a_third_of_the_host_time_without_replay() -> None:
    """A call with more than 2,048 tokens allocates its workspace and its output."""
    problem = SHAPES["qwen3_30b"].with_tokens(4096)
    kernel, inputs = make_kernel(*PAIR, problem), random_inputs(problem, DEVICE)
    for _ in range(3):
        kernel(*inputs)
    assert kernel.counters()["replayed_calls"] == 1
    host_code_us = measure_host_us(lambda: kernel.start(*inputs).finish())
    replay_us = measure_host_us(lambda: kernel(*inputs))
    assert replay_us <= host_code_us / 3, (replay_us, host_code_us)


class UnreplayableExperts(TritonExperts):
    """Experts that are not declared replayable, so that their host code runs in every call."""


def test_measurement_includes_host_code() -> None:
    """Host code and pauses increase the measured time, so the limit on it is meaningful."""
    problem = SHAPES["qwen3_30b"]
    kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(problem), UnreplayableExperts(problem))
    plan, call_inputs = kernel.plan(), copy_tokens(random_inputs(problem, DEVICE), 0, 1)
    host_code_us = measure_host_us(lambda: plan(*call_inputs))
    assert host_code_us > MAX_HOST_US
    plan = make_plan(problem)
    replay_us = measure_host_us(lambda: plan(*call_inputs))
    paused_us = measure_host_us(lambda: (plan(*call_inputs), _busy_wait(20e-6)))
    assert paused_us > replay_us + 15
    assert host_code_us > 2 * replay_us


def _busy_wait(seconds: float) -> None:
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        pass


@pytest.mark.parametrize("pair", [PAIR, BATCHED], ids=lambda pair: pair[1])
@pytest.mark.parametrize("quant", QUANTS)
def test_replays_are_bitwise_equal_to_host_code(pair: tuple[str, str], quant: str) -> None:
    """Calls have different values, weights, addresses and `out`, in any order."""
    problem = Problem(48, 512, 384, experts=16, top_k=4, quant=quant)
    kernel = make_kernel(*pair, problem)
    plan, inputs = kernel.plan(), random_inputs(problem, DEVICE)
    weights = inputs[1]
    rolled_weights = replace(weights, w1=_roll_experts(weights.w1), w2=_roll_experts(weights.w2))
    calls = [copy_tokens(inputs, start, count) for count in (1, 5, 16) for start in (0, 7, 30)]
    calls += [(x, rolled_weights, r) for x, _, r in calls] + [inputs]
    expected_outputs = [kernel(*call).clone() for call in calls]
    for _ in range(3):
        for call, expected in zip(calls, expected_outputs, strict=True):
            out = torch.full_like(expected, torch.nan)
            assert torch.equal(plan(*call), expected)
            assert torch.equal(plan(*call, out=out), expected)
    recordings = list(plan._recorded._recorded.values())
    assert len(recordings) == 4
    assert None not in recordings


def _roll_experts(w: torch.Tensor) -> torch.Tensor:
    """Give each expert the weights of its neighbor. Rolling bytes works for all dtypes."""
    return w.view(torch.uint8).roll(1, 0).view(w.dtype)


def test_replays_write_all_of_a_poisoned_workspace() -> None:
    """If a launch were missing in the recording, its output would remain NaN."""
    for pair in (PAIR, BATCHED):
        problem = Problem(16, 512, 384, experts=16, top_k=4, quant="fp8_w8a8_channel")
        kernel = make_kernel(*pair, problem)
        poisoned = make_kernel(*pair, problem, poison=True).plan()
        inputs = random_inputs(problem, DEVICE)
        expected = kernel(*inputs)
        for _ in range(3):
            assert torch.equal(poisoned(*inputs), expected)
        assert None not in poisoned._recorded._recorded.values()


def test_replays_use_the_current_stream_and_can_be_captured() -> None:
    problem = SHAPES["qwen3_30b"]
    inputs = random_inputs(problem, DEVICE)
    plan = make_plan(problem)
    static_inputs = copy_tokens(inputs, 0, 1)
    other_inputs = copy_tokens(inputs, 5, 1)
    expected_static, expected_other = plan(*static_inputs).clone(), plan(*other_inputs).clone()
    side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side_stream):
        torch.cuda._sleep(20_000_000)
        side_output = plan(*static_inputs)
        assert not side_stream.query()
    side_stream.synchronize()
    assert torch.equal(side_output, expected_static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = plan(*static_inputs)
    x_TH, _, routing = static_inputs
    x_TH.copy_(other_inputs[0])
    routing.topk_ids_TK.copy_(other_inputs[2].topk_ids_TK)
    routing.topk_weights_TK.copy_(other_inputs[2].topk_weights_TK)
    graph.replay()
    assert torch.equal(captured, expected_other)


def test_launch_hooks_of_triton_are_called_for_replays() -> None:
    import triton

    kernel_names: list[str] = []

    def record_kernel_name(metadata: Any) -> None:
        kernel_names.append(metadata.get()["name"])

    problem = SHAPES["qwen3_30b"]
    plan, call_inputs = make_plan(problem), copy_tokens(random_inputs(problem, DEVICE), 0, 1)
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(record_kernel_name)
    try:
        plan(*call_inputs)
        recorded = list(kernel_names)
        plan(*call_inputs)
    finally:
        hooks.remove(record_kernel_name)
    assert recorded
    assert kernel_names == 2 * recorded
    plan(*call_inputs)
    assert kernel_names == 2 * recorded


def test_replay_works_in_a_thread_that_never_used_the_device() -> None:
    problem = SHAPES["qwen3_30b"]
    plan, call_inputs = make_plan(problem), copy_tokens(random_inputs(problem, DEVICE), 0, 1)
    for _ in range(3):
        expected = plan(*call_inputs).clone()
    with ThreadPoolExecutor(1) as pool:
        torch.cuda.synchronize()
        got = pool.submit(lambda: plan(*call_inputs).clone()).result()
    torch.cuda.synchronize()
    assert torch.equal(got, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_plan_runs_on_the_device_where_it_was_created() -> None:
    problem = replace(SHAPES["qwen3_30b"], tokens=2)
    expected_outputs = []
    for index in range(2):
        device = torch.device("cuda", index)
        with torch.cuda.device(device):
            inputs = random_inputs(problem, device)
            plan = make_plan(problem)
            expected_outputs.append(plan(*inputs).clone())
        with torch.cuda.device(1 - index):
            for _ in range(2):
                assert torch.equal(plan(*inputs), expected_outputs[-1])


def test_tested_pairings_are_replayable() -> None:
    machine = this_machine()
    for pair in (PAIR, BATCHED):
        assert make_kernel(*pair, SHAPES["mixtral"], machine=machine).replayable
