"""place_pairs: Triton kernel and torch twin against a loop over pairs."""

import pytest
import torch
from ops_samples import DEVICE, kernel_and_twin

from modular_kernel.ops import places
from modular_kernel.ops.places import SlotLayout, place_pairs
from modular_kernel.placement import Placement

NAN, INF = float("nan"), float("inf")
WRONG = (8, -2, 2**31 - 1, -(2**31))


path = kernel_and_twin(places)


def placed(ids_TK, weights_TK, placement, layout, *, rank, factor=1.0):
    """Places, weights and the count of invalid ids, which had been 5."""
    tables = placement.tables(DEVICE)
    shape = tuple(ids_TK.shape)
    out = (
        torch.full(shape, 12345, dtype=torch.int32, device=DEVICE),
        torch.full(shape, NAN, device=DEVICE),
        torch.full((1,), 5, dtype=torch.int32, device=DEVICE),
    )
    given = ids_TK.to(DEVICE), weights_TK.to(DEVICE)
    place_pairs(*given, tables, layout, rank=rank, factor=factor, out=out)
    return out[0].tolist(), out[1].tolist(), int(out[2]) - 5


def by_a_loop(ids_TK, weights_TK, placement, layout, *, rank, factor):
    places_TK, weights, invalid = [], [], 0
    for token, (ids, router) in enumerate(zip(ids_TK.tolist(), weights_TK.tolist(), strict=True)):
        first, sinks, row, carried = {}, 0, [], []
        for expert, weight in zip(ids, router, strict=True):
            valid = 0 <= expert < placement.experts
            invalid += expert < -1 or expert >= placement.experts
            if valid and expert in first:
                carried[first[expert]] += weight * factor
            if valid and expert not in first:
                homes = placement.homes[expert]
                home, slot = homes[(token + rank) % len(homes)]
                first[expert] = len(row)
                row.append(home * layout.each + slot)
                carried.append(weight * factor)
            else:
                home, slot = (sinks + rank) % layout.world_size, sinks // layout.world_size
                row.append(home * layout.each + layout.real + slot)
                carried.append(0.0)
                sinks += 1
        places_TK.append(row)
        weights.append(carried)
    return places_TK, weights, invalid


def test_an_example(path: str) -> None:
    """Skipped pairs and second pairs of an expert go to sinks, this rank's first."""
    layout = SlotLayout(world_size=2, real=3, each=5)
    ids_TK = torch.tensor([[2, 3, 2], [-1, 4, -1], [-1, -7, 6]])
    weights_TK = torch.tensor([[1.0, 2.0, 4.0], [NAN, 8.0, INF], [NAN, NAN, NAN]])
    found = placed(ids_TK, weights_TK, Placement.linear(6, 2), layout, rank=1)
    weights = [[5.0, 2.0, 0.0], [0.0, 8.0, 0.0], [0.0, 0.0, 0.0]]
    assert found == ([[2, 5, 8], [8, 6, 3], [8, 3, 9]], weights, 2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("top_k", [1, 3, 8, 16])
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_places_are_those_of_a_loop(path: str, tokens: int, top_k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(tokens + top_k)
    placement = Placement.linear(8, 3).with_copies({0: (2,), 7: (0, 1)})
    sinks = -(-top_k // 3)
    layout = SlotLayout(3, 4, 4 + sinks)
    ids_TK = torch.randint(-1, 8, (tokens, top_k), generator=generator)
    wrong = torch.rand(ids_TK.shape, generator=generator) < 0.2
    ids_TK[wrong] = torch.tensor(WRONG).repeat(int(wrong.sum()))[: int(wrong.sum())]
    # Eighths: sums of them are exact in any order.
    weights_TK = torch.randint(0, 64, (tokens, top_k), generator=generator) / 8
    for rank in range(3):
        given = weights_TK, placement, layout
        found = placed(ids_TK.to(dtype), *given, rank=rank, factor=2.5)
        assert found == by_a_loop(ids_TK, *given, rank=rank, factor=2.5)
        for row in found[0]:
            assert len(set(row)) == top_k
            assert all(0 <= place < layout.world_size * layout.each for place in row)
