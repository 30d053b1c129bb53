"""MoeRunnerConfig has the fields of SGLang's MoeRunnerConfig, and refuses unsupported values."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from fused_experts_calls import BASE, E, K, T, assert_close, call_fused_experts, make_layer
from runner_calls import NOT_INPLACE, run_layer

from modular_kernel.errors import (
    ConfigurationError,
    DtypeError,
    ModularKernelError,
    UnsupportedError,
)
from modular_kernel.integrations.fused_moe import fused_moe
from modular_kernel.integrations.moe_runner import MoeRunner, MoeRunnerConfig
from modular_kernel.reference import float64_reference
from modular_kernel.spec.problem import ActivationSpec

# Names, order and defaults of SGLang 0.5.23. Tests in tests/integrations/in_sglang compare them
# with the installed package.
SGLANG_FIELDS: dict[str, Any] = {
    "num_experts": None,
    "num_local_experts": None,
    "hidden_size": None,
    "intermediate_size_per_partition": None,
    "layer_id": None,
    "top_k": None,
    "num_fused_shared_experts": None,
    "params_dtype": None,
    "routing_method_type": None,
    "runner_backend": None,
    "activation": "silu",
    "is_gated": True,
    "apply_router_weight_on_input": False,
    "inplace": True,
    "no_combine": False,
    "no_combine_keep_router_weight": False,
    "routed_scaling_factor": None,
    "gemm1_alpha": None,
    "gemm1_beta": None,
    "gemm1_clamp_limit": None,
    "swiglu_limit": None,
    "gate_up_interleaved": True,
    "layer": None,
    "use_tp_all_gather_activation": False,
    "silu_mul_keep_fp32": False,
}


class Backend:
    """A wrapper of the name of a backend, like SGLang's MoeRunnerBackend."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __repr__(self) -> str:  # appears in the ids of tests
        return f"Backend({self.value!r})"


def test_the_config_has_the_fields_of_sglang_and_chunk_tokens() -> None:
    defaults = {field.name: field.default for field in fields(MoeRunnerConfig)}
    assert list(defaults) == [*SGLANG_FIELDS, "chunk_tokens"]
    assert {name: defaults[name] for name in SGLANG_FIELDS} == SGLANG_FIELDS


ACTIVATIONS: tuple[tuple[dict[str, Any], ActivationSpec], ...] = (
    ({"is_gated": False}, ActivationSpec("silu_no_mul")),
    ({"is_gated": False, "activation": "gelu_tanh"}, ActivationSpec("gelu_tanh_no_mul")),
    ({"is_gated": False, "activation": "relu2"}, ActivationSpec("relu2")),
    ({"activation": "relu2"}, ActivationSpec("relu2")),
    ({"activation": "situ"}, ActivationSpec("situ", 4.0)),
    (
        {"activation": "situ", "gemm1_alpha": 3.0, "gemm1_clamp_limit": 2.0},
        ActivationSpec("situ", 3.0, 2.0),
    ),
    ({"activation": "situ", "gemm1_clamp_limit": 2.0}, ActivationSpec("situ", 4.0, 2.0)),
    ({"swiglu_limit": 10.0}, ActivationSpec("swiglu_clamp_before", limit=10.0)),
    (
        {"gemm1_alpha": 1.5, "gemm1_beta": 1.0, "gemm1_clamp_limit": 7.0},
        ActivationSpec("swiglu_oai", 1.5, 7.0, interleaved=True),
    ),
    (
        {"gemm1_alpha": 1.5, "gemm1_clamp_limit": 7.0, "gate_up_interleaved": False},
        ActivationSpec("swiglu_oai", 1.5, 7.0, interleaved=False),
    ),
    ({"gate_up_interleaved": False}, ActivationSpec()),
)


@pytest.mark.parametrize(("config_fields", "spec"), ACTIVATIONS, ids=str)
def test_fields_determine_the_activation(
    config_fields: dict[str, Any], spec: ActivationSpec
) -> None:
    assert MoeRunnerConfig(**config_fields).activation_spec() == spec


