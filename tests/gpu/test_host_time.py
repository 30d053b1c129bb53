"""What an eager call of a plan costs the host, and that it does what the parts' host code does.

Time is measured over calls issued one behind the other, without waiting for the device; 30 calls
stay far below what a stream takes before it blocks its host.
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

MOST_US = 25.0
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


def rows(inputs: Inputs, start: int, count: int) -> Inputs:
    """Some of the tokens, in memory of their own."""
    x_TH, weights, routing = inputs
    take = slice(start, start + count)
    few = Routing(routing.topk_weights_TK[take].clone(), routing.topk_ids_TK[take].clone())
    return x_TH[take].clone(), weights, few


def host_us(call: Callable[[], object]) -> float:
    """Microseconds of the host's time that one call takes: the least of 30 medians of 10 times 30
    calls, over half a second and more. What else a host does adds to some of them; a virtual
    machine's may be slow for tens of milliseconds."""
    call()
    found = []
    for _ in range(ROUNDS):
        found.append(_median_us(call))
        time.sleep(PAUSE_S)
    return min(found)


def _median_us(call: Callable[[], object]) -> float:
    found = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found)


def allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def planned(problem: Problem, pair: tuple[str, str] = PAIR) -> Plan:
    return make_kernel(*pair, problem).plan()


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_planned_call_costs_the_host_little(shape: str, quant: str) -> None:
    """With every tensor where it was, and with tokens and routing in other memory each time."""
    problem = replace(SHAPES[shape], quant=quant)
    inputs = random_inputs(problem, DEVICE)
    plan, moving = planned(problem), [rows(inputs, start, 1) for start in range(5)]
    one = moving[0]
    for _ in range(3):
        plan(*one)
    before = allocations()
    for call in moving:
        plan(*call)
    assert allocations() == before
    assert host_us(lambda: plan(*one)) <= MOST_US
    calls = itertools.cycle(moving)
    assert host_us(lambda: plan(*next(calls))) <= MOST_US


def test_a_large_call_costs_the_host_a_third_of_its_host_code() -> None:
    """A call of more than 2,048 tokens, which allocates its workspace and its output."""
    problem = SHAPES["qwen3_30b"].with_tokens(4096)
    kernel, inputs = make_kernel(*PAIR, problem), random_inputs(problem, DEVICE)
    for _ in range(3):
        kernel(*inputs)
    assert kernel.counters()["replayed_calls"] == 1
    slow = host_us(lambda: kernel.start(*inputs).finish())
    quick = host_us(lambda: kernel(*inputs))
    assert quick <= slow / 3, (quick, slow)


class Unhurried(TritonExperts):
    """Not declared replayable, so its host code runs in every call."""


def test_the_measurement_sees_host_code() -> None:
    """The time above is not small because of how it is taken."""
    problem = SHAPES["qwen3_30b"]
    kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(problem), Unhurried(problem))
    plan, one = kernel.plan(), rows(random_inputs(problem, DEVICE), 0, 1)
    slow = host_us(lambda: plan(*one))
    assert slow > MOST_US
    plan = planned(problem)
    quick = host_us(lambda: plan(*one))
    with_pause = host_us(lambda: (plan(*one), _pause(20e-6)))
    assert with_pause > quick + 15
    assert slow > 2 * quick


def _pause(seconds: float) -> None:
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        pass


@pytest.mark.parametrize("pair", [PAIR, BATCHED], ids=lambda pair: pair[1])
@pytest.mark.parametrize("quant", QUANTS)
def test_replays_equal_what_they_replay(pair: tuple[str, str], quant: str) -> None:
    """Other values, weights, memory and `out`, in any order: bit for bit as without a plan."""
    problem = Problem(48, 512, 384, experts=16, top_k=4, quant=quant)
    kernel = make_kernel(*pair, problem)
    plan, first = kernel.plan(), random_inputs(problem, DEVICE)
    weights = first[1]
    other = replace(weights, w1=_other_experts(weights.w1), w2=_other_experts(weights.w2))
    calls = [rows(first, start, count) for count in (1, 5, 16) for start in (0, 7, 30)]
    calls += [(x, other, r) for x, _, r in calls] + [first]
    expected = [kernel(*call).clone() for call in calls]
    for _ in range(3):
        for call, want in zip(calls, expected, strict=True):
            out = torch.full_like(want, torch.nan)
            assert torch.equal(plan(*call), want)
            assert torch.equal(plan(*call, out=out), want)
    recordings = list(plan._recorded._recorded.values())
    assert len(recordings) == 4
    assert None not in recordings


