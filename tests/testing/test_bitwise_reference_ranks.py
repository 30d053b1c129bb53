"""The bitwise reference over ranks applies the roundings of the rank that computes each row."""

import pytest
import torch

from modular_kernel.catalog import this_machine
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.testing.cases.ranks import RankCase
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.verify.over_ranks import prove_ranks

MACHINE = this_machine(device="cpu")
# Rank 0 has three tokens and rank 1 has one, but each receives two rows. For two rows, the experts
# use a path that sums before it rounds.
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
def test_roundings_depend_on_the_received_rows() -> None:
    case = RankCase("TorchAll2AllPrepareAndFinalize", "TritonExperts", PROBLEM, tokens=(3, 1))
    with RankPool(2) as pool:
        proof = prove_ranks(case, pool, MACHINE)
    assert proof.failures == ()
