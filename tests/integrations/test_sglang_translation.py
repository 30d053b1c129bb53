"""The plugin for SGLang, without SGLang: conversion of SGLang's objects, `LayerRunner`, `register`.

`LayerRunner` runs the calls of one MoE layer on this package or on SGLang's own runner.
"""

from dataclasses import dataclass, field, make_dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fused_experts_calls import BASE, E, assert_close, make_layer
from runner_calls import make_quant_info
from test_runner_config import SGLANG_FIELDS

from modular_kernel.errors import ConfigurationError, ModularKernelError, UnsupportedError
from modular_kernel.integrations import sglang
from modular_kernel.integrations.moe_runner import MoeRunnerConfig
from modular_kernel.integrations.sglang import translation
from modular_kernel.integrations.sglang.layer_runner import (
    LayerRunner,
    find_unsupported_reason,
    select_backend,
)
from modular_kernel.reference import float64_reference
from modular_kernel.spec.problem import ActivationSpec
from modular_kernel.tensors import ExpertWeights, Routing

# A dataclass with the fields of SGLang's MoeRunnerConfig.
SGLangConfig: Any = make_dataclass(
    "MoeRunnerConfig", [(name, Any, field(default=value)) for name, value in SGLANG_FIELDS.items()]
)


@dataclass
class TritonMoeQuantInfo:
    """A copy of the class in SGLang 0.5.23, with the additional field `use_new_layout`."""

    w13_weight: torch.Tensor
    w2_weight: torch.Tensor
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    use_mxfp8: bool = False
    use_fp8_w8a8: bool = False
    use_int8_w8a8: bool = False
    use_int8_w8a16: bool = False
    use_int4_w4a16: bool = False
    per_channel_quant: bool = False
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    w13_zp: torch.Tensor | None = None
    w2_zp: torch.Tensor | None = None
    a13_scale: torch.Tensor | None = None
    a2_scale: torch.Tensor | None = None
    block_shape: list[int] | None = None
    fuse_swiglu_interleaved: bool = False
    use_new_layout: bool = False


def make_sglang_quant_info(weights: ExpertWeights, **flags: Any) -> TritonMoeQuantInfo:
    tensors = vars(make_quant_info(weights))
    field_names = TritonMoeQuantInfo.__dataclass_fields__
    shared_tensors = {name: value for name, value in tensors.items() if name in field_names}
    return TritonMoeQuantInfo(**shared_tensors | flags)


def test_fields_of_the_config_are_read_by_name() -> None:
    backend = SimpleNamespace(value="modular_kernel")
    sglang_config = SGLangConfig(
        num_experts=8, num_local_experts=4, layer_id=3, layer=torch.nn.Identity(), top_k=2,
        runner_backend=backend, params_dtype=torch.bfloat16, gemm1_alpha=1.7, gemm1_clamp_limit=7.0,
        no_combine=True, inplace=False, routed_scaling_factor=2.5, num_fused_shared_experts=0,
    )  # fmt: skip
    converted = translation.convert_runner_config(sglang_config)
    for name in SGLANG_FIELDS.keys() - {"layer", "runner_backend"}:
        assert getattr(converted, name) == getattr(sglang_config, name), name
    assert (converted.layer, converted.runner_backend) == (None, None)
    assert translation.convert_runner_config(SGLangConfig()) == MoeRunnerConfig()


def test_interleaved_gate_and_up_rows() -> None:
    converted = translation.convert_runner_config(SGLangConfig(), interleaved=True)
    assert converted.activation_spec() == ActivationSpec(interleaved=True)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"activation": "silu_rounded"}, ConfigurationError, "activation: got silu_rounded"),
        ({"gemm1_alpha": 1.7}, ConfigurationError, "limit"),
        ({"silu_mul_keep_fp32": True}, UnsupportedError, "silu_mul_keep_fp32"),
        ({"top_k": "2"}, ConfigurationError, "top_k"),
    ],
)
def test_unsupported_values_of_the_config_are_refused(
    changes: dict[str, Any], error: type[ModularKernelError], message: str
) -> None:
    with pytest.raises(error, match=message):
        translation.convert_runner_config(SGLangConfig(**changes))


def test_unknown_fields_must_have_their_defaults() -> None:
    fields = [*SGLANG_FIELDS.items(), ("moe_topology", None), ("clip_rows", 0)]
    NewerSGLangConfig = make_dataclass(
        "MoeRunnerConfig", [(name, Any, field(default=value)) for name, value in fields]
    )
    assert translation.convert_runner_config(NewerSGLangConfig()) == MoeRunnerConfig()
    assert translation.convert_runner_config(NewerSGLangConfig(clip_rows=0)) == MoeRunnerConfig()
    for changes in ({"moe_topology": "ring"}, {"clip_rows": 1}):
        (name,) = changes
        with pytest.raises(ConfigurationError, match=f"MoeRunnerConfig.{name}: got .*the default"):
            translation.convert_runner_config(NewerSGLangConfig(**changes))
    with pytest.raises(ConfigurationError, match=r"TritonMoeQuantInfo.use_new_layout: got True"):
        translation.convert_quant_info(
            make_sglang_quant_info(make_layer(BASE)[1], use_new_layout=True)
        )


