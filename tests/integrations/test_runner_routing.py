"""Routing formats of MoeRunner's backends, and vendor backends with stand-in libraries."""

from dataclasses import replace

import pytest
import torch
from fused_experts_calls import BASE, DEVICES, E, H, K, T, assert_close, make_layer
from runner_calls import NOT_INPLACE, make_dispatch_output, make_quant_info
from vendor_stand_in import BatchedDeepGemm, DeepGemm, TritonKernels

from modular_kernel.errors import ConfigurationError, IncompatibleError
from modular_kernel.integrations.moe_runner import MoeRunner
from modular_kernel.integrations.runner_formats import (
    DeepEPLLDispatchOutput,
    DeepEPNormalDispatchOutput,
    StandardDispatchOutput,
)
from modular_kernel.ops.quantize import quantize_values
from modular_kernel.ops.routing_data import to_expert_major, to_token_major
from modular_kernel.reference import float64_reference
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.router import RoutingData, StandardTopKOutput
from modular_kernel.testing.random_inputs import random_inputs


@pytest.mark.parametrize("device", DEVICES)
def test_to_token_major_inverts_to_expert_major(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, E, (9, 3), generator=generator, dtype=torch.int32).to(device)
    weights = torch.rand(9, 3, generator=generator).to(device)
    expert_major = to_expert_major(StandardTopKOutput(weights, ids, None), E)
    data, gather, scatter = expert_major
    assert isinstance(data, RoutingData)
    assert (data.n_expts_act, data.n_expts_tot) == (3, E)
    assert data.expt_hist.tolist() == [int((ids == expert).sum()) for expert in range(E)]  # type: ignore[union-attr]
    pairs = gather.src_indx[gather.src_indx >= 0].long()
    assert ids.flatten()[pairs].tolist() == sorted(ids[ids >= 0].tolist())
    assert torch.equal(data.gate_scal[: len(pairs)], weights.flatten()[pairs])
    assert not data.gate_scal[len(pairs) :].any()
    assert torch.equal(gather.dst_indx[pairs], torch.arange(len(pairs), device=device).int())
    assert (scatter.src_indx, scatter.dst_indx) == (gather.dst_indx, gather.src_indx)
    token_major = to_token_major(expert_major)
    assert torch.equal(token_major.topk_ids, ids)
    assert torch.equal(token_major.topk_weights, weights.masked_fill(ids < 0, 0))


def test_metadata_types_are_constructed_from_tuples() -> None:
    topk_weights, topk_ids = torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32)
    weights, ids, logits = StandardTopKOutput(*(topk_weights, topk_ids, None))
    assert (weights, ids, logits) == (topk_weights, topk_ids, None)
    data = RoutingData(*(1, topk_weights.flatten()))
    assert (data.n_expts_act, data.gate_scal.shape) == (1, (2,))
    with pytest.raises(ConfigurationError, match="expt_hist"):
        to_token_major(to_expert_major((topk_weights, topk_ids), 1)._replace(routing_data=data))  # type: ignore[arg-type]


def test_each_backend_accepts_one_routing_format(monkeypatch: pytest.MonkeyPatch) -> None:
    x_TH, weights, routing = make_layer(BASE)
    token_major = make_dispatch_output(x_TH, routing)
    expert_major = StandardDispatchOutput(x_TH, to_expert_major(token_major.topk_output, E))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError) as caught:
        MoeRunner("torch", NOT_INPLACE).run(expert_major, make_quant_info(weights))
    assert (caught.value.got, caught.value.need) == (
        "TritonKernelTopKOutput", "StandardTopKOutput",
    )  # fmt: skip
    runner = MoeRunner("torch", NOT_INPLACE)
    runner.runner_backend = "triton_kernel"  # The library of this backend may not be installed.
    with pytest.raises(ConfigurationError, match="need TritonKernelTopKOutput"):
        runner.run(token_major, make_quant_info(weights))
    got = runner.run(expert_major, make_quant_info(weights))
    assert_close(got.hidden_states, float64_reference(x_TH, weights, routing, BASE), 1e-6)


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_block"])
@pytest.mark.parametrize("format", ["standard", "deepep_normal", "deepep_ll"])
def test_deep_gemm_backend_with_a_stand_in(format: str, quant: str) -> None:
    """Rows in DeepEP's formats have one scale per 128 values, as a dispatcher sends them."""
    problem = Problem(T, 128, 128, E, K, dtype=torch.bfloat16, quant=quant)
    x_TH, weights, routing = random_inputs(problem, torch.device("cpu"))
    runner = MoeRunner("deep_gemm", replace(NOT_INPLACE, activation="silu"))
    runner._parts = {
        "standard": DeepGemm, "deepep_normal": DeepGemm, "deepep_ll": BatchedDeepGemm,
    }  # fmt: skip
    info = make_quant_info(weights, quant=quant)
    ids, gates = routing.topk_ids_TK, routing.topk_weights_TK
    expected = float64_reference(x_TH, weights, routing, problem)
    if format == "standard":
        got = runner.run(make_dispatch_output(x_TH, routing), info)
        assert_close(got.hidden_states, expected, 0.1)
        return
    rows, scale = x_TH, None
    if quant != "none":
        rows, scale = quantize_values(x_TH.float(), problem.scheme)
    if format == "deepep_normal":
        got = runner.run(DeepEPNormalDispatchOutput(rows, scale, ids, gates), info)
        assert_close(got.hidden_states, expected, 0.1)
        return
    counts = torch.full((E,), T, dtype=torch.int32)
    small_batches = DeepEPLLDispatchOutput(
        _batch_by_expert(rows, T), _batch_by_expert(scale, T), ids, gates, counts
    )
    with pytest.raises(IncompatibleError, match="a multiple of 128"):
        runner.run(small_batches, info)
    rows, scale = _batch_by_expert(rows, 128), _batch_by_expert(scale, 128)
    batches = DeepEPLLDispatchOutput(rows, scale, ids, gates, counts, T)
    combine_input = runner.run(batches, info)
    token = torch.arange(T)[:, None].expand(T, K)
    got_TH = (combine_input.hidden_states[ids.long(), token].float() * gates[..., None]).sum(1)
    assert_close(got_TH, expected, 0.1)


def _batch_by_expert(rows: torch.Tensor | None, capacity: int) -> torch.Tensor | None:
    """Return the same rows for each expert, padded with NaN up to the capacity."""
    if rows is None:
        return None
    batches = torch.full((E, capacity, rows.shape[1]), torch.nan).to(rows.dtype)
    batches.view(torch.uint8)[:, : len(rows)] = rows.contiguous().view(torch.uint8)
    return batches


def test_triton_kernels_backend_with_a_stand_in() -> None:
    problem = Problem(T, H, 48, E, K, dtype=torch.bfloat16)
    x_TH, weights, routing = random_inputs(problem, torch.device("cpu"))
    runner = MoeRunner("triton_kernel", NOT_INPLACE)
    runner._parts = {"standard": TritonKernels}
    topk = to_expert_major(
        StandardTopKOutput(routing.topk_weights_TK, routing.topk_ids_TK, None), E
    )
    transposed_weights = replace(
        weights, w1=weights.w1.mT.contiguous(), w2=weights.w2.mT.contiguous()
    )
    got = runner.run(
        StandardDispatchOutput(x_TH, topk),
        make_quant_info(transposed_weights, use_triton_kernels=True),
    )
    assert_close(got.hidden_states, float64_reference(x_TH, weights, routing, problem), 0.02)
