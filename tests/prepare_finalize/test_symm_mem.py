"""SymmMemPrepareAndFinalize on the ranks of one machine: slots, faults and refusals."""

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ep_layers import Layer, call_layer

from modular_kernel.catalog import check, make_kernel, this_machine
from modular_kernel.errors import (
    CommunicationError,
    DeviceError,
    DtypeError,
    ModularKernelError,
    UnsupportedError,
)
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.testing.ranks.pool import RankPool
from prepare_finalize import SymmetricGroup

PART = "SymmMemPrepareAndFinalize"
MACHINE = this_machine(device="cpu")
pytestmark = pytest.mark.skipif(
    not MACHINE.interpreter, reason="needs the Triton interpreter on a CPU"
)
Pool = Callable[[int], RankPool]
LAYER = Layer(PART, (3, 4))


def catch_error(call: Callable[[], object]) -> ModularKernelError | None:
    try:
        call()
    except ModularKernelError as error:
        return error
    return None


def make_layer(rank: int, group: object, timeout_s: float = 5.0):
    manager = SymmetricGroup(group, timeout_s=timeout_s)
    kernel = make_kernel(PART, "TorchExperts", LAYER.problem(rank), group=manager, machine=MACHINE)
    arguments = LAYER.inputs_of(rank)
    return kernel, (arguments.x_TH, arguments.weights, arguments.routing)


# -------------------------------------------------------------------------------- calls and slots


def start_three_calls(rank: int, world: int, group: object) -> list:
    kernel, arguments = make_layer(rank, group)
    first, second = kernel.start(*arguments), kernel.start(*arguments)
    third_call_error = catch_error(lambda: kernel.start(*arguments))
    results = [second.finish().clone(), first.finish().clone()]
    handle = first.receive()[1]
    second_finalize_error = catch_error(
        lambda: kernel.prepare_finalize.finalize(
            results[0], handle=handle, reduce=kernel.reduce, out=results[0]
        )
    )
    return [*results, kernel(*arguments), third_call_error, second_finalize_error]


def test_two_calls_are_in_flight_and_a_third_is_refused(rank_pool: Pool) -> None:
    reports = rank_pool(2).run(start_three_calls)
    for index in range(3):
        assert LAYER.compare([report[index] for report in reports]).ok
    for report in reports:
        assert isinstance(report[3], UnsupportedError)
        assert "got 3" in str(report[3])
        assert isinstance(report[4], UnsupportedError)
        assert "the handle of a finished call" in str(report[4])


def call_broken_method(rank: int, world: int, group: object, part: str, method: str) -> list:
    """Let a method raise on every rank in more calls than there are slots. Return the output of
    the next call.
    """
    kernel, arguments = make_layer(rank, group)

    def raise_error(*_args: object, **_kwargs: object) -> None:
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(getattr(kernel, part), method, raise_error)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                kernel(*arguments)
            gc.collect()
    return [kernel(*arguments)]


@pytest.mark.parametrize(
    ("part", "method"),
    [("experts", "apply"), ("prepare_finalize", "tables"), ("prepare_finalize", "local_tokens")],
    ids=["experts", "before-sending", "after-sending"],
)
def test_unfinished_calls_release_their_slots(part: str, method: str, rank_pool: Pool) -> None:
    reports = rank_pool(2).run(call_broken_method, part, method)
    assert LAYER.compare([report[0] for report in reports]).ok


# ------------------------------------------------------------------------------------------ faults


def call_without_rank(rank: int, world: int, group: object, phase: str) -> list:
    """Make a call, then one in which rank 1 misses the dispatch or the combine."""
    kernel, arguments = make_layer(rank, group, timeout_s=0.5)
    expected = kernel(*arguments).clone()
    if rank == 1:
        if phase == "combine":
            kernel.start(*arguments).receive()
        return [expected]
    out, start = torch.zeros_like(expected), time.monotonic()
    first_error = catch_error(lambda: kernel(*arguments, out=out))
    seconds = time.monotonic() - start
    second_error = catch_error(lambda: kernel(*arguments))
    manager = kernel.prepare_finalize.manager
    return [
        expected,
        first_error,
        second_error,
        seconds,
        bool(out.isnan().all()),
        manager.last_calls.json_lines(),
    ]


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_missing_rank_is_named_and_the_output_is_nan(rank_pool: Pool, phase: str) -> None:
    reports = rank_pool(2).run(call_without_rank, phase)
    expected, first_error, second_error, seconds, is_nan, lines = reports[0]
    assert LAYER.compare([expected, reports[1][0]]).ok
    assert isinstance(first_error, CommunicationError)
    assert (first_error.phase, first_error.peers, first_error.rank) == (phase, (1,), 0)
    assert str(second_error) == str(first_error)
    assert is_nan
    assert seconds < 10
    assert phase in lines


