"""LoRA adapters written by PEFT are loaded with the weight deltas (B @ A) that PEFT computes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft_samples import EXPERT, GOLDEN, PROBLEM, AdapterFolder, E, H, I, products
from safetensors.torch import load_file

import modular_kernel as mk
from modular_kernel.checkpoints.peft import load_adapter
from modular_kernel.errors import ConfigurationError, WeightsError
from modular_kernel.spec.placement import Placement

DELTAS = load_file(GOLDEN / "deltas.safetensors")
GPT_OSS = replace(PROBLEM, activation="swiglu_oai:alpha=1.702,limit=7.0,interleaved=true")
PROBLEMS = {"transposed": GPT_OSS}
RANK_BY_KIND = {"fused": 5, "transposed": 3, "converted": 4, "down": 4, "modules": 5}


def load_peft_deltas(kind: str, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float64 deltas of w1 and w2 that PEFT computed, with rows in the order of the
    problem.
    """
    deltas = {
        name.partition(".")[2]: delta.double()
        for name, delta in DELTAS.items()
        if name.startswith(kind)
    }
    if "w1" in deltas:
        return torch.cat([deltas["w1"], deltas["w3"]], 1), deltas["w2"]
    w1, w2 = deltas.get("gate_up_proj", torch.zeros(E, 2 * I, H).double()), deltas["down_proj"]
    return (w1.mT, w2.mT) if interleaved else (w1, w2)


