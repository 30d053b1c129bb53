"""Exchanges of fixed capacity over gloo ranks, in which the host reads no counts after the first
call of a layer.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from ep_fault_ranks import make_three_ranks_fixture
from ep_layers import ALL2ALL, BATCHED, GATHERED, PARTS, REPLICATED, Layer

from modular_kernel.catalog import make_kernel
from modular_kernel.errors import CommunicationError, ModularKernelError
from modular_kernel.spec.placement import Placement
from modular_kernel.tensors import Routing
from modular_kernel.testing.ranks.pool import RankPool
from modular_kernel.testing.stress.fault_matrix import list_scenarios, run_scenario
from modular_kernel.testing.stress.faults import Scenario
from prepare_finalize import TorchGroup
from prepare_finalize.common import device_handshake, handshake, torch_group
from prepare_finalize.common.device_status import NOT_REFUSED, Capacity, DeviceStatus, Failure

fault_pool = make_three_ranks_fixture()
BF16 = torch.bfloat16
ALL_PARTS = (*PARTS, BATCHED)


@pytest.fixture(scope="module", params=[2, 3])
def pool(request) -> Iterator[RankPool]:
    with RankPool(request.param, grace=15) as ranks:
        yield ranks


def make_layer(
    part: str, tokens_W: tuple[int, ...], placement="linear", routing="uniform", **fields
):
    experts = "NaiveBatchedExperts" if part == BATCHED else "TorchExperts"
    if part == REPLICATED:
        tokens_W = (max(tokens_W),) * len(tokens_W)
    return Layer(part, tokens_W, placement, routing, experts_part=experts, fields=fields)


def call_layers(rank: int, world: int, group: object, layers: tuple[Layer, ...], checked=False):
    """Call each layer once. Return outputs and numbers of invalid ids."""
    manager, results = TorchGroup(group, checked=checked), []
    for layer in layers:
        kernel, inputs = layer.kernel(rank, manager), layer.inputs_of(rank)
        results.append((kernel(inputs.x_TH, inputs.weights, inputs.routing), kernel.invalid_ids))
        kernel.prepare_finalize.check()
        if manager.device_status is not None:
            begun, ended = manager.device_status.progress()
            assert begun == ended > 0
    return results


def assert_exact(pool: RankPool, layers: list[Layer]) -> None:
    """Assert that each output matches the float64 reference and that invalid ids are counted."""
    reports = pool.run(call_layers, tuple(layers))
    for index, layer in enumerate(layers):
        outputs = [reports[rank][index][0] for rank in range(layer.world_size)]
        comparison = layer.compare(outputs)
        assert comparison.ok, (layer, comparison)
        for rank in range(layer.world_size):
            assert reports[rank][index][1] == layer.count_invalid_ids(rank), layer


@pytest.mark.parametrize("part", ALL_PARTS)
def test_outputs_match_the_float64_reference(pool: RankPool, part: str) -> None:
    world = pool.world_size
    uneven = tuple(range(3, 3 + world))
    layers = [make_layer(part, tokens) for tokens in (uneven, (0, *uneven[1:]), (0,) * world)]
    routings = ("skips", "all_skipped", "out_of_range", "duplicates", "all_to_one")
    layers += [make_layer(part, uneven, routing=routing) for routing in routings]
    linear = Placement.linear(world + 3, world)
    copies = linear.with_copies({0: (world - 1,), world + 2: tuple(range(world - 1))})
    for placement in (linear, Placement.round_robin(world + 3, world), copies):
        layers.append(make_layer(part, uneven, placement, experts=placement.experts))
    layers.append(make_layer(part, uneven, bias=True, routed_scaling_factor=2.5))
    if part != BATCHED:
        layers.append(make_layer(part, uneven, apply_router_weight_on_input=True, top_k=1))
    for quant in ("fp8_w8a8_channel", "int8_w8a8_channel", "int4_w4a16_group:group=8"):
        if part != BATCHED or quant != "int8_w8a8_channel":
            layers.append(make_layer(part, uneven, dtype=BF16, quant=quant))
    if part != REPLICATED:
        layers.append(make_layer(part, uneven, dtype=BF16, quant="fp8_w8a8_tensor"))
    assert_exact(pool, layers)


@pytest.mark.parametrize("part", [ALL2ALL, BATCHED])
def test_a_block_for_each_rank_matches_the_float64_reference(pool: RankPool, part: str) -> None:
    world = pool.world_size
    uneven = tuple(range(3, 3 + world))
    limit = {"max_received": world * max(uneven)}  # less than world * problem.tokens
    routings = ("uniform", "skips", "out_of_range", "duplicates", "all_to_one")
    layers = [make_layer(part, uneven, routing=routing, **limit) for routing in routings]
    linear = Placement.linear(world + 3, world)
    copies = linear.with_copies({0: (world - 1,), world + 2: tuple(range(world - 1))})
    layers.append(make_layer(part, uneven, copies, experts=copies.experts, **limit))
    layers.append(make_layer(part, uneven, dtype=BF16, quant="fp8_w8a8_channel", **limit))
    assert_exact(pool, layers)


@pytest.mark.parametrize("part", ALL_PARTS)
def test_outputs_equal_those_with_counted_rows(pool: RankPool, part: str) -> None:
    layer = make_layer(part, tuple(range(3, 3 + pool.world_size)))
    fixed = pool.run(call_layers, (layer,))
    counted = pool.run(call_layers, (layer,), True)
    for ((fixed_out, _),), ((counted_out, _),) in zip(fixed, counted, strict=True):
        assert torch.equal(fixed_out, counted_out)


def count_handshakes(rank: int, world: int, group: object, layer: Layer, by_manager: bool):
    """Return outputs and numbers of tokens of several calls, and the handshakes of the host."""
    calls = []
    exchange_metadata = handshake.exchange_metadata
    device_handshake.exchange_metadata = lambda *args, **options: (
        calls.append("host"),
        exchange_metadata(*args, **options),
    )
    try:
        manager = TorchGroup(group, checked=not by_manager)
        problem = replace(layer.problem(rank), graph=not by_manager)
        experts = layer.experts_part
        if not by_manager:  # A graph needs experts that can be captured.
            experts = "BatchedTritonExperts" if layer.part == BATCHED else "TritonExperts"
        kernel = make_kernel(layer.part, experts, problem, group=manager, poison=True)
        inputs, plan = layer.inputs_of(rank), kernel.plan()
        outputs, counts = [], []
        for count in (3, 1, 0, 2):
            tokens = count if layer.part == REPLICATED else (count + rank) % 4
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
@pytest.mark.parametrize("part", ALL_PARTS)
def test_the_host_exchanges_metadata_only_once(pool: RankPool, part: str, by_manager: bool) -> None:
    layer = make_layer(part, (4,) * pool.world_size)
    exact = layer.exact()
    for rank, (outputs, counts, calls) in enumerate(pool.run(count_handshakes, layer, by_manager)):
        assert calls == ["host"]
        start = layer.rows(rank).start
        for out, tokens in zip(outputs, counts, strict=True):
            expected = exact[start : start + tokens].float()
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def fail_second_call(rank: int, world: int, group: object, layer: Layer, failure: str):
    """Return whether the first output is finite, and the output and the errors of later calls."""
    manager = TorchGroup(group, timeout_s=5.0, checked=False)
    kernel = layer.kernel(rank, manager)
    inputs = layer.inputs_of(rank)
    first = kernel(inputs.x_TH, inputs.weights, inputs.routing)
    x_TH, routing = inputs.x_TH, inputs.routing
    other_kernel = layer.kernel(rank, manager) if failure == "layer" else kernel
    if failure == "layer":
        other_kernel(inputs.x_TH, inputs.weights, inputs.routing)
    if rank == 1 and failure == "refused":
        x_TH = x_TH.double()
    if rank == 1 and failure == "layer":
        kernel = other_kernel
    if rank == 1 and failure == "call":
        get_handshake(kernel).counter.calls.add_(1)
    if rank == 1 and failure == "rows":
        routing = replace(routing, topk_ids_TK=torch.zeros_like(routing.topk_ids_TK))
    errors: list[str] = []
    out = None
    try:
        out = kernel(x_TH, inputs.weights, routing)
    except ModularKernelError as error:
        errors.append(f"{type(error).__name__}: {error}")
    for _ in range(2):
        try:
            kernel(inputs.x_TH, inputs.weights, inputs.routing)
        except CommunicationError as error:
            errors.append(str(error))
    return bool(first.isfinite().all()), out, errors


def get_handshake(kernel) -> device_handshake.DeviceHandshake:
    part = kernel.prepare_finalize
    fixed = getattr(part, "fixed_capacity", None)
    return part._device_handshake if fixed is None else fixed._handshake


@pytest.mark.parametrize("part", ALL_PARTS)
@pytest.mark.parametrize(
    ("failure", "got"),
    [
        ("refused", "rank 1 refused its call 2 of layer 1 with DtypeError"),
        ("layer", "layer 1, 2"),
        ("call", "call 2, 3"),
    ],
)
def test_the_output_of_a_failed_call_is_nan_and_the_next_call_raises(
    pool: RankPool, part: str, failure: str, got: str
) -> None:
    layer = make_layer(part, (4,) * pool.world_size)
    for rank, (first_is_finite, out, errors) in enumerate(
        pool.run(fail_second_call, layer, failure)
    ):
        assert first_is_finite
        if rank == 1 and failure == "refused":
            assert out is None
            assert errors.pop(0).startswith("DtypeError")
        elif part == REPLICATED:  # On a CPU, this part raises before the all-reduce.
            assert out is None
        else:
            assert out.isnan().all()
        assert len(errors) in (2, 3)
        assert got in errors[0], errors
        assert "peer 1" in errors[0] or rank == 1
        assert all("a manager that failed before" in error for error in errors[1:])


@pytest.mark.parametrize("part", [ALL2ALL, BATCHED])
def test_too_many_rows_for_a_rank_fail_the_call(pool: RankPool, part: str) -> None:
    world = pool.world_size
    placement = Placement.linear(world, world)
    layer = make_layer(
        part, (4,) * world, placement, experts=world, top_k=1, max_received=3 * world
    )
    reports = pool.run(send_too_many_rows, layer)
    for first_is_finite, out, error in reports:
        assert first_is_finite
        assert out.isnan().all()
        assert "4 rows for one rank from rank 1" in error
        assert "need 0 to 3" in error


def send_too_many_rows(rank: int, world: int, group: object, layer: Layer):
    kernel = layer.kernel(rank, TorchGroup(group, timeout_s=5.0, checked=False))
    inputs = layer.inputs_of(rank)
    even_ids = torch.arange(len(inputs.x_TH), dtype=torch.int32)[:, None] % world
    first = kernel(inputs.x_TH, inputs.weights, replace(inputs.routing, topk_ids_TK=even_ids))
    ids = torch.zeros_like(even_ids) if rank == 1 else even_ids
    out = kernel(inputs.x_TH, inputs.weights, replace(inputs.routing, topk_ids_TK=ids))
    try:
        kernel.prepare_finalize.check()
    except CommunicationError as error:
        return bool(first.isfinite().all()), out, str(error)
    raise AssertionError("no error")


def test_checked_must_be_a_bool(pool: RankPool) -> None:
    reports = pool.run(try_checked, "yes")
    assert all("checked" in report for report in reports)


def try_checked(rank: int, world: int, group: object, checked: object) -> str:
    try:
        TorchGroup(group, checked=checked)
    except ModularKernelError as error:
        return str(error)
    return ""


VALID_HEADER = (3, 7, 99, 4, 2, NOT_REFUSED, 1)  # in the order of FIELDS
CAPACITY = Capacity(tokens=5, rows=3)


def verify_headers(headers: list[tuple[int, ...]], capacity: Capacity = CAPACITY) -> Failure | None:
    status = DeviceStatus(len(headers), torch.device("cpu"))
    status.verify(torch.tensor(headers), torch.tensor(headers[0]), status.limits(capacity))
    failure = status.failure()
    assert bool(status.failed) == (failure is not None)
    return failure


@pytest.mark.parametrize(
    "header",
    [
        (4, 7, 99, 4, 2, NOT_REFUSED, 1),
        (3, 8, 99, 4, 2, NOT_REFUSED, 1),
        (3, 7, 98, 4, 2, NOT_REFUSED, 1),
        (3, 7, 99, 6, 2, NOT_REFUSED, 1),
        (3, 7, 99, -1, 2, NOT_REFUSED, 1),
        (3, 7, 99, 4, 4, NOT_REFUSED, 1),
        (3, 7, 99, 4, -1, NOT_REFUSED, 1),
        (3, 7, 99, 4, 2, 0, 1),
    ],
)
def test_each_field_of_a_header_is_verified(header: tuple[int, ...]) -> None:
    failure = verify_headers([VALID_HEADER, VALID_HEADER, header])
    assert failure == Failure((VALID_HEADER, VALID_HEADER, header), CAPACITY)


def test_tokens_may_differ_unless_they_must_be_equal() -> None:
    other_header = (3, 7, 99, 1, 0, NOT_REFUSED, 1)
    assert verify_headers([VALID_HEADER, other_header]) is None
    equal_tokens = replace(CAPACITY, equal_tokens=True)
    assert verify_headers([VALID_HEADER, VALID_HEADER], equal_tokens) is None
    assert verify_headers([VALID_HEADER, other_header], equal_tokens) == Failure(
        (VALID_HEADER, other_header), equal_tokens
    )


def test_the_first_failure_is_kept() -> None:
    status, first_invalid, second_invalid = (
        DeviceStatus(2, torch.device("cpu")),
        (*VALID_HEADER[:3], 9, 2, -1, 1),
        (1, *VALID_HEADER[1:]),
    )
    for second in (VALID_HEADER, first_invalid, second_invalid, VALID_HEADER):
        headers_WF = torch.tensor([VALID_HEADER, second])
        status.verify(headers_WF, headers_WF[0], status.limits(CAPACITY))
    assert status.failure() == Failure((VALID_HEADER, first_invalid), CAPACITY)


def test_headers_of_an_earlier_call_are_refused() -> None:
    status = DeviceStatus(2, torch.device("cpu"))
    local_header_F = torch.tensor((3, 8, *VALID_HEADER[2:]))
    status.verify(
        torch.tensor([VALID_HEADER, VALID_HEADER]), local_header_F, status.limits(CAPACITY)
    )
    assert status.failure() == Failure((VALID_HEADER, VALID_HEADER), CAPACITY)


def differ_in_tokens(rank: int, world: int, group: object, layer: Layer) -> str:
    kernel = layer.kernel(rank, TorchGroup(group, timeout_s=3.0, checked=False))
    inputs = layer.inputs_of(rank)
    kernel(inputs.x_TH, inputs.weights, inputs.routing)
    rows = slice(0, len(inputs.x_TH) - rank)
    routing = Routing(inputs.routing.topk_weights_TK[rows], inputs.routing.topk_ids_TK[rows])
    try:
        kernel(inputs.x_TH[rows], inputs.weights, routing)
        kernel.prepare_finalize.check()
    except CommunicationError as error:
        return str(error)
    return ""


def test_replicated_tokens_that_differ_raise_on_every_rank(pool: RankPool) -> None:
    layer = make_layer(REPLICATED, (4,) * pool.world_size)
    assert all(pool.run(differ_in_tokens, layer))


@pytest.mark.parametrize("part", [GATHERED, ALL2ALL])
def test_a_refused_call_with_one_scale_for_all_ranks_raises(pool: RankPool, part: str) -> None:
    layer = make_layer(part, (4,) * pool.world_size, dtype=BF16, quant="fp8_w8a8_tensor")
    for rank, (first_is_finite, out, errors) in enumerate(
        pool.run(fail_second_call, layer, "refused")
    ):
        assert first_is_finite
        if rank == 1:
            errors.pop(0)
        else:
            assert out.isnan().all()
        assert "rank 1 refused its call 2 of layer 1 with DtypeError" in errors[0]


def call_with_nan(rank: int, world: int, group: object, layer: Layer) -> torch.Tensor:
    kernel, inputs = layer.kernel(rank, TorchGroup(group, checked=False)), layer.inputs_of(rank)
    x_TH = inputs.x_TH.clone()
    if rank == 1:
        x_TH[0, 0] = float("nan")
    return kernel(x_TH, inputs.weights, inputs.routing)


@pytest.mark.parametrize("part", [GATHERED, ALL2ALL])
def test_nan_on_one_rank_makes_the_scale_of_all_ranks_nan(pool: RankPool, part: str) -> None:
    layer = make_layer(part, (4,) * pool.world_size, dtype=BF16, quant="fp8_w8a8_tensor")
    assert all(bool(out.isnan().all()) for out in pool.run(call_with_nan, layer))


@pytest.mark.parametrize("part", [ALL2ALL, BATCHED])
def test_outputs_match_if_rows_fill_the_capacity(pool: RankPool, part: str) -> None:
    world = pool.world_size
    assert_exact(
        pool,
        [make_layer(part, (4,) * world, routing="all_to_one", top_k=1, max_received=4 * world)],
    )


SCENARIOS = [
    scenario
    for part in ALL_PARTS
    for scenario in list_scenarios(part, "gloo", checked=False)
    # Only one part is tested at every point.
    if part == ALL2ALL or scenario.point in ("", "in dispatch")
]


@pytest.mark.share(3)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: f"{scenario.part}-{scenario}")
def test_faults_raise_on_every_other_rank(fault_pool: RankPool, scenario: Scenario) -> None:
    assert run_scenario(scenario, fault_pool).findings() == []


def catch_error(call) -> Exception | None:
    kernel, arguments = call
    try:
        kernel(*arguments)
    except CommunicationError as error:
        return error
    return None


@pytest.mark.parametrize("part", [GATHERED, ALL2ALL])
def test_another_order_of_finishing_fails_a_later_call(pool: RankPool, part: str) -> None:
    layers = (make_layer(part, (4,) * pool.world_size), make_layer(part, (3,) * pool.world_size))
    for error in pool.run(finish_two_layers, layers):
        assert "a different order of earlier exchanges" in error


def finish_two_layers(rank: int, world: int, group: object, layers: tuple[Layer, ...]) -> str:
    """Finish the calls of two layers in reverse order on rank 0."""
    manager = TorchGroup(group, timeout_s=5.0, checked=False)
    problem = layers[0].problem(rank)
    kernels = [make_kernel(layers[0].part, "TorchExperts", problem, group=manager) for _ in layers]
    inputs = layers[0].inputs_of(rank)
    arguments = inputs.x_TH, inputs.weights, inputs.routing
    for kernel in kernels:
        kernel(*arguments)
    pending = [kernel.start(*arguments) for kernel in kernels]
    for call in pending if rank else reversed(pending):
        call.finish()
    errors = map(catch_error, [(kernels[0], arguments)] * 2)
    return next((str(error) for error in errors if error is not None), "")


def interrupt_second_call(rank: int, world: int, group: object, layer: Layer) -> tuple[str, float]:
    kernel = layer.kernel(rank, TorchGroup(group, timeout_s=20.0, checked=False))
    inputs = layer.inputs_of(rank)
    kernel(inputs.x_TH, inputs.weights, inputs.routing)
    if rank == 1:

        def raise_interrupt(*_args, **_options):
            raise KeyboardInterrupt

        kernel.experts.apply = raise_interrupt
    start_time = time.monotonic()
    try:
        kernel(inputs.x_TH, inputs.weights, inputs.routing)
    except (CommunicationError, KeyboardInterrupt) as error:
        return type(error).__name__, time.monotonic() - start_time
    return "", 0.0


@pytest.mark.parametrize("part", ALL_PARTS)
def test_an_interrupted_call_is_reported_at_once(pool: RankPool, part: str) -> None:
    reports = pool.run(interrupt_second_call, make_layer(part, (4,) * pool.world_size))
    names = [name for name, _ in reports]
    assert names == ["CommunicationError", "KeyboardInterrupt", "CommunicationError"][: len(names)]
    assert all(seconds < 10 for _, seconds in reports)


def fail_between_agreement_and_rows(rank: int, world: int, group: object, layer: Layer) -> str:
    """Make a first call that fails on rank 1 after the handshake. Return the error."""
    kernel = layer.kernel(rank, TorchGroup(group, timeout_s=20.0, checked=False))
    inputs, part = layer.inputs_of(rank), kernel.prepare_finalize

    def fail(*_args, **_options):
        raise torch.OutOfMemoryError("no memory")

    if rank == 1:
        part.fixed_capacity.send = fail
    try:
        kernel(inputs.x_TH, inputs.weights, inputs.routing)
    except (CommunicationError, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("part", [GATHERED, ALL2ALL, BATCHED])
def test_a_first_call_that_fails_after_the_agreement_raises_on_all_ranks(
    pool: RankPool, part: str
) -> None:
    reports = pool.run(fail_between_agreement_and_rows, make_layer(part, (4,) * pool.world_size))
    for rank, error in enumerate(reports):
        if rank == 1:
            assert error == "OutOfMemoryError: no memory"
        else:
            assert "aborted its call: OutOfMemoryError" in error
            assert "peer 1" in error


def call_in_inference_mode_first(rank: int, world: int, group: object, layer: Layer) -> bool:
    kernel = layer.kernel(rank, TorchGroup(group, checked=False))
    inputs = layer.inputs_of(rank)
    with torch.inference_mode():
        first = kernel(inputs.x_TH, inputs.weights, inputs.routing).clone()
    return torch.equal(first, kernel(inputs.x_TH, inputs.weights, inputs.routing))


@pytest.mark.parametrize("part", ALL_PARTS)
def test_the_first_call_may_run_in_inference_mode(pool: RankPool, part: str) -> None:
    assert all(pool.run(call_in_inference_mode_first, make_layer(part, (4,) * pool.world_size)))


def test_fewer_rows_than_ranks_are_refused(pool: RankPool) -> None:
    layer = make_layer(ALL2ALL, (4,) * pool.world_size, max_received=1)
    for error in pool.run(try_layer, layer):
        assert "max_received: got 1, need >=" in error


def try_layer(rank: int, world: int, group: object, layer: Layer) -> str:
    try:
        layer.kernel(rank, TorchGroup(group, checked=False))
    except ModularKernelError as error:
        return str(error)
    return ""


def expire_and_check(rank: int, world: int, group: object, layer: Layer) -> tuple[bool, str]:
    manager = TorchGroup(group, timeout_s=2.0, checked=False)
    kernel, inputs = layer.kernel(rank, manager), layer.inputs_of(rank)
    kernel(inputs.x_TH, inputs.weights, inputs.routing)
    manager.device_status.mark_failed()
    manager.close_after_timeout(3.0)
    try:
        kernel.prepare_finalize.check()
    except CommunicationError as error:
        return bool(manager.device_status.failed), str(error)
    return False, ""


def test_check_raises_after_a_call_that_did_not_end(pool: RankPool) -> None:
    for has_failed, error in pool.run(
        expire_and_check, make_layer(ALL2ALL, (4,) * pool.world_size)
    ):
        assert has_failed
        assert "a manager that failed before" in error


def expire_in_two_threads(rank: int, world: int, group: object) -> tuple[int, bool]:
    """Detect a failure in two threads at once. Return how many times it is published."""
    manager = TorchGroup(group, timeout_s=2.0, checked=False)
    publish, find_sentence = (
        manager._failure_records.publish_and_collect,
        torch_group.first_sentence,
    )
    both_failed, published = threading.Barrier(2), []

    def wait_for_other_thread(error: RuntimeError) -> str:
        with suppress(threading.BrokenBarrierError):
            both_failed.wait(1.0)
        return find_sentence(error)

    manager._failure_records.publish_and_collect = lambda *arguments: (
        published.append(arguments),
        publish(*arguments),
    )[1]
    torch_group.first_sentence = wait_for_other_thread
    try:
        threads = [
            threading.Thread(target=manager.close_after_timeout, args=(3.0,)) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch_group.first_sentence = find_sentence
    return len(published), manager.failed


def test_one_of_two_threads_determines_the_failed_ranks(pool: RankPool) -> None:
    assert pool.run(expire_in_two_threads) == [(1, True)] * pool.world_size


def call_layers_of_other_sizes(
    rank: int, world: int, group: object, layers: tuple[Layer, Layer], case: str
) -> tuple[str, list[torch.Tensor]]:
    """Call a different layer on rank 1. Return the error and the outputs of later calls."""
    manager = TorchGroup(group, timeout_s=5.0, checked=False)
    kernels = [layer.kernel(rank, manager) for layer in layers]
    inputs_by_layer = [layer.inputs_of(rank) for layer in layers]

    def call(index: int, x_TH: torch.Tensor | None = None) -> torch.Tensor:
        inputs = inputs_by_layer[index]
        x_TH = inputs.x_TH if x_TH is None else x_TH
        return kernels[index](x_TH, inputs.weights, inputs.routing)

    call(0)
    if case == "later call":
        call(1)
    other_x_TH = inputs_by_layer[1].x_TH.double() if case == "refusal" else None
    errors = []
    try:
        call(1, other_x_TH) if rank == 1 else call(0)
    except ModularKernelError as error:
        errors.append(f"{type(error).__name__}: {error}")
    outputs = [call(0), call(1)]
    for kernel in kernels:
        kernel.prepare_finalize.check()
    return "".join(errors), outputs


# Later calls with replicated tokens exchange only headers, which have the same size in all layers.
@pytest.mark.parametrize(
    ("parts", "case"),
    [
        (parts, case)
        for parts in (*((part, part) for part in ALL_PARTS), (GATHERED, ALL2ALL))
        for case in ("first call", "later call", "refusal")
        if (parts[0], case) != (REPLICATED, "later call")
    ],
)
def test_layers_of_other_sizes_raise_on_every_rank(
    pool: RankPool, parts: tuple[str, str], case: str
) -> None:
    world = pool.world_size
    layers = make_layer(parts[0], (2,) * world), make_layer(parts[1], (9,) * world)
    reports = pool.run(call_layers_of_other_sizes, layers, case)
    for rank, (error, _) in enumerate(reports):
        if case == "refusal" and rank == 1:
            assert error.startswith("DtypeError")
        elif case == "refusal":
            assert error.startswith("CommunicationError: ranks of one call")
            assert "rank 1 refused its call 1 of layer 2 with DtypeError" in error
        else:
            assert error.startswith("CommunicationError: ranks of one call")
            assert "layer 1, 2" in error
            assert case == "first call" or "blocks of another size" in error
    for index, layer in enumerate(layers):
        outputs = [outputs[index] for _, outputs in reports]
        assert layer.compare(outputs).ok
