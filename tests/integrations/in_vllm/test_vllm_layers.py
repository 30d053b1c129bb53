"""Layers that vLLM creates and loads have outputs close to the float64 reference."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import vllm_layers
from vllm.config import get_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import layer as layer_module
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.modular_kernel import ExpertTokensMetadata, FusedMoEKernel
from vllm.model_executor.layers.fused_moe.prepare_finalize.batched import BatchedPrepareAndFinalize
from vllm_layers import (
    call,
    fill,
    stand_in_operators,
    version_module,
    vllm_layer,
    vllm_process,
    vllm_runner,
)

from modular_kernel.errors import DtypeError
from modular_kernel.integrations.vllm import register
from modular_kernel.reference import float64_reference, rounded_reference
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.verify.compare import compare

BASE = Problem(tokens=17, hidden=64, intermediate=32, experts=4, top_k=2)
LARGE = replace(BASE, hidden=256, intermediate=128)
PROBLEMS = (
    BASE,
    replace(BASE, activation="gelu"),
    replace(BASE, activation="gelu_tanh"),
    replace(BASE, activation="swiglu_clamp_after"),
    replace(BASE, activation="swiglu_oai", bias=True),
    replace(BASE, dtype=torch.float16),
    replace(LARGE, quant="fp8_w8a8_tensor"),
    replace(LARGE, quant="fp8_w8a8_tensor:static=true"),
    replace(LARGE, quant="fp8_w8a8_channel"),
    replace(LARGE, quant="fp8_w8a8_block"),
    replace(LARGE, quant="int8_w8a8_channel"),
    replace(BASE, quant="int4_w4a16_group:group=32"),
    replace(BASE, quant="int4_w4a16_group:group=32,zero_points=true"),
    replace(BASE, quant="int8_w8a16_group:group=32"),
    replace(BASE, quant="mxfp4_w4a16"),
    replace(BASE, quant="mxfp4_w4a16", activation="swiglu_oai", bias=True),
    replace(BASE, quant="nvfp4_w4a16"),
)
# Problems and formats of the checkpoint. "" is compressed-tensors or vLLM's own format.
ALL_CASES = (
    *((problem, "") for problem in PROBLEMS),
    (replace(BASE, intermediate=64, quant="int4_w4a16_group:group=32"), "gptq"),
    (replace(BASE, intermediate=64, quant="int8_w8a16_group:group=32"), "gptq"),
    (replace(BASE, quant="int4_w4a16_group:group=32"), "moe_wna16"),
    (replace(LARGE, quant="int4_w4a16_group:group=32,zero_points=true"), "moe_wna16"),
    (replace(BASE, quant="int8_w8a16_group:group=32"), "moe_wna16"),
    (replace(BASE, quant="int4_w4a16_group:group=32,zero_points=true"), "awq"),
    (replace(BASE, quant="int4_w4a16_group:group=32"), "awq"),
    (replace(LARGE, quant="fp8_w8a8_tensor:static=true"), "compressed-tensors"),
    (replace(LARGE, quant="fp8_w8a8_block"), "compressed-tensors"),
    (replace(LARGE, quant="fp8_w8a8_block:block=64x64"), "compressed-tensors"),
    (replace(LARGE, quant="fp8_w8a8_tensor:static=true"), "modelopt"),
    (replace(BASE, quant="nvfp4_w4a16"), "modelopt"),
)
IS_0_26 = version_module().__name__.endswith("v0_26")
# In vLLM 0.26, the method for "moe_wna16" does not call an oracle.
CASES = [case for case in ALL_CASES if not IS_0_26 or case[1] != "moe_wna16"]


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    with vllm_process():
        register()
        yield


@pytest.fixture(autouse=True)
def _use_cpu_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_operators(monkeypatch)


def tensors(problem: Problem) -> tuple[torch.Tensor, ExpertWeights, Routing]:
    x_TH, weights, _, routing = vllm_layers.tensors(problem)
    return x_TH, weights, routing


@pytest.mark.parametrize("part", ["TritonExperts", "TorchExperts"])
@pytest.mark.parametrize(("problem", "checkpoint_format"), CASES, ids=str)
def test_outputs_equal_the_reference(
    problem: Problem, checkpoint_format: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MK_VLLM", part)
    x_TH, weights, routing = tensors(problem)
    layer = vllm_layer(problem, checkpoint_format)
    assert layer.quant_method.experts_cls.__name__ == f"ModularKernel{part}"
    fill(layer, problem, weights, checkpoint_format)
    layer.quant_method.process_weights_after_loading(layer)
    got = call(layer, x_TH, routing)
    exact = float64_reference(x_TH, weights, routing, problem)
    comparison = compare(got, exact, rounded_reference(x_TH, weights, routing, problem), problem)
    assert comparison.ok, comparison.problems
    assert torch.equal(call(layer, x_TH, routing), got)


@pytest.mark.parametrize("part", ["TritonExperts", "TorchExperts"])
def test_router_weights_on_the_input(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's `prepare` multiplies the tokens by the router weights, so the experts must not."""
    monkeypatch.setenv("MK_VLLM", part)
    problem = replace(BASE, top_k=1, apply_router_weight_on_input=True)
    x_TH, weights, routing = tensors(problem)
    routing = replace(routing, topk_weights_TK=torch.linspace(0.1, 0.9, 17)[:, None])
    layer = vllm_layer(problem, apply_router_weight_on_input=True)
    fill(layer, problem, weights)
    layer.quant_method.process_weights_after_loading(layer)
    got = call(layer, x_TH.clone(), routing)
    exact = float64_reference(x_TH, weights, routing, problem)
    comparison = compare(got, exact, rounded_reference(x_TH, weights, routing, problem), problem)
    assert comparison.ok, comparison.problems


