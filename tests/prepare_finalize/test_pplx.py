"""PplxPrepareAndFinalize on gloo ranks, with a stand-in that is stricter than the library."""

import time
from collections.abc import Callable
from dataclasses import replace

import pplx_stand_in as stand_in
import pytest
import torch
import torch.distributed as dist

from modular_kernel.catalog import check, make_kernel, this_machine
from modular_kernel.errors import (
    CapacityError,
    CommunicationError,
    ConfigurationError,
    UnsupportedError,
)
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import Combine, Machine, Parallel, Problem
from modular_kernel.tensors import BatchedShape, ExpertWeights, Routing
from modular_kernel.testing.cases.inputs import FencedCopier, make_inputs
from modular_kernel.testing.cases.rank_inputs import inputs_of_rank
from modular_kernel.testing.cases.ranks import RankCase, rank_cases_for
from modular_kernel.testing.input_mutations.over_ranks import sensitivity_ranks
from modular_kernel.testing.input_mutations.rank_operators import RANK_MUTANTS
from modular_kernel.testing.ranks.pool import RankError, RankPool
from modular_kernel.testing.verify.over_ranks import prove_ranks
from prepare_finalize.pplx import part as pplx
from prepare_finalize.pplx.group import PplxGroup, PplxShape

PART = stand_in.PplxOverGloo
MACHINE = this_machine(device="cpu")
GPU = Machine("cuda", (9, 0), frozenset({"triton", "pplx_kernels"}))
PROBLEM = Problem(4, 64, 32, 6, 3, parallel=Parallel(2))
DIFFERING_FIELDS = ("tokens", "hidden", "quant")

Pool = Callable[[int], RankPool]


def list_cases(experts: str, world_size: int) -> list[RankCase]:
    return list(rank_cases_for(PART, experts, MACHINE, world_size).cases)


def format_case_id(case: RankCase) -> str:
    """Return the text of a case without the part."""
    return str(case).partition("+")[2]


QUANTIZED = [
    case for case in list_cases("BatchedTritonExperts", 2) if case.problem.scheme.quantized
]
UNEVEN = [case for case in list_cases("NaiveBatchedExperts", 4) if case.routing == "duplicates"]


@pytest.mark.parametrize(
    "case", list_cases("NaiveBatchedExperts", 2) + QUANTIZED + UNEVEN, ids=format_case_id
)
def test_cases_are_proven(case: RankCase, rank_pool: Pool) -> None:
    proof = prove_ranks(case, rank_pool(case.world_size), MACHINE)
    assert proof.passed, str(proof)


DEFECTS = ("last_expert_lost", "peer_counts_swapped", "rows_reordered", "stale_rows")


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_found(name: str, rank_pool: Pool) -> None:
    mutants = [mutant for mutant in RANK_MUTANTS if mutant.name == name]
    kills = sensitivity_ranks(PART, "NaiveBatchedExperts", rank_pool(2), mutants=mutants)
    assert [str(kill) for kill in kills if not kill.ok or kill.no_effect_reason] == []
    assert kills


