"""If a rank refuses its call, or layers are called in different orders, all ranks raise at once."""

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

LONG_S = 10.0  # a timeout that no rank reaches, because it is notified earlier
AT_ONCE_S = LONG_S / 2  # upper bound for the time to a notification, even on a busy machine
TOKENS = {REPLICATED: (4, 4, 4), GATHERED: (4, 3, 5), ALL2ALL: (4, 3, 5)}


pool = make_ranks_fixture(3)


@pytest.mark.parametrize("caller", ["kernel", "plan"])
@pytest.mark.parametrize("part", [ALL2ALL, GATHERED, REPLICATED])
def test_a_refused_call_raises_on_all_ranks_and_can_be_repeated(
    pool: RankPool, part: str, caller: str
) -> None:
    """The other ranks raise at once, and the next call of all ranks succeeds."""
    reports = pool.run(refuse_then_call_again, Layer(part, TOKENS[part]), caller, timeout=30)
    for rank, report in enumerate(reports):
        assert report.usable_again
        assert report.seconds < AT_ONCE_S
        if rank == FAULTY_RANK:
            assert report.error == "DtypeError", report
        else:
            assert (report.error, report.peers) == ("CommunicationError", (FAULTY_RANK,)), report
            message = "call 2 of layer 1: got rank 1 refused its call 2 of layer 1 with DtypeError"
            assert message in report.message


def refuse_then_call_again(
    rank: int, world: int, group: object, layer: Layer, caller: str
) -> RankReport:
    inputs = layer.inputs_of(rank)
    manager = TorchGroup(group, timeout_s=LONG_S)
    kernel = make_kernel(layer.part, "TorchExperts", layer.problem(rank), group=manager)
    call = kernel.plan() if caller == "plan" else kernel
    expected = call(inputs.x_TH, inputs.weights, inputs.routing).clone()
    dist.barrier(group)
    x_TH = inputs.x_TH.double() if rank == FAULTY_RANK else inputs.x_TH
    report = run_calls(lambda: call(x_TH, inputs.weights, inputs.routing), manager)
    output = call(inputs.x_TH, inputs.weights, inputs.routing)
    return replace(report, usable_again=torch.allclose(output, expected))


@pytest.mark.parametrize("part", [ALL2ALL, GATHERED, REPLICATED])
def test_layers_called_in_different_orders_raise_on_all_ranks(pool: RankPool, part: str) -> None:
    """Layers of the same shape are distinguished by their numbers."""
    reports = pool.run(swap_layers, Layer(part, TOKENS[part]), timeout=30)
    for rank, report in enumerate(reports):
        assert (report.error, report.phase) == ("CommunicationError", "counts"), report
        assert "layer 1, 2, 1 by rank" in report.message
        assert report.peers == ((0, 2) if rank == FAULTY_RANK else (FAULTY_RANK,))
        assert report.seconds < AT_ONCE_S
        assert report.usable_again


def swap_layers(rank: int, world: int, group: object, layer: Layer) -> RankReport:
    inputs, problem = layer.inputs_of(rank), layer.problem(rank)
    manager = TorchGroup(group, timeout_s=LONG_S)
    first, second = (
        make_kernel(layer.part, "TorchExperts", problem, group=manager) for _ in range(2)
    )
    dist.barrier(group)
    called_first = second if rank == FAULTY_RANK else first
    report = run_calls(lambda: called_first(inputs.x_TH, inputs.weights, inputs.routing), manager)
    outputs = [kernel(inputs.x_TH, inputs.weights, inputs.routing) for kernel in (first, second)]
    return replace(report, usable_again=torch.allclose(*outputs))
