"""A placement states which experts a rank has, and to which copy of its expert a pair is sent.

A pair is a token with one of its experts.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modular_kernel import Parallel, Problem, check
from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError
from modular_kernel.spec.placement import Placement, pairs_to_slots, rank_tiers


def test_linear_assigns_blocks_and_the_remainder_to_the_first_ranks() -> None:
    assert Placement.linear(10, 4).slots == ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))
    assert Placement.linear(8, 2).slots == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert Placement.linear(3, 3).is_linear


def test_round_robin_assigns_experts_in_turn() -> None:
    placement = Placement.round_robin(7, 3)
    assert placement.slots == ((0, 3, 6), (1, 4), (2, 5))
    assert not placement.is_linear


def test_copies_allow_more_ranks_than_experts() -> None:
    placement = Placement(((0,), (1,), (0,), (1,)))
    assert not placement.is_linear
    problem = Problem(4, 64, 128, 2, 1, parallel=Parallel(4, placement))
    assert check("TorchAll2AllPrepareAndFinalize", "TorchExperts", problem).ok


def test_placement_tables_give_rank_and_slot() -> None:
    placement = Placement.of_table([(1, 1), (0, 0), (1, 0)], 2)
    assert placement.slots == ((1,), (2, 0))
    assert placement.locations == (((1, 1),), ((0, 0),), ((1, 0),))
    assert placement.expert_map(1).tolist() == [1, -1, 0]
    assert placement.expert_map(1).dtype is torch.int32


def test_copies_follow_the_existing_experts() -> None:
    placement = Placement.linear(4, 2).with_copies({3: (0,), 0: (1,)})
    assert placement.slots == ((0, 1, 3), (2, 3, 0))
    assert placement.locations[3] == ((0, 2), (1, 1))
    assert placement.experts == 4


def map_pairs_to_slots(
    tables: object = Placement.linear(4, 2).tables(), **options: object
) -> object:
    return pairs_to_slots(torch.zeros(1, 1, dtype=torch.int64), tables, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Placement(()), "experts of a rank"),
        (lambda: Placement(((0,), ())), "experts of a rank"),
        (lambda: Placement(((0, 0),)), "rank 0"),
        (lambda: Placement(((0,), (2,))), "every expert from 0 on"),
        (lambda: Placement.linear(2, 3), "an expert for each"),
        (lambda: Placement.round_robin(0, 1), "got 0, need an int >= 1"),
        (lambda: Placement.of_table([(2, 0)], 2), "expert 0"),
        (lambda: Placement.of_table([(0, 0), (0, 0)], 1), "expert 1"),
        (lambda: Placement.of_table([(0, 1)], 1), "without gaps"),
        (lambda: Placement.linear(4, 2).with_copies({4: (0,)}), "copies"),
        (lambda: Placement.linear(4, 2).with_copies({0: (2,)}), "copies"),
        (lambda: Placement.linear(4, 2).with_copies({0: (0,)}), "rank 0"),
        (lambda: Placement.linear(4, 2).without([2]), "lost ranks: got 2 among them"),
        (lambda: Placement.linear(4, 2).without(0), "lost ranks: got 0, need a sequence, each an"),
        (lambda: Placement.linear(4, 2).without([0.0]), "lost ranks: got 0.0 among them"),
        (lambda: Placement.linear(4, 2).without([True]), "lost ranks: got True among them"),
        (lambda: Placement.linear(4, 2).with_copies(None), "copies: got None"),
        (lambda: Placement.linear(4, 2).with_copies({0: 1}), "copies of expert 0: ranks: got 1,"),
        (lambda: Placement.linear(4, 2).with_copies({0: [0.5]}), "got 0.5 among them"),
        (lambda: Placement.linear(4, 2).with_copies({"0": [1]}), "copies: experts: got '0' among"),
        (lambda: Placement.linear(4, 2).expert_map(0.0), "rank: got 0.0"),
        (
            lambda: Placement.linear(4, 2).expert_map(0, "gpus"),
            "device: got 'gpus', need a torch device",
        ),
        (lambda: Placement.linear(4, 2).tables([0]), "device: got list, need a torch device"),
        (lambda: Placement.linear(4, 2).tables(10**30), "device: got 1000.*, need a torch device"),
        (lambda: Placement.linear(4, 2).tables(True), "device: got True, need a torch device"),
        (
            lambda: map_pairs_to_slots(tables=None),
            "placement tables: got None, need a PlacementTables",
        ),
        (lambda: map_pairs_to_slots(first_token=0.5), "first token: got 0.5, need an int >= 0"),
        (lambda: map_pairs_to_slots(first_token=-1), "first token: got -1"),
        (lambda: map_pairs_to_slots(together=1), "together: got 1, need True or False"),
        (lambda: Placement.linear(4, 2).tables(tiers=[1]), "tiers: got 1 among them"),
        (lambda: Placement.of_table(5, 2), "slot of each expert: got 5, need a sequence"),
        (lambda: Placement.of_table([(0, 0.5)], 1), "slot of each expert: got tuple, need a tuple"),
        (lambda: Placement.from_eplb(None, 2), "physical_to_logical: got None, need a sequence"),
        (lambda: Placement.from_eplb([0, 1], 2, join=1), "join: got 1, need True or False"),
        (lambda: rank_tiers(0, 0), "ranks of a host: got 0"),
        (lambda: rank_tiers(-1, 4), "rank: got -1"),
        (lambda: pairs_to_slots(None, Placement.linear(4, 2).tables()), "topk_ids: got None"),
        (lambda: Placement.linear(5, 2).without([0]), "ranks 0: got no copy of experts 0, 1, 2,"),
        (lambda: Placement.linear(4, 2).without([0, 1]), "no copy of experts 0, 1, 2, 3,"),
        (
            lambda: Placement.from_eplb([0, 1, 2], 2),
            "physical experts: got 3, need the same number",
        ),
        (lambda: Placement.from_eplb([], 2), "physical experts: got 0"),
        (lambda: Placement.from_eplb([0, 0, 1, 1], 2), "rank 0: got .0, 0., need each expert"),
        (lambda: Placement.from_eplb([0, 1, 3, 0], 2), "every expert from 0 on"),
        (lambda: Placement.from_eplb([0, 1.5], 2), "physical_to_logical"),
        (lambda: Placement.linear(3, 2).to_eplb(), "got 1 to 2 experts on a rank"),
        (lambda: Parallel(2, "table"), "a Placement"),
        (lambda: Parallel(2, Placement.linear(4, 4)), "4 ranks"),
        (lambda: Parallel(2, rank=2), "rank"),
        (lambda: Problem(1, 8, 8, 3, 1, parallel=Parallel(4)), "each of 4 rank"),
        (lambda: Problem(1, 8, 8, 3, 1, parallel=Parallel(2, Placement.linear(4, 2))), "4 experts"),
    ],
)
def test_invalid_placements_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()  # type: ignore[operator]


def test_ids_of_another_dtype_are_refused() -> None:
    with pytest.raises(DtypeError, match=r"topk_ids: got torch.float32, need torch.int32 or"):
        pairs_to_slots(torch.full((2, 1), 1.7), Placement.linear(4, 2).tables())


def test_a_problem_has_the_experts_of_its_rank() -> None:
    problem = Problem(1, 8, 8, 10, 2, parallel=Parallel(4))
    assert [replace(problem, parallel=Parallel(4, rank=r)).e for r in range(4)] == [3, 3, 2, 2]
    round_robin = Parallel(3, Placement.round_robin(10, 3), rank=0)
    assert replace(problem, parallel=round_robin).e == 4
    assert replace(problem, parallel=round_robin, local_experts=7).e == 7


@given(st.data())
def test_every_pair_goes_to_one_copy_of_its_expert(data: st.DataObject) -> None:
    experts, world = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    if experts < world:
        experts = world
    placement = Placement.round_robin(experts, world)
    for expert in range(0, experts, 2):
        other_ranks = [rank for rank in range(world) if rank != expert % world]
        placement = placement.with_copies({expert: other_ranks[: data.draw(st.integers(0, 3))]})
    ids = torch.tensor(data.draw(st.lists(st.integers(-2, experts), min_size=1, max_size=12)))
    rank, slot, invalid = pairs_to_slots(ids[:, None], placement.tables(), first_token=5)
    assert invalid.tolist() == [sum(i < -1 or i >= experts for i in ids.tolist())]
    for token, expert in enumerate(ids.tolist()):
        location = int(rank[token]), int(slot[token])
        if not 0 <= expert < experts:
            assert location == (-1, -1)
            continue
        copies = placement.locations[expert]
        assert location == copies[(token + 5) % len(copies)]
        assert placement.slots[location[0]][location[1]] == expert


def test_pairs_are_distributed_over_copies_in_turn() -> None:
    placement = Placement.linear(2, 2).with_copies({0: (1,)})
    rank, _, _ = pairs_to_slots(torch.zeros(4, 1, dtype=torch.int32), placement.tables())
    assert rank.flatten().tolist() == [0, 1, 0, 1]


def test_ids_have_two_dimensions() -> None:
    with pytest.raises(ShapeError, match="topk_ids"):
        pairs_to_slots(torch.zeros(4, dtype=torch.int32), Placement.linear(2, 1).tables())


def test_the_nearest_copies_are_preferred() -> None:
    """Pairs go to a copy on their own rank. If there is none, they go to the copies on their host
    in turn, and otherwise to all copies in turn.
    """
    placement = Placement.linear(4, 4).with_copies({0: (1, 2), 1: (0, 3), 2: (3,)})
    ids = torch.arange(4).repeat_interleave(4)[:, None]  # each expert four times

    def find_ranks(rank: int, ranks_per_host: int | None) -> list[set[int]]:
        """Return the ranks to which `rank` sends the pairs of each expert."""
        tables = placement.tables(tiers=rank_tiers(rank, ranks_per_host))
        assert tables.homes_ER2.shape == placement.tables().homes_ER2.shape
        ranks, _, _ = pairs_to_slots(ids, tables, first_token=rank, together=True)
        return [set(ranks_of_expert) for ranks_of_expert in ranks.view(4, 4).tolist()]

    assert find_ranks(0, 2) == [{0}, {0}, {2, 3}, {3}]
    assert find_ranks(2, 2) == [{2}, {3}, {2}, {3}]
    assert find_ranks(3, 2) == [{2}, {3}, {3}, {3}]
    assert find_ranks(3, None) == [{0, 2, 1}, {3}, {3}, {3}]
    assert find_ranks(1, 1) == [{1}, {1}, {2, 3}, {3}]


def test_pairs_are_distributed_over_the_copies_of_a_host_in_turn() -> None:
    placement = Placement.linear(4, 4).with_copies({0: (1,), 3: (2,)})
    tables = placement.tables(tiers=rank_tiers(0, 2))
    rank, _, _ = pairs_to_slots(torch.full((4, 1), 3), tables)
    assert rank.flatten().tolist() == [2, 3, 2, 3]
    tables = placement.tables(tiers=rank_tiers(2, 2))
    rank, _, _ = pairs_to_slots(torch.zeros(4, 1, dtype=torch.int32), tables)
    assert rank.flatten().tolist() == [0, 1, 0, 1]


def test_removing_a_rank_keeps_the_slots_of_the_others() -> None:
    placement = Placement.linear(6, 3).with_copies({0: (1,), 1: (2,), 4: (0,), 5: (0,)})
    assert placement.without([0]).slots == ((2, 3, 0), (4, 5, 1))
    assert placement.without([2]).slots == ((0, 1, 4, 5), (2, 3, 0))
    assert placement.without([]) == placement
    with pytest.raises(ConfigurationError, match="no copy of experts 2, 3, need a copy of each"):
        placement.without([1])


def test_maps_of_eplb_round_trip() -> None:
    """The second layer of the example in EPLB's README: 12 experts, 16 physical experts, 8 GPUs."""
    physical_to_logical = [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]
    placement = Placement.from_eplb(physical_to_logical, 8)
    assert placement.slots[:3] == ((7, 10), (6, 8), (6, 11))
    maps = placement.to_eplb()
    assert maps.physical_to_logical.tolist() == physical_to_logical
    assert maps.logical_count.tolist() == [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1]
    assert maps.logical_to_physical[:3].tolist() == [[13, -1], [11, 15], [8, -1]]
    assert {tensor.dtype for tensor in vars(maps).values()} == {torch.int64}
    assert Placement.from_eplb([0, 0, 1, 0], 2, join=True).slots == ((0,), (1, 0))


@pytest.mark.parametrize(
    "pair",
    [
        ("MoEPrepareAndFinalizeNoEP", "TorchExperts"),
        ("BatchedPrepareAndFinalize", "NaiveBatchedExperts"),
    ],
)
def test_parts_of_one_rank_require_a_linear_placement(pair: tuple[str, str]) -> None:
    """These parts do not map expert ids to slots, so slot i must have expert i."""
    problem = Problem(4, 8, 8, experts=3, top_k=2, parallel=Parallel(1, Placement(((2, 0, 1),))))
    verdict = check(*pair, problem)
    assert [(r.rule, r.need) for r in verdict.rejections] == [("placement", "linear")]
    linear = Parallel(1, Placement.linear(3, 1))
    assert check(*pair, replace(problem, parallel=linear)).ok