def repeat_refused_call(rank: int, world: int, group: object, caller: str) -> list:
    """Make a call before and after calls that rank 1 refuses. Return outputs and errors."""
    kernel, (x_TH, *others) = make_layer(rank, group)
    call = kernel.plan() if caller == "plan" else kernel
    expected, errors = call(x_TH, *others).clone(), []
    if rank == 1:
        errors = [catch_error(lambda: call(x_TH.double(), *others)) for _ in range(3)]
    repeated = call(x_TH, *others).clone()
    kernel.prepare_finalize.check()
    return [expected, repeated, call(x_TH, *others), errors]


@pytest.mark.parametrize("caller", ["kernel", "plan"])
def test_a_refused_call_can_be_repeated_within_the_timeout(rank_pool: Pool, caller: str) -> None:
    """Other ranks are not notified. They wait, because a refused call does not change the number of
    calls.
    """
    reports = rank_pool(2).run(repeat_refused_call, caller)
    for index in range(3):
        assert LAYER.compare([report[index] for report in reports]).ok
    assert [type(error) for error in reports[1][3]] == [DtypeError] * 3


def make_different_layers(rank: int, world: int, group: object) -> ModularKernelError | None:
    problem = replace(LAYER.problem(rank), hidden=48 if rank else 64)
    manager = SymmetricGroup(group, timeout_s=5)
    return catch_error(
        lambda: make_kernel(PART, "TorchExperts", problem, group=manager, machine=MACHINE)
    )


def test_ranks_that_call_different_layers_raise_before_communication(rank_pool: Pool) -> None:
    for rank, error in enumerate(rank_pool(2).run(make_different_layers)):
        assert isinstance(error, CommunicationError)
        assert (error.phase, error.peers) == ("construct", (1 - rank,))
        assert "H64" in str(error)
        assert "H48" in str(error)


def call_after_destroy(rank: int, world: int, group: object) -> ModularKernelError | None:
    kernel, arguments = make_layer(rank, group)
    kernel.prepare_finalize.manager.destroy()
    return catch_error(lambda: kernel(*arguments))


def test_use_after_destroy_is_refused(rank_pool: Pool) -> None:
    assert all(
        "a destroyed manager" in str(error) for error in rank_pool(2).run(call_after_destroy)
    )


def check_other_device(rank: int, world: int, group: object) -> ModularKernelError | None:
    manager = SymmetricGroup(group)
    manager.check_device("cpu")
    return catch_error(lambda: manager.check_device("cuda"))


def test_tensors_of_another_device_are_refused(rank_pool: Pool) -> None:
    for error in rank_pool(2).run(check_other_device):
        assert isinstance(error, DeviceError)
        assert "got cuda, need cpu: the group's backend is gloo" in str(error)


def connect_alone(rank: int, world: int, group: object) -> ModularKernelError | None:
    if rank == 1:
        return None
    return catch_error(lambda: SymmetricGroup(group, timeout_s=0.3))


def allocate_alone(rank: int, world: int, group: object) -> ModularKernelError | None:
    manager = SymmetricGroup(group, timeout_s=3.0)  # Both ranks must connect within this time.
    if rank == 1:
        return None
    return catch_error(lambda: manager.allocate_heap(256, "nothing", lambda _heap: None))


@pytest.mark.parametrize("call", [connect_alone, allocate_alone])
def test_memory_is_allocated_on_all_ranks_or_none(rank_pool: Pool, call: Any) -> None:
    error = rank_pool(2).run(call)[0]
    assert isinstance(error, CommunicationError)
    assert (error.phase, error.peers) == ("construct", (1,))


def test_outputs_with_activations_quantized_by_the_experts(rank_pool: Pool) -> None:
    """Rows are exchanged without quantization. The experts quantize them."""
    fields = {"quant": "nvfp4_w4a4", "dtype": torch.bfloat16}
    layer = replace(LAYER, fields=fields)
    reports = rank_pool(2).run(call_layer, layer)
    assert layer.compare([out for out, _ in reports]).ok


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"quant": "fp8_w8a8_tensor"}, "scale_of_all_ranks"),
        ({"parallel": Parallel(1)}, "world_size"),
        ({"parallel": Parallel(16)}, "world_size"),
        ({"expert_map": True}, "expert_map"),
    ],
)
def test_unsupported_problems_are_refused(change: dict[str, object], rule: str) -> None:
    problem = Problem(4, 256, 256, experts=16, top_k=2, parallel=Parallel(2))
    assert check(PART, "TritonExperts", problem, MACHINE).ok
    rejections = check(PART, "TritonExperts", replace(problem, **change), MACHINE).rejections
    assert rule in [rejection.rule for rejection in rejections]
