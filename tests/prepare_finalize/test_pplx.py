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
from modular_kernel.testing.cases.inputs import FencedMemory, make_inputs
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
NAMES = ("tokens", "hidden", "quant")

Pool = Callable[[int], RankPool]


def cases(experts: str, world_size: int) -> list[RankCase]:
    return list(rank_cases_for(PART, experts, MACHINE, world_size).cases)


def name(case: RankCase) -> str:
    """Return a name of the case without the class's repr."""
    return str(case).partition("+")[2]


SOME = [case for case in cases("BatchedTritonExperts", 2) if case.problem.scheme.quantized]
UNEVEN = [case for case in cases("NaiveBatchedExperts", 4) if case.routing == "duplicates"]


@pytest.mark.parametrize("case", cases("NaiveBatchedExperts", 2) + SOME + UNEVEN, ids=name)
def test_cases_are_proven(case: RankCase, rank_pool: Pool) -> None:
    proof = prove_ranks(case, rank_pool(case.world_size), MACHINE)
    assert proof.passed, str(proof)


# What a part of this format can do to rows, and what it can do to places.
DEFECTS = ("last_expert_lost", "peer_counts_swapped", "rows_reordered", "stale_rows")


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_found(name: str, rank_pool: Pool) -> None:
    mutants = [mutant for mutant in RANK_MUTANTS if mutant.name == name]
    kills = sensitivity_ranks(PART, "NaiveBatchedExperts", rank_pool(2), mutants=mutants)
    assert [str(kill) for kill in kills if not kill.ok or kill.no_effect_reason] == []
    assert kills


