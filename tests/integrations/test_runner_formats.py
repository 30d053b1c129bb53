"""MoeRunner accepts dispatch outputs and returns combine inputs in three formats."""

from dataclasses import replace

import pytest
import torch
from devices import DEVICE
from fused_experts_calls import BASE, E, H, T, assert_close, make_layer
from runner_calls import NOT_INPLACE, make_quant_info

from modular_kernel.errors import ConfigurationError, DtypeError, IncompatibleError, ShapeError
from modular_kernel.integrations.moe_runner import MoeRunner, MoeRunnerConfig
from modular_kernel.integrations.runner_formats import (
    DeepEPLLCombineInput,
    DeepEPLLDispatchOutput,
    DeepEPNormalCombineInput,
    DeepEPNormalDispatchOutput,
    StandardCombineInput,
    StandardDispatchOutput,
    format_is_deepep_ll,
    format_is_deepep_normal,
    format_is_standard,
)
from modular_kernel.ops.quantize import quantize_values
from modular_kernel.quant.quantized_weights import quantize_weights
from modular_kernel.reference import float64_reference
from modular_kernel.tensors import Routing


def test_formats_are_distinguished() -> None:
    x = torch.zeros(1)
    values_by_check = {
        format_is_standard: (StandardDispatchOutput(x, (x, x)), StandardCombineInput(x)),
        format_is_deepep_normal: (
            DeepEPNormalDispatchOutput(x, None, x, x), DeepEPNormalCombineInput(x, x, x),
        ),
        format_is_deepep_ll: (
            DeepEPLLDispatchOutput(x, None, x, x, x), DeepEPLLCombineInput(x, x, x),
        ),
    }  # fmt: skip
    for is_format, values in values_by_check.items():
        for other, other_values in values_by_check.items():
            assert [is_format(value) for value in other_values] == [is_format is other] * 2  # type: ignore[operator]
        assert values[0].format == values[1].format


def test_wrong_formats_are_refused_with_both_names() -> None:
    x_TH, weights, routing = make_layer(BASE)
    dispatch_output = DeepEPLLDispatchOutput(x_TH, None, *vars(routing).values(), torch.zeros(E))
    with pytest.raises(ConfigurationError) as caught:
        MoeRunner("triton", NOT_INPLACE, fused=False).run(dispatch_output, make_quant_info(weights))
    assert (caught.value.got, caught.value.need) == ("deepep_ll", "standard")
    with pytest.raises(
        ConfigurationError, match="got tuple, which is not a dispatch output, need standard"
    ):
        MoeRunner("torch", NOT_INPLACE).run((x_TH, routing), make_quant_info(weights))  # type: ignore[arg-type]


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_channel", "fp8_w8a8_block:block=32x32"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_received_rows_are_weighted_and_summed(backend: str, quant: str) -> None:
    """Ids are local, or -1 for experts of other ranks. The output is a rank's part of the sum."""
    problem = replace(BASE, quant=quant)
    x_TH, weights, routing = make_layer(problem, DEVICE)
    ids = torch.where(routing.topk_ids_TK == 1, -1, routing.topk_ids_TK).to(torch.int32)
    local_routing = Routing(routing.topk_weights_TK, ids)
    rows, scale = x_TH, None
    if problem.scheme.quantized:
        rows, scale = quantize_values(x_TH, problem.scheme)
    config = MoeRunnerConfig(
        num_experts=16, num_local_experts=E, routed_scaling_factor=2.0, inplace=False
    )
    runner = MoeRunner(backend, config, dtype=torch.float32)
    got = runner.run(
        DeepEPNormalDispatchOutput(
            rows, scale, local_routing.topk_ids_TK, local_routing.topk_weights_TK
        ),
        make_quant_info(weights, quant=quant),
    )
    assert isinstance(got, DeepEPNormalCombineInput)
    assert got.topk_ids is local_routing.topk_ids_TK
    scaled_problem = replace(problem, routed_scaling_factor=2.0)
    expected = float64_reference(x_TH, weights, local_routing, scaled_problem)
    assert_close(got.hidden_states, expected, 0.1 if scale is not None else 1e-6)


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_channel"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_batches_are_returned_unweighted_with_ids_and_weights(backend: str, quant: str) -> None:
    problem = replace(BASE, quant=quant)
    x_TH, weights, routing = make_layer(problem, DEVICE)
    counts = torch.tensor([2, 0, 3, 1], dtype=torch.int32, device=DEVICE)
    x_eCH = torch.full((E, 4, H), torch.nan, device=DEVICE)
    for expert, count in enumerate(counts.tolist()):
        x_eCH[expert, :count] = x_TH[:count]
    rows, scale = x_eCH, None
    if problem.scheme.quantized:
        rows, scale = quantize_values(x_eCH.nan_to_num().flatten(0, 1), problem.scheme)
        rows, scale = rows.view(E, 4, H), scale.view(E, 4, 1)
    runner = MoeRunner(backend, MoeRunnerConfig(routed_scaling_factor=2.5), dtype=torch.float32)
    dispatch_output = DeepEPLLDispatchOutput(
        rows, scale, routing.topk_ids_TK, routing.topk_weights_TK, counts, 2
    )
    got = runner.run(dispatch_output, make_quant_info(weights, quant=quant))
    assert isinstance(got, DeepEPLLCombineInput)
    assert got.topk_ids is routing.topk_ids_TK
    assert torch.equal(got.topk_weights, routing.topk_weights_TK * 2.5)
    for expert, count in enumerate(counts.tolist()):
        if count:
            ids = torch.full((count, 1), expert, device=DEVICE)
            single_expert = Routing(torch.ones(count, 1, device=DEVICE), ids)
            single_expert_problem = replace(problem, tokens=count, top_k=1)
            expected = float64_reference(
                x_TH[:count], weights, single_expert, single_expert_problem
            )
            assert_close(
                got.hidden_states[expert, :count], expected, 0.1 if scale is not None else 1e-6
            )


