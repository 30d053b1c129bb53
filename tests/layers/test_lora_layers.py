"""FusedMoEWithLoRA and LoRABackend add the contributions of LoRA adapters to a base layer."""

from dataclasses import replace

import pytest
import torch
from lora_layers import (
    BATCH,
    FLOATS,
    MAX_RANK,
    NAMES,
    STARTS,
    E,
    H,
    I,
    K,
    add_adapters,
    make_adapter,
    make_base_layer,
    make_call,
)

from modular_kernel import ExpertWeights, Routing, reference
from modular_kernel.errors import ConfigurationError, ShapeError, StateError
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.lora import (
    ForwardBatch,
    FusedMoEWithLoRA,
    LoRABackend,
    LoRAManager,
    MoELoRALayer,
)
from modular_kernel.ops.moe_lora import run_moe_lora


@pytest.mark.parametrize(("mode", "num_a13"), [("merged", 2), ("merged", 1), ("parallel_delta", 1)])
def test_layer_without_adapters_equals_the_base_layer(mode: str, num_a13: int) -> None:
    layer = make_base_layer()
    adapted, manager = add_adapters(layer, mode, num_a13)
    x, logits = make_call()
    expected = layer(x, logits)
    assert torch.equal(adapted(x, logits), expected)
    no_info = manager.prepare_moe_lora_batch(ForwardBatch((None, None, None), STARTS), 3)
    assert no_info is None
    info = manager.prepare_moe_lora_batch(BATCH, 3)
    got = adapted(x, logits, moe_lora_info=info)
    assert torch.equal(adapted(x, logits, moe_lora_info=BATCH), got)
    assert torch.equal(got[4:9], expected[4:9])
    assert bool((got != expected).any(1)[[0, 1, 2, 3, 9, 10, 11]].all())


@pytest.mark.parametrize("num_a13", [1, 2])
def test_merged_mode_equals_merged_weights(num_a13: int) -> None:
    layer = make_base_layer(routed_scaling_factor=1.5)
    adapted, manager = add_adapters(layer, "merged", num_a13)
    x, logits = make_call()
    got = adapted(x, logits, moe_lora_info=manager.prepare_moe_lora_batch(BATCH, 3))
    routing = layer._route(x, logits, None, (12,)).routing
    weights = layer.weights()
    expected = reference.float64_reference(x, weights, routing, layer.problem)
    for rows, rank, scaling in ((slice(0, 4), 5, 0.5), (slice(9, 12), 3, 2.0)):
        adapter = make_adapter(rank, rank, num_a13=num_a13)
        a13, b13, a2, b2 = (getattr(adapter, f"lora_{name}").double() for name in NAMES)
        delta_13 = torch.cat([
            b13[:, :I] @ a13[:, :rank], b13[:, I:] @ a13[:, -rank:]
        ], 1)  # fmt: skip
        merged = ExpertWeights(weights.w1 + scaling * delta_13, weights.w2 + scaling * (b2 @ a2))
        expected[rows] = reference.float64_reference(x, merged, routing, layer.problem)[rows]
    assert float((got.double() - expected).abs().max()) <= 2e-6 * float(expected.abs().max())


def test_parallel_mode_adds_the_branch_to_the_base_output() -> None:
    layer = make_base_layer(routed_scaling_factor=1.5)
    adapted, manager = add_adapters(layer, "parallel_delta", 1)
    x, logits = make_call()
    info = manager.prepare_moe_lora_batch(BATCH, 3)
    assert info is not None
    got = adapted(x, logits, moe_lora_info=info)
    routing = layer._route(x, logits, None, (12,)).routing
    expected = layer(x, logits)
    for rows, rank, scaling in ((range(4), 5, 0.5), (range(9, 12), 3, 2.0)):
        adapter = make_adapter(rank, rank)
        for token in rows:
            for weight, expert in zip(
                routing.topk_weights_TK[token], routing.topk_ids_TK[token], strict=True
            ):
                gate, up = (adapter.lora_b13[expert] @ (adapter.lora_a13[expert] @ x[token])).chunk(
                    2
                )
                h = torch.nn.functional.silu(gate) * up
                expected[token] += (
                    1.5
                    * weight
                    * scaling
                    * (adapter.lora_b2[expert] @ (adapter.lora_a2[expert] @ h))
                )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert info.lora_ranks.tolist() == [3, 5, 0]
    assert info.scalings.tolist() == [2.0, 0.5, 1.0]


