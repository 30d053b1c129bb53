"""FusedMoEWithLoRA and LoRAManager compared with float64, and PEFT models with PEFT, on a GPU."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lora_layers as layers
import pytest
import torch

from modular_kernel import ExpertWeights, reference
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.lora import (
    ForwardBatch,
    FusedMoEWithLoRA,
    LoRAManager,
    MoELoRALayer,
)
from modular_kernel.tensors import Routing

pytestmark = pytest.mark.gpu

BATCH = ForwardBatch(("b", None, "a"), torch.tensor([0, 4, 9, 12]))
# The rows, rank and scaling of adapters b and a.
ADAPTER_ROWS = ((slice(0, 4), 5, 0.5), (slice(9, 12), 3, 2.0))
# Relative to the largest value, for sums of at most 32 values in float32.
TOLERANCE = 2e-6


def make_layers(mode: Any, num_a13: int) -> tuple[FusedMoE, FusedMoEWithLoRA, LoRAManager]:
    layer = layers.make_base_layer(routed_scaling_factor=1.5).cuda()
    lora = f"adapters=3,rank={layers.MAX_RANK}" + ",a13=shared" * (num_a13 == 1)
    manager = LoRAManager(layer.problem, lora, [3], "cuda", mode=mode)
    for name, rank, scaling in (("a", 3, 2.0), ("b", 5, 0.5)):
        adapter = layers.make_adapter(rank, rank, num_a13=num_a13)
        manager.load(name, {3: MoELoRALayer(adapter, scaling)})
    return layer, FusedMoEWithLoRA(layer, manager), manager


def copy_weights_and_routing_to_cpu(
    layer: FusedMoE, x: torch.Tensor, logits: torch.Tensor
) -> tuple[ExpertWeights, Routing]:
    routed, w = layer._route(x, logits, None, (12,)).routing, layer.weights()
    weights = ExpertWeights(w.w1.detach().cpu(), w.w2.detach().cpu())
    return weights, Routing(routed.topk_weights_TK.cpu(), routed.topk_ids_TK.cpu())


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((got.cpu().double() - expected).abs().max()) <= TOLERANCE * float(
        expected.abs().max()
    )


@pytest.mark.parametrize("num_a13", [1, 2])
def test_merged_mode_equals_merged_weights(num_a13: int) -> None:
    layer, adapted, manager = make_layers("merged", num_a13)
    x, logits = (tensor.cuda() for tensor in layers.make_call())
    batch = ForwardBatch(BATCH.lora_ids, BATCH.seg_indptr.cuda())
    got = adapted(x, logits, moe_lora_info=manager.prepare_moe_lora_batch(batch, 3))
    weights, routing = copy_weights_and_routing_to_cpu(layer, x, logits)
    expected = reference.float64_reference(x.cpu(), weights, routing, layer.problem)
    for rows, rank, scaling in ADAPTER_ROWS:
        adapter = layers.make_adapter(rank, rank, num_a13=num_a13)
        a13, b13, a2, b2 = (getattr(adapter, f"lora_{name}").double() for name in layers.NAMES)
        gate, up = b13[:, : layers.I] @ a13[:, :rank], b13[:, layers.I :] @ a13[:, -rank:]
        merged = ExpertWeights(
            weights.w1 + scaling * torch.cat([gate, up], 1), weights.w2 + scaling * (b2 @ a2)
        )
        expected[rows] = reference.float64_reference(x.cpu(), merged, routing, layer.problem)[rows]
    assert_close(got, expected)
    assert torch.equal(got[4:9], layer(x, logits)[4:9])


def test_parallel_mode_adds_only_the_branch() -> None:
    layer, adapted, manager = make_layers("parallel_delta", 1)
    x, logits = (tensor.cuda() for tensor in layers.make_call())
    batch = ForwardBatch(BATCH.lora_ids, BATCH.seg_indptr.cuda())
    got = adapted(x, logits, moe_lora_info=manager.prepare_moe_lora_batch(batch, 3))
    weights, routing = copy_weights_and_routing_to_cpu(layer, x, logits)
    expected = reference.float64_reference(x.cpu(), weights, routing, layer.problem)
    for rows, rank, scaling in ADAPTER_ROWS:
        adapter = layers.make_adapter(rank, rank)
        for t in range(rows.start, rows.stop):
            pairs = zip(routing.topk_weights_TK[t], routing.topk_ids_TK[t], strict=True)
            for weight, e in pairs:
                a13, b13, a2, b2 = (getattr(adapter, f"lora_{n}")[e].double() for n in layers.NAMES)
                gate, up = (b13 @ (a13 @ x[t].cpu().double())).chunk(2)
                h = torch.nn.functional.silu(gate) * up
                expected[t] += 1.5 * weight.double() * scaling * (b2 @ (a2 @ h))
    assert_close(got, expected)
    assert torch.equal(got[4:9], layer(x, logits)[4:9])


def test_reloaded_adapter_replaces_an_evicted_one() -> None:
    """An adapter that is loaded under the name of an evicted adapter replaces it in its slot."""
    _, adapted, manager = make_layers("merged", 2)
    x, logits = (tensor.cuda() for tensor in layers.make_call())
    batch = ForwardBatch(("a", "a", "a"), BATCH.seg_indptr.cuda())
    first_output = adapted(
        x, logits, moe_lora_info=manager.prepare_moe_lora_batch(batch, 3)
    ).clone()
    manager.evict("a")
    manager.load("a", {3: MoELoRALayer(layers.make_adapter(4, 17, num_a13=2))})
    output_of_replacement = adapted(
        x, logits, moe_lora_info=manager.prepare_moe_lora_batch(batch, 3)
    ).clone()
    assert not torch.equal(first_output, output_of_replacement)
    manager.evict("a")
    manager.load("a", {3: MoELoRALayer(layers.make_adapter(3, 3, num_a13=2), 2.0)})
    output_after_reload = adapted(x, logits, moe_lora_info=manager.prepare_moe_lora_batch(batch, 3))
    assert torch.equal(first_output, output_after_reload)


@pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("peft") is None,
    reason="needs transformers and peft",
)
@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "gpt_oss", "down", "ranks", "modules"])
def test_wrapped_model_runs_with_its_adapter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "integrations")
    import test_transformers_peft as peft_tests

    from modular_kernel.integrations.transformers import register, report, serve

    monkeypatch.setattr(peft_tests, "TOKENS", peft_tests.TOKENS.cuda())
    model = peft_tests.make_adapted_model(kind).cuda()
    model.base_model.model.set_experts_implementation(register())
    assert len(serve(model)) == 2
    with monkeypatch.context() as patch:
        patch.setattr(peft_tests.WRAPPER, "_activate_lora", lambda *_: pytest.fail("PEFT ran"))
        got = peft_tests.compute_logits(model)
    assert all(row.served for row in report(model))
    peft_tests.assert_same(got, peft_tests.compute_merged_logits(model))
