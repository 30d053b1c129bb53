"""fused_experts and fused_moe: no keyword is ignored, and tensors as other libraries have them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from fused_samples import BASE, E, H, I, K, T, close, layer, run

from modular_kernel.errors import ConfigurationError, ShapeError
from modular_kernel.integrations import fused_moe as module
from modular_kernel.integrations.fused_moe import (
    MoeRunnerConfig,
    fused_moe,
    outplace_fused_experts,
)
from modular_kernel.reference import oracle
from modular_kernel.types import Combine


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"activation": "gelu"}, {"activation": "gelu"}),
        ({"routed_scaling_factor": 2.5}, {"routed_scaling_factor": 2.5}),
        ({"no_combine": True}, {"combine": Combine.TOPK_WEIGHTED}),
        ({"apply_router_weight_on_input": True}, {"apply_router_weight_on_input": True}),
        ({"gemm1_clamp_limit": 0.5}, {"activation": "swiglu_clamp_after:limit=0.5"}),
        ({"chunk_tokens": 2}, {"chunk_tokens": 2}),
        ({"num_experts": E, "top_k": K}, {}),
    ],
    ids=str,
)
def test_a_field_of_the_config_may_be_a_keyword(
    options: dict[str, Any], facts: dict[str, Any]
) -> None:
    problem = replace(BASE, **facts)
    x_TH, weights, routing = layer(problem)
    want = oracle(x_TH, weights, routing, problem)
    close(run(x_TH, weights, routing, **options), want, 1e-5)
    # It replaces what the config says.
    other = MoeRunnerConfig(activation="relu2" if "activation" in options else "silu", top_k=K)
    close(run(x_TH, weights, routing, other, **options), want, 1e-5)


def test_inplace_as_a_keyword_and_biases_by_either_name() -> None:
    problem = replace(BASE, bias=True)
    x_TH, weights, routing = layer(problem)
    want = oracle(x_TH, weights, routing, problem)
    plain = replace(weights, b1=None, b2=None)
    got = run(x_TH, plain, routing, w1_bias=weights.b1, w2_bias=weights.b2, inplace=True)
    assert got is x_TH
    close(got, want, 1e-5)
    with pytest.raises(ConfigurationError, match="w1_bias: got b1 too, need one of the two"):
        run(x_TH, weights, routing, w1_bias=weights.b1)


def test_chunks_are_made() -> None:
    """TorchExperts and TritonExperts see no more tokens at once than asked for."""
    x_TH, weights, routing = layer(BASE)
    arguments = (x_TH, weights.w1, weights.w2, routing.topk_weights_TK, routing.topk_ids_TK)
    whole = outplace_fused_experts(*arguments, [None] * 9, "none", "silu", False, 1.0, False)
    parts = outplace_fused_experts(*arguments, [None] * 9, "none", "silu", False, 1.0, False, 2)
    close(parts, whole.double(), 1e-6)
    sizes = (16, H, I, E, K, None)
    facts = ("none", "silu", False, 1.0, Combine.SUM, False, 2)
    assert module._kernel(sizes, torch.float32, False, facts, x_TH.device).problem.chunk_tokens == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_fp8": True}, r"keyword: got 'use_fp8', need use_fp8_w8a8\? One of .*activation"),
        ({"inplce": True}, r"keyword: got 'inplce', need inplace\? "),
        ({"zzz": 1}, "keyword: got 'zzz', need One of .*w2_zp"),
        ({"inplace": "false"}, "inplace: got 'false', need True or False"),
        ({"use_fp8_w8a8": 1}, "use_fp8_w8a8: got 1, need True or False"),
        ({"block_shape": "128"}, "block_shape: got '128', need a list"),
        ({"block_shape": [1.5, 2]}, "block_shape: got list, need a list, each an int"),
        ({"w1_scale": 0.1}, "w1_scale: got 0.1, need a Tensor or None"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor: got nan, need a finite"),
        ({"chunk_tokens": 0}, "chunk_tokens: got 0, need an int >= 1"),
        ({"activation": 5}, "activation: got 5"),
        ({"cfg": None}, "keyword: got 'cfg'"),
    ],
    ids=str,
)
def test_no_keyword_is_ignored(options: dict[str, Any], message: str) -> None:
    x_TH, weights, routing = layer(BASE)
    with pytest.raises(ConfigurationError, match=message):
        run(x_TH, weights, routing, **options)
    with pytest.raises(ConfigurationError, match=message):
        fused_moe(x_TH, weights.w1, weights.w2, torch.randn(T, E), top_k=K, **options)


def test_junk_in_the_config() -> None:
    x_TH, weights, routing = layer(BASE)
    with pytest.raises(ConfigurationError, match="moe_runner_config: got dict, need a MoeRunner"):
        run(x_TH, weights, routing, {"inplace": True})  # type: ignore[arg-type]
    for name in ("inplace", "no_combine", "apply_router_weight_on_input"):
        with pytest.raises(ConfigurationError, match=f"{name}: got 'false', need True or False"):
            MoeRunnerConfig(**{name: "false"})


# ------------------------------------------------------------------ tensors as others have them


def test_one_scale_expanded_over_the_experts() -> None:
    problem = replace(BASE, quant="fp8_w8a8_tensor")
    x_TH, weights, routing = layer(problem)
    scales = {name: torch.tensor([0.01]).expand(E) for name in ("w1_scale", "w2_scale")}
    got = run(x_TH, weights, routing, use_fp8_w8a8=True, **scales)
    plain = replace(weights, **{name: scale.contiguous() for name, scale in scales.items()})
    close(got, oracle(x_TH, plain, routing, problem), 0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_router_weights_of_16_bits_are_widened(dtype: torch.dtype) -> None:
    x_TH, weights, routing = layer(BASE)
    short = replace(routing, topk_weights_TK=routing.topk_weights_TK.to(dtype))
    wide = replace(routing, topk_weights_TK=short.topk_weights_TK.float())
    assert torch.equal(run(x_TH, weights, short), run(x_TH, weights, wide))


def test_fused_moe_takes_what_a_router_has_chosen() -> None:
    x_TH, weights, routing = layer(BASE)
    chosen = (routing.topk_weights_TK, routing.topk_ids_TK, None)
    assert torch.equal(fused_moe(x_TH, weights.w1, weights.w2, chosen), run(x_TH, weights, routing))
    with pytest.raises(ConfigurationError, match="renormalize: got True, need the router's logits"):
        fused_moe(x_TH, weights.w1, weights.w2, chosen, renormalize=True)
    for junk in (None, 5, torch.ones(E)):
        with pytest.raises(ShapeError, match="gating_output"):
            fused_moe(x_TH, weights.w1, weights.w2, junk, top_k=K)
