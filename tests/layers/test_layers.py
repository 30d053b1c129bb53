"""FusedMoE in one process: outputs of simulated ranks, all forms of routing, plans and memory."""

import gc
import random
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from small_layers import (
    FAMILIES,
    SPLITS,
    E,
    H,
    I,
    K,
    Sample,
    T,
    make_layer,
    rank_weights,
    relative_error,
)

from modular_kernel.errors import (
    DtypeError,
    StateError,
)
from modular_kernel.layers import fused_moe as fused_moe_module
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.layers.router import Router, RouterSpec, select_experts
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.operators import kernel_cache as kernel_cache_module
from modular_kernel.operators.kernel_cache import KernelCache
from modular_kernel.ops.route import RouterTensors, route
from modular_kernel.plan import plan_capacity
from modular_kernel.spec.placement import Placement
from modular_kernel.tensors import ExpertWeights, Routing

SAMPLES = {
    "plain": Sample(),
    "biases": Sample(fields={"bias": True}),
    "scaled": Sample(FAMILIES["biased"], fields={"routed_scaling_factor": 2.5}),
    "zero experts": Sample(FAMILIES["zero experts"], fields={"routed_scaling_factor": 2.0}),
    "on the input": Sample(fields={"apply_router_weight_on_input": True, "bias": True}),
    "ungated": Sample(fields={"activation": "relu2", "bias": True}),
    "gpt-oss": Sample(
        RouterSpec(K, order="topk_first"), fields={"activation": "swiglu_clamp_before:limit=1.5"}
    ),
    "bf16": Sample(fields={"dtype": torch.bfloat16}),
    "int4": Sample(fields={"quant": "int4_w4a16_group:group=8"}),
    "fp8": Sample(fields={"quant": "fp8_w8a8_block:block=8x8"}),
}
MAX_ERRORS = {"bf16": 1e-2, "fp8": 8e-2}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_rank_outputs_sum_to_the_reference(name: str, split: tuple[int, int]) -> None:
    sample, (ep, tp) = SAMPLES[name], split
    total = torch.zeros(T, H, dtype=torch.float64)
    for ep_rank in range(ep):
        for tp_rank in range(tp):
            layer = make_layer(sample, (ep_rank, ep), (tp_rank, tp))
            total += layer(sample.x_TH, sample.logits).double()
    assert relative_error(total, sample.expected_output()) < MAX_ERRORS.get(name, 1e-5)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_shared_experts_are_added_once(partial: bool, split: tuple[int, int]) -> None:
    sample, (ep, tp) = Sample(), split
    token_counts = []

    def call_shared_experts(x_TH: torch.Tensor) -> torch.Tensor:
        token_counts.append(len(x_TH))
        return sample.shared(x_TH) / (ep * tp if partial else 1)

    total = torch.zeros(T, H, dtype=torch.float64)
    for ep_rank in range(ep):
        for tp_rank in range(tp):
            layer = make_layer(
                sample,
                (ep_rank, ep),
                (tp_rank, tp),
                shared_experts=call_shared_experts,
                shared_partial=partial,
            )
            total += layer(sample.x_TH, sample.logits).double()
    assert relative_error(total, sample.expected_output(shared=True)) < 1e-5
    assert token_counts == [T] * (ep * tp)


def test_experts_that_do_not_divide_evenly() -> None:
    """The 8 experts are on 3 ranks in blocks of 3, 3 and 2."""
    sample, total = Sample(), torch.zeros(T, H, dtype=torch.float64)
    local_experts_by_rank = []
    for rank in range(3):
        layer = make_layer(sample, (rank, 3))
        local_experts_by_rank.append([layer.local_expert(expert) for expert in range(E)])
        total += layer(sample.x_TH, sample.logits).double()
    assert local_experts_by_rank == [
        [0, 1, 2, *[-1] * 5],
        [-1, -1, -1, 0, 1, 2, -1, -1],
        [*[-1] * 6, 0, 1],
    ]
    assert relative_error(total, sample.expected_output()) < 1e-5


