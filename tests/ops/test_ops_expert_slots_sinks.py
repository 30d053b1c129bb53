"""number_pairs with sinks: the Triton kernel and its torch reference, compared with a loop over
pairs.
"""

import pytest
import torch
from ops_fixtures import DEVICE, make_path_fixture

from modular_kernel.errors import ConfigurationError
from modular_kernel.ops import expert_slots
from modular_kernel.ops.expert_slots import Numbering, Pairs, number_pairs
from modular_kernel.spec.placement import Placement
from modular_kernel.tensors import Routing

NAN, INF = float("nan"), float("inf")
INVALID_IDS = (8, -2, 2**31 - 1, -(2**31))


path = make_path_fixture(expert_slots)


def number_with_sinks(ids_TK, weights_TK, placement, num_sinks, *, rank, factor=1.0):
    """Return slots, weights and the count of invalid ids, which starts at 5."""
    shape = tuple(ids_TK.shape)
    pairs = Pairs(
        Routing(weights_TK.to(DEVICE), ids_TK.to(DEVICE)),
        Numbering.of(placement, DEVICE, rank, num_sinks=num_sinks),
        torch.full(shape, 12345, dtype=torch.int32, device=DEVICE),
        torch.full(shape, NAN, device=DEVICE),
        torch.full((1,), 5, dtype=torch.int32, device=DEVICE),
        join=True,
        factor=factor,
    )
    number_pairs(pairs)
    return pairs.numbers_TK.tolist(), pairs.weights_TK.tolist(), int(pairs.invalid_ids) - 5


def number_by_loop(ids_TK, weights_TK, placement, num_sinks, *, rank, factor):
    world_size, slots = placement.world_size, max(map(len, placement.slots))
    slots_per_rank = slots + num_sinks
    slots_TK, weights, invalid = [], [], 0
    for token, (ids, router_weights) in enumerate(
        zip(ids_TK.tolist(), weights_TK.tolist(), strict=True)
    ):
        first, dropped, row, row_weights = {}, 0, [], []
        for expert, weight in zip(ids, router_weights, strict=True):
            valid = 0 <= expert < placement.experts
            invalid += expert < -1 or expert >= placement.experts
            if valid and expert in first:
                row_weights[first[expert]] += weight * factor
            if valid and expert not in first:
                locations = placement.locations[expert]
                target, slot = locations[(token + rank) % len(locations)]
                first[expert] = len(row)
                row.append(target * slots_per_rank + slot)
                row_weights.append(weight * factor)
            else:
                target, slot = (dropped + rank) % world_size, dropped // world_size
                row.append(target * slots_per_rank + slots + slot)
                row_weights.append(0.0)
                dropped += 1
        slots_TK.append(row)
        weights.append(row_weights)
    return slots_TK, weights, invalid


def test_example_with_sinks(path: str) -> None:
    """Skipped pairs and repeated pairs go to the sinks of the ranks in turn, from rank 1."""
    ids_TK = torch.tensor([[2, 3, 2], [-1, 4, -1], [-1, -7, 6]])
    weights_TK = torch.tensor([[1.0, 2.0, 4.0], [NAN, 8.0, INF], [NAN, NAN, NAN]])
    actual = number_with_sinks(ids_TK, weights_TK, Placement.linear(6, 2), 2, rank=1)
    weights = [[5.0, 2.0, 0.0], [0.0, 8.0, 0.0], [0.0, 0.0, 0.0]]
    assert actual == ([[2, 5, 8], [8, 6, 3], [8, 3, 9]], weights, 2)


COPIES = Placement.linear(8, 3).with_copies({0: (2,), 7: (0, 1)})


@pytest.mark.parametrize("placement", [COPIES, Placement.linear(8, 2)], ids=["copies", "blocks"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("top_k", [1, 3, 8, 16, 22, 32])
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_slots_equal_those_of_a_loop(
    path: str, tokens: int, top_k: int, dtype: torch.dtype, placement: Placement
) -> None:
    generator = torch.Generator().manual_seed(tokens + top_k)
    num_sinks = -(-top_k // placement.world_size)
    num_slots = placement.world_size * (max(map(len, placement.slots)) + num_sinks)
    ids_TK = torch.randint(-1, 8, (tokens, top_k), generator=generator)
    is_invalid = torch.rand(ids_TK.shape, generator=generator) < 0.2
    ids_TK[is_invalid] = torch.tensor(INVALID_IDS).repeat(int(is_invalid.sum()))[
        : int(is_invalid.sum())
    ]
    # Sums of eighths are exact in any order.
    weights_TK = torch.randint(0, 64, (tokens, top_k), generator=generator) / 8
    for rank in range(placement.world_size):
        arguments = weights_TK, placement, num_sinks
        actual = number_with_sinks(ids_TK.to(dtype), *arguments, rank=rank, factor=2.5)
        assert actual == number_by_loop(ids_TK, *arguments, rank=rank, factor=2.5)
        for row in actual[0]:
            assert len(set(row)) == top_k
            assert all(0 <= number < num_slots for number in row)


def test_sinks_require_joined_pairs() -> None:
    """Without joining, two pairs of one expert would need its slot twice."""
    ids = torch.zeros(1, 2, dtype=torch.int32)
    separate_pairs = Pairs(
        Routing(torch.ones(1, 2), ids),
        Numbering.of(Placement.linear(8, 2), "cpu", num_sinks=1),
        torch.empty_like(ids),
        torch.empty(1, 2),
        torch.zeros(1, dtype=torch.int32),
        join=False,
        factor=1.0,
    )
    with pytest.raises(ConfigurationError, match="join of pairs: got join=False"):
        number_pairs(separate_pairs)
