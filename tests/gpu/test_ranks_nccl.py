"""Pairings over ranks with one GPU each, over NCCL."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from modular_kernel.catalog import load_catalog, this_machine
from modular_kernel.testing.cases.ranks import RankCase, rank_cases_for, rank_pairings
from modular_kernel.testing.input_mutations.over_ranks import sensitivity_ranks
from modular_kernel.testing.input_mutations.rank_operators import RANK_MUTANTS
from modular_kernel.testing.ranks.pool import RankError, RankPool
from modular_kernel.testing.verify.over_ranks import prove_ranks

NUM_GPUS = torch.cuda.device_count()
WORLD_SIZES = [world_size for world_size in (2, 4) if world_size <= NUM_GPUS]
CASES = [
    case
    for world_size in WORLD_SIZES
    for pair in rank_pairings(this_machine(), world_size)
    for case in rank_cases_for(*pair, this_machine(), world_size).cases
]
# All GPUs are on one host, where combine does not read the counts of other ranks, so that this
# mutation has no effect.
UNREAD_COUNTS = "HostThenRankPrepareAndFinalize", "peer_counts_swapped"
pytestmark = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    pool_by_world_size = {world_size: RankPool(world_size, "nccl") for world_size in WORLD_SIZES}
    yield pool_by_world_size
    for pool in pool_by_world_size.values():
        pool.close()


def all_reduce_rank(rank: int, world_size: int, group: dist.ProcessGroup) -> tuple[float, str, int]:
    """Return the sum of the ranks from an all-reduce, the backend, and the current GPU."""
    value = torch.tensor([float(rank)], device="cuda")
    dist.all_reduce(value, group=group)
    return float(value), dist.get_backend(group), torch.cuda.current_device()


def fail_on_rank_1(rank: int, world_size: int, group: dist.ProcessGroup) -> None:
    """Raise on rank 1 while the other ranks are in an all-reduce."""
    if rank == 1:
        raise ValueError("only here")
    all_reduce_rank(rank, world_size, group)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_each_rank_has_its_gpu(world_size: int, pools: dict[int, RankPool]) -> None:
    total = float(sum(range(world_size)))
    expected = [(total, "nccl", rank) for rank in range(world_size)]
    assert pools[world_size].run(all_reduce_rank) == expected


def test_failing_rank_is_named_and_the_next_run_is_correct(
    pools: dict[int, RankPool],
) -> None:
    with pytest.raises(RankError, match="rank 1: Traceback") as caught:
        pools[2].run(fail_on_rank_1)
    assert caught.value.rank == 1
    assert [total for total, *_ in pools[2].run(all_reduce_rank)] == [1.0, 1.0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases_are_correct(case: RankCase, pools: dict[int, RankPool]) -> None:
    proof = prove_ranks(case, pools[case.world_size])
    assert proof.passed, str(proof)


@pytest.mark.parametrize("pairing", rank_pairings(this_machine(), 2), ids="+".join)
def test_input_mutations_are_killed(pairing: tuple[str, str], pools: dict[int, RankPool]) -> None:
    requires = load_catalog().prepare_finalize(pairing[0]).requires
    kills = sensitivity_ranks(*pairing, pools[2])
    unread = [kill for kill in kills if (pairing[0], kill.mutant) == UNREAD_COUNTS]
    assert all(kill.no_effect_reason == "what it changes is never read" for kill in unread)
    relevant = [kill for kill in kills if kill not in unread]
    assert [str(kill) for kill in relevant if not kill.ok or kill.no_effect_reason] == []
    num_inapplicable = 2 * requires.replicated_input + requires.received_by_library
    assert len(kills) >= len(RANK_MUTANTS) - num_inapplicable
