"""Batched rows over ranks, if the experts require a rounded capacity."""

from collections.abc import Callable
from dataclasses import replace

import torch

from experts.naive_batched import NaiveBatchedExperts
from modular_kernel.catalog import make_kernel
from modular_kernel.spec.problem import Machine, Parallel, Problem
from modular_kernel.testing.random_inputs import random_inputs
from modular_kernel.testing.ranks.pool import RankPool

PART = "TorchAll2AllBatchedPrepareAndFinalize"


class RoundingExperts(NaiveBatchedExperts):
    """The same experts with a capacity that is a multiple of 16 rows."""

    requires = replace(NaiveBatchedExperts.requires, capacity_multiple=16)


def call_with_and_without_rounding(rank: int, world: int, group: object) -> list[torch.Tensor]:
    """Return the outputs of a call without and with rounding."""
    problem = Problem(
        tokens=5, hidden=32, intermediate=24, experts=4, top_k=2, dtype=torch.float32,
        lora="adapters=3,rank=4", parallel=Parallel(world, "linear", rank),
    )  # fmt: skip
    x_TH, weights, routing = random_inputs(problem, torch.device("cpu"))
    routing = replace(routing, adapters_T=torch.tensor([2, -1, 0, 1, 2], dtype=torch.int32))
    return [
        make_kernel(PART, experts, problem, group=group, machine=Machine("cpu"), poison=True)(
            x_TH, weights, routing
        )
        for experts in (NaiveBatchedExperts, RoundingExperts)
    ]


def test_rounded_capacity_does_not_change_adapters(
    rank_pool: Callable[[int], RankPool],
) -> None:
    for exact, rounded in rank_pool(2).run(call_with_and_without_rounding):
        assert exact.abs().sum() > 0
        torch.testing.assert_close(rounded, exact)
