"""Load balancing of experts over ranks: load counts, placements with copies of experts, and the
moves between two placements.
"""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_fixtures import DEVICE

from modular_kernel.errors import ConfigurationError, DtypeError
from modular_kernel.layers.balance import Move, count, moves, rank_loads, rebalance
from modular_kernel.spec.placement import Placement, pairs_to_slots, rank_tiers


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pairs_are_counted(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 2], [2, -1], [5, 2], [-7, 0]], dtype=dtype, device=DEVICE)
    counts = count(ids, 4)
    assert (counts.tolist(), counts.dtype, counts.device.type) == (
        [2, 0, 3, 0],
        torch.int64,
        DEVICE,
    )
    assert count(ids[:0], 3).tolist() == [0, 0, 0]
    for invalid_ids in (ids.float(), [[1]], None):
        with pytest.raises(DtypeError, match="topk_ids: got"):
            count(invalid_ids, 4)  # type: ignore[arg-type]


def test_a_hot_expert_gets_copies() -> None:
    load = [90.0, 10.0, 10.0, 10.0]
    assert rank_loads(load, Placement.linear(4, 2)) == (100, 20)
    placement = rebalance(load, [3, 3])
    assert [sorted(experts) for experts in placement.slots] == [[0, 1, 2], [0, 1, 3]]
    assert rank_loads(load, placement) == (60, 60)


def make_zipf_load(experts: int, seed: int) -> list[float]:
    load = [1000 / (place + 1) for place in range(experts)]
    random.Random(seed).shuffle(load)
    return load


@pytest.mark.parametrize("seed", range(3))
def test_ranks_are_balanced(seed: int) -> None:
    """64 experts with Zipf-distributed load on 8 ranks.

    Without copies, the rank of the most loaded expert also gets the least loaded experts. With two
    spare slots per rank, all loads are within 10% of the mean.
    """
    load = make_zipf_load(64, seed)
    mean, lower_bound = sum(load) / 8, max(load) + sum(sorted(load)[:7])
    linear = max(rank_loads(load, Placement.linear(64, 8))) / mean
    without_copies = max(rank_loads(load, rebalance(load, [8] * 8))) / mean
    with_copies = max(rank_loads(load, rebalance(load, [10] * 8))) / mean
    assert with_copies < 1.1 < without_copies < linear
    assert without_copies == pytest.approx(lower_bound / mean)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_random_loads_and_slots_give_valid_placements(data: st.DataObject) -> None:
    """Every expert is placed, no rank exceeds its slots, and ranks with equally many slots fill
    them.
    """
    world = data.draw(st.integers(1, 6))
    slots = data.draw(st.lists(st.integers(1, 5), min_size=world, max_size=world))
    experts = data.draw(st.integers(1, sum(slots)))
    load = data.draw(st.lists(st.integers(0, 50), min_size=experts, max_size=experts))
    placement = rebalance(load, slots)
    assert placement.experts == experts
    assert all(
        1 <= len(rank_experts) <= size
        for rank_experts, size in zip(placement.slots, slots, strict=True)
    )
    if len(set(slots)) == 1:
        assert sum(map(len, placement.slots)) == min(sum(slots), experts * world)
    # Applying all moves to the old placement must give the new one.
    old = rebalance(load[::-1], slots)
    new = rebalance(load, slots, old)
    assert sorted(map(sorted, new.slots)) == sorted(map(sorted, placement.slots))
    needed_moves = moves(old, new)
    expert_by_slot = {
        (r, s): old.slots[r][s] for r in range(world) for s in range(len(old.slots[r]))
    }
    received = {move.target: expert_by_slot[move.source] for move in needed_moves}
    assert all(received[move.target] == move.expert for move in needed_moves)
    expert_by_slot |= received
    assert all(
        expert_by_slot[r, s] == e
        for r, rank_experts in enumerate(new.slots)
        for s, e in enumerate(rank_experts)
    )


