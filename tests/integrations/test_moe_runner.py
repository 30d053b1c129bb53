"""MoeRunner runs the part that its backend, config and switches select."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from devices import DEVICE
from fused_experts_calls import BASE, E, H, I, K, assert_close, make_layer
from runner_calls import NOT_INPLACE, make_dispatch_output, make_quant_info, run_layer
from toy_backend import FusedToyExperts, ToyExperts

from experts import StagedTritonExperts, TorchExperts, TritonExperts
from modular_kernel.catalog import make_kernel
from modular_kernel.errors import (
    ConfigurationError,
    IncompatibleError,
    ShapeError,
    UnknownPartError,
    UnsupportedError,
)
from modular_kernel.integrations import fused_moe_options
from modular_kernel.integrations.moe_runner import BACKENDS, MoeRunner, MoeRunnerConfig, switches
from modular_kernel.integrations.runner_backends import find_parts
from modular_kernel.reference import float64_reference
from modular_kernel.spec.problem import Combine


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("backend", ["triton", "toy"])
def test_fused_and_staged_parts_compute_the_same(backend: str, fused: bool) -> None:
    x_TH, weights, routing = make_layer(BASE, DEVICE)
    got = run_layer(MoeRunner(backend, NOT_INPLACE, fused=fused), BASE)
    assert_close(got, float64_reference(x_TH, weights, routing, BASE), 1e-6)
    parts_by_backend = {
        "triton": (StagedTritonExperts, TritonExperts),
        "toy": (ToyExperts, FusedToyExperts),
    }
    assert find_parts(backend, fused=fused)["standard"] is parts_by_backend[backend][fused]


def test_backends_are_sglang_names_registered_names_and_parts() -> None:
    for backend in ("triton", "triton_kernel", "deep_gemm", "cutlass", "torch"):
        parts = find_parts(backend, fused=True)
        part_names = {part.__name__ for part in parts.values()}
        assert part_names == set(BACKENDS[backend].values())
    assert find_parts("torch", fused=True)["standard"] is TorchExperts
    assert find_parts("TorchExperts", fused=True) == {
        "standard": TorchExperts,
        "deepep_normal": TorchExperts,
    }
    assert set(find_parts("triton", fused=True)) == {"standard", "deepep_normal", "deepep_ll"}
    assert set(find_parts("triton", fused=False)) == {"standard"}
    with pytest.raises(UnknownPartError, match=r"runner backend: got 'cuda', need one of .*triton"):
        MoeRunner("cuda", NOT_INPLACE)
    for backend in ("torch", "TorchExperts"):
        with pytest.raises(UnsupportedError, match=r"fused of backend .*got False.*toy, triton"):
            MoeRunner(backend, NOT_INPLACE, fused=False)


def test_both_interfaces_share_one_config() -> None:
    assert MoeRunnerConfig is fused_moe_options.MoeRunnerConfig
    field_names = (
        "num_experts num_local_experts hidden_size intermediate_size_per_partition top_k "
        "num_fused_shared_experts layer_id activation apply_router_weight_on_input inplace "
        "no_combine routed_scaling_factor gemm1_alpha gemm1_clamp_limit"
    )
    assert set(field_names.split()) <= {field.name for field in fields(MoeRunnerConfig)}
    assert MoeRunnerConfig().inplace


CONFIG_AND_PROBLEM_FIELDS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"activation": "gelu"}, {"activation": "gelu"}),
    ({"apply_router_weight_on_input": True}, {"apply_router_weight_on_input": True}),
    ({"no_combine": True}, {"combine": Combine.TOPK_UNWEIGHTED}),
    (
        {"no_combine": True, "no_combine_keep_router_weight": True, "routed_scaling_factor": 3.0},
        {"combine": Combine.TOPK_WEIGHTED},
    ),
    ({"swiglu_limit": 0.5}, {"activation": "swiglu_clamp_before:limit=0.5"}),
    ({"routed_scaling_factor": 2.5}, {"routed_scaling_factor": 2.5}),
    (
        {"gemm1_alpha": 1.5, "gemm1_clamp_limit": 0.5},
        {"activation": "swiglu_oai:alpha=1.5,limit=0.5,interleaved=true"},
    ),
    ({"gemm1_clamp_limit": 0.5}, {"activation": "swiglu_clamp_after:limit=0.5"}),
    ({"chunk_tokens": 2}, {"chunk_tokens": 2}),
    ({"layer_id": 7, "num_fused_shared_experts": 1, "params_dtype": torch.float32}, {}),
)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("config_fields", "problem_fields"), CONFIG_AND_PROBLEM_FIELDS, ids=str)
def test_every_field_reaches_the_problem(
    config_fields: dict[str, Any], problem_fields: dict[str, Any], backend: str
) -> None:
    problem = replace(BASE, bias=True, **problem_fields)
    x_TH, weights, routing = make_layer(problem, DEVICE)
    got = run_layer(MoeRunner(backend, replace(NOT_INPLACE, **config_fields)), problem)
    assert_close(got, float64_reference(x_TH, weights, routing, problem), 1e-5)


@pytest.mark.parametrize(
    ("config_fields", "error", "message"),
    [
        ({"num_experts": 5}, ShapeError, "num_experts = 5"),
        ({"num_local_experts": 3}, ShapeError, "num_experts = 3"),
        ({"hidden_size": 8}, ShapeError, "hidden_size = 8"),
        ({"intermediate_size_per_partition": 8}, ShapeError, "intermediate_size_per_partition = 8"),
        ({"top_k": 3}, ShapeError, "K = top_k = 3"),
        ({"num_fused_shared_experts": 9}, ConfigurationError, "num_fused_shared_experts"),
        ({"gemm1_alpha": 1.0}, ConfigurationError, "limit"),
        ({"inplace": True, "no_combine": True}, ConfigurationError, "inplace"),
    ],
)
def test_contradicting_fields_are_refused(
    config_fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_layer(MoeRunner("torch", replace(NOT_INPLACE, **config_fields)), BASE)


def test_inplace_is_the_default_and_overwrites_x() -> None:
    x_TH, weights, routing = make_layer(BASE, DEVICE)
    expected, before = float64_reference(x_TH, weights, routing, BASE), x_TH.clone()
    for fused in (True, False):
        MoeRunner("triton", NOT_INPLACE, fused=fused).run(
            make_dispatch_output(x_TH, routing), make_quant_info(weights)
        )
        assert torch.equal(x_TH, before)
    got = MoeRunner("triton", MoeRunnerConfig()).run(
        make_dispatch_output(x_TH, routing), make_quant_info(weights)
    )
    assert got.hidden_states is x_TH
    assert_close(x_TH, expected, 1e-6)


def test_environment_variables_of_sglang_are_switches() -> None:
    assert switches({}) == {}
    assert switches({"PATH": "/", "SGLANG_MOE_PADDING": "true"}) == {"padding": True}
    assert switches({"SGLANG_CI_DISABLE_MOE_FUSED_FUNC": "1"}) == {"fused": False}
    disabled = {"SGLANG_CI_DISABLE_MOE_FUSED_FUNC": "0", "SGLANG_MOE_USE_AITER": "false"}
    assert switches(disabled) == {"fused": True, "aiter": False}
    with pytest.raises(ConfigurationError, match="SGLANG_MOE_PADDING: got 'often'"):
        switches({"SGLANG_MOE_PADDING": "often"})
    MoeRunner("triton", NOT_INPLACE, **switches(disabled))
    for name, option in (
        ("SGLANG_MOE_USE_AITER", "aiter"), ("SGLANG_MASKED_GEMM_FAST_ACT", "fast_act"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match=f"{option}: got True, need False"):
            MoeRunner("triton", NOT_INPLACE, **switches({name: "1"}))


def test_an_environment_variable_disables_fused_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CI_DISABLE_MOE_FUSED_FUNC", "1")
    runner = MoeRunner("triton", SIZES, dtype=torch.float32)
    assert "standard: StagedTritonExperts, staged" in runner.explain()
    x_TH, weights, routing = make_layer(BASE, DEVICE)
    assert_close(run_layer(runner, BASE), float64_reference(x_TH, weights, routing, BASE), 1e-6)
    # An argument takes precedence. The variable has no effect on a backend without stages.
    assert "standard: TritonExperts" in MoeRunner("triton", SIZES, fused=True).explain()
    assert "standard: TorchExperts" in MoeRunner("torch", SIZES).explain()
    monkeypatch.setenv("SGLANG_CI_DISABLE_MOE_FUSED_FUNC", "0")
    assert "standard: TritonExperts" in MoeRunner("triton", SIZES).explain()


SIZES = MoeRunnerConfig(
    num_experts=E, hidden_size=H, intermediate_size_per_partition=I, top_k=K, inplace=False
)


def test_unsupported_configs_are_refused_at_construction() -> None:
    with pytest.raises(IncompatibleError, match=r"\[quant\] ToyExperts"):
        MoeRunner("toy", SIZES, quant="int8_w8a8_channel", fused=False)
    with pytest.raises(UnsupportedError, match="quant of backend 'toy': got int8_w8a8_channel, ne"):
        MoeRunner("toy", NOT_INPLACE, quant="int8_w8a8_channel")
    runner = MoeRunner("torch", SIZES, quant="int8_w8a16_channel")
    x_TH, weights, routing = make_layer(BASE, DEVICE)
    with pytest.raises(ConfigurationError, match="quant_info: got none, need int8_w8a16_channel"):
        runner.run(make_dispatch_output(x_TH, routing), make_quant_info(weights))


def test_explain_states_which_part_runs_and_why_others_do_not() -> None:
    explanation = MoeRunner("triton", SIZES, dtype=torch.float32).explain()
    assert "standard: TritonExperts, fused, instead of StagedTritonExperts; " in explanation
    assert "deepep_ll: BatchedTritonExperts, without stages; " in explanation
    explanation = MoeRunner("toy", SIZES, fused=False).explain("int8_w8a8_channel")
    assert (
        "standard: ToyExperts, staged; MoEPrepareAndFinalizeNoEP x ToyExperts: refused"
        in explanation
    )
    assert "[quant] ToyExperts / problem" in explanation
    assert "deepep_ll: no part" in explanation
    with pytest.raises(ConfigurationError, match="num_experts, hidden_size"):
        MoeRunner("triton", NOT_INPLACE).explain()


def test_calls_equal_calls_of_the_kernel() -> None:
    x_TH, weights, routing = make_layer(BASE, DEVICE)
    kernel = make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", BASE)
    assert torch.equal(
        run_layer(MoeRunner("torch", NOT_INPLACE), BASE), kernel(x_TH, weights, routing)
    )
