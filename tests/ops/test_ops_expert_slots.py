"""number_pairs: the Triton kernel and its torch reference, compared with loops over pairs."""

import random

import pytest
import torch
from ops_fixtures import DEVICE, make_path_fixture

from modular_kernel.errors import ShapeError
from modular_kernel.ops import expert_slots
from modular_kernel.spec.placement import Placement
from modular_kernel.tensors import Routing

PLACEMENTS = (
    Placement.linear(8, 2),
    Placement.linear(7, 2),
    Placement.round_robin(8, 4),
    Placement.linear(6, 3).with_copies({0: (1, 2), 5: (0,)}),
)


path = make_path_fixture(expert_slots)


def make_random_routing(
    placement: Placement, tokens: int, top_k: int, dtype: torch.dtype
) -> Routing:
    """Return strided ids from -2 to E, and one far above E. Weights of skipped pairs are NaN."""
    rng = random.Random(tokens + top_k)
    experts = placement.experts
    ids = torch.tensor(
        [[rng.randint(-2, experts) for _ in range(top_k + 1)] for _ in range(tokens)],
        dtype=dtype,
    ).view(tokens, top_k + 1)
    if tokens > 3:
        ids[3, 0] = 2**31 - 1 if dtype is torch.int32 else 2**32  # 0 in its lower half
    weights = torch.rand(tokens, top_k + 1, generator=torch.Generator().manual_seed(1))
    weights[(ids < 0) | (ids >= experts)] = torch.nan
    return Routing(weights.to(DEVICE)[:, :top_k], ids.to(DEVICE)[:, :top_k])


def run_number_pairs(
    routing: Routing, placement: Placement, *, join: bool, factor: float = 1.0, first: int = 1
) -> tuple[list[list[int]], list[list[float]], int]:
    shape = routing.topk_ids_TK.shape
    out = torch.full(shape, 99, dtype=torch.int64, device=DEVICE)
    weights = torch.full(shape, torch.nan, device=DEVICE)
    invalid = torch.full((1,), 5, dtype=torch.int32, device=DEVICE)
    expert_slots.number_pairs(
        expert_slots.Pairs(
            routing,
            expert_slots.Numbering.of(placement, DEVICE, first),
            out,
            weights,
            invalid,
            join,
            factor,
        )
    )
    return out.tolist(), weights.tolist(), int(invalid) - 5


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=range(len(PLACEMENTS)))
def test_every_pair_goes_to_the_rank_of_its_expert(
    placement: Placement, dtype: torch.dtype
) -> None:
    routing = make_random_routing(placement, 37, 3, dtype)
    joined, weights, invalid = run_number_pairs(routing, placement, join=False, factor=2.0)
    slots, experts = expert_slots.count_slots_per_rank(placement), placement.experts
    seen = set()
    ids, router_weights = routing.topk_ids_TK.tolist(), routing.topk_weights_TK.tolist()
    assert invalid == sum(i < -1 or i >= experts for row in ids for i in row)
    for token in range(37):
        for k in range(3):
            expert, number = ids[token][k], joined[token][k]
            if not 0 <= expert < experts:
                assert (number, weights[token][k]) == (-1, 0.0)
                continue
            rank, slot = divmod(number, slots)
            locations = placement.locations[expert]
            assert (rank, slot) == locations[(token + 1) % len(locations)]
            assert weights[token][k] == 2 * router_weights[token][k]
            seen.add((expert, rank))
    assert seen == {
        (e, r) for r, experts_of_rank in enumerate(placement.slots) for e in experts_of_rank
    }


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (50, 5), (17, 8), (3, 32)])
@pytest.mark.parametrize("placement", PLACEMENTS[::3], ids=["blocks", "copies"])
def test_weights_of_pairs_of_one_expert_are_added(
    placement: Placement, tokens: int, top_k: int
) -> None:
    routing = make_random_routing(placement, tokens, top_k, torch.int64)
    separate, _, _ = run_number_pairs(routing, placement, join=False)
    joined, weights, _ = run_number_pairs(routing, placement, join=True, factor=0.5)
    router_weights = routing.topk_weights_TK.tolist()
    for token in range(tokens):
        assert [n for n in joined[token] if n >= 0] == list(
            dict.fromkeys(n for n in separate[token] if n >= 0)
        )
        for k, number in enumerate(joined[token]):
            pairs = zip(separate[token], router_weights[token], strict=True)
            expected = sum(w for n, w in pairs if n == number) if number >= 0 else 0.0
            assert number in (-1, separate[token][k])
            assert weights[token][k] == pytest.approx(0.5 * expected, rel=1e-6)


@pytest.mark.usefixtures("path")
def test_no_tokens_give_no_numbers() -> None:
    assert run_number_pairs(
        make_random_routing(PLACEMENTS[0], 0, 4, torch.int32), PLACEMENTS[0], join=True
    ) == (
        [],
        [],
        0,
    )


def test_outputs_of_another_shape_are_refused() -> None:
    routing, placement = make_random_routing(PLACEMENTS[0], 4, 2, torch.int32), PLACEMENTS[0]
    out = torch.empty(4, 3, dtype=torch.int64, device=DEVICE)
    pairs = expert_slots.Pairs(
        routing,
        expert_slots.Numbering.of(placement, DEVICE),
        out,
        out.float(),
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
        join=False,
        factor=1.0,
    )
    with pytest.raises(ShapeError, match=r"numbers of pairs: got \(4, 3\), need \(4, 2\)"):
        expert_slots.number_pairs(pairs)
