"""Unsupported layers run on SGLang's Triton backend, and the plugin logs the reason once."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from sglang_runtime import dispatch_output, fill, fused_moe, layer_inputs, run_core, select

from modular_kernel.spec.problem import Problem

BASE = Problem(tokens=5, hidden=64, intermediate=32, experts=4, top_k=2, dtype=torch.bfloat16)
TRITON = "sglang.srt.layers.moe.moe_runner.triton"


@pytest.fixture
def triton_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Replace the fused operation of SGLang's Triton backend, which needs a GPU, by a recorder."""
    from sglang.srt.layers.moe.moe_runner.base import FusedOpPool
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

    calls: list[tuple[Any, ...]] = []

    def run(*arguments: Any) -> Any:
        calls.append(arguments)
        return StandardCombineInput(torch.full_like(arguments[0].hidden_states, 7))

    monkeypatch.setitem(FusedOpPool._fused_funcs, ("none", "triton"), run)
    return calls


def list_refusal_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "SGLang's triton" in r.getMessage()]


def make_quant_info(layer: Any) -> Any:
    """Return SGLang's quant_info of an unquantized layer."""
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo

    biases = (getattr(layer, f"{name}_weight_bias", None) for name in ("w13", "w2"))
    return TritonMoeQuantInfo(layer.w13_weight, layer.w2_weight, *biases)


REFUSED_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "silu_rounded": ({"activation": "silu_rounded"}, "activation: got silu_rounded, need one of"),
    "two limits": (
        {"swiglu_limit": 10.0, "gemm1_clamp_limit": 7.0},
        "swiglu_limit: got 10.0 with gemm1_alpha or gemm1_clamp_limit",
    ),
    "beta": ({"gemm1_beta": 0.5}, "gemm1_beta: got 0.5"),
}


