"""LoRA adapters on TP and EP ranks are sharded like the weights, and rank outputs sum to the output
of the layer.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from lora_layers import (
    BATCH,
    FLOATS,
    E,
    H,
    I,
    K,
    add_adapters,
    fill_parameters,
    make_adapter,
    make_base_layer,
    make_call,
)

from modular_kernel import ExpertWeights
from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.lora import ForwardBatch, FusedMoEWithLoRA, LoRAManager, MoELoRALayer
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.spec.intermediate_split import split_intermediate
from modular_kernel.spec.lora import Adapter
from modular_kernel.spec.quantization import QuantScheme


def make_tp_rank(
    layer: FusedMoE, rank: int, ranks: int
) -> tuple[FusedMoE, slice, Callable[..., Any]]:
    """Return a TP rank's layer, its intermediate columns, and a function that shards adapters."""
    split = split_intermediate(I, ranks, QuantScheme.parse("none"))
    columns = slice(*split.columns(rank))
    rank_layer = make_base_layer(parallel=LayerParallel(tp=(rank, ranks)))
    weights, pad = layer.weights(), (0, split.width - (columns.stop - columns.start))
    w1 = torch.nn.functional.pad(weights.w1.unflatten(1, (2, I))[:, :, columns], (0, 0, *pad))
    w2 = torch.nn.functional.pad(weights.w2[:, :, columns], pad)
    rank_layer.set_weights(ExpertWeights(w1.flatten(1, 2).contiguous(), w2.contiguous()))
    return rank_layer, columns, lambda adapter: adapter.share(rank, ranks)


@pytest.mark.parametrize(("mode", "num_a13"), [("merged", 2), ("parallel_delta", 1)])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_tp_rank_outputs_sum_to_the_layer(mode: str, num_a13: int, ranks: int) -> None:
    """B of w1 and A of w2 are sharded like the weights."""
    layer = make_base_layer()
    adapted, manager = add_adapters(layer, mode, num_a13)
    x, logits = make_call()
    expected = adapted(x, logits, moe_lora_info=manager.prepare_moe_lora_batch(BATCH, 3))
    got = torch.zeros_like(expected)
    for rank in range(ranks):
        rank_layer, _, shard_adapter = make_tp_rank(layer, rank, ranks)
        lora = str(manager.problem.adapters)
        rank_manager = LoRAManager(rank_layer.problem, lora, [3], mode=mode)  # type: ignore[arg-type]
        for name, lora_rank, scaling in (("a", 3, 2.0), ("b", 5, 0.5)):
            rank_manager.load(
                name,
                {
                    3: MoELoRALayer(
                        shard_adapter(make_adapter(lora_rank, lora_rank, num_a13=num_a13)), scaling
                    )
                },
            )
        info = rank_manager.prepare_moe_lora_batch(BATCH, 3)
        got += FusedMoEWithLoRA(rank_layer, rank_manager)(x, logits, moe_lora_info=info)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_an_adapter_is_sharded_like_its_weights() -> None:
    adapter = make_adapter(2, 0, num_a13=2)
    shard = adapter.share(1, 3)
    assert torch.equal(shard.lora_b13[:, :8], adapter.lora_b13[:, 8:16])
    assert torch.equal(shard.lora_b13[:, 8:], adapter.lora_b13[:, I + 8 : I + 16])
    assert torch.equal(shard.lora_a2, adapter.lora_a2[:, :, 8:16])
    assert shard.lora_a13 is adapter.lora_a13
    assert shard.lora_b2 is adapter.lora_b2
    # gated=False is for activations without a gate or with interleaved rows.
    ungated = adapter.share(2, 3, gated=False)
    assert torch.equal(ungated.lora_b13, adapter.lora_b13[:, 32:])
    with pytest.raises(ConfigurationError, match="tp: ranks: got 25, need at most 24"):
        adapter.share(0, 25)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("ranks", "quant"), [(5, "none"), (2, "nvfp4_w4a16")])
