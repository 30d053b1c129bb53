"""If ranks disagree on layers, calls or the order of calls, every rank raises at once and names the
other ranks.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ep_fault_ranks import (
    AT_ONCE_S,
    LONG_S,
    Fault,
    assert_reports_faulty_rank,
    make_three_ranks_fixture,
)
from ep_layers import ALL2ALL, GATHERED, REPLICATED, Layer

from experts.torch_experts import TorchExperts
from modular_kernel.catalog import make_kernel
from modular_kernel.errors import CommunicationError
from modular_kernel.testing.cases.inputs import make_inputs
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.stress.faults import FAULTY_RANK, TIMEOUT_S, RankReport, run_calls
from prepare_finalize import TorchGroup

pool = make_three_ranks_fixture()


class OtherExperts(TorchExperts):
    """The same experts under another name."""


def call_different_layers(rank: int, world: int, group: object, fault: Fault) -> RankReport:
    """Call a different layer on the faulty rank, then the same layer on all ranks."""
    layer = fault.layer
    options = dict(fault.other) if rank == FAULTY_RANK else {}
    experts = options.pop("experts_part", "TorchExperts")
    part = options.pop("part", fault.part)
    tokens_W = options.pop("tokens_W", layer.tokens_W)
    layer_of_rank = replace(layer, part=part, tokens_W=tokens_W, fields=options)
    inputs = layer_of_rank.inputs_of(rank)
    dist.barrier(group)  # Ranks that start late must not cause a timeout.
    manager = TorchGroup(group, timeout_s=LONG_S)
    kernel = make_kernel(part, experts, layer_of_rank.problem(rank), group=manager)
    report = run_calls(lambda: kernel(inputs.x_TH, inputs.weights, inputs.routing), manager)
    inputs = layer.inputs_of(rank)
    kernel = make_kernel(fault.part, "TorchExperts", layer.problem(rank), group=manager)
    output = kernel(inputs.x_TH, inputs.weights, inputs.routing)
    new_kernel = make_kernel(
        fault.part, "TorchExperts", layer.problem(rank), group=TorchGroup(group)
    )
    expected = new_kernel(inputs.x_TH, inputs.weights, inputs.routing)
    return replace(report, usable_again=torch.equal(output, expected))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"hidden": 64}, "hidden 48, 64, 48"),
        ({"top_k": 2}, "top_k 3, 2, 3"),
        ({"experts": 9}, "experts 8, 9, 8"),
        ({"tokens_W": (4, 7, 5)}, "tokens 6, 8, 6"),
        ({"dtype": torch.bfloat16}, "another dtype"),
        ({"quant": "int8_w8a8_channel"}, "scheme"),
        ({"routed_scaling_factor": 2.0}, "pairing"),
        ({"experts_part": OtherExperts}, "pairing"),
        ({"part": GATHERED}, "pairing"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_ranks_that_call_different_layers_raise_at_once(
    pool: RankPool, other: dict[str, object], message: str
) -> None:
    """Every rank detects the difference before communication, and the manager stays usable."""
    reports = pool.run(call_different_layers, Fault(ALL2ALL, other), timeout=30)
    for rank, report in enumerate(reports):
        assert report.error == "CommunicationError", report
        assert report.phase == "counts"
        assert report.seconds < AT_ONCE_S
        assert message in report.message
        assert report.peers == ((0, 2) if rank == FAULTY_RANK else (FAULTY_RANK,))
        assert report.usable_again


def call_with_adapters_on_one_rank(rank: int, world: int, group: object, part: str) -> RankReport:
    """Call a layer with adapters on the faulty rank only."""
    problem = Layer(part, (4,) * world).problem(rank)
    if rank == FAULTY_RANK:
        problem = replace(problem, lora="adapters=2,rank=8")
    inputs = make_inputs(problem, "uniform", torch.device("cpu"))
    manager = TorchGroup(group, timeout_s=LONG_S)
    kernel = make_kernel(part, "TorchExperts", problem, group=manager)
    return run_calls(lambda: kernel(inputs.x_TH, inputs.weights, inputs.routing), manager)


@pytest.mark.parametrize("part", [ALL2ALL, GATHERED, REPLICATED])
def test_ranks_must_have_the_same_adapters(pool: RankPool, part: str) -> None:
    for report in pool.run(call_with_adapters_on_one_rank, part, timeout=30):
        assert report.error == "CommunicationError", report
        assert report.phase == "counts"
        assert "or adapters" in report.message


def test_replicated_ranks_must_have_equal_numbers_of_tokens(pool: RankPool) -> None:
    other = {"tokens_W": (3, 3, 3)}
    reports = pool.run(call_different_layers, Fault(REPLICATED, other), timeout=30)
    assert {report.error for report in reports} == {"CommunicationError"}
    assert all("tokens 5, 4, 5" in report.message for report in reports)


def test_a_second_call_in_flight_raises_at_once(pool: RankPool) -> None:
    """The second call raises at once, and names the same rank as the first."""
    reports = pool.run(fail_with_two_calls, Fault(ALL2ALL), timeout=30)
    assert reports[FAULTY_RANK] is None
    for rank in (0, 2):
        first, second = reports[rank]
        assert_reports_faulty_rank(first, {"combine"})
        assert second.error == "CommunicationError"
        assert second.peers == (FAULTY_RANK,)
        assert second.seconds < TIMEOUT_S


def fail_with_two_calls(
    rank: int, world: int, group: object, fault: Fault
) -> tuple[RankReport, RankReport] | None:
    inputs = fault.layer.inputs_of(rank)
    dist.barrier(group)
    manager = TorchGroup(group, timeout_s=TIMEOUT_S)
    kernel = make_kernel(fault.part, "TorchExperts", fault.layer.problem(rank), group=manager)
    pending = [kernel.start(inputs.x_TH, inputs.weights, inputs.routing) for _ in range(2)]
    if rank == FAULTY_RANK:
        return None
    first, second = (run_calls(call.finish, manager) for call in pending)
    return first, second


def test_ranks_that_finish_in_different_orders_raise_in_the_next_call(pool: RankPool) -> None:
    reports = pool.run(finish_in_another_order, Fault(ALL2ALL), timeout=30)
    for rank, report in enumerate(reports):
        assert report.error == "CommunicationError", report
        assert "a different order of earlier exchanges" in report.message
        assert report.peers == ((0, 2) if rank == FAULTY_RANK else (FAULTY_RANK,))


def finish_in_another_order(rank: int, world: int, group: object, fault: Fault) -> RankReport:
    layer = replace(fault.layer, tokens_W=(4, 4, 4), routing="all_to_one")
    inputs = layer.inputs_of(rank)
    dist.barrier(group)
    manager = TorchGroup(group, timeout_s=TIMEOUT_S)
    kernel = make_kernel(fault.part, "TorchExperts", layer.problem(rank), group=manager)
    pending = [kernel.start(inputs.x_TH, inputs.weights, inputs.routing) for _ in range(2)]
    for call in reversed(pending) if rank == FAULTY_RANK else pending:
        call.finish()
    return run_calls(lambda: kernel(inputs.x_TH, inputs.weights, inputs.routing), manager)


def test_a_concurrent_call_of_a_failing_manager_raises(pool: RankPool) -> None:
    """While ranks determine which rank failed, the communicator is already destroyed."""
    assert pool.run(call_while_failing, timeout=30)[0] == ["CommunicationError"]


def call_while_failing(rank: int, world: int, group: object) -> list[str]:
    manager = TorchGroup(group, timeout_s=0.5)
    if rank:
        return []
    publish, errors = manager._failure_records.publish_and_collect, []

    def call_then_publish(record: dict[str, Any], until_s: float) -> object:
        try:
            manager.all_reduce(torch.ones(1), step=2, phase="combine")
        except Exception as error:  # noqa: BLE001
            errors.append(type(error).__name__)
        return publish(record, until_s)

    manager._failure_records.publish_and_collect = call_then_publish  # type: ignore[method-assign,assignment]
    with pytest.raises(CommunicationError):
        manager.all_reduce(torch.ones(1), step=1, phase="combine").wait()
    return errors
