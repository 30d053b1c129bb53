"""Problem.max_received limits buffers. If a rank would receive more rows, every rank raises before
the exchange.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_fixtures import make_ranks_fixture
from test_ranks_on_hosts import set_host_id

from modular_kernel.catalog import check, make_kernel
from modular_kernel.errors import CommunicationError
from modular_kernel.spec.problem import Machine, Parallel, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.ranks.pool import RankPool

ALL2ALL, BATCHED = "TorchAll2AllPrepareAndFinalize", "TorchAll2AllBatchedPrepareAndFinalize"
HOST_THEN_RANK = "HostThenRankPrepareAndFinalize"
PAIRS = {ALL2ALL: "TorchExperts", BATCHED: "NaiveBatchedExperts", HOST_THEN_RANK: "TorchExperts"}
TOKENS = 6
PROBLEM = Problem(TOKENS, 32, 16, 8, 2, dtype=torch.float32, max_received=10)
pytestmark = pytest.mark.cpu


four = make_ranks_fixture(4)


def call_three_times(
    rank: int, world: int, group: object, part: str, ids: str, max_received: int | None
) -> list[Any]:
    """Return the sum of the output, or the error, of each of three calls.
    The first call sends TOKENS tokens to rank 2, the second sends 2 tokens to rank 2, and the third
    sends 2 tokens to rank 0.
    """
    set_host_id(rank, ids)
    parallel = Parallel(world, rank=rank, ranks_per_host=ids.count("a"))
    problem = replace(PROBLEM, parallel=parallel, max_received=max_received)
    kernel = make_kernel(part, PAIRS[part], problem, group=group)
    weights = ExpertWeights(torch.ones(2, 32, 32), torch.ones(2, 32, 16))
    results: list[Any] = []
    exchanged_phases: list[str] = []
    manager: Any = kernel.prepare_finalize.manager
    exchange = manager.all_to_all

    def record_and_exchange(*tensors: torch.Tensor, phase: str, **options: Any) -> Any:
        exchanged_phases.append(phase)
        return exchange(*tensors, phase=phase, **options)

    manager.all_to_all = record_and_exchange
    for tokens, expert in ((TOKENS, 4), (2, 4), (2, 0)):
        ids_TK = torch.full((tokens, 2), expert, dtype=torch.int32)
        ids_TK[:, 1] += 1
        routing = Routing(torch.full((tokens, 2), 0.5), ids_TK)
        try:
            results.append(kernel(torch.ones(tokens, 32), weights, routing).sum().item())
        except CommunicationError as error:
            assert not exchanged_phases
            results.append(f"{error.peers} {error.phase} {error.got}, {error.need}")
    kernel.prepare_finalize.destroy()
    return results


@pytest.mark.parametrize(
    ("part", "ids"),
    [(ALL2ALL, "aaaa"), (BATCHED, "aaaa"), (HOST_THEN_RANK, "aabb"), (HOST_THEN_RANK, "abcd")],
)
def test_more_rows_than_max_received_raise_on_every_rank(
    four: RankPool, part: str, ids: str
) -> None:
    unlimited = four.run(call_three_times, part, ids, None)
    limited = four.run(call_three_times, part, ids, 10)
    for rank in range(4):
        message = limited[rank][0]
        # Rank 3 forwards rows from rank 1 of the other host.
        peers, other_ranks = ("(2, 3)", "; 12 rows for rank 3") if ids == "aabb" else ("(2,)", "")
        assert message.startswith(f"{peers} counts 24 rows for rank 2{other_ranks}")
        assert message.endswith("<= 10 (Problem.max_received)")
        assert limited[rank][1:] == unlimited[rank][1:]
        assert isinstance(unlimited[rank][0], float)
    # A limit equal to the number of rows is enough.
    assert four.run(call_three_times, part, ids, 24) == unlimited


def measure_buffer_bytes(
    rank: int, world: int, group: object, part: str, max_received: int | None
) -> tuple[int, int]:
    """Return the bytes of the workspaces of a call, and of the buffers that ranks share."""
    set_host_id(rank, "aabb")
    parallel = Parallel(world, rank=rank, ranks_per_host=2)
    problem = replace(PROBLEM, tokens=512, max_received=max_received, parallel=parallel)
    kernel = make_kernel(part, PAIRS[part], problem, group=group)
    specs = kernel.workspace_specs(512)
    heap = getattr(getattr(kernel.prepare_finalize, "_buffer_pool", None), "heap", None)
    shared = 0 if heap is None else heap.bytes_N.numel()
    kernel.prepare_finalize.destroy()
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in specs.values()), shared


@pytest.mark.parametrize("part", PAIRS)
def test_max_received_reduces_the_sizes_of_buffers(four: RankPool, part: str) -> None:
    (unlimited_bytes, heap), (limited_bytes, limited_heap), (other_ranks, _) = (
        four.run(measure_buffer_bytes, part, max_received)[0]
        for max_received in (None, 1024, 10**6)
    )
    assert limited_bytes < unlimited_bytes == other_ranks
    assert limited_bytes + limited_heap < 0.7 * (unlimited_bytes + heap)
    assert (limited_heap < 0.6 * heap) is (part == HOST_THEN_RANK)


def test_parts_that_do_not_support_max_received_refuse_it() -> None:
    machine = Machine("cuda", (9, 0), frozenset({"triton"}))
    sizes = {"tokens": 8, "hidden": 512, "intermediate": 512, "experts": 8, "top_k": 2}
    problem = Problem(**sizes, max_received=9, parallel=Parallel(4))
    for part in ("ReplicatedEP", "AllGatherReduceScatter", "SymmMem"):
        verdict = check(f"{part}PrepareAndFinalize", "TorchExperts", problem, machine)
        assert "got max_received=9, need max_received=None, because its buffers" in str(verdict)
    assert check(ALL2ALL, "TorchExperts", problem, machine).ok
    assert check(HOST_THEN_RANK, "TorchExperts", problem, machine).ok