@pytest.mark.parametrize("name", REFUSED_OPTIONS)
def test_layers_refused_at_construction_have_the_runner_of_sglang(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.layers.moe.moe_runner.triton import TritonRunnerCore

    options, reason = REFUSED_OPTIONS[name]
    layer = fused_moe(BASE, **options)
    assert layer.runner_backend.value == "triton"
    assert type(layer.runner.runner_core) is TritonRunnerCore
    assert layer.runner.fused_func is not None
    (message,) = list_refusal_messages(caplog)
    assert message.startswith("MoE layer 3 runs on SGLang's triton, not modular_kernel: " + reason)


def test_layers_refused_in_their_first_call_run_on_triton(
    triton_calls: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo

    inputs = layer_inputs(BASE)
    layer = fused_moe(BASE)
    fill(layer, inputs.weights)
    invalid_info = TritonMoeQuantInfo(layer.w13_weight[:, :, :32], layer.w2_weight)
    dispatched = dispatch_output(inputs)
    for _ in range(2):
        assert torch.all(layer.runner.run(dispatched, invalid_info).hidden_states == 7)
    assert triton_calls == [(dispatched, invalid_info, layer.moe_runner_config)] * 2
    (message,) = list_refusal_messages(caplog)
    assert message.startswith("MoE layer 3 runs on SGLang's triton, not modular_kernel: ")
    assert "got (4, 64, 32), need (E, N, H) with H = 64" in message


def test_weights_on_the_input_with_a_bias_run_on_triton(
    triton_calls: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang multiplies the bias by the router weights, too, which is not supported here."""
    problem = replace(BASE, bias=True, top_k=1, apply_router_weight_on_input=True)
    inputs = layer_inputs(problem)
    layer = fused_moe(problem)
    fill(layer, inputs.weights)
    assert torch.all(
        layer.runner.run(dispatch_output(inputs), make_quant_info(layer)).hidden_states == 7
    )
    (message,) = list_refusal_messages(caplog)
    assert message.endswith(
        "b13: got a tensor, need None, because apply_router_weight_on_input is True"
    )
    assert len(triton_calls) == 1


def test_changed_configs_are_converted_again(
    triton_calls: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    inputs = layer_inputs(BASE)
    layer = fused_moe(BASE)
    fill(layer, inputs.weights)
    layer.moe_runner_config.inplace = False
    dispatched = dispatch_output(inputs)
    before = layer.runner.run(dispatched, make_quant_info(layer)).hidden_states
    layer.moe_runner_config.routed_scaling_factor = 2.0
    after = layer.runner.run(dispatched, make_quant_info(layer)).hidden_states
    torch.testing.assert_close(after, 2 * before)
    layer.moe_runner_config.activation = "silu_rounded"
    assert torch.all(layer.runner.run(dispatched, make_quant_info(layer)).hidden_states == 7)
    (message,) = list_refusal_messages(caplog)
    assert "activation: got silu_rounded" in message
    assert len(triton_calls) == 1


def test_unsupported_records_and_calls_run_on_triton(
    triton_calls: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
    from sglang.srt.layers.moe.topk import PackedTopKOutput

    inputs = layer_inputs(BASE)
    weights = inputs.weights.w1, inputs.weights.w2
    run_core(BASE, inputs, TritonMoeQuantInfo(*weights, use_mxfp8=True))
    assert list_refusal_messages(caplog)[-1].endswith("use_mxfp8: got True, need False")
    layer = fused_moe(BASE)
    packed = dispatch_output(inputs)._replace(topk_output=PackedTopKOutput(torch.zeros(5, 2), None))
    info = TritonMoeQuantInfo(*weights)
    layer.runner.run(packed, info)
    assert list_refusal_messages(caplog)[-1].endswith(
        "got PackedTopKOutput, need topk_weights and topk_ids"
    )
    assert len(triton_calls) == 2


def test_later_unsupported_calls_run_on_triton(
    triton_calls: list[tuple[Any, ...]],
) -> None:
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo

    inputs = layer_inputs(BASE)
    layer = fused_moe(BASE)
    info = TritonMoeQuantInfo(inputs.weights.w1, inputs.weights.w2)
    dispatched = dispatch_output(inputs)
    expected = layer.runner.run(
        dispatched._replace(hidden_states=inputs.x_TH.clone()), info
    ).hidden_states
    scaled = dispatched._replace(hidden_states_scale=torch.ones(5, 4))
    assert torch.all(layer.runner.run(scaled, info).hidden_states == 7)
    repeated = layer.runner.run(
        dispatched._replace(hidden_states=inputs.x_TH.clone()), info
    ).hidden_states
    assert torch.equal(repeated, expected)
    assert len(triton_calls) == 1


def test_lora_and_exchanges_run_on_sglang(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig
    from sglang.srt.layers.moe.utils import MoeA2ABackend, resolve_moe_runner_backend
    from sglang.srt.runtime_context import get_flags

    backend = resolve_moe_runner_backend("modular_kernel")
    runner = MoeRunner(backend, MoeRunnerConfig(layer_id=1), lora_enabled=True)
    assert runner.runner_backend.value == "triton"
    monkeypatch.setattr(get_flags().moe, "a2a_backend", MoeA2ABackend.DEEPEP)
    runner = MoeRunner(backend, MoeRunnerConfig(layer_id=2))
    assert runner.runner_backend.value == "triton"
    reasons = "lora_enabled: got True, need False", "--moe-a2a-backend: got deepep, need none"
    assert list_refusal_messages(caplog) == [
        f"MoE layer {layer} runs on SGLang's triton, not modular_kernel: {reason}"
        for layer, reason in enumerate(reasons, start=1)
    ]


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_other_backends_are_not_changed(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    select(backend)
    with caplog.at_level(logging.INFO):
        layer = fused_moe(BASE)
    assert layer.runner_backend.value == "triton"
    assert layer.runner.fused_func.__module__ == TRITON
    assert "modular_kernel" not in caplog.text
