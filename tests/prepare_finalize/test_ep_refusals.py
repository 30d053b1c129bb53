"""A rank that refuses its call, and layers called in different orders: every rank raises at
once."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ep_layers import ALL2ALL, GATHERED, REPLICATED, Layer
from rank_fixtures import make_ranks_fixture

from modular_kernel.catalog import make_kernel
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.stress.faults import FAULTY_RANK, RankReport, run_calls
from prepare_finalize import TorchGroup

LONG_S = 10.0  # a deadline that no rank waits for which is told
AT_ONCE_S = LONG_S / 2  # on a busy machine, too
TOKENS = {REPLICATED: (4, 4, 4), GATHERED: (4, 3, 5), ALL2ALL: (4, 3, 5)}


pool = make_ranks_fixture(3)


@pytest.mark.parametrize("by", ["kernel", "plan"])
@pytest.mark.parametrize("part", [ALL2ALL, GATHERED, REPLICATED])
def test_a_rank_that_refuses_its_input_and_then_calls_again(
    pool: RankPool, part: str, by: str
) -> None:
    """The others raise at once, with layer and call; then all make the call together."""
    reports = pool.run(refuse_one, Layer(part, TOKENS[part]), by, timeout=30)
    for rank, report in enumerate(reports):
        assert report.usable_again
        assert report.seconds < AT_ONCE_S
        if rank == FAULTY_RANK:
            assert report.error == "DtypeError", report
        else:
            assert (report.error, report.peers) == ("CommunicationError", (FAULTY_RANK,)), report
            told = "call 2 of layer 1: got rank 1 refused its call 2 of layer 1 with DtypeError"
            assert told in report.message


def refuse_one(rank: int, world: int, group: object, layer: Layer, by: str) -> RankReport:
    given = layer.inputs_of(rank)
    manager = TorchGroup(group, timeout_s=LONG_S)
    kernel = make_kernel(layer.part, "TorchExperts", layer.problem(rank), group=manager)
    call = kernel.plan() if by == "plan" else kernel
    good = call(given.x_TH, given.weights, given.routing).clone()
    dist.barrier(group)
    x_TH = given.x_TH.double() if rank == FAULTY_RANK else given.x_TH
    report = run_calls(lambda: call(x_TH, given.weights, given.routing), manager)
    again = call(given.x_TH, given.weights, given.routing)
    return replace(report, usable_again=torch.allclose(again, good))


@pytest.mark.parametrize("part", [ALL2ALL, GATHERED, REPLICATED])
def test_layers_of_one_manager_called_in_different_orders(pool: RankPool, part: str) -> None:
    """Two layers of the same shape are distinguished by their numbers only."""
    reports = pool.run(swap_layers, Layer(part, TOKENS[part]), timeout=30)
    for rank, report in enumerate(reports):
        assert (report.error, report.phase) == ("CommunicationError", "counts"), report
        assert "layer 1, 2, 1 by rank" in report.message
        assert report.peers == ((0, 2) if rank == FAULTY_RANK else (FAULTY_RANK,))
        assert report.seconds < AT_ONCE_S
        assert report.usable_again


def swap_layers(rank: int, world: int, group: object, layer: Layer) -> RankReport:
    given, problem = layer.inputs_of(rank), layer.problem(rank)
    manager = TorchGroup(group, timeout_s=LONG_S)
    first, second = (
        make_kernel(layer.part, "TorchExperts", problem, group=manager) for _ in range(2)
    )
    dist.barrier(group)
    mine = second if rank == FAULTY_RANK else first
    report = run_calls(lambda: mine(given.x_TH, given.weights, given.routing), manager)
    outputs = [each(given.x_TH, given.weights, given.routing) for each in (first, second)]
    return replace(report, usable_again=torch.allclose(*outputs))