@pytest.mark.parametrize("reduce_results", [False, True])
def test_a_single_rank_can_have_a_permuted_placement(reduce_results: bool) -> None:
    """Weights are in the order of the placement, so a single rank must map ids, too."""
    sample = SAMPLES["biases"]
    order = (3, 0, 5, 1, 7, 2, 6, 4)
    layer = FusedMoE(
        E, H, I, 3, K, bias=True, params_dtype=torch.float32, placement=Placement((order,)),
        router=sample.router, reduce_results=reduce_results, device="cpu",
    )  # fmt: skip
    tensors = vars(sample.plain)
    permuted = {name: t[list(order)] for name, t in tensors.items() if t is not None}
    layer.set_weights(ExpertWeights(**permuted))
    assert [layer.local_expert(expert) for expert in order] == list(range(E))
    y = layer(sample.x_TH, sample.logits).double()
    assert relative_error(y, sample.expected_output()) < 1e-5


def test_parameters_have_their_usual_names() -> None:
    layer = FusedMoE(E, H, I, 3, K, bias=True, parallel=LayerParallel(ep=(1, 2), tp=(0, 2)))
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes == {
        "w13_weight": (E // 2, I, H),
        "w2_weight": (E // 2, H, I // 2),
        "w13_bias": (E // 2, I),
        "w2_bias": (E // 2, H),
    }
    assert not any(p.requires_grad for p in layer.parameters())
    assert all(bool(p.isnan().all()) for p in layer.parameters())
    quantized = FusedMoE(E, H, I, top_k=K, quant_config="int4_w4a16_group:group=16")
    shapes = {name: tuple(p.shape) for name, p in quantized.named_parameters()}
    assert shapes["w13_weight"] == (E, 2 * I, H // 2)
    assert shapes["w13_weight_scale"] == (E, 2 * I, H // 16)


def test_state_dict_round_trip() -> None:
    sample = SAMPLES["biases"]
    layer, loaded = make_layer(sample), FusedMoE(E, H, I, bias=True, router=sample.router)
    loaded.load_state_dict(layer.state_dict())
    expected = layer(sample.x_TH, sample.logits)
    assert torch.equal(loaded(sample.x_TH, sample.logits), expected)
    assert torch.equal(deepcopy(layer)(sample.x_TH, sample.logits), expected)


def test_replaced_weights_are_used() -> None:
    sample = Sample()
    layer = make_layer(sample)
    before = layer(sample.x_TH, sample.logits)
    assert layer.weights() is layer.weights()
    weights_before = layer.weights()
    layer.w2_weight.data = layer.w2_weight.data * 2
    assert layer.weights() is not weights_before
    assert relative_error(layer(sample.x_TH, sample.logits), 2 * before.double()) < 1e-6
    layer.w2_weight.data.mul_(0.5)
    assert relative_error(layer(sample.x_TH, sample.logits), before.double()) < 1e-6
    layer.set_weights(
        rank_weights(replace(sample, fields={"dtype": torch.float32}), (0, 1), (0, 1))
    )
    assert torch.equal(layer(sample.x_TH, sample.logits), before)
    layer.half()
    with pytest.raises(DtypeError, match="x: got float32, need float16"):
        layer(sample.x_TH, sample.logits)


def test_transposed_weights_are_used_without_a_copy() -> None:
    """Some libraries store weights as (e, H, 2I) and (e, I, H), and pass transposed views."""
    sample = Sample()
    layer, weights = make_layer(sample), rank_weights(sample, (0, 1), (0, 1))
    expected = layer(sample.x_TH, sample.logits)
    w13, w2 = weights.w1.mT.contiguous(), weights.w2.mT.contiguous()
    layer.set_weights(ExpertWeights(w13.mT, w2.mT))
    assert layer.w13_weight.data_ptr() == w13.data_ptr()
    assert torch.allclose(layer(sample.x_TH, sample.logits), expected, atol=1e-6)


def test_describe_states_where_experts_are() -> None:
    layer = make_layer(Sample(), (1, 4), layer_id=5)
    text = layer.describe()
    for substring in (
        "layer 5: T1-H32-I48-E8-K3",
        "EP rank 1 of 4: 2 of 8 experts",
        "TP rank 0 of 1: 48 of 48 intermediate columns",
        "0 -> -1, 1 -> -1, 2 -> 0, 3 -> 1, 4 -> -1",
        "router: RouterSpec(top_k=3",
        "parts: MoEPrepareAndFinalizeNoEP, TorchExperts (default on cpu); ",
        "output not summed over ranks",
    ):
        assert substring in text, text
    assert "layer_id=5, ep=(1, 4), tp=(0, 1)" in repr(layer)
    with_experts_part = make_layer(Sample(), experts="NaiveBatchedExperts")
    assert "MoEPrepareAndFinalizeNoEP, NaiveBatchedExperts; output" in with_experts_part.describe()
    layer.to("meta")
    assert "NoEP, experts not chosen yet (parameters are on the meta device); " in layer.describe()


# -------------------------------------------------------------------------------------- routing


def test_every_form_of_routing() -> None:
    sample = Sample()
    layer = make_layer(sample, router=None, top_k=K)
    routing = route(sample.logits, sample.router).routing
    expected = layer(sample.x_TH, routing)
    assert relative_error(expected, sample.expected_output()) < 1e-5
    weights, ids = routing.topk_weights_TK, routing.topk_ids_TK
    for routing_argument in (
        select_experts(sample.logits, sample.router),
        (weights, ids),
        [weights, ids.long(), None],
        (weights.mT.contiguous().mT, ids),  # strided
    ):
        assert torch.equal(layer(sample.x_TH, routing_argument), expected)
    with_bf16_weights = layer(sample.x_TH, (weights.bfloat16(), ids))
    with_widened_weights = layer(sample.x_TH, (weights.bfloat16().float(), ids))
    assert torch.equal(with_bf16_weights, with_widened_weights)


def test_batches_of_sequences_equal_flat_tokens() -> None:
    sample = Sample(tokens=6)
    layer = make_layer(sample)
    expected = layer(sample.x_TH, sample.logits)
    got = layer(sample.x_TH.view(2, 3, H), sample.logits.view(2, 3, E))
    assert torch.equal(got, expected.view(2, 3, H))
    layer_without_router = make_layer(sample, router=None, top_k=K)
    routing = route(sample.logits, sample.router).routing
    batched_routing = tuple(t.view(2, 3, K) for t in (routing.topk_weights_TK, routing.topk_ids_TK))
    assert torch.equal(
        layer_without_router(sample.x_TH.view(2, 3, H), batched_routing), expected.view(2, 3, H)
    )
    assert layer(sample.x_TH[:0], sample.logits[:0]).shape == (0, H)


@pytest.mark.parametrize("table", [False, True])
def test_a_layer_with_a_router_module(table: bool) -> None:
    sample = Sample()
    spec = RouterSpec(K, "sqrtsoftplus", renormalize=True, selection_bias=not table, table=table)
    router = Router(spec, H, E, bias=True, vocabulary=20 if table else None)
    router.weight.data = sample.draw(E, H, seed=8)
    router.bias.data = sample.draw(E, seed=9)
    token_ids = (
        torch.randint(20, (T,), generator=torch.Generator().manual_seed(3)) if table else None
    )
    if table:
        router.tid2eid.copy_(torch.stack([torch.randperm(E)[:K] for _ in range(20)]))
    else:
        router.e_score_correction_bias.data = sample.draw(E, seed=10)
    layer = make_layer(sample, router=router, selection_bias=None)
    assert "router.weight" in dict(layer.named_parameters())
    got = layer(sample.x_TH, token_ids=token_ids)
    weights, ids, logits = router(sample.x_TH, token_ids)
    assert torch.allclose(logits, sample.x_TH @ router.weight.T + router.bias, atol=1e-5)
    expected = make_layer(sample, router=None, top_k=K)(sample.x_TH, (weights, ids))
    assert torch.equal(got, expected)
    if token_ids is not None:
        assert torch.equal(ids.long(), router.tid2eid[token_ids])


# -------------------------------------------------------------------------------- plans, memory


@pytest.fixture
def without_interpreted_router() -> Iterator[None]:
    """Run the router in torch, because the interpreted kernel is too slow."""
    with prefer_torch_reference():
        yield


def read_resident_bytes() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * 4096


@pytest.mark.usefixtures("without_interpreted_router")
def test_a_thousand_calls_leak_no_memory_and_keep_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers, two with the same shape, share a kernel cache. Earlier outputs do not change."""
    cache = KernelCache()
    monkeypatch.setattr(fused_moe_module, "_plan_cache", cache)
    sample = Sample(tokens=600)
    with_biases = Sample(fields={"bias": True})
    layers = [
        make_layer(sample),
        make_layer(sample),
        make_layer(with_biases),
        make_layer(sample, (0, 2)),
    ]
    rng, outputs, bytes_before = random.Random(1), [], 0
    x_TH, logits = sample.x_TH, sample.logits
    for call in range(1000):
        tokens = rng.choice((0, 1, rng.randint(2, 60), rng.randint(61, 600)))
        start = rng.randint(0, 600 - tokens)
        rows = slice(start, start + tokens)
        layer = layers[rng.randrange(4)]
        got = layer(x_TH[rows], logits[rows])
        if call % 100 == 0:
            outputs.append((layer, rows, got, got.clone()))
        if call == 300:
            gc.collect()
            bytes_before = read_resident_bytes()
    gc.collect()
    assert len(cache.kernels) == 3 * len({plan_capacity(n) for n in range(601)})
    assert read_resident_bytes() - bytes_before < 4 << 20
    for layer, rows, got, copy in outputs:
        assert torch.equal(got, copy)
        assert torch.allclose(layer(x_TH[rows], logits[rows]), copy, atol=1e-6)


def test_layers_of_the_same_shape_share_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KernelCache()
    monkeypatch.setattr(fused_moe_module, "_plan_cache", cache)
    sample = Sample()
    first, second = make_layer(sample), make_layer(sample)
    first.warm_up(1, 16, 40)
    kernels = list(cache.kernels.values())
    assert [kernel.problem.tokens for kernel in kernels] == [16, 64]
    assert [kernel._call_plans.capacities for kernel in kernels] == [(16,), (64,)]
    first_output = first(sample.x_TH, sample.logits)
    second_output = second(sample.x_TH, sample.logits)
    assert len(cache.kernels) == 2
    assert first_output.data_ptr() != second_output.data_ptr()


@pytest.mark.usefixtures("without_interpreted_router")
def test_no_kernel_is_made_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KernelCache(max_kernels=2)
    monkeypatch.setattr(fused_moe_module, "_plan_cache", cache)
    sample = Sample(tokens=2049)
    layer = make_layer(sample)
    assert relative_error(layer(sample.x_TH, sample.logits), sample.expected_output()) < 1e-5
    layer.warm_up(9)
    with monkeypatch.context() as capture:
        capture.setattr(kernel_cache_module, "is_capturing", lambda device: True)
        layer(sample.x_TH[:9], sample.logits[:9])
        with pytest.raises(
            StateError, match="a kernel of a new size: got a call during CUDA graph"
        ):
            layer(sample.x_TH[:40], sample.logits[:40])
    for tokens in (1, 20, 40):
        layer(sample.x_TH[:tokens], sample.logits[:tokens])
    assert [key[1].tokens for key in cache.kernels] == [32, 64]


def test_expected_output_equals_a_loop_over_pairs() -> None:
    """The other tests rely on these expected outputs."""
    sample = SAMPLES["biases"]
    routing: Routing = route(sample.logits, sample.router, RouterTensors()).routing
    weights: ExpertWeights = sample.plain
    total = torch.zeros(T, H, dtype=torch.float64)
    for token in range(T):
        for weight, expert in zip(
            routing.topk_weights_TK[token], routing.topk_ids_TK[token], strict=True
        ):
            gate_up = weights.w1[expert].double() @ sample.x_TH[token].double()
            gate, up = (gate_up + weights.b1[expert].double()).chunk(2)
            down = weights.w2[expert].double() @ (torch.nn.functional.silu(gate) * up)
            total[token] += weight.double() * (down + weights.b2[expert].double())
    assert relative_error(sample.expected_output(), total) < 1e-12
