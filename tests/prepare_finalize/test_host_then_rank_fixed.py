"""HostThenRankPrepareAndFinalize with a fixed capacity: the host reads no counts after the first
call of a layer. The ranks are on one host, or on several simulated hosts.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from ep_layers import ALL2ALL, Layer
from interpreted_replays import interpreted_replays
from replayed_exchanges import (
    TWO_LEVEL,
    refuse_in_replay,
    replay_calls,
    replay_during_a_started_call,
)

from modular_kernel.catalog import make_kernel
from modular_kernel.errors import CommunicationError, ModularKernelError, UnsupportedError
from modular_kernel.execution import Pending
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.perf_model.memory import exchange_bytes
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.tensors import Routing
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.stress.fault_matrix import list_scenarios, run_scenario
from modular_kernel.testing.stress.faults import SLACK_S, Scenario
from modular_kernel.workspace import workspace_bytes
from prepare_finalize import HostThenRankGroup
from prepare_finalize.common import device_handshake, handshake
from prepare_finalize.symm_mem.group import align_up
from prepare_finalize.symm_mem.launch import buffer_sections

pytestmark = pytest.mark.cpu  # the kernels of the exchange are interpreted
PART = TWO_LEVEL
BF16 = torch.bfloat16
DEADLINE_S = 3.0


@pytest.fixture(scope="module", params=[(2, None), (4, 2), (4, 1), (6, 2)], ids=str)
def pool(request) -> Iterator[RankPool]:
    world_size, ranks_per_host = request.param
    with RankPool(world_size, grace=15, ranks_per_host=ranks_per_host) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[RankPool]:
    with RankPool(4, grace=15, ranks_per_host=2) as ranks:
        yield ranks


def make_layer(pool: RankPool, placement="linear", routing="uniform", *, tokens=None, **fields):
    tokens = tokens or (3, 5, 4, 2, 6, 1)[: pool.world_size]
    return Layer(PART, tuple(tokens), placement, routing, fields=fields)


def call_layers(rank: int, world: int, group: object, layers: list[Layer], checked: bool):
    """Call each layer twice. Return the outputs and numbers of invalid ids."""
    manager, results = HostThenRankGroup(group, timeout_s=20.0, checked=checked), []
    for layer in layers:
        kernel, inputs = layer.kernel(rank, manager), layer.inputs_of(rank)
        arguments = inputs.x_TH, inputs.weights, inputs.routing
        outputs = [kernel(*arguments).clone() for _ in range(2)]
        kernel.prepare_finalize.check()
        results.append((outputs, kernel.invalid_ids))
    if not checked:
        begun, ended = manager.device_status.progress()
        assert begun == ended == 2 * len(layers)
    return results


def list_layers(pool: RankPool) -> list[Layer]:
    world = pool.world_size
    first = make_layer(pool)
    layers = [first]
    for tokens in ((0, *first.tokens_W[1:]), (*first.tokens_W[:-1], 0), (0,) * world):
        layers.append(make_layer(pool, tokens=tokens))
    routings = ("skips", "all_skipped", "out_of_range", "duplicates", "all_to_one")
    layers += [make_layer(pool, routing=routing) for routing in routings]
    linear = Placement.linear(world + 3, world)
    copies = linear.with_copies({0: (world - 1,), world + 2: tuple(range(world - 1))})
    for placement in (linear, Placement.round_robin(world + 3, world), copies):
        layers.append(make_layer(pool, placement, experts=placement.experts))
    layers.append(make_layer(pool, bias=True, routed_scaling_factor=2.5))
    layers.append(make_layer(pool, apply_router_weight_on_input=True, top_k=1))
    quants = ("fp8_w8a8_channel", "int8_w8a8_channel", "fp8_w8a8_block:block=16x16")
    for quant in (*quants, "fp8_w8a8_tensor", "fp8_w8a8_tensor:static=true"):
        layers.append(make_layer(pool, dtype=BF16, quant=quant))
    limit = {"max_received": world * max(first.tokens_W)}  # less than world * problem.tokens
    layers += [make_layer(pool, routing=r, **limit) for r in ("uniform", *routings)]
    layers.append(make_layer(pool, copies, experts=copies.experts, **limit))
    layers.append(make_layer(pool, dtype=BF16, quant="fp8_w8a8_channel", **limit))
    return layers


def test_outputs_match_the_reference_and_equal_those_with_counted_rows(pool: RankPool) -> None:
    layers = list_layers(pool)
    fixed, counted = (pool.run(call_layers, layers, checked) for checked in (False, True))
    for index, layer in enumerate(layers):
        for call in range(2):
            outputs = [report[index][0][call] for report in fixed]
            comparison = layer.compare(outputs)
            assert comparison.ok, (layer, comparison)
            for out, report in zip(outputs, counted, strict=True):
                assert torch.equal(out, report[index][0][call]), layer
        for rank in range(layer.world_size):
            assert fixed[rank][index][1] == 2 * layer.count_invalid_ids(rank), layer


def call_in_torch(rank: int, world: int, group: object, layers: list[Layer]):
    """Call each layer with torch references of the operations on blocks."""
    with prefer_torch_reference(enabled=True):
        return call_layers(rank, world, group, layers, False)


def test_blocks_may_be_filled_without_triton(two_hosts: RankPool) -> None:
    layers = [make_layer(two_hosts), make_layer(two_hosts, max_received=4 * 5)]
    reports = two_hosts.run(call_in_torch, layers)
    for index, layer in enumerate(layers):
        assert layer.compare([report[index][0][1] for report in reports]).ok


def count_handshakes(rank: int, world: int, group: object, layer: Layer, by_manager: bool):
    """Return outputs and numbers of tokens of several calls, and the handshakes of the host."""
    calls = []
    exchange_metadata = handshake.exchange_metadata
    device_handshake.exchange_metadata = lambda *args, **options: (
        calls.append("host"),
        exchange_metadata(*args, **options),
    )
    try:
        manager = HostThenRankGroup(group, checked=not by_manager)
        problem = replace(layer.problem(rank), graph=not by_manager)
        experts = "TorchExperts" if by_manager else "TritonExperts"  # A graph needs TritonExperts.
        kernel = make_kernel(PART, experts, problem, group=manager, poison=True)
        inputs, plan = layer.inputs_of(rank), kernel.plan()
        outputs, counts = [], []
        for count in (3, 1, 0, 2):
            tokens = (count + rank) % 4
            rows, routing = slice(0, tokens), inputs.routing
            routing_of_rows = Routing(routing.topk_weights_TK[rows], routing.topk_ids_TK[rows])
            call = plan if count % 2 else kernel
            outputs.append(call(inputs.x_TH[rows], inputs.weights, routing_of_rows).clone())
            counts.append(tokens)
        kernel.prepare_finalize.check()
        return outputs, counts, calls
    finally:
        device_handshake.exchange_metadata = exchange_metadata


@pytest.mark.parametrize("by_manager", [False, True])
def test_the_host_exchanges_metadata_only_once(two_hosts: RankPool, by_manager: bool) -> None:
    layer = make_layer(two_hosts, tokens=(4,) * 4)
    exact = layer.exact()
    reports = two_hosts.run(count_handshakes, layer, by_manager)
    for rank, (outputs, counts, calls) in enumerate(reports):
        assert calls == ["host"]
        start = layer.rows(rank).start
        for out, tokens in zip(outputs, counts, strict=True):
            expected = exact[start : start + tokens].float()
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def fail_second_call(rank: int, world: int, group: object, layer: Layer, failure: str):
    """Return whether the first output is finite, and the output and the errors of later calls."""
    manager = HostThenRankGroup(group, timeout_s=20.0, checked=False)
    kernel, inputs = layer.kernel(rank, manager), layer.inputs_of(rank)
    arguments = inputs.x_TH, inputs.weights, inputs.routing
    first = kernel(*arguments)
    x_TH, routing = inputs.x_TH, inputs.routing
    if failure == "layer":
        other_kernel = layer.kernel(rank, manager)
        other_kernel(*arguments)
        kernel = other_kernel if rank == 1 else kernel
    if rank == 1 and failure == "refused":
        x_TH = x_TH.double()
    if rank == 1 and failure == "call":
        kernel.prepare_finalize.fixed_capacity._handshake.counter.calls.add_(1)
    if failure == "rows":
        ids_TK = torch.arange(len(x_TH), dtype=torch.int32)[:, None] * 3 % 8
        first = kernel(x_TH, inputs.weights, replace(routing, topk_ids_TK=ids_TK))
        ids_TK = torch.zeros_like(ids_TK) if rank == 1 else ids_TK
        routing = replace(routing, topk_ids_TK=ids_TK)
    errors: list[str] = []
    out = None
    try:
        out = kernel(x_TH, inputs.weights, routing)
    except ModularKernelError as error:
        errors.append(f"{type(error).__name__}: {error}")
    for _ in range(2):
        try:
            kernel(*arguments)
        except CommunicationError as error:
            errors.append(str(error))
    return bool(first.isfinite().all()), out, errors


@pytest.mark.parametrize(
    ("failure", "got", "need"),
    [
        ("refused", "rank 1 refused its call 2 of layer 1 with DtypeError", "every rank accepts"),
        ("layer", "layer 1, 2", "one layer, call and order"),
        ("call", "call 2, 3", "one layer, call and order"),
        ("rows", "4 rows for one rank from rank 1", "0 to 3"),
    ],
)
def test_a_failure_of_one_rank_reaches_every_rank(
    two_hosts: RankPool, failure: str, got: str, need: str
) -> None:
    fields = {"top_k": 1, "max_received": 4 * 3} if failure == "rows" else {}
    layer = make_layer(two_hosts, tokens=(4,) * 4, **fields)
    reports = two_hosts.run(fail_second_call, layer, failure)
    for rank, (first_is_finite, out, errors) in enumerate(reports):
        assert first_is_finite
        if rank == 1 and failure == "refused":
            assert out is None
            assert errors.pop(0).startswith("DtypeError")
        else:
            assert out is not None, errors
            assert out.isnan().all()
        assert len(errors) == 2
        assert got in errors[0], errors
        assert need in errors[0], errors
        assert "rank 1: on host host 0" in errors[0] or rank == 1
        assert "a manager that failed before" in errors[1]


def test_a_refused_call_with_one_scale_for_all_ranks_raises(two_hosts: RankPool) -> None:
    layer = make_layer(two_hosts, tokens=(4,) * 4, dtype=BF16, quant="fp8_w8a8_tensor")
    for rank, (_, out, errors) in enumerate(two_hosts.run(fail_second_call, layer, "refused")):
        assert rank == 1 or out.isnan().all()
        assert "rank 1 refused its call 2 of layer 1" in errors[rank == 1]


def call_layers_of_other_sizes(
    rank: int, world: int, group: object, layers: tuple[Layer, Layer], case: str
) -> tuple[str, list[torch.Tensor]]:
    """Call a different layer on rank 1. Return the error and the outputs of later calls."""
    manager = HostThenRankGroup(group, timeout_s=20.0, checked=False)
    kernels = [layer.kernel(rank, manager) for layer in layers]
    inputs_by_layer = [layer.inputs_of(rank) for layer in layers]

    def call(index: int) -> torch.Tensor:
        inputs = inputs_by_layer[index]
        return kernels[index](inputs.x_TH, inputs.weights, inputs.routing)

    call(0)
    if case == "later call":
        call(1)
    errors = []
    try:
        call(rank == 1)
    except ModularKernelError as error:
        errors.append(str(error))
    outputs = [call(0), call(1)]
    for kernel in kernels:
        kernel.prepare_finalize.check()
    return "".join(errors), outputs


@pytest.mark.parametrize("other_part", [PART, ALL2ALL])
@pytest.mark.parametrize("case", ["first call", "later call"])
def test_layers_of_other_sizes_raise_on_every_rank(
    two_hosts: RankPool, other_part: str, case: str
) -> None:
    second = replace(
        make_layer(two_hosts, tokens=(9 if other_part == PART else 4,) * 4), part=other_part
    )
    layers = make_layer(two_hosts, tokens=(4,) * 4), second
    reports = two_hosts.run(call_layers_of_other_sizes, layers, case)
    for error, _ in reports:
        assert "layer 1, 2" in error
        assert case == "first call" or "blocks of another size" in error
    for index, layer in enumerate(layers):
        assert layer.compare([outputs[index] for _, outputs in reports]).ok


def call_layers_of_both_kinds(rank: int, world: int, group: object, layer: Layer):
    """Alternate a layer with counted rows and one with a fixed capacity on one manager."""
    manager, experts = HostThenRankGroup(group), "TritonExperts"
    problem, inputs = layer.problem(rank), layer.inputs_of(rank)
    kernels = [
        make_kernel(PART, experts, replace(problem, graph=graph), group=manager)
        for graph in (False, True)
    ]
    calls = [
        kernel(inputs.x_TH, inputs.weights, inputs.routing) for _ in "abc" for kernel in kernels
    ]
    kernels[1].prepare_finalize.check()
    have_fixed_capacity = [kernel.prepare_finalize.fixed_capacity is not None for kernel in kernels]
    return have_fixed_capacity, [kernel.replayable for kernel in kernels], calls


def test_layers_of_both_kinds_share_a_manager(two_hosts: RankPool) -> None:
    layer = make_layer(two_hosts)
    reports = two_hosts.run(call_layers_of_both_kinds, layer)
    for index in range(6):
        assert layer.compare([calls[index] for *_, calls in reports]).ok
    assert all(fixed == replayable == [False, True] for fixed, replayable, _ in reports)


def start_two_calls(rank: int, world: int, group: object, layer: Layer):
    """Start two calls, fail to start a third, and finish the two. Return outputs and the error."""
    kernel = layer.kernel(rank, HostThenRankGroup(group, timeout_s=20.0, checked=False))
    inputs = layer.inputs_of(rank)
    x_TH, weights, routing = inputs.x_TH, inputs.weights, inputs.routing
    kernel(x_TH, weights, routing)
    pending = [kernel.start(x, weights, routing) for x in (x_TH, -x_TH)]
    message = ""
    try:
        kernel.start(x_TH, weights, routing)
    except UnsupportedError as error:
        message = str(error)
    outputs = [call.finish().clone() for call in pending]
    outputs.append(kernel(x_TH, weights, routing))
    kernel.prepare_finalize.check()
    return outputs, message


def test_two_calls_may_be_in_flight(two_hosts: RankPool) -> None:
    layer = make_layer(two_hosts)
    reports = two_hosts.run(start_two_calls, layer)
    for index in (0, 2):
        assert layer.compare([outputs[index] for outputs, _ in reports]).ok
    for (first, second, third), error in reports:
        assert torch.equal(first, third)
        assert not torch.equal(first, second)
        assert "calls in flight: got 3, need at most 2" in error


def drop_started_call(rank: int, world: int, group: object, layer: Layer, checked: bool):
    """Start a call that is never finished. Only rank 1 drops it before its next calls.

    Return the errors of the next three calls, and the seconds until the first one.
    """
    manager = HostThenRankGroup(group, timeout_s=DEADLINE_S, checked=checked)
    kernel, inputs = layer.kernel(rank, manager), layer.inputs_of(rank)
    arguments = inputs.x_TH, inputs.weights, inputs.routing
    kernel(*arguments)
    started_calls = [kernel.start(*arguments)]
    if rank == 1:
        started_calls.clear()
    errors, start_time, seconds = [], time.monotonic(), 0.0
    for _ in range(3):
        try:
            kernel(*arguments)
        except CommunicationError as error:
            errors.append(error)
            seconds = seconds or time.monotonic() - start_time
    return [(error.phase, error.peers, str(error)) for error in errors], seconds


@pytest.mark.parametrize("checked", [False, True])
def test_ranks_that_use_different_buffers_raise(two_hosts: RankPool, checked: bool) -> None:
    layer = make_layer(two_hosts, tokens=(4,) * 4)
    two_hosts.run(
        call_layers, [layer], checked
    )  # Importing modules may take longer than the deadline.
    reports = two_hosts.run(drop_started_call, layer, checked)
    for errors, seconds in reports:
        assert len(errors) == 3
        if checked:  # The handshake detects the difference, and the manager remains usable.
            assert all("a different order of earlier exchanges" in error[2] for error in errors)
            assert seconds < DEADLINE_S
        else:
            assert seconds < DEADLINE_S + SLACK_S
            assert all("a manager that failed before" in message for *_, message in errors[1:])
    for rank, peer in ((0, 1), (1, 0)):
        (phase, peers, _), *_ = reports[rank][0]
        assert phase == ("counts" if checked else "dispatch")
        assert peer in peers


def finish_in_another_order(rank: int, world: int, group: object, layer: Layer) -> str:
    """Finish two calls in reverse order on rank 1. Return the error of a later call."""
    manager = HostThenRankGroup(group, timeout_s=20.0, checked=False)
    kernels = [layer.kernel(rank, manager) for _ in range(2)]
    inputs = layer.inputs_of(rank)
    arguments = inputs.x_TH, inputs.weights, inputs.routing
    for kernel in kernels:
        kernel(*arguments)
    pending = [kernel.start(*arguments) for kernel in kernels]
    errors = []
    try:
        for call in reversed(pending) if rank == 1 else pending:
            call.finish()
        for _ in range(2):
            kernels[0](*arguments)
    except CommunicationError as error:
        errors.append(str(error))
    return "".join(errors)


def test_another_order_of_finishing_fails_a_later_call(two_hosts: RankPool) -> None:
    for error in two_hosts.run(finish_in_another_order, make_layer(two_hosts)):
        assert error


def call_first_in_inference_mode(rank: int, world: int, group: object, layer: Layer) -> bool:
    kernel = layer.kernel(rank, HostThenRankGroup(group, checked=False))
    inputs = layer.inputs_of(rank)
    arguments = inputs.x_TH, inputs.weights, inputs.routing
    with torch.inference_mode():
        first = kernel(*arguments).clone()
    return torch.equal(first, kernel(*arguments))


def test_the_first_call_may_run_in_inference_mode(two_hosts: RankPool) -> None:
    assert all(two_hosts.run(call_first_in_inference_mode, make_layer(two_hosts)))


SCENARIOS = list_scenarios(PART, "gloo", checked=False)


@pytest.mark.share(3)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_faults_raise_on_every_other_rank(two_hosts: RankPool, scenario: Scenario) -> None:
    # Ranks that an earlier scenario has killed import modules in this call. This would take too
    # much of the short deadline of a scenario.
    two_hosts.run(call_layers, [make_layer(two_hosts)], False)
    assert run_scenario(scenario, two_hosts).findings() == []


def make_replayed_layer(pool: RankPool, seed: int = 0, **fields) -> Layer:
    return replace(make_layer(pool, **fields), experts_part="TritonExperts", seed=seed)


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_channel"])
@pytest.mark.parametrize("max_received", [None, 4 * 5])
def test_replays_match_the_reference(
    two_hosts: RankPool, quant: str, max_received: int | None
) -> None:
    fields = {"quant": quant, "dtype": torch.float32 if quant == "none" else BF16}
    layers = [
        make_replayed_layer(two_hosts, seed, max_received=max_received, **fields)
        for seed in range(5)
    ]
    reports = two_hosts.run(replay_calls, layers)
    for index, layer in enumerate(layers):
        comparison = layer.compare([outputs[index] for outputs, *_ in reports])
        assert comparison.ok, (index, comparison)
    for _, counters, _ in reports:
        assert counters["fallback_calls"] == {"first call of a layer over ranks": 1}
        assert (counters["recorded_calls"], counters["replayed_calls"]) == (1, 3)


def test_calls_of_a_rank_without_tokens_are_replayed(two_hosts: RankPool) -> None:
    """If they were not, all ranks would wait for the host code of the rank without tokens."""
    layer = make_replayed_layer(two_hosts, tokens=(3, 0, 2, 1))
    reports = two_hosts.run(replay_calls, [layer] * 4)
    for call in range(4):
        assert layer.compare([outputs[call] for outputs, *_ in reports]).ok
    for _, counters, _ in reports:
        assert counters["fallback_calls"] == {"first call of a layer over ranks": 1}
        assert (counters["recorded_calls"], counters["replayed_calls"]) == (1, 2)


def test_a_refusal_reaches_ranks_that_replay(two_hosts: RankPool) -> None:
    message = "rank 1 refused its call 5 of layer 1 with DtypeError"
    for rank, errors in enumerate(
        two_hosts.run(refuse_in_replay, make_replayed_layer(two_hosts), 20.0)
    ):
        assert errors[0].startswith("DtypeError") if rank == 1 else errors[0] == "NaN"
        assert message in errors[1]
        assert "a manager that failed before" in errors[2]


def test_calls_are_not_replayed_if_their_buffers_are_in_use(two_hosts: RankPool) -> None:
    layer = make_replayed_layer(two_hosts)
    for outputs, replayed in two_hosts.run(replay_during_a_started_call, layer):
        assert all(torch.equal(out, outputs[0]) for out in outputs)
        assert replayed == 3 + 1


def call_two_layers_at_random(
    rank: int, world: int, group: object, layers: tuple[Layer, Layer], steps: int
) -> tuple[list[str], int]:
    """Call two layers of a manager at random, with up to two calls of each layer in flight.

    Numbers of tokens differ between ranks and calls, so some ranks replay a call that others
    record.

    Return the wrong outputs and the number of replayed calls.
    """
    rng, wrong_outputs = random.Random(0), list[str]()
    with interpreted_replays():
        manager = HostThenRankGroup(group, timeout_s=30.0, checked=False)
        plans = [layer.kernel(rank, manager).plan() for layer in layers]
        inputs = [layer.inputs_of(rank) for layer in layers]
        exact = [layer.exact()[layer.rows(rank)].float() for layer in layers]
        in_flight: list[tuple[int, Pending, torch.Tensor]] = []

        def check(step: int, out: torch.Tensor, expected: torch.Tensor) -> None:
            if not torch.allclose(out, expected, rtol=1e-4, atol=1e-4):
                wrong_outputs.append(f"step {step}: {(out - expected).abs().max()}")

        for step in range(steps):
            index = rng.randrange(2)
            counts = [rng.choice((0, 1, 4)) for _ in range(world)]
            rows, routing = slice(0, counts[rank]), inputs[index].routing
            routing = Routing(routing.topk_weights_TK[rows], routing.topk_ids_TK[rows])
            arguments = inputs[index].x_TH[rows], inputs[index].weights, routing
            mode = rng.choice(("plan", "plan", "plan", "start", "finish"))
            if [i for i, *_ in in_flight].count(index) == 2 or (mode == "finish" and in_flight):
                position = [i for i, *_ in in_flight].index(index) if mode != "finish" else 0
                _, pending, expected = in_flight.pop(position)
                check(step, pending.finish(), expected)
            if mode == "start":
                pending = plans[index].kernel.start(*arguments)
                in_flight.append((index, pending, exact[index][rows]))
            elif mode == "plan":
                check(step, plans[index](*arguments), exact[index][rows])
        for _, pending, expected in in_flight:
            check(steps, pending.finish(), expected)
        for plan in plans:
            plan.kernel.prepare_finalize.check()
        return wrong_outputs, sum(plan.kernel.counters()["replayed_calls"] for plan in plans)


def test_random_calls_of_two_layers_match_the_reference(two_hosts: RankPool) -> None:
    layers = (
        make_replayed_layer(two_hosts, tokens=(4,) * 4),
        make_replayed_layer(two_hosts, 1, tokens=(4,) * 4, max_received=4 * 4),
    )
    reports = two_hosts.run(call_two_layers_at_random, layers, 40)
    assert all(wrong_outputs == [] for wrong_outputs, _ in reports), reports
    assert sum(replayed for _, replayed in reports) > 4


def measure_buffers(rank: int, world: int, group: object, problem: Problem) -> int:
    """Return the bytes of the workspace and of the shared memory of a layer."""
    parallel = replace(problem.parallel, rank=rank)
    problem = replace(problem, parallel=parallel)
    kernel = make_kernel(PART, "TritonExperts", problem, group=HostThenRankGroup(group))
    part = kernel.prepare_finalize
    exchange = part.fixed_capacity
    sections = buffer_sections(exchange._host_problem, exchange.received_rows).values()
    heap = exchange.pool.heap.bytes_N.nbytes
    assert heap == pytest.approx(
        2 * sum(align_up(section.nbytes) for section in sections), rel=0.01
    )
    specs = dict(part.workspace_shapes(problem.tokens))
    specs.pop("sent_blocks", None)  # only gloo needs them
    return heap + workspace_bytes(specs)


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_block"])
@pytest.mark.parametrize("max_received", [None, 4 * 64])
def test_the_estimate_of_memory_counts_the_buffers_of_an_exchange(
    two_hosts: RankPool, quant: str, max_received: int | None
) -> None:
    parallel = Parallel(4, ranks_per_host=2)
    problem = Problem(
        256, 2048, 64, 8, 2, quant=quant, graph=True, max_received=max_received, parallel=parallel
    )
    for nbytes in two_hosts.run(measure_buffers, problem):
        assert exchange_bytes(PART, problem) == pytest.approx(nbytes, rel=0.05)