def test_the_backend_uses_the_buffers_of_its_pool() -> None:
    layer = make_base_layer()
    _, manager = add_adapters(layer, "parallel_delta", 1)
    backend, (x, _) = manager.backend(3), make_call()
    assert backend.moe_gate_up_a_buffer.shape == (3, E, MAX_RANK, H)
    assert backend.moe_down_a_buffer.shape == (3, E, MAX_RANK, I)
    ids, weights = torch.arange(12)[:, None] % E, torch.ones(12, 1)
    info = manager.prepare_moe_lora_batch(BATCH, 3)
    assert info is not None
    out, expected = torch.zeros(12, H), torch.zeros(12, H)
    assert backend.run_moe_lora(x, ids, weights, info, out) is out
    buffers = (
        backend.moe_gate_up_a_buffer, backend.moe_gate_up_b_buffer,
        backend.moe_down_a_buffer, backend.moe_down_b_buffer,
    )  # fmt: skip
    run_moe_lora(x, ids, weights, info, *buffers, expected)
    assert torch.equal(out, expected)
    assert out.any()
    _, merged_manager = add_adapters(make_base_layer(), "merged", 2)
    with pytest.raises(
        ConfigurationError, match="pool: got lora_a13 with 10 rows, lora_a2 with rank 5"
    ):
        LoRABackend(merged_manager.pools[3])
    with pytest.raises(ConfigurationError, match="mode: got merged, need parallel_delta"):
        merged_manager.backend(3)


def test_shared_experts_and_batches_of_tokens() -> None:
    layer = make_base_layer(shared_experts=lambda x: 0.5 * x)
    adapted, manager = add_adapters(layer, "merged", 2)
    x, logits = make_call()
    info = manager.prepare_moe_lora_batch(BATCH, 3)
    got = adapted(x.view(3, 4, H), logits.view(3, 4, E), moe_lora_info=info)
    assert torch.equal(got.view(12, H), adapted(x, logits, moe_lora_info=info))
    assert torch.equal(got.view(12, H)[4:9], layer(x, logits)[4:9])
    wrong_info = replace(info, weight_indices=torch.zeros(11).int(), seg_indptr=None)  # type: ignore[type-var]
    with pytest.raises(ShapeError, match="weight_indices: got"):
        adapted(x, logits, moe_lora_info=wrong_info)


def test_invalid_arguments_are_refused() -> None:
    layer = make_base_layer()
    problem = layer.problem
    shared = "adapters=2,rank=5,a13=shared"
    for invalid_problem, lora in (
        (problem, "adapters=2,rank=5"),
        (replace(problem, activation="gelu"), shared),
        (replace(problem, activation="silu:interleaved=true"), shared),
    ):
        with pytest.raises(ConfigurationError, match="parallel_delta: got"):
            LoRAManager(invalid_problem, lora, [3], mode="parallel_delta")
    for arguments in ((None, shared, [3]), (problem, 7, [3]), (problem, "none", [3])):
        with pytest.raises(ConfigurationError, match="got"):
            LoRAManager(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="mode: got 'both'"):
        LoRAManager(problem, shared, [3], mode="both")  # type: ignore[arg-type]
    manager = LoRAManager(problem, shared, [3])
    adapter = MoELoRALayer(make_adapter(3, 0))
    with pytest.raises(ConfigurationError, match="layer: got 5, need one of 3"):
        manager.load("mine", {5: adapter})
    with pytest.raises(ConfigurationError, match="adapter 'mine': layer 3: got Adapter"):
        manager.load("mine", {3: adapter.factors})  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match="layer: got 4"):
        manager.prepare_moe_lora_batch(BATCH, 4)
    for call in (lambda: manager.evict("a"), lambda: manager.prepare_moe_lora_batch(BATCH, 3)):
        with pytest.raises(StateError, match="got not loaded, need a loaded adapter: none"):
            call()
    with pytest.raises(ConfigurationError, match="forward_batch: got None"):
        manager.prepare_moe_lora_batch(None, 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="scaling: got inf"):
        MoELoRALayer(adapter.factors, float("inf"))
    with pytest.raises(ConfigurationError, match="base_layer: got Linear"):
        FusedMoEWithLoRA(torch.nn.Linear(2, 2), manager)  # type: ignore[arg-type]
    other_layer = FusedMoE(E, H, I, 9, top_k=K, **FLOATS)
    with pytest.raises(ConfigurationError, match="layer_id: got 9"):
        FusedMoEWithLoRA(other_layer, manager)
    other_layer = FusedMoE(E, H, 2 * I, 3, top_k=K, **FLOATS)
    with pytest.raises(ConfigurationError, match="problem of the layer: got"):
        FusedMoEWithLoRA(other_layer, manager)
    with pytest.raises(ConfigurationError, match="moe_lora_info: got"):
        FusedMoEWithLoRA(layer, manager)(*make_call(), moe_lora_info=Routing)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="adapter 'b': got not loaded"):
        FusedMoEWithLoRA(layer, manager)(*make_call(), moe_lora_info=BATCH)


def test_a_backend_requires_a_pool() -> None:
    with pytest.raises(ConfigurationError, match="pool: got None"):
        LoRABackend(None)  # type: ignore[arg-type]
