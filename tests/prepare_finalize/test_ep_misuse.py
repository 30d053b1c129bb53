"""Managers and parts over torch.distributed refuse misuse and unsupported problems."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ep_layers import ALL2ALL, PARTS, REPLICATED, Layer
from rank_fixtures import make_ranks_fixture

from modular_kernel.catalog import check, make_kernel, this_machine
from modular_kernel.errors import (
    CommunicationError,
    ConfigurationError,
    DeviceError,
    ModularKernelError,
    UnsupportedError,
)
from modular_kernel.settings import read_settings
from modular_kernel.spec.problem import Combine, Machine, Parallel, Problem
from modular_kernel.testing.ranks.pool import RankPool
from prepare_finalize import DeepEPGroup, SymmetricGroup, TorchGroup
from prepare_finalize.pplx.group import PplxGroup

two_ranks = make_ranks_fixture(2)


def catch_error(function) -> ModularKernelError | None:
    try:
        function()
    except ModularKernelError as error:
        return error
    return None


def test_use_after_destroy_is_refused(two_ranks: RankPool) -> None:
    for part in PARTS:
        assert (
            two_ranks.run(call_after_destroy, Layer(part, (3, 3)))
            == [UnsupportedError.__name__] * 2
        )


def call_after_destroy(rank: int, world: int, group: object, layer: Layer) -> str:
    kernel, inputs = layer.kernel(rank, group), layer.inputs_of(rank)
    kernel(inputs.x_TH, inputs.weights, inputs.routing)
    kernel.prepare_finalize.destroy()
    kernel.prepare_finalize.destroy()
    error = catch_error(lambda: kernel(inputs.x_TH, inputs.weights, inputs.routing))
    return type(error).__name__


def test_a_part_does_not_destroy_a_given_manager(two_ranks: RankPool) -> None:
    two_ranks.run(destroy_one_of_two_kernels, Layer(ALL2ALL, (3, 3)))


def destroy_one_of_two_kernels(rank: int, world: int, group: object, layer: Layer) -> None:
    manager = TorchGroup(group)
    inputs = layer.inputs_of(rank)
    first, second = layer.kernel(rank, manager), layer.kernel(rank, manager)
    expected = first(inputs.x_TH, inputs.weights, inputs.routing)
    first.prepare_finalize.destroy()
    assert torch.equal(second(inputs.x_TH, inputs.weights, inputs.routing), expected)
    manager.destroy()
    assert isinstance(catch_error(manager.next_step), UnsupportedError)


def test_wrong_groups_are_refused_before_connecting(two_ranks: RankPool) -> None:
    for messages in two_ranks.run(refuse_wrong_groups, Layer(ALL2ALL, (3, 3))):
        size, rank, group_type, device, backend = messages
        assert "process group's size: got 2, need 3" in size
        assert "rank in the process group" in rank
        assert "process group: got int, need a ProcessGroup" in group_type
        assert "tensors of an exchange: got cuda, need cpu: the group's backend is gloo" in device
        assert "process group's backend: got cpu:gloo,cuda:gloo, need nccl for cuda" in backend


def refuse_wrong_groups(rank: int, world: int, group: object, layer: Layer) -> list[str]:
    problem = layer.problem(rank)
    problem_for_three_ranks = replace(problem, parallel=Parallel(3, rank=rank))
    problem_of_other_rank = replace(problem, parallel=Parallel(2, rank=1 - rank))
    manager = TorchGroup(group)
    cuda = Machine("cuda", (9, 0))

    def build(problem: Problem, process_group: object, machine: Machine | None = None):
        return make_kernel(ALL2ALL, "TorchExperts", problem, group=process_group, machine=machine)

    errors = [
        catch_error(lambda: build(problem_for_three_ranks, group)),
        catch_error(lambda: build(problem_of_other_rank, group)),
        catch_error(lambda: build(problem, 7)),
        catch_error(lambda: build(problem, manager, cuda)),
        catch_error(lambda: TorchGroup(group, device="cuda")),
    ]
    error_types = [ConfigurationError, ConfigurationError, ConfigurationError, DeviceError]
    assert [type(error) for error in errors] == [*error_types, ConfigurationError]
    return [str(error) for error in errors]


def test_a_missing_process_group_is_refused() -> None:
    assert not dist.is_initialized()
    problem = Problem(4, 16, 16, 4, 2, parallel=Parallel(2))
    for part in PARTS:
        with pytest.raises(ConfigurationError, match="init_process_group first"):
            make_kernel(part, "TorchExperts", problem, machine=Machine())


@pytest.mark.parametrize("manager_class", [TorchGroup, SymmetricGroup, DeepEPGroup, PplxGroup])
@pytest.mark.parametrize(
    "timeout_s", [0.0, -1, float("inf"), float("nan"), True, "2", [2.0]], ids=repr
)
def test_timeouts_must_be_positive_numbers(manager_class: Any, timeout_s: object) -> None:
    with pytest.raises(ConfigurationError) as exc_info:
        manager_class(None, timeout_s=timeout_s)
    assert str(exc_info.value) == f"timeout_s: got {timeout_s!r}, need seconds > 0"
    with pytest.raises(ConfigurationError, match="init_process_group first"):
        manager_class(None, timeout_s=2)


def test_a_handle_of_another_kernel_is_refused(two_ranks: RankPool) -> None:
    assert (
        two_ranks.run(pass_handle_of_another_kernel, Layer(ALL2ALL, (3, 3)))
        == ["UnsupportedError"] * 2
    )


def pass_handle_of_another_kernel(rank: int, world: int, group: object, layer: Layer) -> str:
    manager, inputs = TorchGroup(group), layer.inputs_of(rank)
    first, second = layer.kernel(rank, manager), layer.kernel(rank, manager)
    _, handle = first.start(inputs.x_TH, inputs.weights, inputs.routing).receive()
    out = torch.empty(3, 48)
    error = catch_error(
        lambda: second.prepare_finalize.finalize(out, handle=handle, reduce=second.reduce, out=out)
    )
    return type(error).__name__


def test_a_rank_that_misses_the_construction_is_named(two_ranks: RankPool) -> None:
    """The other rank raises within the timeout, and the next attempt of both ranks succeeds."""
    error, seconds = two_ranks.run(construct_late, Layer(ALL2ALL, (3, 3)))[0]
    assert "construct of step 0, peer 1" in error
    assert seconds < 1.0 + 2.0


def construct_late(rank: int, world: int, group: object, layer: Layer) -> tuple[str, float]:
    start, message = time.monotonic(), ""
    if rank == 0:
        error = catch_error(lambda: TorchGroup(group, timeout_s=1.0))
        assert isinstance(error, CommunicationError)
        message = str(error)
    seconds = time.monotonic() - start
    dist.barrier(group)
    inputs = layer.inputs_of(rank)
    layer.kernel(rank, group)(inputs.x_TH, inputs.weights, inputs.routing)
    return message, seconds


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("part", PARTS)
def test_problems_are_refused_before_construction(part: str) -> None:
    valid = Problem(4, 16, 16, 4, 2, parallel=Parallel(2))

    def find_violated_rules(problem: Problem) -> set[str]:
        rejections = check(part, "TorchExperts", problem, this_machine(device="cpu")).rejections
        return {rejection.rule for rejection in rejections}

    assert find_violated_rules(valid) == set()
    assert find_violated_rules(replace(valid, parallel=Parallel())) == {"world_size"}
    assert find_violated_rules(replace(valid, combine=Combine.TOPK_WEIGHTED)) == {"keep_topk"}
    assert find_violated_rules(replace(valid, graph=True)) >= {"graph"}
    assert find_violated_rules(replace(valid, expert_map=True)) == {"expert_map"}
    assert find_violated_rules(replace(valid, local_experts=3)) == {"placement"}
    assert find_violated_rules(replace(valid, deterministic=True)) == (
        {"deterministic"} if part == REPLICATED else set()
    )
    assert find_violated_rules(replace(valid, asynchronous=True)) == (
        {"asynchronous"} if part == REPLICATED else set()
    )


def test_the_environment_can_set_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MK_TIMEOUT_S", raising=False)
    assert read_settings().timeout_s == 10.0
    monkeypatch.setenv("MK_TIMEOUT_S", "2.5")
    assert read_settings().timeout_s == 2.5
    for timeout in ("0", "-1", "inf", "nan", "soon"):
        monkeypatch.setenv("MK_TIMEOUT_S", timeout)
        with pytest.raises(ConfigurationError, match="MK_TIMEOUT_S"):
            read_settings()
