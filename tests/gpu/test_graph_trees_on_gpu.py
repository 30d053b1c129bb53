"""Eager calls of a kernel in a process that also replays CUDA graphs of torch.compile."""

import pytest
import torch

from modular_kernel.operators.experts import EXPERTS_FORWARD
from modular_kernel.operators.pairing import Pairing, serialize_layer
from modular_kernel.spec.problem import Problem
from modular_kernel.testing.random_inputs import random_inputs

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
PAIR = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")


@torch.no_grad()
def test_eager_calls_beside_cuda_graphs_of_torch_compile_are_replayed() -> None:
    problem = Problem(16, 512, 384, experts=16, top_k=4)
    x_TH, weights, routing = random_inputs(problem, CUDA)
    pairing = Pairing(*PAIR)
    operator_options = "w1,w2", serialize_layer(problem), str(pairing)
    ids_TK, weights_TK = routing.topk_ids_TK, routing.topk_weights_TK
    params = [weights.w1, weights.w2]

    def layer(x_TH: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = EXPERTS_FORWARD(x_TH, ids_TK, weights_TK, params, *operator_options)
        return output

    expected = layer(x_TH)
    compiled = torch.compile(layer, mode="reduce-overhead")
    for _ in range(4):  # covers warm-up, recording and replays of the graph
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(x_TH), expected)
    (kernel,) = pairing.kernels.values()
    replayed_before = kernel.counters()["replayed_calls"]
    assert isinstance(replayed_before, int)
    for _ in range(3):
        assert torch.equal(layer(x_TH), expected)
    assert kernel.counters()["replayed_calls"] == replayed_before + 3
    torch.compiler.cudagraph_mark_step_begin()
    assert torch.equal(compiled(x_TH), expected)
