"""MoeRunner: a facade that computes nothing, by backends, formats, weights and switches."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from fused_samples import BASE, DEVICES, E, H, I, K, T, close, layer
from toy_backend import FusedToyExperts, ToyExperts
from vendor_stand_in import BatchedDeepGemm, DeepGemm, TritonKernels

from experts import StagedTritonExperts, TorchExperts, TritonExperts
from modular_kernel.catalog import make_kernel
from modular_kernel.composer import random_inputs
from modular_kernel.errors import (
    ConfigurationError,
    DtypeError,
    IncompatibleError,
    ShapeError,
    UnknownPartError,
    UnsupportedError,
)
from modular_kernel.integrations import fused_moe_options
from modular_kernel.integrations.moe_runner import (
    BACKENDS,
    MoeQuantInfo,
    MoeRunner,
    MoeRunnerConfig,
    switches,
)
from modular_kernel.integrations.runner_backends import parts_of
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
from modular_kernel.ops.quantise import quantised
from modular_kernel.ops.routing_data import by_experts, by_tokens
from modular_kernel.quant import quantise_weights
from modular_kernel.reference import oracle
from modular_kernel.routers import RoutingData, StandardTopKOutput
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.types import Combine, Problem

OUT = MoeRunnerConfig(inplace=False)


def info_of(weights: ExpertWeights, **flags: Any) -> MoeQuantInfo:
    return MoeQuantInfo(
        weights.w1, weights.w2, weights.b1, weights.b2, expert_map=weights.expert_map,
        w13_scale=weights.w1_scale, w2_scale=weights.w2_scale, w13_zp=weights.w1_zero_point,
        w2_zp=weights.w2_zero_point, a13_scale=weights.a1_scale, a2_scale=weights.a2_scale,
        w13_global_scale=weights.w1_global_scale, w2_global_scale=weights.w2_global_scale, **flags,
    )  # fmt: skip


def standard(x_TH: torch.Tensor, routing: Routing) -> StandardDispatchOutput:
    return StandardDispatchOutput(
        x_TH, StandardTopKOutput(routing.topk_weights_TK, routing.topk_ids_TK, None)
    )


def ran(runner: MoeRunner, problem: Problem, **flags: Any) -> torch.Tensor:
    x_TH, weights, routing = layer(problem)
    got = runner.run(standard(x_TH, routing), info_of(weights, **flags))
    assert isinstance(got, StandardCombineInput)
    return got.hidden_states


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("backend", ["triton", "toy"])
def test_fused_and_staged_give_the_same_numbers(backend: str, fused: bool) -> None:
    x_TH, weights, routing = layer(BASE)
    got = ran(MoeRunner(backend, OUT, fused=fused), BASE)
    close(got, oracle(x_TH, weights, routing, BASE), 1e-6)
    names = {
        "triton": (StagedTritonExperts, TritonExperts),
        "toy": (ToyExperts, FusedToyExperts),
    }
    assert parts_of(backend, fused=fused)["standard"] is names[backend][fused]


def test_backends_are_the_field_s_names_registered_ones_and_parts() -> None:
    for backend in ("triton", "triton_kernel", "deep_gemm", "cutlass", "torch"):
        parts = parts_of(backend, fused=True)
        named = {part.__name__ for part in parts.values()}
        assert named == set(BACKENDS[backend].values())
    assert parts_of("torch", fused=True)["standard"] is TorchExperts
    assert parts_of("TorchExperts", fused=True) == {
        "standard": TorchExperts,
        "deepep_normal": TorchExperts,
    }
    assert set(parts_of("triton", fused=True)) == {"standard", "deepep_normal", "deepep_ll"}
    assert set(parts_of("triton", fused=False)) == {"standard"}
    with pytest.raises(UnknownPartError, match=r"runner backend: got 'cuda', need one of .*triton"):
        MoeRunner("cuda", OUT)
    for backend in ("torch", "TorchExperts"):
        with pytest.raises(UnsupportedError, match=r"fused of backend .*got False.*toy, triton"):
            MoeRunner(backend, OUT, fused=False)


# ------------------------------------------------------------------------------ config and weights


def test_there_is_one_config() -> None:
    assert MoeRunnerConfig is fused_moe_options.MoeRunnerConfig
    seeds = (
        "num_experts num_local_experts hidden_size intermediate_size_per_partition top_k "
        "num_fused_shared_experts layer_id activation apply_router_weight_on_input inplace "
        "no_combine routed_scaling_factor gemm1_alpha gemm1_clamp_limit"
    )
    assert set(seeds.split()) <= {field.name for field in fields(MoeRunnerConfig)}
    assert MoeRunnerConfig().inplace


REACHES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"activation": "gelu"}, {"activation": "gelu"}),
    ({"apply_router_weight_on_input": True}, {"apply_router_weight_on_input": True}),
    ({"no_combine": True}, {"combine": Combine.TOPK_WEIGHTED}),
    ({"routed_scaling_factor": 2.5}, {"routed_scaling_factor": 2.5}),
    (
        {"gemm1_alpha": 1.5, "gemm1_clamp_limit": 0.5},
        {"activation": "swiglu_oai:alpha=1.5,limit=0.5,interleaved=true"},
    ),
    ({"gemm1_clamp_limit": 0.5}, {"activation": "swiglu_clamp_after:limit=0.5"}),
    ({"chunk_tokens": 2}, {"chunk_tokens": 2}),
    ({"layer_id": 7, "num_fused_shared_experts": 1}, {}),
)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("given", "facts"), REACHES, ids=str)
def test_every_field_reaches_the_problem(
    given: dict[str, Any], facts: dict[str, Any], backend: str
) -> None:
    problem = replace(BASE, bias=True, **facts)
    x_TH, weights, routing = layer(problem)
    got = ran(MoeRunner(backend, replace(OUT, **given)), problem)
    close(got, oracle(x_TH, weights, routing, problem), 1e-5)


@pytest.mark.parametrize(
    ("given", "error", "words"),
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
def test_or_raises(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ran(MoeRunner("torch", replace(OUT, **given)), BASE)


def test_inplace_is_the_default_and_overwrites_tokens_only_then() -> None:
    x_TH, weights, routing = layer(BASE)
    want, before = oracle(x_TH, weights, routing, BASE), x_TH.clone()
    for fused in (True, False):
        MoeRunner("triton", OUT, fused=fused).run(standard(x_TH, routing), info_of(weights))
        assert torch.equal(x_TH, before)
    got = MoeRunner("triton", MoeRunnerConfig()).run(standard(x_TH, routing), info_of(weights))
    assert got.hidden_states is x_TH
    close(x_TH, want, 1e-6)


FLAGS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"use_fp8_w8a8": True}, "fp8_w8a8_tensor"),
    ({"use_fp8_w8a8": True}, "fp8_w8a8_tensor:static=true"),
    ({"use_fp8_w8a8": True, "per_channel_quant": True}, "fp8_w8a8_channel"),
    ({"use_fp8_w8a8": True, "block_shape": [32, 32]}, "fp8_w8a8_block:block=32x32"),
    ({"use_int8_w8a8": True, "per_channel_quant": True}, "int8_w8a8_channel"),
    ({"use_int8_w8a16": True}, "int8_w8a16_channel"),
    ({"use_int4_w4a16": True, "block_shape": [0, 32]}, "int4_w4a16_group:group=32"),
    ({"quant": "mxfp4_w4a16"}, "mxfp4_w4a16"),
    ({"quant": "nvfp4_w4a16"}, "nvfp4_w4a16"),
)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("flags", "quant"), FLAGS, ids=[quant for _, quant in FLAGS])
def test_flags_or_a_name_say_the_scheme(flags: dict[str, Any], quant: str, backend: str) -> None:
    problem = replace(BASE, quant=quant)
    x_TH, weights, routing = layer(problem)
    want = oracle(x_TH, weights, routing, problem)
    for fused in {True, backend == "torch"}:
        got = ran(MoeRunner(backend, OUT, fused=fused), problem, **flags)
        close(got, want, 0.1 if "w8a8" in quant else 1e-5)


def test_contradicting_schemes_are_refused() -> None:
    _, weights, _ = layer(BASE)
    for flags, words in (
        ({"use_fp8_w8a8": True, "quant": "mxfp4_w4a16"}, "quant: got mxfp4_w4a16 and fp8"),
        ({"use_fp8_w8a8": True, "use_int8_w8a8": True}, "one use_"),
        ({"quant": "fp9"}, "quant: got fp9"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            info_of(weights, **flags).scheme()
    with pytest.raises(ConfigurationError, match=r"MoeQuantInfo\.w13_weight: got 7"):
        MoeQuantInfo(7, weights.w2)  # type: ignore[arg-type]


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_tensor"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_padded_weights_give_the_same_result(backend: str, quant: str) -> None:
    problem = replace(BASE, quant=quant)
    x_TH, weights, routing = layer(problem)
    flags = {"use_fp8_w8a8": True} if quant != "none" else {}
    wide = replace(weights, w1=_padded(weights.w1), w2=_padded(weights.w2))
    plain = MoeRunner(backend, OUT).run(standard(x_TH, routing), info_of(weights, **flags))
    runner = MoeRunner(backend, OUT, padding=True)
    got = runner.run(standard(x_TH, routing), info_of(wide, **flags))
    assert torch.equal(got.hidden_states, plain.hidden_states)
    if quant != "none":
        with pytest.raises(UnsupportedError, match="padding: got int4"):
            runner.run(standard(x_TH, routing), info_of(wide, quant="int4_w4a16_group:group=32"))
        return
    with pytest.raises(ShapeError, match="padded weights"):
        runner.run(standard(x_TH, routing), info_of(replace(wide, w1=weights.w1[:, :, 1:])))
    with pytest.raises(ShapeError):
        MoeRunner(backend, OUT).run(standard(x_TH, routing), info_of(wide, **flags))


def _padded(weight: torch.Tensor) -> torch.Tensor:
    filler = torch.full((*weight.shape[:2], 128), torch.nan, dtype=torch.float32)
    return torch.cat([weight.float(), filler], 2).to(weight.dtype)


def test_transposed_storage_is_the_same_layer() -> None:
    x_TH, weights, routing = layer(BASE)
    stored = replace(
        weights,
        w1=weights.w1.transpose(1, 2).contiguous(),
        w2=weights.w2.transpose(1, 2).contiguous(),
    )
    assert stored.w1.shape == (E, H, 2 * I)
    got = MoeRunner("torch", OUT).run(
        standard(x_TH, routing), info_of(stored, use_triton_kernels=True)
    )
    close(got.hidden_states, oracle(x_TH, weights, routing, BASE), 1e-6)


# ------------------------------------------------------------------------------ dispatch formats


def test_formats_are_told_apart() -> None:
    x = torch.zeros(1)
    of = {
        format_is_standard: (StandardDispatchOutput(x, (x, x)), StandardCombineInput(x)),
        format_is_deepep_normal: (
            DeepEPNormalDispatchOutput(x, None, x, x), DeepEPNormalCombineInput(x, x, x),
        ),
        format_is_deepep_ll: (
            DeepEPLLDispatchOutput(x, None, x, x, x), DeepEPLLCombineInput(x, x, x),
        ),
    }  # fmt: skip
    for is_format, values in of.items():
        for other, theirs in of.items():
            assert [is_format(value) for value in theirs] == [is_format is other] * 2  # type: ignore[operator]
        assert values[0].format == values[1].format


def test_a_wrong_format_raises_with_both_names() -> None:
    x_TH, weights, routing = layer(BASE)
    given = DeepEPLLDispatchOutput(x_TH, None, *vars(routing).values(), torch.zeros(E))
    with pytest.raises(ConfigurationError) as caught:
        MoeRunner("triton", OUT, fused=False).run(given, info_of(weights))
    assert (caught.value.got, caught.value.need) == ("deepep_ll", "standard")
    with pytest.raises(ConfigurationError, match="got tuple, no dispatch output, need standard"):
        MoeRunner("torch", OUT).run((x_TH, routing), info_of(weights))  # type: ignore[arg-type]


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_channel", "fp8_w8a8_block:block=32x32"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_received_rows_are_weighted_and_summed(backend: str, quant: str) -> None:
    """By local ids, -1 elsewhere: a rank's share of the whole layer."""
    problem = replace(BASE, quant=quant)
    x_TH, weights, routing = layer(problem)
    ids = torch.where(routing.topk_ids_TK == 1, -1, routing.topk_ids_TK).to(torch.int32)
    local = Routing(routing.topk_weights_TK, ids)
    rows, scale = x_TH, None
    if problem.scheme.quantised:
        rows, scale = quantised(x_TH, problem.scheme)
    config = MoeRunnerConfig(
        num_experts=16, num_local_experts=E, routed_scaling_factor=2.0, inplace=False
    )
    runner = MoeRunner(backend, config, dtype=torch.float32)
    got = runner.run(
        DeepEPNormalDispatchOutput(rows, scale, local.topk_ids_TK, local.topk_weights_TK),
        info_of(weights, quant=quant),
    )
    assert isinstance(got, DeepEPNormalCombineInput)
    assert got.topk_ids is local.topk_ids_TK
    want = oracle(x_TH, weights, local, replace(problem, routed_scaling_factor=2.0))
    close(got.hidden_states, want, 0.1 if scale is not None else 1e-6)


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_channel"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_batches_come_back_unweighted_with_ids_and_weights(backend: str, quant: str) -> None:
    problem = replace(BASE, quant=quant)
    x_TH, weights, routing = layer(problem)
    counts = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    x_eCH = torch.full((E, 4, H), torch.nan)
    for expert, count in enumerate(counts.tolist()):
        x_eCH[expert, :count] = x_TH[:count]
    rows, scale = x_eCH, None
    if problem.scheme.quantised:
        rows, scale = quantised(x_eCH.nan_to_num().flatten(0, 1), problem.scheme)
        rows, scale = rows.view(E, 4, H), scale.view(E, 4, 1)
    runner = MoeRunner(backend, MoeRunnerConfig(routed_scaling_factor=2.5), dtype=torch.float32)
    given = DeepEPLLDispatchOutput(
        rows, scale, routing.topk_ids_TK, routing.topk_weights_TK, counts, 2
    )
    got = runner.run(given, info_of(weights, quant=quant))
    assert isinstance(got, DeepEPLLCombineInput)
    assert got.topk_ids is routing.topk_ids_TK
    assert torch.equal(got.topk_weights, routing.topk_weights_TK * 2.5)
    for expert, count in enumerate(counts.tolist()):
        if count:
            one = Routing(torch.ones(count, 1), torch.full((count, 1), expert))
            alone = replace(problem, tokens=count, top_k=1)
            want = oracle(x_TH[:count], weights, one, alone)
            close(got.hidden_states[expert, :count], want, 0.1 if scale is not None else 1e-6)


