"""Act-order weights (GPTQ's desc_act): columns are sorted by group, and rows of w1 are sorted to
match the columns of w2.

Sorted weights must represent the same values as unsorted weights. Parts that cannot gather columns
of x refuse act-order weights.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import CPU, DEVICE
from fused_experts_calls import move_tensors
from test_checkpoint_values import compute_output_error, dequantize_w1_w2

import modular_kernel as mk
from experts.triton.standard import supported_paths
from modular_kernel import ExpertWeights, Problem
from modular_kernel.checkpoints.formats import format_of
from modular_kernel.checkpoints.gptq_awq import argsort_by_group
from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError, WeightsError
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.quant.quantized_weights import (
    check_weights_quantized,
    dequantize_weights,
    quantize_weights,
)
from modular_kernel.reference import float64_reference
from modular_kernel.testing.checkpoints.published_formats import ACT_ORDER_FORMATS
from modular_kernel.testing.checkpoints.samples import write as write_checkpoint

INT4 = "int4_w4a16_act_order:group=32,zero_points=true"
BASE = Problem(tokens=5, hidden=96, intermediate=64, experts=3, top_k=2, quant=INT4)


def make_act_order_weights(**changes: Any) -> tuple[ExpertWeights, ExpertWeights, Problem]:
    """Return unquantized weights, the same weights in the act-order scheme, and the problem."""
    problem = replace(BASE, **changes)
    generator = torch.Generator().manual_seed(0)
    unquantized = ExpertWeights(
        torch.randn(3, problem.w1_rows, 96, generator=generator),
        torch.randn(3, 96, 64, generator=generator),
    )
    return unquantized, quantize_weights(unquantized, problem), problem


def test_quantizer_sorts_columns_by_magnitude() -> None:
    """Each expert has its own permutation, in which every column occurs once."""
    unquantized, weights, problem = make_act_order_weights()
    assert weights.w1_order is not None
    assert torch.equal(weights.w1_order.sort(1).values, torch.arange(96).expand(3, 96).int())
    assert not torch.equal(weights.w1_order[0], weights.w1_order[1])
    sorted_maxima = unquantized.w1.abs().amax(1).gather(1, weights.w1_order.long())
    assert (sorted_maxima.diff(dim=1) <= 0).all()
    error = (dequantize_weights(weights, "w1", problem) - unquantized.w1).abs().max()
    assert error < unquantized.w1.abs().max() / 7
    # With another order, the same codes represent other weights.
    identity_order = torch.arange(96).int().expand(3, 96).contiguous()
    with_identity_order = dequantize_weights(
        replace(weights, w1_order=identity_order), "w1", problem
    )
    assert (with_identity_order - unquantized.w1).abs().max() > 1


def test_argsort_by_group_refuses_unequal_groups() -> None:
    order = argsort_by_group(torch.tensor([1, 0, 1, 0, 2]), 5, 2, "g_idx")
    assert order.tolist() == [1, 3, 0, 2, 4]
    for g_idx in ([1, 0, 1, 1, 2], [0, 0, 1, 1, 3], [0, 0, 1, 1]):
        with pytest.raises(
            WeightsError, match="g_idx: got groups of different sizes, need 2 columns"
        ):
            argsort_by_group(torch.tensor(g_idx), 5, 2, "g_idx")


@pytest.mark.parametrize(
    ("value", "error", "need"),
    [
        (None, WeightsError, r"w1_order: got None, need \(e, H\)"),
        (torch.zeros(3, 64).int(), ShapeError, r"need \(e, H\) = \(3, 96\)"),
        (torch.zeros(3, 96).long(), DtypeError, "int64, need int32"),
    ],
)
def test_invalid_w1_order_is_refused(
    value: torch.Tensor | None, error: type[Exception], need: str
) -> None:
    _, weights, problem = make_act_order_weights()
    check_weights_quantized(weights, problem, CPU)
    with pytest.raises(error, match=need):
        check_weights_quantized(replace(weights, w1_order=value), problem, CPU)
    unordered_problem = replace(problem, quant=INT4.replace("act_order", "group"))
    with pytest.raises(WeightsError, match="w1_order: got a tensor, need None"):
        check_weights_quantized(weights, unordered_problem, CPU)


def test_out_of_range_column_reads_zero_or_is_refused_if_checked() -> None:
    """A kernel without checks must not read outside x, and the error of a checked kernel names the
    first invalid entry.
    """
    _, weights, problem = make_act_order_weights()
    weights = move_tensors(weights, DEVICE)
    assert weights.w1_order is not None
    order, want = weights.w1_order.clone(), dequantize_weights(weights, "w1", problem)
    order[0, 5], order[1, 7] = 96, -1
    want[0, :, weights.w1_order[0, 5]] = want[1, :, weights.w1_order[1, 7]] = 0
    invalid_weights = replace(weights, w1_order=order)
    assert torch.equal(dequantize_weights(invalid_weights, "w1", problem), want)
    random_x = torch.randn(5, 96, generator=torch.Generator().manual_seed(3)).to(
        DEVICE, problem.dtype
    )
    routing = move_tensors(mk.Routing(torch.ones(5, 2), torch.tensor([[0, 1]] * 5)), DEVICE)
    unchecked_kernel = mk.make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", problem)
    expected = float64_reference(random_x, invalid_weights, routing, problem)
    assert expected.norm() > 0
    difference = unchecked_kernel(random_x, invalid_weights, routing).double() - expected
    assert difference.norm() < 0.02 * expected.norm()
    checked_kernel = mk.make_kernel(
        "MoEPrepareAndFinalizeNoEP", "TorchExperts", problem, checked=True
    )
    x_TH = torch.zeros_like(random_x)
    checked_kernel(x_TH, weights, routing)
    with pytest.raises(WeightsError, match=r"w1_order: got 2 values, the first 96 at \(0, 5\)"):
        checked_kernel(x_TH, invalid_weights, routing)


@pytest.mark.parametrize("scheme_name", ["int4_w4a16_act_order", "int8_w8a16_act_order"])
def test_only_the_aligned_path_supports_act_order(scheme_name: str) -> None:
    assert supported_paths(replace(BASE, quant=scheme_name)) == ("aligned",)
    verdict = mk.check(
        "MoEPrepareAndFinalizeNoEP", "GroupedGemmExperts", replace(BASE, quant=scheme_name)
    )
    assert "quant" in {rejection.rule for rejection in verdict.rejections}


def test_adapters_with_act_order_are_refused() -> None:
    """Act-order sorts the rows of w1, but adapters were trained with their original order."""
    pair = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
    assert mk.check(*pair, BASE).ok
    verdict = mk.check(*pair, replace(BASE, lora="adapters=2,rank=8"))
    assert [rejection.need for rejection in verdict.rejections] == ["no act_order"]


# Checkpoints


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("kind", ACT_ORDER_FORMATS)
def test_loaded_values_equal_the_checkpoint(kind: str, family: str, tmp_path: Path) -> None:
    sample = write_checkpoint(tmp_path, family, kind)
    loaded = mk.load_experts(tmp_path, 0)
    assert str(loaded.problem_fields["quant"]) == ACT_ORDER_FORMATS[kind].scheme
    assert not torch.equal(loaded.weights.w1_order[0], loaded.weights.w1_order[1])
    w1, w2 = dequantize_w1_w2(loaded)
    # The rows of gate, the rows of up and the columns of w2 have the same permutation, because
    # column i of w2 is multiplied by the value of h that row i of gate and row i of up produce.
    for expert in range(len(w1)):
        gate, up = w1[expert].chunk(2)
        true_gate, true_up = sample.w1[expert].chunk(2)
        row_order = torch.cdist(gate, true_gate).argmin(1)
        assert torch.equal(row_order.sort().values, torch.arange(len(gate)))
        torch.testing.assert_close(gate, true_gate[row_order], rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(up, true_up[row_order], rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(
            w2[expert], sample.w2[expert][:, row_order], rtol=1e-6, atol=1e-12
        )
    assert compute_output_error(sample, loaded) <= ACT_ORDER_FORMATS[kind].bound


def test_ep_rank_has_the_orders_of_its_experts(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral", "gptq, act-order")
    all_experts = mk.load_experts(tmp_path, 0).weights
    for rank in (0, 1):
        rank_weights = mk.load_experts(tmp_path, 0, ep=(rank, 2)).weights
        local_experts = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(rank_weights.w1_order, all_experts.w1_order[local_experts])
        assert torch.equal(rank_weights.w1, all_experts.w1[local_experts])


def test_tensor_parallelism_with_act_order_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral", "gptq, act-order")
    with pytest.raises(ConfigurationError, match="tp: ranks: got 2, need 1: act-order scatters"):
        mk.load_experts(tmp_path, 0, tp=(0, 2))


def test_loading_act_order_tensor_by_tensor_is_refused() -> None:
    config = ACT_ORDER_FORMATS["gptq, act-order"].config
    assert format_of(config).scheme.act_order
    with pytest.raises(ConfigurationError, match=r"act_order.* use `load_experts` for"):
        FusedMoE(4, 128, 256, top_k=2, quant_config=config)


def test_layers_accept_loaded_act_order_weights(tmp_path: Path) -> None:
    sample = write_checkpoint(tmp_path, "mixtral", "gptq, act-order, zero points")
    loaded = mk.load_experts(tmp_path, 0)
    scheme = ACT_ORDER_FORMATS["gptq, act-order, zero points"].scheme
    layer = FusedMoE(4, 128, 256, top_k=2, quant_config=scheme, params_dtype=torch.bfloat16)
    layer.set_weights(loaded.weights)
    assert torch.equal(layer.w13_weight_order, loaded.weights.w1_order)
    assert compute_output_error(sample, loaded) <= 1e-2