def check(got: torch.Tensor, inputs: tuple[Any, ...], problem: Problem) -> None:
    comparison = compare(
        got, float64_reference(*inputs, problem), rounded_reference(*inputs, problem), problem
    )
    assert comparison.ok, comparison.problems


@pytest.mark.skipif(IS_0_26, reason="0.26 loads only declared biases")
@pytest.mark.parametrize("loaded", [("w13_bias", "w2_bias"), ("w13_bias",), ("w2_bias",), ()])
@pytest.mark.parametrize("declared", [False, True])
def test_biases_equal_those_of_the_checkpoint(
    loaded: tuple[str, ...], declared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM loads biases of GPTQ checkpoints whether the model declares them or not."""
    monkeypatch.setenv("MK_VLLM", "TorchExperts")
    problem = replace(BASE, intermediate=64, quant="int4_w4a16_group:group=32", bias=True)
    x_TH, weights, routing = tensors(problem)
    layer = vllm_layer(replace(problem, bias=declared), "gptq")
    fill(layer, problem, weights, "gptq")
    layer._loaded_expert_biases |= set(loaded)
    layer.quant_method.process_weights_after_loading(layer)
    got = call(layer, x_TH, routing)
    zero_biases = {
        name: torch.zeros_like(getattr(weights, name))
        for name, parameter in (("b1", "w13_bias"), ("b2", "w2_bias"))
        if parameter not in loaded
    }
    check(got, (x_TH, replace(weights, **zero_biases), routing), problem)


def test_declared_biases_that_are_not_loaded_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's method for this format has no biases."""
    monkeypatch.setenv("MK_VLLM", "TorchExperts")
    problem = replace(LARGE, quant="fp8_w8a8_channel")
    x_TH, weights, routing = tensors(problem)
    layer = vllm_layer(replace(problem, bias=True))
    fill(layer, problem, weights)
    layer.quant_method.process_weights_after_loading(layer)
    check(call(layer, x_TH, routing), (x_TH, weights, routing), problem)


@pytest.mark.parametrize("quant", ["nvfp4_w4a16", "fp8_w8a8_tensor"])
def test_reloads_keep_the_memory_of_scales(quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph that was captured before the reload still reads the memory of its scales."""
    monkeypatch.setenv("MK_VLLM", "TorchExperts")
    problem = replace(BASE, quant=quant)
    _, weights, _ = tensors(problem)
    layer = vllm_layer(problem)
    fill(layer, problem, weights)
    layer.quant_method.process_weights_after_loading(layer)
    config = layer.quant_method.moe_quant_config
    vllm_weights = layer.w13_weight, layer.w2_weight
    experts = layer.quant_method.moe_kernel.fused_experts
    name = "w1_global_scale" if quant == "nvfp4_w4a16" else "w1_scale"
    captured_scale = getattr(experts._get_weights(*vllm_weights, None), name)
    before = captured_scale.clone()
    source_scale = config.g1_alphas if quant == "nvfp4_w4a16" else config.w1_scale
    source_scale.data.mul_(0.5)
    experts = type(experts)(layer.moe_config, config)  # as vLLM does after loading weights
    reloaded = getattr(experts._get_weights(*vllm_weights, None), name)
    assert reloaded.data_ptr() == captured_scale.data_ptr()
    assert torch.equal(captured_scale, before / 2)


class SharedExpert(torch.nn.Module):
    def __init__(self, weight_HH: torch.Tensor) -> None:
        super().__init__()
        self.weight_HH = weight_HH

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return x_TH @ self.weight_HH


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "not renormalized": {"renormalize": False},
    "groups": {"use_grouped_topk": True, "num_expert_group": 2, "topk_group": 1},
    "sigmoid with a correction": {
        "use_grouped_topk": True, "num_expert_group": 2, "topk_group": 1,
        "scoring_func": "sigmoid", "e_score_correction_bias": torch.linspace(-1, 1, 4),
        "routed_scaling_factor": 2.5,
    },
    "scaled output": {
        "use_grouped_topk": True, "num_expert_group": 2, "topk_group": 1,
        "routed_scaling_factor": 2.5, "apply_routed_scale_to_output": True,
    },
}  # fmt: skip


@pytest.mark.skipif(
    not hasattr(layer_module, "FusedMoEFactory"), reason="vLLM 0.26 needs its extension"
)
@pytest.mark.parametrize("name", ROUTERS)
def test_layers_with_a_router_and_a_shared_expert(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MK_VLLM", "TorchExperts")
    x_TH, weights, routing = tensors(BASE)
    options = ROUTERS[name]
    shared_expert = SharedExpert(torch.eye(BASE.hidden, dtype=BASE.dtype).roll(1, 0))
    runner = vllm_runner(BASE, shared_experts=shared_expert, **options)
    layer = runner.routed_experts
    fill(layer, BASE, weights)
    layer.quant_method.process_weights_after_loading(layer)
    generator = torch.Generator().manual_seed(11)
    logits_TE = torch.randn(BASE.tokens, BASE.experts, generator=generator).to(BASE.dtype)
    config = get_current_vllm_config()
    with torch.inference_mode(), set_forward_context(None, config, num_tokens=BASE.tokens):
        got = runner(x_TH.clone(), logits_TE)
        weights_TK, ids_TK = runner.router.select_experts(x_TH, logits_TE)
    routing = Routing(weights_TK.float(), ids_TK.long())
    scale = 2.5 if "apply_routed_scale_to_output" in options else 1
    expected = float64_reference(x_TH, weights, routing, BASE) * scale + shared_expert(x_TH)
    torch.testing.assert_close(got.double(), expected.double(), rtol=0.02, atol=0.02)


BATCHED_PROBLEMS = (
    BASE,
    replace(LARGE, quant="fp8_w8a8_tensor"),
    replace(LARGE, quant="fp8_w8a8_tensor:static=true"),
    replace(LARGE, quant="fp8_w8a8_channel"),
    # In vLLM 0.26, the dispatch cannot allocate rows for mxfp4.
    *((replace(BASE, quant="mxfp4_w4a16"),) if not IS_0_26 else ()),
)


@pytest.mark.parametrize("part", ["BatchedTritonExperts", "NaiveBatchedExperts"])
@pytest.mark.parametrize("problem", BATCHED_PROBLEMS, ids=str)
def test_batched_experts(problem: Problem, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts run in vLLM's kernel, whose dispatch quantizes and batches the tokens."""
    monkeypatch.setenv("MK_VLLM", "TorchExperts")
    version = version_module()
    x_TH, weights, routing = tensors(problem)
    if problem.scheme.activation_granularity == "tensor" and not problem.scheme.static:
        x_TH *= torch.logspace(-2, 2, problem.tokens)[:, None].to(problem.dtype)
    layer = vllm_layer(problem)
    fill(layer, problem, weights)
    layer.quant_method.process_weights_after_loading(layer)
    experts = version.make_experts_class(version.BatchedExperts, problem.quant, part)(
        layer.moe_config,
        layer.quant_method.moe_quant_config,
        max_num_tokens=problem.tokens,
        num_dispatchers=1,
    )
    prepare = BatchedPrepareAndFinalize(
        max_num_tokens=problem.tokens, num_local_experts=problem.experts, num_dispatchers=1, rank=0
    )
    got = FusedMoEKernel(prepare, experts).apply(
        x_TH.clone(),
        layer.w13_weight,
        layer.w2_weight,
        routing.topk_weights_TK,
        routing.topk_ids_TK,
        MoEActivation.SILU,
        problem.experts,
        None,
        False,
    )
    check(got, (x_TH, weights, routing), problem)


def test_batched_rows_that_do_not_match_the_scheme_are_refused() -> None:
    version = version_module()
    _, weights, _ = tensors(BASE)
    config = vllm_layer(BASE).moe_config
    experts = version.make_experts_class(version.BatchedExperts, "none", "NaiveBatchedExperts")(
        config, FusedMoEQuantConfig.make(), max_num_tokens=3, num_dispatchers=1
    )
    x_eCH = torch.zeros(4, 3, 64, dtype=torch.float8_e4m3fn)
    tokens_metadata = ExpertTokensMetadata(torch.tensor([3, 0, 1, 2], dtype=torch.int32), None)
    workspace, out = torch.empty(1 << 20, dtype=torch.bfloat16), torch.empty(4, 3, 64)
    with pytest.raises(DtypeError, match=r"hidden_states for none: got torch.float8_e4m3fn"):
        experts.apply(
            out, x_eCH, weights.w1, weights.w2, None, None, MoEActivation.SILU, 4, None,
            torch.ones(4, 1, 1), None, workspace[:0], workspace, tokens_metadata, False,
        )  # fmt: skip