def test_what_a_dispatcher_cannot_have_is_refused() -> None:
    x_TH, weights, routing = layer(BASE)
    ids, gates = routing.topk_ids_TK, routing.topk_weights_TK
    normal = DeepEPNormalDispatchOutput(x_TH, None, ids, gates)
    rows, counts = x_TH[None].repeat(E, 1, 1), torch.zeros(E, dtype=torch.int32)
    batches = DeepEPLLDispatchOutput(rows, None, ids, gates, counts)
    with pytest.raises(ConfigurationError, match="no_combine of deepep_normal"):
        MoeRunner("torch", replace(OUT, no_combine=True)).run(normal, info_of(weights))
    on_input = MoeRunner("torch", replace(OUT, apply_router_weight_on_input=True))
    with pytest.raises(IncompatibleError, match="ReceivedBatches x NaiveBatchedExperts"):
        on_input.run(batches, info_of(weights))
    placed = replace(weights, expert_map=torch.arange(E, dtype=torch.int32))
    with pytest.raises(ConfigurationError, match="expert_map of deepep_ll"):
        MoeRunner("torch", OUT).run(batches, info_of(placed))
    quantised_info = info_of(quantise_weights(weights, replace(BASE, quant="fp8_w8a8_channel")),
                             quant="fp8_w8a8_channel")  # fmt: skip
    with pytest.raises(DtypeError, match="hidden_states for fp8_w8a8_channel"):
        MoeRunner("torch", OUT).run(batches, quantised_info)
    eight = batches._replace(hidden_states=batches.hidden_states.to(torch.float8_e4m3fn))
    for scale in (None, torch.ones(E, T, 2)):
        with pytest.raises(ShapeError, match="hidden_states_scale"):
            MoeRunner("torch", OUT).run(eight._replace(hidden_states_scale=scale), quantised_info)


