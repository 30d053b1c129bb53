"""Layers of vLLM, built and loaded by vLLM, compute what the float64 oracle computes."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.fused_moe.prepare_finalize.batched import BatchedPrepareAndFinalize
from vllm_layers import (
    call,
    fill,
    stand_in_operators,
    version_module,
    vllm_layer,
    vllm_process,
)

from modular_kernel.integrations.vllm import register
from modular_kernel.quant.quantized_weights import quantize_weights
from modular_kernel.reference import oracle, recipe
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.verify.compare import compare

BASE = Problem(tokens=17, hidden=64, intermediate=32, experts=4, top_k=2)
WIDE = replace(BASE, hidden=256, intermediate=128)
PROBLEMS = (
    BASE,
    replace(BASE, activation="gelu"),
    replace(BASE, activation="gelu_tanh"),
    replace(BASE, activation="swiglu_clamp_after"),
    replace(BASE, activation="swiglu_oai", bias=True),
    replace(BASE, dtype=torch.float16),
    replace(WIDE, quant="fp8_w8a8_tensor"),
    replace(WIDE, quant="fp8_w8a8_tensor:static=true"),
    replace(WIDE, quant="fp8_w8a8_channel"),
    replace(WIDE, quant="fp8_w8a8_block"),
    replace(WIDE, quant="int8_w8a8_channel"),
    replace(BASE, quant="int4_w4a16_group:group=32"),
    replace(BASE, quant="int4_w4a16_group:group=32,zero_points=true"),
    replace(BASE, quant="int8_w8a16_group:group=32"),
    replace(BASE, quant="mxfp4_w4a16"),
    replace(BASE, quant="mxfp4_w4a16", activation="swiglu_oai", bias=True),
    replace(BASE, quant="nvfp4_w4a16"),
)
# (problem, format of the checkpoint); compressed-tensors or vLLM's own by default.
ALL_CASES = (
    *((problem, "") for problem in PROBLEMS),
    (replace(BASE, intermediate=64, quant="int4_w4a16_group:group=32"), "gptq"),
    (replace(BASE, quant="int4_w4a16_group:group=32"), "moe_wna16"),
    (replace(BASE, quant="int4_w4a16_group:group=32,zero_points=true"), "awq"),
    (replace(BASE, quant="int4_w4a16_group:group=32"), "awq"),
)
HAS_GROUPS = "int_wna16" in version_module().ORACLES
CASES = [
    (problem, form)
    for problem, form in ALL_CASES
    if HAS_GROUPS or not problem.quant.startswith(("int4_w4a16_group", "int8_w8a16_group"))
]


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    with vllm_process():
        register()
        yield


@pytest.fixture(autouse=True)
def _operators(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_operators(monkeypatch)


def tensors(problem: Problem) -> tuple[torch.Tensor, ExpertWeights, Routing]:
    g = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(problem.dtype)

    e, h, i = problem.experts, problem.hidden, problem.intermediate
    weights = ExpertWeights(normal(e, problem.w1_rows, h) / h**0.5, normal(e, h, i) / i**0.5)
    if problem.bias:
        weights = replace(weights, b1=normal(e, problem.w1_rows), b2=normal(e, h))
    if problem.scheme.static:
        weights = replace(weights, a1_scale=torch.tensor([0.01]), a2_scale=torch.tensor([0.004]))
    if problem.scheme.quantized:
        weights = quantize_weights(weights, problem)
    if weights.w1_global_scale is not None:  # vLLM uses that of gate for up, too
        weights = replace(weights, w1_global_scale=weights.w1_global_scale[:, :1].repeat(1, 2))
    values, ids = torch.randn(problem.tokens, e, generator=g).topk(problem.top_k)
    return normal(problem.tokens, h), weights, Routing(values.softmax(-1), ids)


@pytest.mark.parametrize("part", ["TritonExperts", "TorchExperts"])
@pytest.mark.parametrize(("problem", "form"), CASES, ids=str)
def test_layer(problem: Problem, form: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MK_VLLM", part)
    x_TH, weights, routing = tensors(problem)
    layer = vllm_layer(problem, form)
    assert layer.quant_method.experts_cls.__name__ == f"ModularKernel{part}"
    fill(layer, problem, weights, form)
    layer.quant_method.process_weights_after_loading(layer)
    got = call(layer, x_TH, routing)
    exact = oracle(x_TH, weights, routing, problem)
    comparison = compare(got, exact, recipe(x_TH, weights, routing, problem), problem)
    assert comparison.ok, comparison.problems
    assert torch.equal(call(layer, x_TH, routing), got)


@pytest.mark.parametrize("part", ["TritonExperts", "TorchExperts"])
def test_router_weights_on_the_input(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's `prepare` applies the weights to the tokens, so the experts must not."""
    monkeypatch.setenv("MK_VLLM", part)
    problem = replace(BASE, top_k=1, apply_router_weight_on_input=True)
    x_TH, weights, routing = tensors(problem)
    routing = replace(routing, topk_weights_TK=torch.linspace(0.1, 0.9, 17)[:, None])
    layer = vllm_layer(problem, apply_router_weight_on_input=True)
    fill(layer, problem, weights)
    layer.quant_method.process_weights_after_loading(layer)
    got = call(layer, x_TH.clone(), routing)
    exact = oracle(x_TH, weights, routing, problem)
    comparison = compare(got, exact, recipe(x_TH, weights, routing, problem), problem)
    assert comparison.ok, comparison.problems


@pytest.mark.parametrize("part", ["BatchedTritonExperts", "NaiveBatchedExperts"])
def test_batched_experts(part: str) -> None:
    """In vLLM's kernel, with its own dispatch into rows by expert."""
    version = version_module()
    x_TH, weights, routing = tensors(BASE)
    config = vllm_layer(BASE).moe_config
    experts = version.make_experts_class(version.BatchedExperts, "none", part)(
        config, FusedMoEQuantConfig.make(), max_num_tokens=BASE.tokens, num_dispatchers=1
    )
    prepare = BatchedPrepareAndFinalize(
        max_num_tokens=BASE.tokens, num_local_experts=BASE.experts, num_dispatchers=1, rank=0
    )
    got = FusedMoEKernel(prepare, experts).apply(
        x_TH.clone(),
        weights.w1,
        weights.w2,
        routing.topk_weights_TK,
        routing.topk_ids_TK,
        MoEActivation.SILU,
        BASE.experts,
        None,
        False,
    )
    exact = oracle(x_TH, weights, routing, BASE)
    comparison = compare(got, exact, recipe(x_TH, weights, routing, BASE), BASE)
    assert comparison.ok, comparison.problems