def test_every_pair_of_a_token_has_a_sink() -> None:
    for world_size, top_k, sinks in ((2, 8, 4), (4, 8, 2), (8, 8, 1), (4, 9, 3)):
        problem = Problem(1, 64, 32, 32, top_k, parallel=Parallel(world_size))
        assert pplx.num_sinks(problem) == sinks
        part = PART.__new__(PART)
        part.problem, part._shape = problem, pplx._shape(problem)
        assert part.dispatch_shape(1) == BatchedShape(32 // world_size + sinks, world_size)
    copies = Placement.linear(6, 2).with_copies({0: (1,)})
    assert pplx._shape(replace(PROBLEM, parallel=Parallel(2, copies))).slots == 2 * (4 + 2)


def test_limits_of_the_library() -> None:
    shape = PplxShape(128, 256, 8, 7168, row_bytes=7168, scale_bytes=224)
    assert shape.device_bytes(2) == 128 * 128 * 7168 * 4 * 2


def refused(**changes: object) -> list[str]:
    problem = replace(PROBLEM, **changes)
    found = check("PplxPrepareAndFinalize", "NaiveBatchedExperts", problem, GPU).rejections
    return [f"[{each.rule}] {each.got}; {each.need}" for each in found]


def test_unsupported_problems_are_refused() -> None:
    assert refused() == []
    assert refused(hidden=7168, quant="fp8_w8a8_block", experts=256, top_k=8) == []
    assert refused(quant="fp8_w8a8_tensor:static=true") == []
    (one_scale,) = refused(quant="fp8_w8a8_tensor")
    assert one_scale.startswith("[dispatch_quant] fp8_w8a8_tensor: one scale for the tokens of all")
    (odd,) = refused(hidden=72, quant="int8_w8a8_channel")
    assert odd == "[hidden] 72 bytes a row; a multiple of 16 bytes"
    (many,) = refused(hidden=16, quant="fp8_w8a8_block:block=1x2", intermediate=16)
    assert many == "[hidden] 32 bytes of scales a row; at most its 16 bytes"
    assert refused(hidden=24568) == []
    assert refused(hidden=24576) == ["[hidden] 49168 bytes a row; at most 49152 bytes"]
    assert [text.split()[0] for text in refused(hidden=76, dtype=torch.float32)] == [
        "[dtype]",
        "[hidden]",
    ]
    assert refused(parallel=Parallel(16), experts=16)[0].startswith("[world_size] 16; 2 to 8")
    (kept,) = refused(combine=Combine.TOPK_WEIGHTED)
    assert kept.startswith("[keep_topk]")
    cpu = check("PplxPrepareAndFinalize", "NaiveBatchedExperts", PROBLEM, Machine("cpu"))
    assert {each.rule for each in cpu.rejections} == {"device", "package"}


def layer(rank: int, manager: object, problem: Problem = PROBLEM):
    problem = replace(problem, parallel=replace(problem.parallel, rank=rank))
    return make_kernel(PART, "NaiveBatchedExperts", problem, group=manager, poison=True)


def inputs(rank: int, problem: Problem = PROBLEM) -> tuple[torch.Tensor, ExpertWeights, Routing]:
    device = torch.device("cpu")
    alone = replace(problem, parallel=Parallel())
    whole = make_inputs(alone, "uniform", device, seed=3, strided=False)
    mine = replace(problem, parallel=replace(problem.parallel, rank=rank))
    got = inputs_of_rank(whole, slice(0, problem.tokens), mine, FencedMemory(device), strided=False)
    return got.x_TH, got.weights, got.routing


def share_and_close(rank: int, world: int, group: object) -> tuple[int, list[str]]:
    """Run two layers of one shape on one manager, with calls in flight, and return what is
    refused."""
    made, words = stand_in.AllToAll.made, []
    manager = stand_in.GlooGroup(group)
    first, second = layer(rank, manager), layer(rank, manager)
    given = inputs(rank)
    alone = first(*given)
    assert torch.equal(alone, second(*given))
    assert stand_in.AllToAll.made == made + 1
    calls = [kernel.start(*given) for kernel in (first, second)]
    with pytest.raises(UnsupportedError, match="calls in flight: got 3, need at most 2") as caught:
        first.start(*given)
    words.append(str(caught.value))
    assert all(torch.equal(call.finish(), alone) for call in calls)
    part, pending = first.prepare_finalize, first.start(*given)
    tokens, handle = pending.receive()
    output = torch.zeros_like(tokens.x_eCH)
    ours = {"handle": handle, "reduce": first.reduce, "out": torch.empty_like(alone)}
    with pytest.raises(UnsupportedError, match="one of this"):
        second.prepare_finalize.finalize(output, **ours)
    part.finalize(output, **ours)  # not the buffer of the call: copied, all zero
    assert not ours["out"].any()
    with pytest.raises(UnsupportedError, match="one that was combined"):
        part.finalize(output, **ours)
    next_call = first.start(*given)  # takes the same buffers
    with pytest.raises(UnsupportedError, match="one that was combined"):
        part.finalize(output, **ours)
    assert torch.equal(next_call.finish(), alone)
    made = stand_in.AllToAll.made - made
    first.prepare_finalize.destroy()  # not its own manager
    second(*given)
    manager.destroy()
    manager.destroy()
    with pytest.raises(UnsupportedError, match="a destroyed manager"):
        second(*given)
    with pytest.raises(UnsupportedError, match="a destroyed manager"):
        layer(rank, manager)
    return made, words


def test_layers_share_buffers_without_overwriting(rank_pool: Pool) -> None:
    (made, _), (_, _) = rank_pool(2).run(share_and_close)
    assert made == 2  # one, and another for the second call in flight


def too_many_tokens(rank: int, world: int, group: object) -> None:
    kernel = layer(rank, group)
    x_TH, weights, routing = inputs(rank)
    part = kernel.prepare_finalize
    with pytest.raises(CapacityError, match="tokens: got 5, need <= 4"):
        part.prepare(torch.cat([x_TH, x_TH[:1]]), routing, weights=weights, call=None)
    part.destroy()


def test_too_many_tokens_are_refused_before_communication(rank_pool: Pool) -> None:
    rank_pool(2).run(too_many_tokens)


def disagree(rank: int, world: int, group: object, name: str) -> tuple[str, tuple[int, ...]]:
    """Rank 1 calls another layer; then both call the same one, on the same manager."""
    manager = stand_in.GlooGroup(group)
    other = {"tokens": 5, "hidden": 128, "quant": "fp8_w8a8_channel"}[name]
    with pytest.raises(CommunicationError) as caught:
        layer(rank, manager, replace(PROBLEM, **({name: other} if rank else {})))
    kernel = layer(rank, manager)
    kernel(*inputs(rank))
    manager.destroy()
    return str(caught.value), caught.value.peers


@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_call_different_layers_all_raise(name: str, rank_pool: Pool) -> None:
    texts = rank_pool(2).run(disagree, name)
    assert [peers for _, peers in texts] == [(1,), (0,)]
    assert all(f"{name} " in text and "by rank" in text for text, _ in texts), texts


def come_alone(rank: int, world: int, group: object) -> float:
    """Rank 1 never makes its layer."""
    start = time.monotonic()
    manager = stand_in.GlooGroup(group, timeout_s=0.5)
    dist.barrier(group)  # a manager that is gone already would end the other's connecting
    if rank == 0:
        with pytest.raises(CommunicationError, match="no sign of life") as caught:
            layer(rank, manager)
        assert caught.value.peers == (1,)
        assert caught.value.phase == "construct"
    return time.monotonic() - start


def try_again(rank: int, world: int, group: object) -> None:
    """Rank 1 misses the first attempt; then both make a manager that works."""
    dist.barrier(group)  # whoever imported this later
    if rank == 0:
        with pytest.raises(CommunicationError, match="no sign of life") as caught:
            stand_in.GlooGroup(group, timeout_s=0.3)
        assert caught.value.peers == (1,)
    else:
        time.sleep(0.8)
    manager = stand_in.GlooGroup(group)
    layer(rank, manager)(*inputs(rank))
    manager.destroy()


def test_a_missing_rank_is_named_within_the_timeout(rank_pool: Pool) -> None:
    assert max(rank_pool(2).run(come_alone)) < 3


def test_construction_succeeds_after_a_missed_attempt(rank_pool: Pool) -> None:
    rank_pool(2).run(try_again)


def leave_late(rank: int, world: int, group: object) -> float:
    """Return the seconds until the buffers are freed; rank 1 is late to free its own."""
    dist.barrier(group)
    manager = stand_in.GlooGroup(group)
    manager.reserve(PplxShape(4, 4, 2, 64, row_bytes=128, scale_bytes=0))
    time.sleep(0.4 * rank)
    start = time.monotonic()
    manager.destroy()
    return time.monotonic() - start


def test_no_buffer_is_freed_while_a_peer_can_write_to_it(rank_pool: Pool) -> None:
    assert rank_pool(2).run(leave_late)[0] > 0.2


def without_library(rank: int, world: int, group: object) -> None:
    PplxGroup(group)


def test_a_missing_library_is_reported(rank_pool: Pool) -> None:
    with pytest.raises(RankError, match="ConfigurationError: pplx_kernels: got No module named"):
        rank_pool(2).run(without_library)
    with pytest.raises(ConfigurationError, match="in_flight"):
        PplxGroup(in_flight=0)


def dispatch_in_halves(rank: int, world: int, group: object) -> list[list[tuple[bool, bool]]]:
    """Return how the library dispatched for a call, a plan, and a started call."""
    kernel, given, found = layer(rank, group), inputs(rank), []
    plan = kernel.plan()
    for run in (kernel, plan, lambda *args: kernel.start(*args).finish()):
        stand_in.AllToAll.halves.clear()
        out = run(*given).clone()
        assert torch.equal(out, kernel(*given))
        found.append(stand_in.AllToAll.halves[:-1])
    kernel.prepare_finalize.destroy()
    return found


def test_only_a_started_call_is_dispatched_in_two_steps(rank_pool: Pool) -> None:
    for found in rank_pool(2).run(dispatch_in_halves):
        assert found == [[(True, True)], [(True, True)], [(True, False), (False, True)]]