def test_moves_prefer_local_sources_and_balance_remote_ones() -> None:
    old = Placement(((0, 1), (2, 0), (3, 4)))
    assert moves(old, old) == ()
    for other in (Placement(((0, 1), (2,), (3,))), Placement(((0, 1), (2, 3, 4)))):
        with pytest.raises(ConfigurationError, match="need 5 experts on 3 ranks, as before"):
            moves(old, other)
    new = Placement(((1, 0), (2, 4), (3, 0)))
    assert moves(old, new) == (
        Move(1, (0, 1), (0, 0)),
        Move(0, (0, 0), (0, 1)),
        Move(4, (2, 1), (1, 1)),
        Move(0, (0, 0), (2, 1)),
    )
    old_on_4_ranks = Placement(((0, 1), (0, 1), (2,), (3,)))
    new_on_4_ranks = Placement(((0, 1), (0, 1), (2, 0), (3, 1)))
    assert [move.source for move in moves(old_on_4_ranks, new_on_4_ranks)] == [(0, 0), (1, 1)]


def test_experts_that_stay_keep_their_slots() -> None:
    old = Placement(((4, 0, 1), (2, 3, 5)))
    new = rebalance([9.0, 9, 1, 1, 1, 1], [3, 3], old)
    for new_experts, old_experts in zip(new.slots, old.slots, strict=True):
        for slot, expert in enumerate(new_experts):
            assert expert not in old_experts or old_experts[slot] == expert


@pytest.mark.parametrize("top_k", [2, 4])
def test_pairs_of_one_token_are_distributed_over_copies(top_k: int) -> None:
    placement = rebalance([1.0] * 4, [4, 4])
    ids = torch.arange(top_k)[None]
    rank, _, _ = pairs_to_slots(ids, placement.tables())
    assert rank.flatten().bincount(minlength=2).tolist() == [top_k // 2] * 2
    together, _, _ = pairs_to_slots(ids, placement.tables(), first_token=1, together=True)
    assert together.unique().numel() == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rebalance([1.0, 2.0, 3.0], [1, 1]), "slots of all ranks: got 2, need >= 3"),
        (lambda: rebalance([], [1]), "slots of all ranks: got 1, need >= 1, the number of experts"),
        (lambda: rebalance([1.0], []), "slots of all ranks: got 0"),
        (lambda: rebalance([1.0], [0]), "slots: got 0 among them, need each an int >= 1"),
        (lambda: rebalance([1.0, -1.0], [2]), "load of expert 1: got -1.0, need >= 0"),
        (lambda: rebalance([float("nan")], [1]), "load of expert 0: got nan, need a finite"),
        (lambda: rank_loads([1.0], Placement.linear(2, 1)), "load: got 1, need 2 experts"),
        (
            lambda: rank_loads([1.0] * 4, Placement.linear(4, 4), ranks_per_host=3),
            "ranks_per_host: got 3, need a divisor of 4 ranks",
        ),
        (lambda: rebalance([1.0] * 4, [2, 2, 2], hosts=2), "ranks: got 3, need a multiple of 2"),
        (lambda: rebalance([1.0] * 4, [2, 2], hosts=2), "groups: got 1, need a multiple of 2"),
        (
            lambda: rebalance([1.0] * 5, [3, 3], hosts=2, groups=2),
            "experts: got 5, need a multiple of 2",
        ),
        (
            lambda: rebalance([1.0] * 6, [4, 2], hosts=2, groups=2),
            "slots of host 1: got 2, need >= 3, the number of experts",
        ),
        (lambda: rebalance([1.0] * 2, [2], hosts=0), "hosts: got 0"),
        (lambda: rebalance({1.0}, [2]), "load: got set, need a list"),
        (lambda: rank_loads([1.0], None), "placement: got None, need a Placement"),
        (
            lambda: rank_loads([1.0], Placement.linear(1, 1), ranks_per_host=0),
            "ranks_per_host: got 0, need an int >= 1",
        ),
        (lambda: moves(None, Placement.linear(1, 1)), "old placement: got None, need a Placement"),
        (lambda: count(torch.zeros(1, 1, dtype=torch.int32), 0), "experts: got 0"),
    ],
)
def test_invalid_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()


