"""Over ranks a row rounds as that rank does which computes it, by the rows that came there."""

import pytest
import torch

from modular_kernel.catalog import this_machine
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.testing.cases.ranks import RankCase
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.verify.over_ranks import prove_ranks

MACHINE = this_machine(device="cpu")
# Of three tokens and one, two come to each rank: as many as a path takes that sums before it
# rounds. Rank 0 passes more, rank 1 fewer.
PROBLEM = Problem(
    tokens=4,
    hidden=2080,
    intermediate=16,
    experts=4,
    top_k=1,
    dtype=torch.bfloat16,
    parallel=Parallel(world_size=2),
)


@pytest.mark.cpu  # ranks on a CPU interpret the kernels
def test_a_rank_rounds_by_the_rows_that_came_and_not_by_those_that_it_passed() -> None:
    case = RankCase("TorchAll2AllPrepareAndFinalize", "TritonExperts", PROBLEM, tokens=(3, 1))
    with RankPool(2) as pool:
        proof = prove_ranks(case, pool, MACHINE)
    assert proof.failures == ()
