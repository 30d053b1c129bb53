"""LoRAManager assigns adapters to the same slots in several layers, builds batches by adapter name,
and refuses invalid arguments.
"""

from typing import Any

import pytest
import torch
from lora_layers import MAX_RANK, STARTS, make_adapter, make_base_layer, make_call

from modular_kernel.errors import (
    CapacityError,
    ConfigurationError,
    DtypeError,
    ModularKernelError,
    ShapeError,
    StateError,
)
from modular_kernel.layers.lora import ForwardBatch, FusedMoEWithLoRA, LoRAManager, MoELoRALayer


def test_layers_without_an_adapter_add_nothing_and_have_the_same_slots() -> None:
    layer = make_base_layer()
    manager = LoRAManager(layer.problem, "adapters=2,rank=5", [3, 4])
    assert not manager.has_moe_lora
    adapter = MoELoRALayer(make_adapter(4, 1, num_a13=2))
    assert manager.load("one", {4: adapter}) == 0
    assert manager.load("two", {3: adapter, 4: adapter}) == 1
    assert manager.has_moe_lora
    batch_3, batch_4 = (manager.prepare_moe_lora_batch(ForwardBatch(("one",), STARTS[:2]), n)
                     for n in (3, 4))  # fmt: skip
    assert batch_3 is not None
    assert batch_4 is not None
    assert (batch_3.lora_ranks.tolist(), batch_4.lora_ranks.tolist()) == ([0, 4], [4, 4])
    x, logits = make_call()
    got = FusedMoEWithLoRA(layer, manager)(x[:4], logits[:4], moe_lora_info=batch_3)
    torch.testing.assert_close(got, layer(x[:4], logits[:4]))
    ranks = batch_4.lora_ranks
    manager.evict("one")
    assert ranks.tolist() == [0, 4]  # `evict` writes in place, because captured graphs read it
    assert manager.load("three", {3: adapter}) == 0
    with pytest.raises(CapacityError, match="'four'"):
        manager.load("four", {3: adapter})


def test_an_error_in_one_layer_changes_no_layer() -> None:
    manager = LoRAManager(make_base_layer().problem, "adapters=2,rank=5", [3, 4])
    valid, invalid = (MoELoRALayer(make_adapter(r, 1, num_a13=2)) for r in (4, 6))
    with pytest.raises(ModularKernelError, match="rank: got 6"):
        manager.load("mine", {3: valid, 4: invalid})
    assert not manager.has_moe_lora
    assert all(not pool.slots for pool in manager.pools.values())
    assert manager.load("mine", {3: valid}) == 0


@pytest.mark.parametrize("scaling", [2.0, 1.0])
def test_folding_scales_both_b_matrices(scaling: float) -> None:
    adapter = make_adapter(3, 0)
    folded = MoELoRALayer(adapter, scaling).fold_scaling()
    assert torch.equal(folded.lora_b13, adapter.lora_b13 * scaling)
    assert torch.equal(folded.lora_b2, adapter.lora_b2 * scaling)
    assert torch.equal(folded.lora_a13, adapter.lora_a13)


def make_manager_of_two_layers() -> LoRAManager:
    manager = LoRAManager(make_base_layer().problem, f"adapters=3,rank={MAX_RANK}", [3, 5])
    manager.load("a", {3: MoELoRALayer(make_adapter(3, 1, num_a13=2))})
    return manager


def test_a_pool_changed_without_the_manager_is_detected() -> None:
    manager, adapter = make_manager_of_two_layers(), make_adapter(3, 2, num_a13=2)
    manager.pools[5].load("mine", adapter)
    with pytest.raises(StateError, match=r"slots by layer: got \{3: 1, 5: 2\}"):
        manager.load("b", {3: MoELoRALayer(adapter)})
    assert [dict(pool.slots) for pool in manager.pools.values()] == [{"a": 0}, {"a": 0, "mine": 1}]
    batch = ForwardBatch(("a",), torch.tensor([0, 12]))
    manager.prepare_moe_lora_batch(batch, 5)
    manager.pools[5].evict("a")
    with pytest.raises(StateError, match="pool of layer 5: got slot None, need slot 0"):
        manager.prepare_moe_lora_batch(batch, 5)
    manager.prepare_moe_lora_batch(batch, 3)


def test_fingerprints_identify_adapters_and_their_slots() -> None:
    def make_manager(*loads: tuple[str, int]) -> LoRAManager:
        manager = LoRAManager(make_base_layer().problem, "adapters=3,rank=5", [3, 5])
        for seed, (name, layer) in enumerate(loads):
            manager.load(name, {layer: MoELoRALayer(make_adapter(3, seed, num_a13=2))})
        return manager

    manager = make_manager(("a", 3), ("b", 3))
    fingerprint = manager.fingerprint(3)
    same = make_manager(("x", 3), ("b", 3))
    assert same.fingerprint(3) != fingerprint
    same.evict("x")
    assert same.fingerprint(3) != fingerprint
    same.load("a", {3: MoELoRALayer(make_adapter(4, 9, num_a13=2))})  # other matrices
    assert same.fingerprint(3) == fingerprint
    for loads in (
        (), (("a", 3),), (("b", 3), ("a", 3)), (("a", 3), ("c", 3)), (("a", 3), ("b", 5)),
    ):  # fmt: skip
        assert make_manager(*loads).fingerprint(3) != fingerprint
    changed = make_manager(("a", 3), ("b", 3))
    changed.pools[3].evict("b")  # without the manager
    assert changed.fingerprint(3) != fingerprint
    assert changed.fingerprint(5) == manager.fingerprint(5)
    with pytest.raises(ConfigurationError, match="layer: got 4"):
        manager.fingerprint(4)


@pytest.mark.parametrize("layers", [3, [], [3, 3], "ab", [3, "4"], [True]])
def test_layers_must_be_distinct_numbers(layers: Any) -> None:
    with pytest.raises(ConfigurationError, match="layer"):
        LoRAManager(make_base_layer().problem, "adapters=3,rank=5", layers)


@pytest.mark.parametrize("name", [3, ["a"], None])
def test_adapter_names_must_be_strings_and_layers_integers(name: Any) -> None:
    manager = make_manager_of_two_layers()
    with pytest.raises(ConfigurationError, match="name of an adapter"):
        manager.evict(name)
    with pytest.raises(ConfigurationError, match="layer"):
        manager.prepare_moe_lora_batch(ForwardBatch(("a",), torch.tensor([0, 12])), [3])  # type: ignore[arg-type]


@pytest.mark.parametrize("names", ["ab", None, ("a", 3), ("a", ["b"])])
def test_lora_ids_must_be_strings_or_none(names: Any) -> None:
    with pytest.raises(ConfigurationError, match="lora_ids"):
        ForwardBatch(names, torch.tensor([0, 4, 12]))


def test_batches_have_one_entry_per_sequence() -> None:
    with pytest.raises(ShapeError, match=r"seg_indptr: got \(3,\), need \(2,\)"):
        ForwardBatch(("a",), torch.tensor([0, 4, 12]))
    with pytest.raises(DtypeError, match="seg_indptr: got list"):
        ForwardBatch(("a",), [0, 12])  # type: ignore[arg-type]