def test_options_that_a_format_does_not_support_are_refused() -> None:
    x_TH, weights, routing = make_layer(BASE)
    ids, gates = routing.topk_ids_TK, routing.topk_weights_TK
    normal = DeepEPNormalDispatchOutput(x_TH, None, ids, gates)
    rows, counts = x_TH[None].repeat(E, 1, 1), torch.zeros(E, dtype=torch.int32)
    batches = DeepEPLLDispatchOutput(rows, None, ids, gates, counts)
    with pytest.raises(ConfigurationError, match="no_combine of deepep_normal"):
        MoeRunner("torch", replace(NOT_INPLACE, no_combine=True)).run(
            normal, make_quant_info(weights)
        )
    on_input = MoeRunner("torch", replace(NOT_INPLACE, apply_router_weight_on_input=True))
    with pytest.raises(IncompatibleError, match="ReceivedBatches x NaiveBatchedExperts"):
        on_input.run(batches, make_quant_info(weights))
    with_expert_map = replace(weights, expert_map=torch.arange(E, dtype=torch.int32))
    with pytest.raises(ConfigurationError, match="expert_map of deepep_ll"):
        MoeRunner("torch", NOT_INPLACE).run(batches, make_quant_info(with_expert_map))
    with pytest.raises(ConfigurationError, match="expert_map of deepep_normal"):
        MoeRunner("torch", NOT_INPLACE).run(normal, make_quant_info(with_expert_map))
    quantized = quantize_weights(weights, replace(BASE, quant="fp8_w8a8_channel"))
    quantized_info = make_quant_info(quantized, quant="fp8_w8a8_channel")
    with pytest.raises(DtypeError, match="hidden_states for fp8_w8a8_channel"):
        MoeRunner("torch", NOT_INPLACE).run(batches, quantized_info)
    fp8_batches = batches._replace(hidden_states=batches.hidden_states.to(torch.float8_e4m3fn))
    for scale in (None, torch.ones(E, T, 2)):
        with pytest.raises(ShapeError, match="hidden_states_scale"):
            MoeRunner("torch", NOT_INPLACE).run(
                fp8_batches._replace(hidden_states_scale=scale), quantized_info
            )