# ------------------------------------------------------------------------------ routers' formats


@pytest.mark.parametrize("device", DEVICES)
def test_routing_by_experts_and_back(device: str) -> None:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, E, (9, 3), generator=g, dtype=torch.int32).to(device)
    weights = torch.rand(9, 3, generator=g).to(device)
    found = by_experts(StandardTopKOutput(weights, ids, None), E)
    data, gather, scatter = found
    assert isinstance(data, RoutingData)
    assert (data.n_expts_act, data.n_expts_tot) == (3, E)
    assert data.expt_hist.tolist() == [int((ids == e).sum()) for e in range(E)]  # type: ignore[union-attr]
    pairs = gather.src_indx[gather.src_indx >= 0].long()
    assert ids.flatten()[pairs].tolist() == sorted(ids[ids >= 0].tolist())
    assert torch.equal(data.gate_scal[: len(pairs)], weights.flatten()[pairs])
    assert not data.gate_scal[len(pairs) :].any()
    assert torch.equal(gather.dst_indx[pairs], torch.arange(len(pairs), device=device).int())
    assert (scatter.src_indx, scatter.dst_indx) == (gather.dst_indx, gather.src_indx)
    back = by_tokens(found)
    assert torch.equal(back.topk_ids, ids)
    assert torch.equal(back.topk_weights, weights.masked_fill(ids < 0, 0))


