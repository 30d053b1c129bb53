"""Replayed calls with more than 2,048 tokens, each of which allocates a new workspace."""

from dataclasses import replace

import pytest
import torch

from modular_kernel.catalog import make_kernel
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.plan import held_bytes
from modular_kernel.spec.problem import Problem
from modular_kernel.testing.random_inputs import Inputs, random_inputs

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
TOKENS = 2500
PROBLEM = Problem(4096, 512, 384, experts=16, top_k=4)
QUANTS = ("none", "fp8_w8a8_channel", "fp8_w8a8_block", "int4_w4a16_group", "mxfp4_w4a16")


def copy_tokens(inputs: Inputs, start: int, count: int = TOKENS) -> Inputs:
    """Return copies of `count` tokens and their routing, with the same weights."""
    x_TH, weights, routing = inputs
    token_slice = slice(start, start + count)
    return (
        x_TH[token_slice].clone(),
        weights,
        replace(
            routing,
            topk_weights_TK=routing.topk_weights_TK[token_slice].clone(),
            topk_ids_TK=routing.topk_ids_TK[token_slice].clone(),
        ),
    )


def run_without_plan(kernel: FusedMoEModularKernel, inputs: Inputs) -> torch.Tensor:
    return kernel.start(*inputs).finish()


def count_replayed_calls(kernel: FusedMoEModularKernel) -> int:
    count = kernel.counters()["replayed_calls"]
    assert isinstance(count, int)
    return count


@pytest.fixture(params=QUANTS)
def recorded(request: pytest.FixtureRequest) -> tuple[FusedMoEModularKernel, Inputs]:
    """Return a kernel whose large calls are recorded, and inputs of 4,096 tokens."""
    kernel = make_kernel(
        "MoEPrepareAndFinalizeNoEP", "TritonExperts", replace(PROBLEM, quant=request.param)
    )
    inputs = random_inputs(kernel.problem, CUDA)
    for _ in range(2):
        kernel(*copy_tokens(inputs, 0))
    counters = kernel.counters()
    assert counters["recorded_calls"] == 1, counters["fallback_calls"]
    return kernel, inputs


def test_replays_equal_calls_without_plan_at_any_workspace_address(
    recorded: tuple[FusedMoEModularKernel, Inputs],
) -> None:
    """Calls differ in tokens, weights and `out`, and live allocations force new addresses."""
    kernel, inputs = recorded
    replayed_before, bytes_before = count_replayed_calls(kernel), held_bytes()
    allocated: list[torch.Tensor] = []
    for step in range(6):
        x_TH, weights, routing = copy_tokens(inputs, 200 * step)
        if step % 2:
            w1 = weights.w1.view(torch.uint8).roll(1, 0).view(weights.w1.dtype)
            weights = replace(weights, w1=w1, w1_tiles=None, w1_tile_scales=None)
        call = x_TH, weights, routing
        expected = run_without_plan(kernel, call)
        allocated.append(torch.full((1 << 24,), 0xA5, dtype=torch.uint8, device=CUDA))
        assert torch.equal(kernel(*call), expected)
        out = torch.full_like(expected, torch.nan)
        assert torch.equal(kernel(*call, out=out), expected)
    assert count_replayed_calls(kernel) == replayed_before + 12
    assert held_bytes() == bytes_before  # the memory that all plans of the process hold
    assert all(bool((memory == 0xA5).all()) for memory in allocated)


def test_workspace_is_freed_when_the_call_returns(
    recorded: tuple[FusedMoEModularKernel, Inputs],
) -> None:
    kernel, inputs = recorded
    call = copy_tokens(inputs, 0)
    out = torch.empty_like(call[0])
    torch.cuda.synchronize()
    bytes_before = torch.cuda.memory_allocated()
    for _ in range(3):
        kernel(*call, out=out)
        assert torch.cuda.memory_allocated() == bytes_before


def test_replays_on_streams_and_in_a_graph_are_correct(
    recorded: tuple[FusedMoEModularKernel, Inputs],
) -> None:
    """Concurrent calls on two streams have separate workspaces. A captured call is not replayed."""
    kernel, inputs = recorded
    first, second = copy_tokens(inputs, 0), copy_tokens(inputs, 900)
    expected_outputs = [run_without_plan(kernel, call) for call in (first, second)]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(4):
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            side_outputs = [kernel(*call) for call in (second, first)]
        main_outputs = [kernel(*call) for call in (first, second)]
        torch.cuda.synchronize()
        assert all(map(torch.equal, main_outputs, expected_outputs))
        assert all(map(torch.equal, side_outputs, reversed(expected_outputs)))
    replayed_before, graph = count_replayed_calls(kernel), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel(*first)
    assert count_replayed_calls(kernel) == replayed_before
    first[0].copy_(second[0])
    first[2].topk_ids_TK.copy_(second[2].topk_ids_TK)
    first[2].topk_weights_TK.copy_(second[2].topk_weights_TK)
    kernel(*second)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected_outputs[1])