def test_groups_are_placed_on_hosts_as_by_eplb() -> None:
    """In the example of EPLB's README, ranks have the same experts and the same maximum load."""
    load = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
    placement = rebalance(load, [2] * 8, hosts=2, groups=4)
    eplb_placement = Placement.from_eplb([5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1], 8)
    assert sorted(map(sorted, placement.slots)) == sorted(map(sorted, eplb_placement.slots))
    assert max(rank_loads(load, placement)) == max(rank_loads(load, eplb_placement)) == 156
    for group in range(4):
        hosts = {rank // 4 for rank, slots in enumerate(placement.slots)
                 for expert in slots if expert // 3 == group}  # fmt: skip
        assert len(hosts) == 1


def test_pairs_of_a_host_without_a_copy_are_distributed_over_all_copies() -> None:
    placement = Placement.linear(4, 4).with_copies({0: (1,), 1: (2,)})
    loads = rank_loads([8, 8, 0, 0], placement)
    assert loads == (4, 8, 4, 0)
    assert rank_loads([8, 8, 0, 0], placement, ranks_per_host=2) == (4, 8, 4, 0)
    assert rank_loads([0, 8, 0, 0], placement, ranks_per_host=1) == (0, 4, 4, 0)
    near = placement.with_copies({1: (3,)})
    assert rank_loads([0, 12, 0, 0], near) == (0, 4, 4, 4)
    assert rank_loads([0, 12, 0, 0], near, ranks_per_host=2) == (0, 6, 3, 3)


@pytest.mark.parametrize("per_host", [None, 2])
def test_rank_loads_equal_loads_counted_with_nearest_copies(per_host: int | None) -> None:
    placement = Placement.linear(6, 4).with_copies({0: (1, 2, 3), 2: (3,), 5: (0,)})
    tokens, load, pair_counts = 60, [0.0] * 6, [0] * 4
    for rank in range(4):
        ids = torch.arange(tokens)[:, None] % 6
        load = [a + b for a, b in zip(load, count(ids, 6).tolist(), strict=True)]
        near = rank_tiers(rank, per_host)
        for first in range(6):  # Over six values of first_token, all copies get equal shares.
            selected_ranks, _, _ = pairs_to_slots(
                ids, placement.tables(tiers=near), first_token=first
            )
            pair_counts = [n + int((selected_ranks == r).sum()) for r, n in enumerate(pair_counts)]
    expected = rank_loads(load, placement, ranks_per_host=per_host)
    assert [n / 6 for n in pair_counts] == pytest.approx(expected)


def test_remaining_ranks_are_rebalanced_after_a_rank_is_lost() -> None:
    """Every move copies an expert from a remaining rank."""
    old = rebalance([4.0, 3, 2, 1], [2, 2, 2, 2])
    remaining = old.without([3])
    new = rebalance([4.0, 3, 2, 1], [2, 2, 2], remaining)
    expert_by_slot = {(rank, slot): expert for rank, slots in enumerate(remaining.slots)
                      for slot, expert in enumerate(slots)}  # fmt: skip
    assert all(expert_by_slot[move.source] == move.expert for move in moves(remaining, new))


def test_every_host_gets_equally_many_groups() -> None:
    placement = rebalance([90.0, 90, 1, 1, 1, 1, 1, 1], [2] * 4, hosts=2, groups=4)
    assert [
        sorted(e for rank_experts in placement.slots[r : r + 2] for e in rank_experts)
        for r in (0, 2)
    ] == [
        [0, 1, 6, 7],
        [2, 3, 4, 5],
    ]