def test_both_metadata_types_are_made_of_a_plain_tuple() -> None:
    one, two = torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32)
    weights, ids, logits = StandardTopKOutput(*(one, two, None))
    assert (weights, ids, logits) == (one, two, None)
    data = RoutingData(*(1, one.flatten()))
    assert (data.n_expts_act, data.gate_scal.shape) == (1, (2,))
    with pytest.raises(ConfigurationError, match="expt_hist"):
        by_tokens(by_experts((one, two), 1)._replace(routing_data=data))  # type: ignore[arg-type]


def test_a_backend_takes_one_format_of_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    x_TH, weights, routing = layer(BASE)
    plain = standard(x_TH, routing)
    found = StandardDispatchOutput(x_TH, by_experts(plain.topk_output, E))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError) as caught:
        MoeRunner("torch", OUT).run(found, info_of(weights))
    assert (caught.value.got, caught.value.need) == (
        "TritonKernelTopKOutput", "StandardTopKOutput",
    )  # fmt: skip
    runner = MoeRunner("torch", OUT)
    runner.runner_backend = "triton_kernel"  # the part of that name may not be here
    with pytest.raises(ConfigurationError, match="need TritonKernelTopKOutput"):
        runner.run(plain, info_of(weights))
    got = runner.run(found, info_of(weights))
    close(got.hidden_states, oracle(x_TH, weights, routing, BASE), 1e-6)


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_block"])
@pytest.mark.parametrize("format", ["standard", "deepep_normal", "deepep_ll"])
def test_deep_gemm_by_its_stand_in(format: str, quant: str) -> None:
    """Rows by expert or in a row, with scales of 128 values as a dispatcher leaves them."""
    problem = Problem(T, 128, 128, E, K, dtype=torch.bfloat16, quant=quant)
    x_TH, weights, routing = random_inputs(problem, torch.device("cpu"))
    runner = MoeRunner("deep_gemm", replace(OUT, activation="silu"))
    runner._parts = {
        "standard": DeepGemm, "deepep_normal": DeepGemm, "deepep_ll": BatchedDeepGemm,
    }  # fmt: skip
    info = info_of(weights, quant=quant)
    ids, gates = routing.topk_ids_TK, routing.topk_weights_TK
    want = oracle(x_TH, weights, routing, problem)
    if format == "standard":
        got = runner.run(standard(x_TH, routing), info)
        close(got.hidden_states, want, 0.1)
        return
    rows, scale = x_TH, None
    if quant != "none":
        rows, scale = quantised(x_TH.float(), problem.scheme)
    if format == "deepep_normal":
        got = runner.run(DeepEPNormalDispatchOutput(rows, scale, ids, gates), info)
        close(got.hidden_states, want, 0.1)
        return
    counts = torch.full((E,), T, dtype=torch.int32)
    few = DeepEPLLDispatchOutput(_by_expert(rows, T), _by_expert(scale, T), ids, gates, counts)
    with pytest.raises(IncompatibleError, match="a multiple of 128"):
        runner.run(few, info)
    rows, scale = _by_expert(rows, 128), _by_expert(scale, 128)
    batches = DeepEPLLDispatchOutput(rows, scale, ids, gates, counts, T)
    given = runner.run(batches, info)
    token = torch.arange(T)[:, None].expand(T, K)
    got_TH = (given.hidden_states[ids.long(), token].float() * gates[..., None]).sum(1)
    close(got_TH, want, 0.1)


