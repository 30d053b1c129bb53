"""FusedMoEWithLoRA, its manager and backend: the base layer with what adapters add."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from modular_kernel import ExpertWeights, Routing, reference
from modular_kernel.adapters import Adapter
from modular_kernel.errors import (
    CapacityError,
    ConfigurationError,
    DtypeError,
    ModularKernelError,
    ShapeError,
    StateError,
    UnsupportedError,
)
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.lora import (
    ForwardBatch,
    FusedMoEWithLoRA,
    LoRABackend,
    LoRAManager,
    MoELoRALayer,
)
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.ops.moe_lora import run_moe_lora
from modular_kernel.routers import RouterSpec

E, K, H, I, R = 6, 2, 32, 24, 5  # noqa: E741
STARTS = torch.tensor([0, 4, 9, 12])
NAMES = ("a13", "b13", "a2", "b2")
FLOATS: dict[str, Any] = {"params_dtype": torch.float32}


def base(**options: Any) -> FusedMoE:
    layer = FusedMoE(E, H, I, 3, router=RouterSpec(K, renormalise=True), **{**FLOATS, **options})
    return filled(layer)


def filled(layer: FusedMoE, seed: int = 0) -> FusedMoE:
    g = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=g) / 6)
    return layer


def adapter(rank: int, seed: int, *, halves: int = 1, experts: int = E, inner: int = I) -> Adapter:
    g = torch.Generator().manual_seed(seed)
    shapes = (halves * rank, H), (2 * inner, rank), (rank, inner), (H, rank)
    made = (torch.randn(experts, *shape, generator=g) / shape[1] ** 0.5 for shape in shapes)
    return Adapter(*made)


def call() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(9)
    return torch.randn(12, H, generator=g), torch.randn(12, E, generator=g)


def made(layer: FusedMoE, mode: Any, halves: int) -> tuple[FusedMoEWithLoRA, LoRAManager]:
    """Two adapters: "a" of rank 3, scaled by 2, and "b" of rank 5."""
    lora = f"adapters=3,rank={R}" + ",a13=shared" * (halves == 1)
    manager = LoRAManager(layer.problem, lora, [3], mode=mode)
    for name, rank, scaling in (("a", 3, 2.0), ("b", 5, 0.5)):
        own = MoELoRALayer(adapter(rank, rank, halves=halves), scaling)
        manager.load(name, {3: own})
    return FusedMoEWithLoRA(layer, manager), manager


BATCH = ForwardBatch(("b", None, "a"), STARTS)


@pytest.mark.parametrize(("mode", "halves"), [("merged", 2), ("merged", 1), ("parallel_delta", 1)])
def test_without_adapters_it_is_the_base_layer_bit_for_bit(mode: str, halves: int) -> None:
    layer = base()
    adapted, manager = made(layer, mode, halves)
    x, logits = call()
    want = layer(x, logits)
    assert torch.equal(adapted(x, logits), want)
    nobody = manager.prepare_moe_lora_batch(ForwardBatch((None, None, None), STARTS), 3)
    assert nobody is None
    info = manager.prepare_moe_lora_batch(BATCH, 3)
    got = adapted(x, logits, moe_lora_info=info)
    assert torch.equal(got[4:9], want[4:9])
    assert bool((got != want).any(1)[[0, 1, 2, 3, 9, 10, 11]].all())


@pytest.mark.parametrize("halves", [1, 2])
def test_merged_is_the_exact_rule(halves: int) -> None:
    """Beside the oracle of weights with s B A added, written without it."""
    layer = base(routed_scaling_factor=1.5)
    adapted, manager = made(layer, "merged", halves)
    x, logits = call()
    got = adapted(x, logits, moe_lora_info=manager.prepare_moe_lora_batch(BATCH, 3))
    routing = layer._routed(x, logits, None, (12,)).routing
    weights = layer.weights()
    want = reference.oracle(x, weights, routing, layer.problem)
    for rows, rank, scaling in ((slice(0, 4), 5, 0.5), (slice(9, 12), 3, 2.0)):
        a = adapter(rank, rank, halves=halves)
        a13, b13, a2, b2 = (getattr(a, f"lora_{name}").double() for name in NAMES)
        first = torch.cat([
            b13[:, :I] @ a13[:, :rank], b13[:, I:] @ a13[:, -rank:]
        ], 1)  # fmt: skip
        merged = ExpertWeights(weights.w1 + scaling * first, weights.w2 + scaling * (b2 @ a2))
        want[rows] = reference.oracle(x, merged, routing, layer.problem)[rows]
    assert float((got.double() - want).abs().max()) <= 2e-6 * float(want.abs().max())


def test_parallel_adds_the_branch_alone() -> None:
    layer = base(routed_scaling_factor=1.5)
    adapted, manager = made(layer, "parallel_delta", 1)
    x, logits = call()
    info = manager.prepare_moe_lora_batch(BATCH, 3)
    assert info is not None
    got = adapted(x, logits, moe_lora_info=info)
    routing = layer._routed(x, logits, None, (12,)).routing
    want = layer(x, logits)
    for rows, rank, scaling in ((range(4), 5, 0.5), (range(9, 12), 3, 2.0)):
        a = adapter(rank, rank)
        for t in rows:
            for weight, e in zip(routing.topk_weights_TK[t], routing.topk_ids_TK[t], strict=True):
                gate, up = (a.lora_b13[e] @ (a.lora_a13[e] @ x[t])).chunk(2)
                h = torch.nn.functional.silu(gate) * up
                want[t] += 1.5 * weight * scaling * (a.lora_b2[e] @ (a.lora_a2[e] @ h))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert info.lora_ranks.tolist() == [3, 5, 0]
    assert info.scalings.tolist() == [2.0, 0.5, 1.0]


def test_the_backend_has_a_pool_s_buffers() -> None:
    layer = base()
    _, manager = made(layer, "parallel_delta", 1)
    backend, (x, _) = manager.backend(3), call()
    assert backend.moe_gate_up_a_buffer.shape == (3, E, R, H)
    assert backend.moe_down_a_buffer.shape == (3, E, R, I)
    ids, weights = torch.arange(12)[:, None] % E, torch.ones(12, 1)
    info = manager.prepare_moe_lora_batch(BATCH, 3)
    assert info is not None
    out, want = torch.zeros(12, H), torch.zeros(12, H)
    assert backend.run_moe_lora(x, ids, weights, info, out) is out
    buffers = (
        backend.moe_gate_up_a_buffer, backend.moe_gate_up_b_buffer,
        backend.moe_down_a_buffer, backend.moe_down_b_buffer,
    )  # fmt: skip
    run_moe_lora(x, ids, weights, info, *buffers, want)
    assert torch.equal(out, want)
    assert out.any()
    _, other = made(base(), "merged", 2)
    with pytest.raises(ConfigurationError, match="pool: got 10 rows of A of w1, ranks of 5"):
        LoRABackend(other.pools[3])
    with pytest.raises(ConfigurationError, match="mode: got merged, need parallel_delta"):
        other.backend(3)


def tp(layer: FusedMoE, rank: int, ranks: int) -> tuple[FusedMoE, slice, Callable[..., Any]]:
    """One TP rank of a layer: its share of weights."""
    part = slice(rank * I // ranks, (rank + 1) * I // ranks)
    its = base(parallel=LayerParallel(tp=(rank, ranks)))
    w = layer.weights()
    rows = torch.arange(2 * I).view(2, I)[:, part].flatten()
    its.set_weights(ExpertWeights(w.w1[:, rows].contiguous(), w.w2[:, :, part].contiguous()))
    return its, part, lambda a: a.share(rank, ranks)


@pytest.mark.parametrize(("mode", "halves"), [("merged", 2), ("parallel_delta", 1)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_shares_of_tp_ranks_add_up(mode: str, halves: int, ranks: int) -> None:
    """B of w1 and A of w2 are cut, as the layer is; what ranks return adds up to the whole."""
    layer = base()
    whole, manager = made(layer, mode, halves)
    x, logits = call()
    want = whole(x, logits, moe_lora_info=manager.prepare_moe_lora_batch(BATCH, 3))
    got = torch.zeros_like(want)
    for rank in range(ranks):
        its, _, share = tp(layer, rank, ranks)
        lora = str(manager.problem.adapters)
        own = LoRAManager(its.problem, lora, [3], mode=mode)  # type: ignore[arg-type]
        for name, r, scaling in (("a", 3, 2.0), ("b", 5, 0.5)):
            own.load(name, {3: MoELoRALayer(share(adapter(r, r, halves=halves)), scaling)})
        info = own.prepare_moe_lora_batch(BATCH, 3)
        got += FusedMoEWithLoRA(its, own)(x, logits, moe_lora_info=info)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_an_adapter_is_cut_as_its_weights_are() -> None:
    whole = adapter(2, 0, halves=2)
    part = whole.share(1, 3)
    assert torch.equal(part.lora_b13[:, :8], whole.lora_b13[:, 8:16])
    assert torch.equal(part.lora_b13[:, 8:], whole.lora_b13[:, I + 8 : I + 16])
    assert torch.equal(part.lora_a2, whole.lora_a2[:, :, 8:16])
    assert part.lora_a13 is whole.lora_a13
    assert part.lora_b2 is whole.lora_b2
    one = whole.share(2, 3, gated=False)  # rows that alternate, or without a gate
    assert torch.equal(one.lora_b13, whole.lora_b13[:, 32:])
    with pytest.raises(ConfigurationError, match="intermediate size: got 24, need a multiple of 5"):
        whole.share(0, 5)
    for rank, ranks in ((3, 3), (-1, 3), (0, 0), (0.0, 1)):
        with pytest.raises(ConfigurationError, match="rank"):
            whole.share(rank, ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize(("mode", "halves"), [("merged", 2), ("parallel_delta", 1)])
def test_shares_of_ep_ranks_add_up(mode: str, halves: int) -> None:
    """Every rank has all tokens and half of the experts, of the base and of adapters."""
    layer = base()
    whole, manager = made(layer, mode, halves)
    x, logits = call()
    want = whole(x, logits, moe_lora_info=manager.prepare_moe_lora_batch(BATCH, 3))
    got = torch.zeros_like(want)
    for rank in (0, 1):
        here = slice(rank * 3, rank * 3 + 3)
        its = base(parallel=LayerParallel(ep=(rank, 2)))
        w = layer.weights()
        its.set_weights(ExpertWeights(w.w1[here].contiguous(), w.w2[here].contiguous()))
        lora = str(manager.problem.adapters)
        own = LoRAManager(its.problem, lora, [3], mode=mode)  # type: ignore[arg-type]
        for name, r, scaling in (("a", 3, 2.0), ("b", 5, 0.5)):
            every = vars(adapter(r, r, halves=halves))
            mine = Adapter(**{name: each[here] for name, each in every.items()})
            own.load(name, {3: MoELoRALayer(mine, scaling)})
        info = own.prepare_moe_lora_batch(BATCH, 3)
        got += FusedMoEWithLoRA(its, own)(x, logits, moe_lora_info=info)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_ids_of_no_expert_are_skipped_by_an_ep_rank_s_branch() -> None:
    """-1 is not the last expert's, and E and beyond are nobody's."""
    its = filled(FusedMoE(E, H, I, 3, K, parallel=LayerParallel(ep=(1, 2)), **FLOATS))
    manager = LoRAManager(its.problem, "adapters=1,rank=5,a13=shared", [3], mode="parallel_delta")
    manager.load("a", {3: MoELoRALayer(adapter(3, 3, experts=3), 2.0)})
    x, _ = call()
    ids = torch.full((12, K), -1)
    ids[:3, 0], ids[3:6, 0], ids[6:9, 0] = E, 1 << 40, 0  # the last: on the other rank
    ids[9:, 1] = 5
    batch = ForwardBatch(("a",), torch.tensor([0, 12]))
    info = manager.prepare_moe_lora_batch(batch, 3)
    routing = (torch.ones(12, K), ids)
    got, want = FusedMoEWithLoRA(its, manager)(x, routing, moe_lora_info=info), its(x, routing)
    assert torch.equal(got[:9], want[:9])
    assert bool((got[9:] != want[9:]).any(1).all())


def test_shared_experts_and_batches_of_tokens() -> None:
    layer = base(shared_experts=lambda x: 0.5 * x)
    adapted, manager = made(layer, "merged", 2)
    x, logits = call()
    info = manager.prepare_moe_lora_batch(BATCH, 3)
    got = adapted(x.view(3, 4, H), logits.view(3, 4, E), moe_lora_info=info)
    assert torch.equal(got.view(12, H), adapted(x, logits, moe_lora_info=info))
    assert torch.equal(got.view(12, H)[4:9], layer(x, logits)[4:9])
    flat = replace(info, weight_indices=torch.zeros(11).int(), seg_indptr=None)  # type: ignore[type-var]
    with pytest.raises(ShapeError, match="weight_indices: got"):
        adapted(x, logits, moe_lora_info=flat)


def test_layers_that_an_adapter_has_not_are_zero_and_slots_agree() -> None:
    layer = base()
    manager = LoRAManager(layer.problem, "adapters=2,rank=5", [3, 4])
    assert not manager.has_moe_lora
    own = MoELoRALayer(adapter(4, 1, halves=2))
    assert manager.load("one", {4: own}) == 0
    assert manager.load("two", {3: own, 4: own}) == 1
    assert manager.has_moe_lora
    third, fourth = (manager.prepare_moe_lora_batch(ForwardBatch(("one",), STARTS[:2]), n)
                     for n in (3, 4))  # fmt: skip
    assert third is not None
    assert fourth is not None
    assert (third.lora_ranks.tolist(), fourth.lora_ranks.tolist()) == ([0, 4], [4, 4])
    x, logits = call()
    same = FusedMoEWithLoRA(layer, manager)(x[:4], logits[:4], moe_lora_info=third)
    torch.testing.assert_close(same, layer(x[:4], logits[:4]))
    ranks = fourth.lora_ranks
    manager.evict("one")
    assert ranks.tolist() == [0, 4]  # in place: what a captured graph reads
    assert manager.load("three", {3: own}) == 0
    with pytest.raises(CapacityError, match="'four'"):
        manager.load("four", {3: own})


def test_what_fails_in_one_layer_changes_none() -> None:
    manager = LoRAManager(base().problem, "adapters=2,rank=5", [3, 4])
    good, bad = (MoELoRALayer(adapter(r, 1, halves=2)) for r in (4, 6))
    with pytest.raises(ModularKernelError, match="rank: got 6"):
        manager.load("mine", {3: good, 4: bad})
    assert not manager.has_moe_lora
    assert all(not pool.slots for pool in manager.pools.values())
    assert manager.load("mine", {3: good}) == 0


@pytest.mark.parametrize("scaling", [2.0, 1.0])
def test_a_scaling_is_in_both_b(scaling: float) -> None:
    whole = adapter(3, 0)
    folded = MoELoRALayer(whole, scaling).folded()
    assert torch.equal(folded.lora_b13, whole.lora_b13 * scaling)
    assert torch.equal(folded.lora_b2, whole.lora_b2 * scaling)
    assert torch.equal(folded.lora_a13, whole.lora_a13)


def test_what_is_refused() -> None:
    layer = base()
    problem = layer.problem
    shared = "adapters=2,rank=5,a13=shared"
    for bad, lora in ((problem, "adapters=2,rank=5"), (replace(problem, activation="gelu"), shared),
                      (replace(problem, activation="silu:interleaved=true"), shared)):  # fmt: skip
        with pytest.raises(ConfigurationError, match="parallel_delta: got"):
            LoRAManager(bad, lora, [3], mode="parallel_delta")
    for arguments in ((None, shared, [3]), (problem, 7, [3]), (problem, "none", [3])):
        with pytest.raises(ConfigurationError, match="got"):
            LoRAManager(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="mode: got 'both'"):
        LoRAManager(problem, shared, [3], mode="both")  # type: ignore[arg-type]
    manager = LoRAManager(problem, shared, [3])
    own = MoELoRALayer(adapter(3, 0))
    with pytest.raises(ConfigurationError, match="layer: got 5, need one of 3"):
        manager.load("mine", {5: own})
    with pytest.raises(ConfigurationError, match="adapter 'mine': layer 3: got Adapter"):
        manager.load("mine", {3: own.factors})  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match="layer: got 4"):
        manager.prepare_moe_lora_batch(BATCH, 4)
    for change in (lambda: manager.evict("a"), lambda: manager.prepare_moe_lora_batch(BATCH, 3)):
        with pytest.raises(StateError, match="got not loaded, need a loaded one: none"):
            change()
    with pytest.raises(ConfigurationError, match="forward_batch: got None"):
        manager.prepare_moe_lora_batch(None, 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="scaling: got inf"):
        MoELoRALayer(own.factors, float("inf"))
    with pytest.raises(ConfigurationError, match="base_layer: got Linear"):
        FusedMoEWithLoRA(torch.nn.Linear(2, 2), manager)  # type: ignore[arg-type]
    other = FusedMoE(E, H, I, 9, top_k=K, **FLOATS)
    with pytest.raises(ConfigurationError, match="layer_id: got 9"):
        FusedMoEWithLoRA(other, manager)
    other = FusedMoE(E, H, 2 * I, 3, top_k=K, **FLOATS)
    with pytest.raises(ConfigurationError, match="problem of the layer: got"):
        FusedMoEWithLoRA(other, manager)
    with pytest.raises(ConfigurationError, match="moe_lora_info: got"):
        FusedMoEWithLoRA(layer, manager)(*call(), moe_lora_info=Routing)  # type: ignore[arg-type]


def test_parts_over_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = base()
    manager = LoRAManager(layer.problem, "adapters=2,rank=5", [3])
    over = replace(layer.problem.parallel, world_size=2)
    monkeypatch.setattr(layer, "problem", replace(layer.problem, parallel=over))
    with pytest.raises(UnsupportedError, match="prepare_finalize: got a part over ranks"):
        FusedMoEWithLoRA(layer, manager)


@pytest.mark.parametrize(
    ("gated", "rows"), [(True, I), (True, 3 * I), (False, 3 * I), (True, 2 * I + 2)]
)
def test_shares_ask_for_the_rows_of_w1(gated: bool, rows: int) -> None:
    whole = adapter(4, 0)
    other = replace(whole, lora_b13=torch.zeros(E, rows, 4))
    with pytest.raises(ShapeError, match=f"got {rows}, need .*gated={gated}"):
        other.share(0, 2, gated=gated)


def test_shares_are_of_tensors() -> None:
    whole = adapter(4, 0)
    with pytest.raises(DtypeError, match="lora_a2: got list, need a tensor"):
        replace(whole, lora_a2=[1.0]).share(0, 2)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"lora_b13: got \(3, 4\), need three dimensions"):
        replace(whole, lora_b13=torch.zeros(3, 4)).share(0, 2)
    with pytest.raises(ConfigurationError, match="gated: got 'no'"):
        whole.share(0, 2, gated="no")  # type: ignore[arg-type]


def two_layers() -> LoRAManager:
    manager = LoRAManager(base().problem, f"adapters=3,rank={R}", [3, 5])
    manager.load("a", {3: MoELoRALayer(adapter(3, 1, halves=2))})
    return manager


def test_a_pool_changed_beside_the_manager_is_noticed() -> None:
    manager, own = two_layers(), adapter(3, 2, halves=2)
    manager.pools[5].load("mine", own)
    with pytest.raises(StateError, match=r"slots by layer: got \{3: 1, 5: 2\}"):
        manager.load("b", {3: MoELoRALayer(own)})
    assert [dict(pool.slots) for pool in manager.pools.values()] == [{"a": 0}, {"a": 0, "mine": 1}]
    batch = ForwardBatch(("a",), torch.tensor([0, 12]))
    manager.prepare_moe_lora_batch(batch, 5)
    manager.pools[5].evict("a")
    with pytest.raises(StateError, match="pool of layer 5: got slot None, need slot 0"):
        manager.prepare_moe_lora_batch(batch, 5)
    manager.prepare_moe_lora_batch(batch, 3)


@pytest.mark.parametrize("layers", [3, [], [3, 3], "ab", [3, "4"], [True]])
def test_layers_are_numbers_each_once(layers: Any) -> None:
    with pytest.raises(ConfigurationError, match="layer"):
        LoRAManager(base().problem, "adapters=3,rank=5", layers)


@pytest.mark.parametrize("name", [3, ["a"], None])
def test_names_are_text(name: Any) -> None:
    manager = two_layers()
    with pytest.raises(ConfigurationError, match="name of an adapter"):
        manager.evict(name)
    with pytest.raises(ConfigurationError, match="layer"):
        manager.prepare_moe_lora_batch(ForwardBatch(("a",), torch.tensor([0, 12])), [3])  # type: ignore[arg-type]


@pytest.mark.parametrize("names", ["ab", None, ("a", 3), ("a", ["b"])])
def test_a_batch_names_text_or_nothing(names: Any) -> None:
    with pytest.raises(ConfigurationError, match="lora_ids"):
        ForwardBatch(names, torch.tensor([0, 4, 12]))


def test_a_batch_has_a_place_for_each_sequence() -> None:
    with pytest.raises(ShapeError, match=r"seg_indptr: got \(3,\), need \(2,\)"):
        ForwardBatch(("a",), torch.tensor([0, 4, 12]))
    with pytest.raises(ConfigurationError, match="seg_indptr: got list"):
        ForwardBatch(("a",), [0, 12])  # type: ignore[arg-type]


def test_a_backend_is_of_a_pool() -> None:
    with pytest.raises(ConfigurationError, match="pool: got None"):
        LoRABackend(None)  # type: ignore[arg-type]