def _other_experts(w: torch.Tensor) -> torch.Tensor:
    """Each expert with its neighbor's weights; by bytes, whatever their dtype."""
    return w.view(torch.uint8).roll(1, 0).view(w.dtype)


def test_a_poisoned_replay_leaves_nothing_unwritten() -> None:
    """Were a launch missing from the recording, NaN would show where it has to write."""
    for pair in (PAIR, BATCHED):
        problem = Problem(16, 512, 384, experts=16, top_k=4, quant="fp8_w8a8_channel")
        kernel = make_kernel(*pair, problem)
        poisoned = make_kernel(*pair, problem, poison=True).plan()
        inputs = random_inputs(problem, DEVICE)
        want = kernel(*inputs)
        for _ in range(3):
            assert torch.equal(poisoned(*inputs), want)
        assert None not in poisoned._recorded._recorded.values()


def test_replays_go_to_the_current_stream_and_into_a_graph() -> None:
    problem = SHAPES["qwen3_30b"]
    inputs = random_inputs(problem, DEVICE)
    plan, static, other = planned(problem), rows(inputs, 0, 1), rows(inputs, 5, 1)
    want_static, want_other = plan(*static).clone(), plan(*other).clone()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late = plan(*static)
        assert not side.query()
    side.synchronize()
    assert torch.equal(late, want_static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = plan(*static)
    x_TH, _, routing = static
    x_TH.copy_(other[0])
    routing.topk_ids_TK.copy_(other[2].topk_ids_TK)
    routing.topk_weights_TK.copy_(other[2].topk_weights_TK)
    graph.replay()
    assert torch.equal(captured, want_other)


def test_launch_hooks_of_triton_are_called_as_ever() -> None:
    import triton

    seen: list[str] = []

    def enter(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    problem = SHAPES["qwen3_30b"]
    plan, one = planned(problem), rows(random_inputs(problem, DEVICE), 0, 1)
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(enter)
    try:
        plan(*one)
        recorded = list(seen)
        plan(*one)
    finally:
        hooks.remove(enter)
    assert recorded
    assert seen == 2 * recorded
    plan(*one)
    assert seen == 2 * recorded


def test_a_thread_that_never_used_the_device_may_replay() -> None:
    problem = SHAPES["qwen3_30b"]
    plan, one = planned(problem), rows(random_inputs(problem, DEVICE), 0, 1)
    for _ in range(3):
        want = plan(*one).clone()
    with ThreadPoolExecutor(1) as pool:
        torch.cuda.synchronize()
        got = pool.submit(lambda: plan(*one).clone()).result()
    torch.cuda.synchronize()
    assert torch.equal(got, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_plan_runs_where_it_was_made() -> None:
    problem = replace(SHAPES["qwen3_30b"], tokens=2)
    wants = []
    for index in range(2):
        device = torch.device("cuda", index)
        with torch.cuda.device(device):
            inputs = random_inputs(problem, device)
            plan = planned(problem)
            wants.append(plan(*inputs).clone())
        with torch.cuda.device(1 - index):
            for _ in range(2):
                assert torch.equal(plan(*inputs), wants[-1])


def test_the_pairings_under_test_are_replayable() -> None:
    machine = this_machine()
    for pair in (PAIR, BATCHED):
        assert make_kernel(*pair, SHAPES["mixtral"], machine=machine).replayable