def _by_expert(rows: torch.Tensor | None, capacity: int) -> torch.Tensor | None:
    """The same rows for each expert, and what nobody may use behind them."""
    if rows is None:
        return None
    whole = torch.full((E, capacity, rows.shape[1]), torch.nan).to(rows.dtype)
    whole.view(torch.uint8)[:, : len(rows)] = rows.contiguous().view(torch.uint8)
    return whole


def test_triton_kernels_by_its_stand_in() -> None:
    problem = Problem(T, H, 48, E, K, dtype=torch.bfloat16)
    x_TH, weights, routing = random_inputs(problem, torch.device("cpu"))
    runner = MoeRunner("triton_kernel", OUT)
    runner._parts = {"standard": TritonKernels}
    topk = by_experts(StandardTopKOutput(routing.topk_weights_TK, routing.topk_ids_TK, None), E)
    stored = replace(weights, w1=weights.w1.mT.contiguous(), w2=weights.w2.mT.contiguous())
    got = runner.run(StandardDispatchOutput(x_TH, topk), info_of(stored, use_triton_kernels=True))
    close(got.hidden_states, oracle(x_TH, weights, routing, problem), 0.02)


# ------------------------------------------------------------------------------ switches


def test_switches_by_the_field_s_names() -> None:
    assert switches({}) == {}
    assert switches({"PATH": "/", "SGLANG_MOE_PADDING": "true"}) == {"padding": True}
    assert switches({"SGLANG_CI_DISABLE_MOE_FUSED_FUNC": "1"}) == {"fused": False}
    off = {"SGLANG_CI_DISABLE_MOE_FUSED_FUNC": "0", "SGLANG_MOE_USE_AITER": "false"}
    assert switches(off) == {"fused": True, "aiter": False}
    with pytest.raises(ConfigurationError, match="SGLANG_MOE_PADDING: got 'often'"):
        switches({"SGLANG_MOE_PADDING": "often"})
    MoeRunner("triton", OUT, **switches(off))
    for name, option in (
        ("SGLANG_MOE_USE_AITER", "aiter"), ("SGLANG_MASKED_GEMM_FAST_ACT", "fast_act"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match=f"{option}: got True, need False"):
            MoeRunner("triton", OUT, **switches({name: "1"}))


SIZES = MoeRunnerConfig(
    num_experts=E, hidden_size=H, intermediate_size_per_partition=I, top_k=K, inplace=False
)


def test_what_is_not_served_is_refused_where_the_runner_is_made() -> None:
    with pytest.raises(IncompatibleError, match=r"\[quant\] ToyExperts"):
        MoeRunner("toy", SIZES, quant="int8_w8a8_channel", fused=False)
    runner = MoeRunner("torch", SIZES, quant="int8_w8a16_channel")
    x_TH, weights, routing = layer(BASE)
    with pytest.raises(ConfigurationError, match="quant_info: got none, need int8_w8a16_channel"):
        runner.run(standard(x_TH, routing), info_of(weights))


def test_explain_says_which_part_runs_and_why_not() -> None:
    told = MoeRunner("triton", SIZES, dtype=torch.float32).explain()
    assert "standard: TritonExperts, fused, in place of StagedTritonExperts; " in told
    assert "deepep_ll: BatchedTritonExperts, by one part; " in told
    told = MoeRunner("toy", SIZES, fused=False).explain("int8_w8a8_channel")
    assert (
        "standard: ToyExperts, by stages; MoEPrepareAndFinalizeNoEP x ToyExperts: refused" in told
    )
    assert "[quant] ToyExperts / problem" in told
    assert "deepep_ll: no part" in told
    with pytest.raises(ConfigurationError, match="num_experts, hidden_size"):
        MoeRunner("triton", OUT).explain()


def test_the_facade_is_the_kernel_s_own_call() -> None:
    x_TH, weights, routing = layer(BASE)
    kernel = make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", BASE)
    assert torch.equal(ran(MoeRunner("torch", OUT), BASE), kernel(x_TH, weights, routing))