def test_ranks_have_a_sink_for_every_pair_of_a_token() -> None:
    for world_size, top_k, num_sinks in ((2, 8, 4), (4, 8, 2), (8, 8, 1), (4, 9, 3)):
        problem = Problem(1, 64, 32, 32, top_k, parallel=Parallel(world_size))
        assert pplx.num_sinks(problem) == num_sinks
        part = PART.__new__(PART)
        part.problem, part._shape = problem, pplx._make_shape(problem)
        assert part.dispatch_shape(1) == BatchedShape(32 // world_size + num_sinks, world_size)
    copies = Placement.linear(6, 2).with_copies({0: (1,)})
    assert pplx._make_shape(replace(PROBLEM, parallel=Parallel(2, copies))).slots == 2 * (4 + 2)


def test_bytes_of_large_buffers_are_computed() -> None:
    shape = PplxShape(128, 256, 8, 7168, row_bytes=7168, scale_bytes=224)
    assert shape.device_bytes(2) == 128 * 128 * 7168 * 4 * 2


def list_refusals(**changes: object) -> list[str]:
    problem = replace(PROBLEM, **changes)
    rejections = check("PplxPrepareAndFinalize", "NaiveBatchedExperts", problem, GPU).rejections
    return [f"[{rejection.rule}] {rejection.got}; {rejection.need}" for rejection in rejections]


def test_unsupported_problems_are_refused() -> None:
    assert list_refusals() == []
    assert list_refusals(hidden=7168, quant="fp8_w8a8_block", experts=256, top_k=8) == []
    assert list_refusals(quant="fp8_w8a8_tensor:static=true") == []
    (one_scale,) = list_refusals(quant="fp8_w8a8_tensor")
    assert one_scale.startswith("[dispatch_quant] fp8_w8a8_tensor: one scale for the tokens of all")
    (refusal,) = list_refusals(hidden=72, quant="int8_w8a8_channel")
    assert refusal == "[hidden] 72 bytes a row; a multiple of 16 bytes"
    (refusal,) = list_refusals(hidden=16, quant="fp8_w8a8_block:block=1x2", intermediate=16)
    assert refusal == "[hidden] 32 bytes of scales a row; at most its 16 bytes"
    assert list_refusals(hidden=24568) == []
    assert list_refusals(hidden=24576) == ["[hidden] 49168 bytes a row; at most 49152 bytes"]
    assert [message.split()[0] for message in list_refusals(hidden=76, dtype=torch.float32)] == [
        "[dtype]",
        "[hidden]",
    ]
    assert list_refusals(parallel=Parallel(16), experts=16)[0].startswith("[world_size] 16; 2 to 8")
    (refusal,) = list_refusals(combine=Combine.TOPK_WEIGHTED)
    assert refusal.startswith("[keep_topk]")
    cpu = check("PplxPrepareAndFinalize", "NaiveBatchedExperts", PROBLEM, Machine("cpu"))
    assert {rejection.rule for rejection in cpu.rejections} == {"device", "package"}


def make_layer(rank: int, manager: object, problem: Problem = PROBLEM):
    problem = replace(problem, parallel=replace(problem.parallel, rank=rank))
    return make_kernel(PART, "NaiveBatchedExperts", problem, group=manager, poison=True)


def make_rank_inputs(
    rank: int, problem: Problem = PROBLEM
) -> tuple[torch.Tensor, ExpertWeights, Routing]:
    device = torch.device("cpu")
    single_rank = replace(problem, parallel=Parallel())
    all_inputs = make_inputs(single_rank, "uniform", device, seed=3, strided=False)
    rank_problem = replace(problem, parallel=replace(problem.parallel, rank=rank))
    rank_inputs = inputs_of_rank(
        all_inputs, slice(0, problem.tokens), rank_problem, FencedCopier(device), strided=False
    )
    return rank_inputs.x_TH, rank_inputs.weights, rank_inputs.routing


def share_and_close(rank: int, world: int, group: object) -> tuple[int, list[str]]:
    """Use two layers of one shape with one manager. Return how many buffers were made, and the
    messages of refusals.
    """
    num_made, messages = stand_in.AllToAll.made, []
    manager = stand_in.GlooGroup(group)
    first, second = make_layer(rank, manager), make_layer(rank, manager)
    arguments = make_rank_inputs(rank)
    expected = first(*arguments)
    assert torch.equal(expected, second(*arguments))
    assert stand_in.AllToAll.made == num_made + 1
    calls = [kernel.start(*arguments) for kernel in (first, second)]
    with pytest.raises(
        UnsupportedError, match="calls in flight: got 3, need at most 2"
    ) as exc_info:
        first.start(*arguments)
    messages.append(str(exc_info.value))
    assert all(torch.equal(call.finish(), expected) for call in calls)
    part, pending = first.prepare_finalize, first.start(*arguments)
    tokens, handle = pending.receive()
    output = torch.zeros_like(tokens.x_eCH)
    finalize_arguments = {
        "handle": handle,
        "reduce": first.reduce,
        "out": torch.empty_like(expected),
    }
    with pytest.raises(UnsupportedError, match="one of this"):
        second.prepare_finalize.finalize(output, **finalize_arguments)
    part.finalize(output, **finalize_arguments)
    assert not finalize_arguments["out"].any()
    with pytest.raises(UnsupportedError, match="one that was combined"):
        part.finalize(output, **finalize_arguments)
    next_call = first.start(*arguments)  # This call uses the same buffers.
    with pytest.raises(UnsupportedError, match="one that was combined"):
        part.finalize(output, **finalize_arguments)
    assert torch.equal(next_call.finish(), expected)
    num_made = stand_in.AllToAll.made - num_made
    first.prepare_finalize.destroy()  # This must not destroy the manager.
    second(*arguments)
    manager.destroy()
    manager.destroy()
    with pytest.raises(UnsupportedError, match="a destroyed manager"):
        second(*arguments)
    with pytest.raises(UnsupportedError, match="a destroyed manager"):
        make_layer(rank, manager)
    return num_made, messages


def test_layers_of_one_manager_share_buffers(rank_pool: Pool) -> None:
    (num_made, _), (_, _) = rank_pool(2).run(share_and_close)
    assert num_made == 2  # The second buffer is for a second call in flight.


def prepare_too_many_tokens(rank: int, world: int, group: object) -> None:
    kernel = make_layer(rank, group)
    x_TH, weights, routing = make_rank_inputs(rank)
    part = kernel.prepare_finalize
    with pytest.raises(CapacityError, match="tokens: got 5, need <= 4"):
        part.prepare(torch.cat([x_TH, x_TH[:1]]), routing, weights=weights, call=None)
    part.destroy()


def test_too_many_tokens_are_refused_before_communication(rank_pool: Pool) -> None:
    rank_pool(2).run(prepare_too_many_tokens)


def make_different_layers(
    rank: int, world: int, group: object, field: str
) -> tuple[str, tuple[int, ...]]:
    """Call a different layer on rank 1, then the same layer on both ranks."""
    manager = stand_in.GlooGroup(group)
    other_value = {"tokens": 5, "hidden": 128, "quant": "fp8_w8a8_channel"}[field]
    with pytest.raises(CommunicationError) as exc_info:
        make_layer(rank, manager, replace(PROBLEM, **({field: other_value} if rank else {})))
    kernel = make_layer(rank, manager)
    kernel(*make_rank_inputs(rank))
    manager.destroy()
    return str(exc_info.value), exc_info.value.peers


@pytest.mark.parametrize("field", DIFFERING_FIELDS)
def test_ranks_that_call_different_layers_all_raise(field: str, rank_pool: Pool) -> None:
    reports = rank_pool(2).run(make_different_layers, field)
    assert [peers for _, peers in reports] == [(1,), (0,)]
    assert all(f"{field} " in message and "by rank" in message for message, _ in reports), reports


def make_layer_alone(rank: int, world: int, group: object) -> float:
    """Make a layer on rank 0 only. Return the elapsed seconds."""
    start = time.monotonic()
    manager = stand_in.GlooGroup(group, timeout_s=0.5)
    dist.barrier(group)  # The manager of rank 1 must not be freed while rank 0 connects.
    if rank == 0:
        with pytest.raises(CommunicationError, match="no sign of life") as exc_info:
            make_layer(rank, manager)
        assert exc_info.value.peers == (1,)
        assert exc_info.value.phase == "construct"
    return time.monotonic() - start


def connect_twice(rank: int, world: int, group: object) -> None:
    """Let rank 1 miss the first attempt of rank 0. The next attempt succeeds."""
    dist.barrier(group)
    if rank == 0:
        with pytest.raises(CommunicationError, match="no sign of life") as exc_info:
            stand_in.GlooGroup(group, timeout_s=0.3)
        assert exc_info.value.peers == (1,)
    else:
        time.sleep(0.8)
    manager = stand_in.GlooGroup(group)
    make_layer(rank, manager)(*make_rank_inputs(rank))
    manager.destroy()


def test_a_missing_rank_is_named_within_the_timeout(rank_pool: Pool) -> None:
    assert max(rank_pool(2).run(make_layer_alone)) < 3


def test_construction_succeeds_after_a_missed_attempt(rank_pool: Pool) -> None:
    rank_pool(2).run(connect_twice)


def destroy_late(rank: int, world: int, group: object) -> float:
    """Return the seconds that `destroy` takes. Rank 1 starts it 0.4 s later."""
    dist.barrier(group)
    manager = stand_in.GlooGroup(group)
    manager.reserve(PplxShape(4, 4, 2, 64, row_bytes=128, scale_bytes=0))
    time.sleep(0.4 * rank)
    start = time.monotonic()
    manager.destroy()
    return time.monotonic() - start


def test_no_buffer_is_freed_while_a_peer_can_write_to_it(rank_pool: Pool) -> None:
    assert rank_pool(2).run(destroy_late)[0] > 0.2


def make_manager_without_library(rank: int, world: int, group: object) -> None:
    PplxGroup(group)


def test_a_missing_library_is_reported(rank_pool: Pool) -> None:
    with pytest.raises(RankError, match="ConfigurationError: pplx_kernels: got No module named"):
        rank_pool(2).run(make_manager_without_library)
    with pytest.raises(ConfigurationError, match="in_flight"):
        PplxGroup(in_flight=0)


def record_dispatch_steps(rank: int, world: int, group: object) -> list[list[tuple[bool, bool]]]:
    """Return which steps of dispatch a call, a plan and a started call use."""
    kernel, arguments, steps_by_call = make_layer(rank, group), make_rank_inputs(rank), []
    plan = kernel.plan()
    for call in (kernel, plan, lambda *args: kernel.start(*args).finish()):
        stand_in.AllToAll.halves.clear()
        out = call(*arguments).clone()
        assert torch.equal(out, kernel(*arguments))
        steps_by_call.append(stand_in.AllToAll.halves[:-1])
    kernel.prepare_finalize.destroy()
    return steps_by_call


def test_only_started_calls_are_dispatched_in_two_steps(rank_pool: Pool) -> None:
    for steps_by_call in rank_pool(2).run(record_dispatch_steps):
        assert steps_by_call == [[(True, True)], [(True, True)], [(True, False), (False, True)]]
