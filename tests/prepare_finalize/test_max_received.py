"""Problem.max_received bounds buffers; if a rank would receive more rows, every rank raises before
the exchange.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_fixtures import make_ranks_fixture
from test_ranks_on_hosts import simulated

from modular_kernel.catalog import check, make_kernel
from modular_kernel.errors import CommunicationError
from modular_kernel.spec.problem import Machine, Parallel, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.ranks.pool import RankPool

ALL2ALL, BATCHED = "TorchAll2AllPrepareAndFinalize", "TorchAll2AllBatchedPrepareAndFinalize"
BY_HOSTS = "HostThenRankPrepareAndFinalize"
PAIRS = {ALL2ALL: "TorchExperts", BATCHED: "NaiveBatchedExperts", BY_HOSTS: "TorchExperts"}
TOKENS = 6
PROBLEM = Problem(TOKENS, 32, 16, 8, 2, dtype=torch.float32, max_received=10)
pytestmark = pytest.mark.cpu


four = make_ranks_fixture(4)


def calls(rank: int, world: int, group: object, part: str, ids: str, most: int | None) -> list[Any]:
    """Return the results of calls in which each token goes to rank 2, then 2 tokens do, then
    all."""
    simulated(rank, ids)
    parallel = Parallel(world, rank=rank, ranks_per_host=ids.count("a"))
    problem = replace(PROBLEM, parallel=parallel, max_received=most)
    kernel = make_kernel(part, PAIRS[part], problem, group=group)
    weights = ExpertWeights(torch.ones(2, 32, 32), torch.ones(2, 32, 16))
    said: list[Any] = []
    exchanged: list[str] = []
    manager: Any = kernel.prepare_finalize.manager
    exchange = manager.all_to_all

    def noted(*tensors: torch.Tensor, phase: str, **rest: Any) -> Any:
        exchanged.append(phase)
        return exchange(*tensors, phase=phase, **rest)

    manager.all_to_all = noted
    for tokens, expert in ((TOKENS, 4), (2, 4), (2, 0)):
        pairs = torch.full((tokens, 2), expert, dtype=torch.int32)
        pairs[:, 1] += 1
        routing = Routing(torch.full((tokens, 2), 0.5), pairs)
        try:
            said.append(kernel(torch.ones(tokens, 32), weights, routing).sum().item())
        except CommunicationError as error:
            assert not exchanged
            said.append(f"{error.peers} {error.phase} {error.got}, {error.need}")
    kernel.prepare_finalize.destroy()
    return said


@pytest.mark.parametrize(
    ("part", "ids"), [(ALL2ALL, "aaaa"), (BATCHED, "aaaa"), (BY_HOSTS, "aabb"), (BY_HOSTS, "abcd")]
)
def test_above_it_every_rank_raises_before_the_exchange_and_stays_usable(
    four: RankPool, part: str, ids: str
) -> None:
    free = four.run(calls, part, ids, None)
    bound = four.run(calls, part, ids, 10)
    for rank in range(4):
        told = bound[rank][0]
        # Rank 3 passes on what comes from its like on the other host.
        peers, more = ("(2, 3)", "; 12 rows for rank 3") if ids == "aabb" else ("(2,)", "")
        assert told.startswith(f"{peers} counts 24 rows for rank 2{more}")
        assert told.endswith("<= 10 (Problem.max_received)")
        assert bound[rank][1:] == free[rank][1:]
        assert isinstance(free[rank][0], float)
    # As many as come are enough.
    assert four.run(calls, part, ids, 24) == free


def sizes(rank: int, world: int, group: object, part: str, most: int | None) -> tuple[int, int]:
    """Return the bytes of the buffers of a call, and of those that ranks share."""
    simulated(rank, "aabb")
    parallel = Parallel(world, rank=rank, ranks_per_host=2)
    problem = replace(PROBLEM, tokens=512, max_received=most, parallel=parallel)
    kernel = make_kernel(part, PAIRS[part], problem, group=group)
    specs = kernel.workspace_specs(512)
    heap = getattr(getattr(kernel.prepare_finalize, "_buffer_pool", None), "heap", None)
    shared = 0 if heap is None else heap.bytes_N.numel()
    kernel.prepare_finalize.destroy()
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in specs.values()), shared


@pytest.mark.parametrize("part", PAIRS)
def test_buffers_have_its_size(four: RankPool, part: str) -> None:
    (whole, heap), (half, less), (more, _) = (
        four.run(sizes, part, most)[0] for most in (None, 1024, 10**6)
    )
    assert half < whole == more
    assert half + less < 0.7 * (whole + heap)
    assert (less < 0.6 * heap) is (part == BY_HOSTS)


def test_parts_without_a_bound_refuse_it() -> None:
    machine = Machine("cuda", (9, 0), frozenset({"triton"}))
    sizes = {"tokens": 8, "hidden": 512, "intermediate": 512, "experts": 8, "top_k": 2}
    problem = Problem(**sizes, max_received=9, parallel=Parallel(4))
    for part in ("ReplicatedEP", "AllGatherReduceScatter", "SymmMem"):
        verdict = check(f"{part}PrepareAndFinalize", "TorchExperts", problem, machine)
        assert "got max_received=9, need max_received=None, because its buffers" in str(verdict)
    assert check(ALL2ALL, "TorchExperts", problem, machine).ok
    assert check(BY_HOSTS, "TorchExperts", problem, machine).ok
