"""Automatic preparation of weights, and repeated calls of `route`, on a GPU."""

from dataclasses import replace

import pytest
import torch
from grouped_gemm_stand_in import MXFP4 as MXFP4_PROBLEM

from modular_kernel.catalog import make_kernel
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.ops.route import Routed, RouterTensors, route, route_ref
from modular_kernel.quant.auto_prepare import AUTO_PREPARED
from modular_kernel.spec.router import RouterSpec
from modular_kernel.tensors import Routing
from modular_kernel.testing.cases.inputs import make_inputs

CUDA = torch.device("cuda")
PAIR = ("MoEPrepareAndFinalizeNoEP", "TritonExperts")
SCHEMES = ("mxfp4_w4a16", "int4_w4a16_group", "int4_w4a16_group:zero_points=true", "nvfp4_w4a16")


@pytest.mark.parametrize("tokens", [1, 40, 512])
@pytest.mark.parametrize("quant", SCHEMES)
def test_automatic_preparation_is_bitwise_equal_to_manual(quant: str, tokens: int) -> None:
    problem = replace(MXFP4_PROBLEM, quant=quant, tokens=tokens, hidden=512, intermediate=768)
    inputs = make_inputs(problem, "uniform", CUDA)
    unprepared_kernel = make_kernel(*PAIR, problem, auto_prepare=False)
    expected = unprepared_kernel(
        inputs.x_TH, unprepared_kernel.prepare_weights(inputs.weights), inputs.routing
    )
    layer = FusedMoE(
        problem.experts, problem.hidden, problem.intermediate, top_k=problem.top_k,
        params_dtype=problem.dtype, quant_config=quant, device="cuda",
    )  # fmt: skip
    layer.set_weights(inputs.weights)
    for _ in range(3):
        assert torch.equal(layer(inputs.x_TH, inputs.routing), expected)
    assert AUTO_PREPARED.held_bytes()[torch.device("cuda", 0)] > 0


def test_capture_before_the_first_call_with_the_weights_uses_unprepared_weights() -> None:
    problem = replace(MXFP4_PROBLEM, hidden=512, intermediate=768)
    inputs = make_inputs(problem, "uniform", CUDA)
    warmup_inputs = make_inputs(replace(problem), "uniform", CUDA)
    unprepared_kernel = make_kernel(*PAIR, problem, auto_prepare=False)
    unprepared_output = unprepared_kernel(inputs.x_TH, inputs.weights, inputs.routing)
    kernel = make_kernel(*PAIR, problem)
    # This call compiles the kernels, with other weights.
    kernel(warmup_inputs.x_TH, warmup_inputs.weights, warmup_inputs.routing)
    unprepared_kernel(inputs.x_TH, inputs.weights, inputs.routing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = kernel(inputs.x_TH, inputs.weights, inputs.routing)
    graph.replay()
    assert torch.equal(output, unprepared_output)
    expected = unprepared_kernel(
        inputs.x_TH, unprepared_kernel.prepare_weights(inputs.weights), inputs.routing
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(kernel(inputs.x_TH, inputs.weights, inputs.routing), expected)
        torch.cuda.current_stream().synchronize()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        output = kernel(inputs.x_TH, inputs.weights, inputs.routing)
    graph.replay()
    assert torch.equal(output, expected)


@pytest.mark.parametrize(
    "spec",
    [
        RouterSpec(8, renormalize=True),
        RouterSpec(4, order="topk_first"),
        RouterSpec(
            8, "sigmoid", groups=8, topk_groups=4, selection_bias=True, renormalize=True, eps=1e-20
        ),
    ],
    ids=["softmax", "topk_first", "deepseek"],
)
def test_repeated_routing_equals_the_torch_reference(spec: RouterSpec) -> None:
    experts, generator = 128, torch.Generator("cuda").manual_seed(3)
    bias = None
    if spec.selection_bias:
        bias = torch.randn(experts, device="cuda", generator=generator)
    tensors = RouterTensors(bias)
    for tokens in (1, 3, 64, 1025):
        outputs: list[tuple[Routing, Routing]] = []
        for _ in range(4):
            logits = torch.randn(tokens, experts, device="cuda", generator=generator)
            got = route(logits, spec, tensors).routing
            expected = Routed(
                Routing(torch.empty_like(got.topk_weights_TK), torch.empty_like(got.topk_ids_TK))
            )
            route_ref(logits, spec, tensors, None, expected)
            outputs.append((got, expected.routing))
        # Compare after all calls, because a call must not overwrite the results of earlier calls.
        for got, expected_routing in outputs:
            assert torch.equal(got.topk_ids_TK, expected_routing.topk_ids_TK)
            torch.testing.assert_close(got.topk_weights_TK, expected_routing.topk_weights_TK)
