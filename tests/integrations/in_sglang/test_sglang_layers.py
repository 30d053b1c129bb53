"""SGLang's layers run on this package, for every scheme that the layers pass to a runner."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from sglang_runtime import (
    call,
    channel_config,
    dispatch_output,
    fill,
    fp8_config,
    fused_moe,
    group_config,
    int8_block_config,
    interpret_triton_backend,
    layer_inputs,
    run_core,
)

from modular_kernel.integrations.sglang import layer_runner
from modular_kernel.reference import float64_reference, rounded_reference
from modular_kernel.spec.problem import Combine, Problem
from modular_kernel.testing.cases.inputs import Inputs
from modular_kernel.testing.verify.compare import compare

BASE = Problem(
    tokens=24, hidden=64, intermediate=64, experts=6, top_k=2, dtype=torch.bfloat16,
    routed_scaling_factor=1.5,
)  # fmt: skip


def check_output(got: torch.Tensor, inputs: Inputs, problem: Problem) -> None:
    arguments = inputs.x_TH, inputs.weights, inputs.routing, problem
    comparison = compare(got, float64_reference(*arguments), rounded_reference(*arguments), problem)
    assert not comparison.problems, comparison


SCHEMES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "fp8_w8a8_channel": lambda: channel_config("fp8_w8a8_channel"),
    "fp8_w8a8_block:block=32x32": lambda: fp8_config(weight_block_size=[32, 32]),
    "fp8_w8a8_tensor": lambda: fp8_config(activation_scheme="dynamic"),
    "fp8_w8a8_tensor:static=true": lambda: fp8_config(activation_scheme="static"),
    "int8_w8a8_channel": lambda: channel_config("int8_w8a8_channel"),
    "int8_w8a8_block:block=32x32": int8_block_config,
    "int4_w4a16_group:group=32": lambda: group_config(4, zero_points=False),
    "int4_w4a16_group:group=32,zero_points=true": lambda: group_config(4, zero_points=True),
    "int8_w8a16_group:group=32": lambda: group_config(8, zero_points=False),
    "int8_w8a16_group:group=32,zero_points=true": lambda: group_config(8, zero_points=True),
}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("quant", SCHEMES)
def test_layers_return_our_output(
    quant: str, backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(layer_runner, "select_backend", lambda device: backend)
    problem = replace(BASE, quant=quant)
    inputs = layer_inputs(problem)
    layer = fused_moe(problem, SCHEMES[quant]())
    fill(layer, inputs.weights)
    with caplog.at_level(logging.INFO):
        got = call(layer, inputs)
    check_output(got, inputs, problem)
    assert layer.runner_backend.value == "modular_kernel"
    assert f"MoE layer 3 runs on modular_kernel ({backend}, {quant})" in caplog.text
    assert "SGLang's triton" not in caplog.text


OAI = "swiglu_oai:alpha=1.702,limit=7.0,interleaved="
# Options of SGLang's layer, and the fields of the problem that they determine.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gelu": ({"activation": "gelu"}, {"activation": "gelu"}),
    "gelu_tanh": ({"activation": "gelu_tanh"}, {"activation": "gelu_tanh"}),
    "relu2": ({"activation": "relu2", "is_gated": False}, {"activation": "relu2"}),
    "no gate": ({"is_gated": False}, {"activation": "silu_no_mul"}),
    "swiglu_limit": ({"swiglu_limit": 10.0}, {"activation": "swiglu_clamp_before:limit=10"}),
    "clamp": ({"gemm1_clamp_limit": 1.0}, {"activation": "swiglu_clamp_after:limit=1"}),
    "gpt-oss": (
        {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0},
        {"activation": OAI + "true", "bias": True},
    ),
    "gpt-oss, split": (
        {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "gate_up_interleaved": False},
        {"activation": OAI + "false", "bias": True},
    ),
    "situ": ({"activation": "situ", "gemm1_alpha": 3.0}, {"activation": "situ:alpha=3"}),
    "weight on input": ({}, {"apply_router_weight_on_input": True, "top_k": 1}),
    "float16": ({}, {"dtype": torch.float16}),
    "float32": ({}, {"dtype": torch.float32}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_layer_reach_the_kernels(name: str) -> None:
    options, problem_fields = OPTIONS[name]
    problem = replace(BASE, **problem_fields)
    inputs = layer_inputs(problem)
    layer = fused_moe(problem, **options)
    fill(layer, inputs.weights)
    check_output(call(layer, inputs), inputs, problem)
    assert layer.runner.runner_core.layer_runner.refusal is None


def make_quant_info(inputs: Inputs, **options: Any) -> Any:
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo

    return TritonMoeQuantInfo(inputs.weights.w1, inputs.weights.w2, **options)


@pytest.mark.parametrize("keep", [False, True])
def test_outputs_that_are_not_combined(keep: bool) -> None:
    combine = Combine.TOPK_WEIGHTED if keep else Combine.TOPK_UNWEIGHTED
    problem = replace(BASE, combine=combine, routed_scaling_factor=1.0)
    inputs = layer_inputs(problem)
    # The caller of an SGLang layer applies this factor, so the layer must not.
    scaled = replace(problem, routed_scaling_factor=2.5)
    options = {"no_combine": True, "no_combine_keep_router_weight": keep}
    check_output(run_core(scaled, inputs, make_quant_info(inputs), **options), inputs, problem)


def test_interleaved_rows_of_w13() -> None:
    problem = replace(BASE, activation="silu:interleaved=true")
    inputs = layer_inputs(problem)
    got = run_core(problem, inputs, make_quant_info(inputs, fuse_swiglu_interleaved=True))
    check_output(got, inputs, problem)


def test_experts_of_other_ranks_are_skipped() -> None:
    """SGLang's dispatcher maps the ids of other ranks to -1."""
    inputs = layer_inputs(BASE)
    ids_TK = torch.where(inputs.routing.topk_ids_TK % 3 == 1, -1, inputs.routing.topk_ids_TK)
    inputs = replace(inputs, routing=replace(inputs.routing, topk_ids_TK=ids_TK))
    problem = replace(BASE, experts=18, local_experts=6, expert_map=True)
    check_output(run_core(problem, inputs, make_quant_info(inputs)), inputs, BASE)


