"""SymmMemPrepareAndFinalize on the ranks of one machine: slots, faults, and what is refused."""

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
pytestmark = pytest.mark.skipif(not MACHINE.interpreter, reason="interpreted ranks on a CPU")
Pool = Callable[[int], RankPool]
LAYER = Layer(PART, (3, 4))


def error_of(call: Callable[[], object]) -> ModularKernelError | None:
    try:
        call()
    except ModularKernelError as error:
        return error
    return None


def made(rank: int, group: object, timeout_s: float = 5.0):
    manager = SymmetricGroup(group, timeout_s=timeout_s)
    kernel = make_kernel(PART, "TorchExperts", LAYER.problem(rank), group=manager, machine=MACHINE)
    given = LAYER.inputs_of(rank)
    return kernel, (given.x_TH, given.weights, given.routing)


# -------------------------------------------------------------------------------- calls and slots


def two_and_then_three(rank: int, world: int, group: object) -> list:
    kernel, given = made(rank, group)
    first, second = kernel.start(*given), kernel.start(*given)
    refused = error_of(lambda: kernel.start(*given))
    results = [second.finish().clone(), first.finish().clone()]
    handle = first.receive()[1]
    again = error_of(
        lambda: kernel.prepare_finalize.finalize(
            results[0], handle=handle, reduce=kernel.reduce, out=results[0]
        )
    )
    return [*results, kernel(*given), refused, again]


def test_two_calls_are_in_flight_and_a_third_is_refused(rank_pool: Pool) -> None:
    reports = rank_pool(2).run(two_and_then_three)
    for index in range(3):
        assert LAYER.compare([report[index] for report in reports]).ok
    for report in reports:
        assert isinstance(report[3], UnsupportedError)
        assert "got 3" in str(report[3])
        assert isinstance(report[4], UnsupportedError)
        assert "a finished call's" in str(report[4])


def broken(rank: int, world: int, group: object, part: str, method: str) -> list:
    """A method raises on every rank, more often than there are slots; then it works again."""
    kernel, given = made(rank, group)

    def breaks(*_args: object, **_kwargs: object) -> None:
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(getattr(kernel, part), method, breaks)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                kernel(*given)
            gc.collect()
    return [kernel(*given)]


@pytest.mark.parametrize(
    ("part", "method"),
    [("experts", "apply"), ("prepare_finalize", "tables"), ("prepare_finalize", "local_tokens")],
    ids=["experts", "before-sending", "after-sending"],
)
def test_unfinished_calls_release_their_slots(part: str, method: str, rank_pool: Pool) -> None:
    reports = rank_pool(2).run(broken, part, method)
    assert LAYER.compare([report[0] for report in reports]).ok


# ------------------------------------------------------------------------------------------ faults


def absent(rank: int, world: int, group: object, phase: str) -> list:
    """A correct call; then rank 1 misses a call, or only its dispatch."""
    kernel, given = made(rank, group, timeout_s=0.5)
    good = kernel(*given).clone()
    if rank == 1:
        if phase == "combine":
            kernel.start(*given).receive()
        return [good]
    out, start = torch.zeros_like(good), time.monotonic()
    first = error_of(lambda: kernel(*given, out=out))
    seconds = time.monotonic() - start
    again = error_of(lambda: kernel(*given))
    manager = kernel.prepare_finalize.manager
    return [good, first, again, seconds, bool(out.isnan().all()), manager.last_calls.json_lines()]


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_missing_rank_is_named_and_the_output_is_nan(rank_pool: Pool, phase: str) -> None:
    reports = rank_pool(2).run(absent, phase)
    good, first, again, seconds, nan, lines = reports[0]
    assert LAYER.compare([good, reports[1][0]]).ok
    assert isinstance(first, CommunicationError)
    assert (first.phase, first.peers, first.rank) == (phase, (1,), 0)
    assert str(again) == str(first)
    assert nan
    assert seconds < 10
    assert phase in lines


def retried(rank: int, world: int, group: object, by: str) -> list:
    """Rank 1 makes several refused calls, and then a valid one."""
    kernel, (x_TH, *rest) = made(rank, group)
    call = kernel.plan() if by == "plan" else kernel
    good, refused = call(x_TH, *rest).clone(), []
    if rank == 1:
        refused = [error_of(lambda: call(x_TH.double(), *rest)) for _ in range(3)]
    again = call(x_TH, *rest).clone()
    kernel.prepare_finalize.check()
    return [good, again, call(x_TH, *rest), refused]


@pytest.mark.parametrize("by", ["kernel", "plan"])
def test_a_refused_call_can_be_repeated_within_the_timeout(rank_pool: Pool, by: str) -> None:
    """The others are not notified: they wait for the number of the call, which a refusal does not
    use up.
    """
    reports = rank_pool(2).run(retried, by)
    for index in range(3):
        assert LAYER.compare([report[index] for report in reports]).ok
    assert [type(error) for error in reports[1][3]] == [DtypeError] * 3


def disagreeing(rank: int, world: int, group: object) -> ModularKernelError | None:
    problem = replace(LAYER.problem(rank), hidden=48 if rank else 64)
    manager = SymmetricGroup(group, timeout_s=5)
    return error_of(
        lambda: make_kernel(PART, "TorchExperts", problem, group=manager, machine=MACHINE)
    )


def test_ranks_that_call_different_layers_raise_before_communication(rank_pool: Pool) -> None:
    for rank, error in enumerate(rank_pool(2).run(disagreeing)):
        assert isinstance(error, CommunicationError)
        assert (error.phase, error.peers) == ("construct", (1 - rank,))
        assert "H64" in str(error)
        assert "H48" in str(error)


def destroyed(rank: int, world: int, group: object) -> ModularKernelError | None:
    kernel, given = made(rank, group)
    kernel.prepare_finalize.manager.destroy()
    return error_of(lambda: kernel(*given))


def test_use_after_destroy_is_refused(rank_pool: Pool) -> None:
    assert all("a destroyed manager" in str(error) for error in rank_pool(2).run(destroyed))


def elsewhere(rank: int, world: int, group: object) -> ModularKernelError | None:
    manager = SymmetricGroup(group)
    manager.check_device("cpu")
    return error_of(lambda: manager.check_device("cuda"))


def test_tensors_of_another_device_are_refused(rank_pool: Pool) -> None:
    for error in rank_pool(2).run(elsewhere):
        assert isinstance(error, DeviceError)
        assert "got cuda, need cpu: the group's backend is gloo" in str(error)


def lonely(rank: int, world: int, group: object) -> ModularKernelError | None:
    if rank == 1:
        return None
    return error_of(lambda: SymmetricGroup(group, timeout_s=0.3))


def without_the_other(rank: int, world: int, group: object) -> ModularKernelError | None:
    manager = SymmetricGroup(group, timeout_s=3.0)  # both ranks must be in time here
    if rank == 1:
        return None
    return error_of(lambda: manager.allocate_heap(256, "nothing", lambda _heap: None))


@pytest.mark.parametrize("lonely", [lonely, without_the_other])
def test_memory_is_allocated_on_all_ranks_or_none(rank_pool: Pool, lonely: Any) -> None:
    error = rank_pool(2).run(lonely)[0]
    assert isinstance(error, CommunicationError)
    assert (error.phase, error.peers) == ("construct", (1,))


def test_scales_of_experts_stay_with_the_weights(rank_pool: Pool) -> None:
    """Rows are exchanged unquantized; the experts quantize them."""
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
    found = check(PART, "TritonExperts", replace(problem, **change), MACHINE).rejections
    assert rule in [rejection.rule for rejection in found]