FLAGS_BY_SCHEME: dict[str, dict[str, Any]] = {
    "none": {},
    "fp8_w8a8_tensor": {"use_fp8_w8a8": True},
    "fp8_w8a8_tensor:static=true": {"use_fp8_w8a8": True},
    "fp8_w8a8_channel": {"use_fp8_w8a8": True, "per_channel_quant": True},
    "fp8_w8a8_block:block=32x32": {"use_fp8_w8a8": True, "block_shape": [32, 32]},
    "int8_w8a8_channel": {"use_int8_w8a8": True, "per_channel_quant": True},
    "int8_w8a8_block:block=32x32": {"use_int8_w8a8": True, "block_shape": [32, 32]},
    "int8_w8a16_channel": {"use_int8_w8a16": True},
    "int8_w8a16_group:group=32": {"use_int8_w8a16": True, "block_shape": [0, 32]},
    "int4_w4a16_group:group=32": {"use_int4_w4a16": True, "block_shape": [0, 32]},
    "int4_w4a16_group:group=32,zero_points=true": {
        "use_int4_w4a16": True, "block_shape": [0, 32],
    },
}  # fmt: skip


@dataclass
class DispatchOutput:
    """SGLang's dispatch output in the standard format."""

    hidden_states: torch.Tensor
    topk_output: Any
    hidden_states_scale: torch.Tensor | None = None
    format: Any = field(default_factory=lambda: SimpleNamespace(value="standard"))


def make_sglang_dispatch(x_TH: torch.Tensor, routing: Routing) -> DispatchOutput:
    topk = SimpleNamespace(topk_weights=routing.topk_weights_TK, topk_ids=routing.topk_ids_TK)
    return DispatchOutput(x_TH, topk)


@pytest.mark.parametrize("quant", FLAGS_BY_SCHEME)
def test_flags_of_the_quant_info_determine_the_scheme(quant: str) -> None:
    problem = replace(BASE, quant=quant, routed_scaling_factor=2.0)
    x_TH, weights, routing = make_layer(problem)
    quant_info = make_sglang_quant_info(weights, **FLAGS_BY_SCHEME[quant])
    info, interleaved = translation.convert_quant_info(quant_info)
    assert (info.scheme(), interleaved) == (quant, False)
    config = SGLangConfig(routed_scaling_factor=2.0, inplace=False, num_experts=E)
    runner = LayerRunner(config, pytest.fail)
    got = runner.run(make_sglang_dispatch(x_TH, routing), quant_info, config)
    assert_close(
        got, float64_reference(x_TH, weights, routing, problem), 0.1 if "w8a8" in quant else 1e-5
    )


def test_unsupported_quant_info_is_refused() -> None:
    _, weights, _ = make_layer(BASE)
    with pytest.raises(UnsupportedError, match="use_mxfp8: got True, need False"):
        translation.convert_quant_info(make_sglang_quant_info(weights, use_mxfp8=True))
    with pytest.raises(UnsupportedError, match="quant_info: got MarlinMoeQuantInfo, need Triton"):
        translation.convert_quant_info(make_dataclass("MarlinMoeQuantInfo", [])())


def test_unsupported_calls_have_a_reason() -> None:
    x_TH, _, routing = make_layer(BASE)
    dispatch_output = make_sglang_dispatch(x_TH, routing)
    assert find_unsupported_reason(dispatch_output) is None
    other_format = SimpleNamespace(value="deepep_ll")
    assert find_unsupported_reason(replace(dispatch_output, format=other_format)) == (
        "dispatch format: got deepep_ll, need standard"
    )
    assert "hidden_states_scale" in str(
        find_unsupported_reason(replace(dispatch_output, hidden_states_scale=x_TH))
    )
    reason = find_unsupported_reason(
        replace(dispatch_output, topk_output=SimpleNamespace(router_logits=x_TH))
    )
    assert reason == "topk_output: got SimpleNamespace, need topk_weights and topk_ids"


def test_first_call_determines_the_runner_of_the_layer(caplog: pytest.LogCaptureFixture) -> None:
    x_TH, weights, routing = make_layer(BASE)
    dispatch_output = make_sglang_dispatch(x_TH, routing)
    quant_info = make_sglang_quant_info(weights)
    config = SGLangConfig(layer_id=9, hidden_size=x_TH.shape[1] + 1)
    runner = LayerRunner(config, lambda *arguments: arguments)
    for _ in range(2):
        assert runner.run(dispatch_output, quant_info, config) == (
            dispatch_output,
            quant_info,
            config,
        )
    (record,) = caplog.records
    assert record.getMessage().startswith("MoE layer 9 runs on SGLang's triton, not modular_kern")
    assert runner.refusal == "x: got 64 hidden values, need hidden_size = 65"
    # If the first call ran on modular_kernel, a later unsupported call raises an error.
    config = SGLangConfig(inplace=False)
    runner = LayerRunner(config, pytest.fail)
    runner.run(dispatch_output, quant_info, config)
    with pytest.raises(UnsupportedError, match="use_mxfp8"):
        runner.run(dispatch_output, replace(quant_info, use_mxfp8=True), config)
    with pytest.raises(UnsupportedError, match="fuse_swiglu_interleaved: got True, need False"):
        runner.run(dispatch_output, replace(quant_info, fuse_swiglu_interleaved=True), config)


def test_torch_runs_on_a_cpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select_backend(torch.device("cpu")) == "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert select_backend(torch.device("cpu")) == "torch"
    assert select_backend(torch.device("cuda")) == "triton"


def test_entry_function_without_sglang_does_not_raise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raise_import_error(name: str) -> str:
        raise ImportError(f"no package {name}")

    monkeypatch.setattr(sglang, "version", raise_import_error)
    sglang.register()
    (record,) = caplog.records
    assert record.getMessage() == (
        "SGLang runs without the MoE backend modular_kernel: ImportError: no package sglang"
    )


@pytest.mark.parametrize("value", ["0", "false", " OFF ", "no"])
def test_environment_variable_disables_the_plugin(
    value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MK_SGLANG", value)
    monkeypatch.setattr(sglang, "version", pytest.fail)
    sglang.register()
    assert not caplog.records