def test_no_tokens() -> None:
    problem = replace(BASE, tokens=0)
    inputs = layer_inputs(problem)
    assert run_core(problem, inputs, make_quant_info(inputs)).shape == (0, BASE.hidden)


def test_layers_overwrite_their_tokens() -> None:
    """As on the triton backend, a layer overwrites its input unless its model disables that."""
    inputs = layer_inputs(BASE)
    layer = fused_moe(BASE)
    fill(layer, inputs.weights)
    dispatched = dispatch_output(inputs)
    got = layer.run_moe_core(dispatched).hidden_states
    assert got is dispatched.hidden_states
    check_output(got, inputs, BASE)


def make_compressed_tensors_info(inputs: Inputs) -> Any:
    """Return SGLang's quant_info of int4 weights that compressed-tensors packs into int32."""
    from sglang.srt.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_wNa16_moe as wna16_module,
    )

    layer, weights = torch.nn.Module(), inputs.weights
    for name, packed, scale in (
        ("w13", weights.w1, weights.w1_scale),
        ("w2", weights.w2, weights.w2_scale),
    ):
        assert scale is not None
        packed_words = packed.contiguous().view(torch.int32).transpose(1, 2)
        layer.register_parameter(f"{name}_weight_packed", torch.nn.Parameter(packed_words, False))
        scale_parameter = torch.nn.Parameter(scale.transpose(1, 2), False)
        layer.register_parameter(f"{name}_weight_scale", scale_parameter)
    scheme = object.__new__(wna16_module.CompressedTensorsWNA16TritonMoE)
    scheme.group_size = 32
    scheme.process_weights_after_loading(layer)
    return scheme.get_triton_quant_info(layer)