REFUSED_FIELDS: tuple[tuple[dict[str, Any], type[ModularKernelError], str], ...] = (
    ({"use_tp_all_gather_activation": True}, UnsupportedError, "use_tp_all_gather_activation"),
    ({"silu_mul_keep_fp32": True}, UnsupportedError, "silu_mul_keep_fp32"),
    ({"gemm1_beta": 1.0}, ConfigurationError, "gemm1_beta"),
    (
        {"gemm1_alpha": 1.5, "gemm1_clamp_limit": 7.0, "gemm1_beta": 0.0},
        ConfigurationError,
        "gemm1_beta: got 0.0, need None, or 1",
    ),
    ({"swiglu_limit": 1.0, "gemm1_clamp_limit": 1.0}, ConfigurationError, "swiglu_limit"),
    ({"swiglu_limit": 1.0, "activation": "gelu"}, ConfigurationError, "activation"),
    ({"swiglu_limit": 1.0, "activation": "situ"}, ConfigurationError, "activation"),
    ({"is_gated": False, "swiglu_limit": 1.0}, ConfigurationError, "swiglu_limit"),
    ({"is_gated": False, "activation": "situ"}, ConfigurationError, "is_gated=False: got situ"),
    ({"is_gated": 1}, ConfigurationError, "is_gated"),
    ({"layer": "mlp"}, ConfigurationError, "layer"),
    ({"params_dtype": "bfloat16"}, ConfigurationError, "params_dtype"),
    ({"params_dtype": torch.bfloat16}, DtypeError, "w1: got torch.float32, need params_dtype = "),
    ({"runner_backend": "deep_gemm"}, ConfigurationError, "got 'deep_gemm', need None or 'torch'"),
    ({"runner_backend": Backend("cutlass")}, ConfigurationError, "got 'cutlass', need None or"),
    ({"runner_backend": []}, ConfigurationError, r"got \[\], need None or"),
    ({"routing_method_type": "renormalize"}, ConfigurationError, "routing_method_type"),
)


@pytest.mark.parametrize(("config_fields", "error", "message"), REFUSED_FIELDS, ids=str)
def test_unsupported_values_are_refused_by_name(
    config_fields: dict[str, Any], error: type[ModularKernelError], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_layer(MoeRunner("torch", replace(NOT_INPLACE, **config_fields)), BASE)


def test_fields_without_an_effect_are_ignored() -> None:
    x_TH, weights, routing = make_layer(BASE)
    expected = call_fused_experts(x_TH, weights, routing)
    config_fields: dict[str, Any] = {"layer": torch.nn.Identity(), "routing_method_type": 1}
    config_fields |= {"num_fused_shared_experts": None, "gate_up_interleaved": False}
    assert torch.equal(call_fused_experts(x_TH, weights, routing, **config_fields), expected)
    for backend in ("torch", Backend("torch")):
        got = run_layer(
            MoeRunner("torch", replace(NOT_INPLACE, runner_backend=backend, **config_fields)), BASE
        )
        assert_close(got, expected.double(), 1e-6)
    assert call_fused_experts(x_TH, weights, routing, runner_backend="triton") is not None
    with pytest.raises(ConfigurationError, match="runner_backend of the config: got 'torch'"):
        call_fused_experts(x_TH, weights, routing, runner_backend="torch")


def test_routing_method_is_refused_with_logits() -> None:
    x_TH, weights, _ = make_layer(BASE)
    with pytest.raises(ConfigurationError, match="routing_method_type: got 1, need None, or w"):
        fused_moe(x_TH, weights.w1, weights.w2, torch.ones(T, E), top_k=K, routing_method_type=1)


def test_uncombined_rows_are_not_scaled() -> None:
    x_TH, weights, routing = make_layer(BASE)
    config = replace(NOT_INPLACE, no_combine=True, routed_scaling_factor=2.5)
    expected = float64_reference(x_TH, weights, routing, BASE)
    rows_TKH = run_layer(MoeRunner("torch", config), BASE)
    config = replace(config, no_combine_keep_router_weight=True)
    weighted_TKH = run_layer(MoeRunner("torch", config), BASE)
    assert_close(weighted_TKH.sum(1), expected, 1e-6)
    assert_close((rows_TKH * routing.topk_weights_TK[..., None]).sum(1), expected, 1e-6)