def test_padded_shards_of_adapters_are_padded_with_zeros(
    gated: bool, ranks: int, quant: str
) -> None:
    """The last rank has fewer columns than the other ranks, and zeros in their place."""
    adapter = make_adapter(2, 0, num_a13=2)
    split = split_intermediate(I, ranks, QuantScheme.parse(quant))
    b13 = adapter.lora_b13.unflatten(1, (2, I) if gated else (I, 2))
    b13 = b13 if gated else b13.transpose(1, 2)
    assert split.is_padded
    for rank in range(ranks):
        (first, last) = split.columns(rank)
        shard = adapter.share(rank, ranks, gated=gated, quant=quant)
        rows = shard.lora_b13.unflatten(1, (2, split.width) if gated else (split.width, 2))
        rows = rows if gated else rows.transpose(1, 2)
        assert torch.equal(rows[:, :, : last - first], b13[:, :, first:last])
        assert torch.equal(shard.lora_a2[..., : last - first], adapter.lora_a2[..., first:last])
        assert shard.lora_a2.shape[2] == split.width
        assert not rows[:, :, last - first :].any()
        assert not shard.lora_a2[..., last - first :].any()
    for rank, ranks in ((3, 3), (-1, 3), (0, 0), (0.0, 1)):
        with pytest.raises(ConfigurationError, match="rank"):
            adapter.share(rank, ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize(("mode", "num_a13"), [("merged", 2), ("parallel_delta", 1)])
def test_ep_rank_outputs_sum_to_the_layer(mode: str, num_a13: int) -> None:
    """Every rank has all tokens, and half of the experts of the base layer and of the adapters."""
    layer = make_base_layer()
    adapted, manager = add_adapters(layer, mode, num_a13)
    x, logits = make_call()
    expected = adapted(x, logits, moe_lora_info=manager.prepare_moe_lora_batch(BATCH, 3))
    got = torch.zeros_like(expected)
    for rank in (0, 1):
        local_experts = slice(rank * 3, rank * 3 + 3)
        rank_layer = make_base_layer(parallel=LayerParallel(ep=(rank, 2)))
        weights = layer.weights()
        rank_layer.set_weights(
            ExpertWeights(
                weights.w1[local_experts].contiguous(), weights.w2[local_experts].contiguous()
            )
        )
        lora = str(manager.problem.adapters)
        rank_manager = LoRAManager(rank_layer.problem, lora, [3], mode=mode)  # type: ignore[arg-type]
        for name, lora_rank, scaling in (("a", 3, 2.0), ("b", 5, 0.5)):
            tensors = vars(make_adapter(lora_rank, lora_rank, num_a13=num_a13))
            local_adapter = Adapter(
                **{name: tensor[local_experts] for name, tensor in tensors.items()}
            )
            rank_manager.load(name, {3: MoELoRALayer(local_adapter, scaling)})
        info = rank_manager.prepare_moe_lora_batch(BATCH, 3)
        got += FusedMoEWithLoRA(rank_layer, rank_manager)(x, logits, moe_lora_info=info)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_the_branch_of_an_ep_rank_skips_invalid_ids() -> None:
    """The id -1 must not wrap around to the last expert. Ids of E and above select no expert."""
    layer = fill_parameters(FusedMoE(E, H, I, 3, K, parallel=LayerParallel(ep=(1, 2)), **FLOATS))
    manager = LoRAManager(layer.problem, "adapters=1,rank=5,a13=shared", [3], mode="parallel_delta")
    manager.load("a", {3: MoELoRALayer(make_adapter(3, 3, experts=3), 2.0)})
    x, _ = make_call()
    ids = torch.full((12, K), -1)
    ids[:3, 0], ids[3:6, 0], ids[6:9, 0] = E, 1 << 40, 0  # expert 0 is on the other rank
    ids[9:, 1] = 5
    batch = ForwardBatch(("a",), torch.tensor([0, 12]))
    info = manager.prepare_moe_lora_batch(batch, 3)
    routing = (torch.ones(12, K), ids)
    got = FusedMoEWithLoRA(layer, manager)(x, routing, moe_lora_info=info)
    expected = layer(x, routing)
    assert torch.equal(got[:9], expected[:9])
    assert bool((got[9:] != expected[9:]).any(1).all())


@pytest.mark.parametrize(
    ("gated", "rows"), [(True, I), (True, 3 * I), (False, 3 * I), (True, 2 * I + 2)]
)
def test_sharding_requires_the_rows_of_w1(gated: bool, rows: int) -> None:
    adapter = make_adapter(4, 0)
    invalid = replace(adapter, lora_b13=torch.zeros(E, rows, 4))
    with pytest.raises(ShapeError, match=f"got {rows}, need .*gated={gated}"):
        invalid.share(0, 2, gated=gated)


def test_sharding_requires_tensors() -> None:
    adapter = make_adapter(4, 0)
    with pytest.raises(DtypeError, match="lora_a2: got list, need a tensor"):
        replace(adapter, lora_a2=[1.0]).share(0, 2)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"lora_b13: got \(3, 4\), need three dimensions"):
        replace(adapter, lora_b13=torch.zeros(3, 4)).share(0, 2)
    with pytest.raises(ConfigurationError, match="gated: got 'no'"):
        adapter.share(0, 2, gated="no")  # type: ignore[arg-type]