def test_int4_weights_of_compressed_tensors() -> None:
    problem = replace(BASE, quant="int4_w4a16_group:group=32")
    inputs = layer_inputs(problem)
    check_output(run_core(problem, inputs, make_compressed_tensors_info(inputs)), inputs, problem)


# Fields of the problem, options of SGLang's MoeRunnerConfig, and fields of its TritonMoeQuantInfo.
COMPARED_CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "bias": ({"bias": True}, {}, {}),
    "gelu": ({}, {"activation": "gelu"}, {}),
    "situ": ({}, {"activation": "situ", "gemm1_alpha": 2.0, "gemm1_clamp_limit": 0.3}, {}),
    "gpt-oss": ({"bias": True}, {"gemm1_alpha": 1.3, "gemm1_clamp_limit": 0.5}, {}),
    "split": (
        {"bias": True},
        {"gemm1_alpha": 1.3, "gemm1_clamp_limit": 0.5, "gate_up_interleaved": False},
        {},
    ),
    "limit": ({}, {"gemm1_clamp_limit": 0.2}, {}),
    "no gate": ({"activation": "silu_no_mul"}, {"is_gated": False}, {}),
    "weights on input": ({}, {"apply_router_weight_on_input": True}, {}),
    "weights on input and bias": ({"bias": True}, {"apply_router_weight_on_input": True}, {}),
    "not combined": ({"bias": True}, {"no_combine": True}, {}),
    "weighted": ({}, {"no_combine": True, "no_combine_keep_router_weight": True}, {}),
    "fp8": ({"quant": "fp8_w8a8_tensor", "bias": True}, {}, {"use_fp8_w8a8": True}),
    "fp8 by channel": (
        {"quant": "fp8_w8a8_channel"}, {}, {"use_fp8_w8a8": True, "per_channel_quant": True},
    ),
    "fp8 by block": (
        {"quant": "fp8_w8a8_block:block=32x32", "bias": True}, {},
        {"use_fp8_w8a8": True, "block_shape": [32, 32]},
    ),
    "int4": (
        {"quant": "int4_w4a16_group:group=32,zero_points=true"}, {},
        {"use_int4_w4a16": True, "block_shape": [0, 32]},
    ),
    "int8": (
        {"quant": "int8_w8a16_group:group=32"}, {},
        {"use_int8_w8a16": True, "block_shape": [0, 32]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPARED_CONFIGS)
def test_runners_equal_the_triton_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids include -1 for experts of other ranks."""
    from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton import (
        TritonMoeQuantInfo,
        fused_experts_none_to_triton,
    )
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend

    interpret_triton_backend(monkeypatch)
    problem_fields, options, quant_info_fields = COMPARED_CONFIGS[name]
    inputs = layer_inputs(replace(BASE, **problem_fields))
    ids_TK = inputs.routing.topk_ids_TK.clone()
    ids_TK[::3, 0] = -1
    inputs = replace(inputs, routing=replace(inputs.routing, topk_ids_TK=ids_TK))
    weights = inputs.weights
    info = TritonMoeQuantInfo(
        weights.w1, weights.w2, weights.b1, weights.b2,
        w13_scale=weights.w1_scale, w2_scale=weights.w2_scale,
        w13_zp=weights.w1_zero_point, w2_zp=weights.w2_zero_point, **quant_info_fields,
    )  # fmt: skip
    config = MoeRunnerConfig(
        num_experts=2 * BASE.experts, num_local_experts=BASE.experts, top_k=BASE.top_k, layer_id=1,
        inplace=False, routed_scaling_factor=1.5, **options,
    )  # fmt: skip
    runner = MoeRunner(resolve_moe_runner_backend("modular_kernel"), config)
    got = runner.run(dispatch_output(inputs), info).hidden_states.double()
    expected = fused_experts_none_to_triton(dispatch_output(inputs), info, config).hidden_states
    assert got.shape == expected.shape
    # The backends round activations to fp8 with scales that differ in their last bits.
    tolerance = 0.05 if "use_fp8_w8a8" in quant_info_fields else 0.02
    assert (got - expected.double()).norm() < tolerance * expected.double().norm()