@pytest.mark.parametrize("shared", ["", ",a13=shared"])
@pytest.mark.parametrize("kind", RANK_BY_KIND)
def test_products_equal_peft(kind: str, shared: str) -> None:
    problem = PROBLEMS.get(kind, PROBLEM)
    problem = replace(problem, lora=problem.lora + shared)  # type: ignore[operator]
    adapter = load_adapter(GOLDEN / kind, 1, problem)
    # A shared A is the concatenation of gate (rank 5) and up (rank 3).
    assert adapter.lora_a2.shape[1] == (8 if shared and kind == "modules" else RANK_BY_KIND[kind])
    got, want = products(adapter, problem), load_peft_deltas(kind, problem.act.interleaved)
    for got_delta, want_delta in zip(got, want, strict=True):
        torch.testing.assert_close(got_delta, want_delta, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shared", ["", ",a13=shared"])
def test_separate_gate_and_up_are_interleaved_like_w1(shared: str) -> None:
    problem = replace(GPT_OSS, lora=f"adapters=2,rank=8{shared}")
    got, _ = products(load_adapter(GOLDEN / "modules", 1, problem), problem)
    want, _ = load_peft_deltas("modules", interleaved=False)
    torch.testing.assert_close(got[:, 0::2], want[:, :I], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(got[:, 1::2], want[:, I:], rtol=1e-5, atol=1e-7)


def test_smaller_ranks_are_padded_and_b_includes_the_scaling() -> None:
    adapter = load_adapter(GOLDEN / "modules", 1, PROBLEM)
    stored = load_file(GOLDEN / "modules" / "adapter_model.safetensors")
    assert not adapter.lora_a2[:, 2:].any()
    assert not adapter.lora_b2[:, :, 2:].any()
    assert not adapter.lora_a13[[0, 1, 3], 3:5].any()
    assert adapter.lora_a13[2, 3:5].any()
    assert torch.equal(adapter.lora_a2[3, :2], stored[f"{EXPERT}.3.w2.lora_A.weight"])
    want = stored[f"{EXPERT}.3.w2.lora_B.weight"] * 2  # alpha 4, rank 2
    assert torch.equal(adapter.lora_b2[3, :, :2], want)


def test_untargeted_projections_are_zero() -> None:
    adapter = load_adapter(GOLDEN / "down", 1, PROBLEM)
    assert not adapter.lora_a13.any()
    assert not adapter.lora_b13.any()
    assert adapter.lora_a2.any()


@pytest.mark.parametrize("kind", ["fused", "modules"])
def test_ep_ranks_load_their_experts(kind: str) -> None:
    all_experts = load_adapter(GOLDEN / kind, 1, PROBLEM)
    rank_problem = replace(PROBLEM, parallel=mk.Parallel(2, "linear", 1))
    partial_problem = replace(PROBLEM, local_experts=2, expert_map=True)
    for adapter in (
        load_adapter(GOLDEN / kind, 1, rank_problem),
        load_adapter(GOLDEN / kind, 1, partial_problem, ep=(1, 2)),
    ):
        for got_product, want_product in zip(
            products(adapter, rank_problem), products(all_experts, PROBLEM), strict=True
        ):
            assert torch.equal(got_product, want_product[2:])
    with pytest.raises(ConfigurationError, match="ep: got 4 experts on rank 0 of 1, need 2"):
        load_adapter(GOLDEN / kind, 1, partial_problem)


@pytest.mark.parametrize("kind", ["fused", "modules"])
@pytest.mark.parametrize(
    "placement",
    [Placement.round_robin(E, 2), Placement(((3, 0), (2, 1, 0)))],
    ids=["round robin", "copies"],
)
def test_ep_ranks_load_their_experts_by_placement(kind: str, placement: Placement) -> None:
    all_experts = load_adapter(GOLDEN / kind, 1, PROBLEM)
    for rank, experts in enumerate(placement.slots):
        rank_problem = replace(PROBLEM, parallel=mk.Parallel(2, placement, rank))
        partial_problem = replace(PROBLEM, local_experts=len(experts), expert_map=True)
        for adapter in (
            load_adapter(GOLDEN / kind, 1, rank_problem),
            load_adapter(GOLDEN / kind, 1, partial_problem, ep=(rank, 2), placement=placement),
        ):
            for got_product, want_product in zip(
                products(adapter, rank_problem), products(all_experts, PROBLEM), strict=True
            ):
                assert torch.equal(got_product, want_product[list(experts)])


def test_a_placement_requires_the_rank() -> None:
    with pytest.raises(ConfigurationError, match="placement: got a placement without ep"):
        load_adapter(GOLDEN / "fused", 1, PROBLEM, placement=Placement.linear(E, 2))


def test_equal_factors_are_shared_if_the_problem_shares_them(tmp_path: Path) -> None:
    problem = replace(PROBLEM, lora="adapters=2,rank=8,outer=shared")
    folder = AdapterFolder(tmp_path, "modules")
    folder.config.update(r=3, rank_pattern={}, alpha_pattern={})
    torch.manual_seed(0)
    shared_names = ("w1.lora_A", "w3.lora_A", "w2.lora_B")
    for name in (*shared_names, "w1.lora_B", "w3.lora_B", "w2.lora_A"):
        shape = {"w1.lora_A": (3, H), "w3.lora_A": (3, H), "w2.lora_B": (H, 3), "w2.lora_A": (3, I)}
        for layer in (0, 1):
            factor = torch.randn(shape.get(name, (I, 3)))
            for expert in range(E):
                expert_factor = factor if name in shared_names else factor * (expert + 1)
                block = EXPERT.replace("layers.1", f"layers.{layer}")
                folder.tensors[f"{block}.{expert}.{name}.weight"] = expert_factor.clone()
    shared, separate = folder.load(problem), folder.load()
    assert len(shared.lora_a13) == len(shared.lora_b2) == 1
    for got, want in zip(products(shared, problem), products(separate, PROBLEM), strict=True):
        assert torch.equal(got, want)
    second_ep_rank = folder.load(replace(problem, parallel=mk.Parallel(2, "linear", 1)))
    assert torch.equal(second_ep_rank.lora_a13, shared.lora_a13)
    assert torch.equal(second_ep_rank.lora_b13, shared.lora_b13[2:])
    assert torch.equal(second_ep_rank.lora_a2, shared.lora_a2[2:])
    assert torch.equal(second_ep_rank.lora_b2, shared.lora_b2)
    with pytest.raises(WeightsError, match="lora_a13 that differs between experts"):
        load_adapter(GOLDEN / "modules", 1, problem)
