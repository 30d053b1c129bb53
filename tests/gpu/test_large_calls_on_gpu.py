"""Calls of more than 2,048 tokens: replayed in a workspace of each call, on a GPU."""

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


def few(inputs: Inputs, start: int, count: int = TOKENS) -> Inputs:
    """Some of the tokens, in memory of their own."""
    x_TH, weights, routing = inputs
    take = slice(start, start + count)
    return (
        x_TH[take].clone(),
        weights,
        replace(
            routing,
            topk_weights_TK=routing.topk_weights_TK[take].clone(),
            topk_ids_TK=routing.topk_ids_TK[take].clone(),
        ),
    )


def host_code(kernel: FusedMoEModularKernel, inputs: Inputs) -> torch.Tensor:
    """Run a call without a plan."""
    return kernel.start(*inputs).finish()


def replayed(kernel: FusedMoEModularKernel) -> int:
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
        kernel(*few(inputs, 0))
    counters = kernel.counters()
    assert counters["recorded_calls"] == 1, counters["fallback_calls"]
    return kernel, inputs


def test_replays_equal_host_code_wherever_the_workspace_is(
    recorded: tuple[FusedMoEModularKernel, Inputs],
) -> None:
    """Bit for bit, with other tokens, weights and `out`, and memory that forces a new address."""
    kernel, inputs = recorded
    before, held = replayed(kernel), held_bytes()
    kept: list[torch.Tensor] = []
    for step in range(6):
        x_TH, weights, routing = few(inputs, 200 * step)
        if step % 2:
            w1 = weights.w1.view(torch.uint8).roll(1, 0).view(weights.w1.dtype)
            weights = replace(weights, w1=w1, w1_tiles=None, w1_tile_scales=None)
        call = x_TH, weights, routing
        want = host_code(kernel, call)
        kept.append(torch.full((1 << 24,), 0xA5, dtype=torch.uint8, device=CUDA))
        assert torch.equal(kernel(*call), want)
        out = torch.full_like(want, torch.nan)
        assert torch.equal(kernel(*call, out=out), want)
    assert replayed(kernel) == before + 12
    assert held_bytes() == held
    assert all(bool((memory == 0xA5).all()) for memory in kept)


def test_a_workspace_is_freed_when_the_call_returns(
    recorded: tuple[FusedMoEModularKernel, Inputs],
) -> None:
    kernel, inputs = recorded
    call = few(inputs, 0)
    out = torch.empty_like(call[0])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        kernel(*call, out=out)
        assert torch.cuda.memory_allocated() == before


def test_replays_on_streams_and_in_a_graph(
    recorded: tuple[FusedMoEModularKernel, Inputs],
) -> None:
    """Calls in flight on two streams have separate workspaces; a captured call is not replayed."""
    kernel, inputs = recorded
    first, second = few(inputs, 0), few(inputs, 900)
    wants = [host_code(kernel, call) for call in (first, second)]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(4):
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            late = [kernel(*call) for call in (second, first)]
        early = [kernel(*call) for call in (first, second)]
        torch.cuda.synchronize()
        assert all(map(torch.equal, early, wants))
        assert all(map(torch.equal, late, reversed(wants)))
    before, graph = replayed(kernel), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel(*first)
    assert replayed(kernel) == before
    first[0].copy_(second[0])
    first[2].topk_ids_TK.copy_(second[2].topk_ids_TK)
    first[2].topk_weights_TK.copy_(second[2].topk_weights_TK)
    kernel(*second)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, wants[1])
