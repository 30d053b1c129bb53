"""Checks of correct and incorrect calls that every rank makes in the same way.

They pass tensors on an unsupported device, dispatch with `prepare`, pass texts that ranks compare,
start more calls than fit in shared memory, and count the (token, expert) pairs that each copy of an
expert computes. The fault scenario "misunderstood" of `problem_scenarios` runs them.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from modular_kernel.contracts import CallState, Receiver
from modular_kernel.errors import CommunicationError, UnsupportedError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.replay.recording import record_launches
from modular_kernel.spec.placement import Placement
from modular_kernel.tensors import Routing, StandardTokens
from modular_kernel.testing.cases.scenario_names import prefers_near_copies, shares_memory
from modular_kernel.testing.verify.problem_scenarios import Outcomes
from modular_kernel.testing.verify.scenario_context import CORRECT, ScenarioContext, capture_outcome
from modular_kernel.workspace import Workspace

_DELAY_S = 0.2
_MAX_IN_FLIGHT = 2  # maximum number of calls in flight of a part with shared memory


def check_meta_tokens_rejected(
    context: ScenarioContext, kernel: FusedMoEModularKernel
) -> tuple[str, str]:
    """Pass tensors on an unsupported device directly to the part, bypassing the kernel."""
    meta, inputs = torch.device("meta"), context.sample.inputs
    specs = kernel.workspace_specs(len(inputs.x_TH))
    call = CallState(Workspace(specs, torch.device("cpu")), torch.zeros(1, dtype=torch.int32))
    tokens = inputs.x_TH.to(meta), move_routing(meta, inputs.routing)
    prepare = kernel.prepare_finalize.prepare
    return capture_outcome(
        lambda: str(prepare(*tokens, weights=inputs.weights, call=call))
    ), "DeviceError"


def check_synchronous_prepare(
    context: ScenarioContext, kernel: FusedMoEModularKernel
) -> tuple[str, str]:
    """Check that `prepare` waits for the rows of a late rank.

    A kernel dispatches with `prepare_no_receive`, which is replaced by `prepare` here.
    """
    part: Any = kernel.prepare_finalize

    def prepare_no_receive(*args: Any, **kwargs: Any) -> Receiver:
        del part.prepare_no_receive
        result = part.prepare(*args, **kwargs)
        return lambda: result

    # If this rank reads too early, it finds the zeros of this call.
    context.start(kernel, torch.zeros_like(context.sample.inputs.x_TH)).finish()
    part.prepare_no_receive = prepare_no_receive
    dist.barrier()
    if context.is_faulty_rank:
        time.sleep(_DELAY_S)
    outcome = context.make_correct_call(kernel)
    # A kernel that calls `prepare` itself did not call the replacement, which is then still there.
    vars(part).pop("prepare_no_receive", None)
    return outcome


def check_same_on_ranks(context: ScenarioContext, kernel: FusedMoEModularKernel) -> Outcomes:
    """Start calls whose `same_on_ranks` differs on rank 1, and calls in which it is the same.

    If the part compares calls, every rank must raise CommunicationError for the first call, and the
    later calls must be correct. Otherwise, the kernel must refuse both calls.
    """
    inputs, compares = context.sample.inputs, kernel.prepare_finalize.compares_calls()
    for text, error in (("b" if context.is_faulty_rank else "a", "CommunicationError"), ("a", "")):
        try:
            pending = kernel.start(
                context.sample.x_TH(), inputs.weights, inputs.routing, same_on_ranks=text
            )
            outcome = context.compare(pending.finish())
        except (CommunicationError, UnsupportedError) as refusal:
            outcome = type(refusal).__name__
        yield outcome, (error or CORRECT) if compares else "UnsupportedError"
    yield context.make_correct_call(kernel)


def move_routing(device: torch.device, routing: Routing) -> Routing:
    """Return a copy of the routing on another device, without adapters."""
    return Routing(routing.topk_weights_TK.to(device), routing.topk_ids_TK.to(device))


def check_in_flight_limit(context: ScenarioContext, kernel: FusedMoEModularKernel) -> Outcomes:
    """Start one call more than fits in shared memory. Every rank must refuse it and recover.

    While a call is in flight whose buffers a recorded call would use, the call is not replayed.
    """
    if not shares_memory(context.part):
        return
    may_record = kernel.prepare_finalize.may_record()
    with record_launches(()) as recorder:
        outcome = context.make_correct_call(kernel)
    yield outcome
    in_flight = context.start(kernel)
    yield f"bypassed {recorder.is_bypassed()}", f"bypassed {may_record}"
    yield capture_outcome(lambda: context.compare(in_flight.finish())), CORRECT
    yield f"bypassed {recorder.is_bypassed()}", "bypassed False"
    pending = [context.start(kernel) for _ in range(_MAX_IN_FLIGHT)]
    yield capture_outcome(lambda: type(context.start(kernel)).__name__), "UnsupportedError"
    for call in pending:
        yield capture_outcome(lambda call=call: context.compare(call.finish())), CORRECT  # type: ignore[misc]
    yield _check_nested_call(context, kernel)
    yield context.make_correct_call(kernel)


def _check_nested_call(context: ScenarioContext, kernel: FusedMoEModularKernel) -> tuple[str, str]:
    """Run a second call between the dispatch and the experts of a first call.

    The output of the first call is correct only if the two calls do not share buffers.
    """
    apply = kernel.experts.apply

    def apply_after_another(tokens: Any, **kwargs: Any) -> None:
        kernel.experts.apply = apply  # type: ignore[method-assign]
        context.start(kernel, torch.zeros_like(context.sample.inputs.x_TH)).finish()
        apply(tokens, **kwargs)

    kernel.experts.apply = apply_after_another  # type: ignore[method-assign]
    return context.make_correct_call(kernel)


def check_nearest_copies(context: ScenarioContext, manager: object) -> Outcomes:
    """Check that each pair is computed by the nearest copy of its expert.

    If every rank has all experts, no (token, expert) pair may leave its rank. If every host has all
    experts, no pair may leave its host. Parts that do not prefer near copies must use all copies
    evenly. Any copy gives the correct output, so the check counts the pairs that each rank
    computes.
    """
    if not prefers_near_copies(context.part):
        yield from _check_copies_share_pairs(context, manager)
        return
    parallel, world_size = context.case.problem.parallel, context.world_size
    experts = tuple(range(context.case.problem.experts))
    yield from _check_ranks_compute_own_pairs(
        context, manager, Placement((experts,) * world_size), (context.rank,)
    )
    if parallel.hosts > 1:
        per_host = world_size // parallel.hosts
        first_rank = context.rank // per_host * per_host
        placement = Placement(
            tuple(experts[rank % per_host :: per_host] for rank in range(world_size))
        )
        yield from _check_ranks_compute_own_pairs(
            context, manager, placement, range(first_rank, first_rank + per_host)
        )


def _check_ranks_compute_own_pairs(
    context: ScenarioContext, manager: object, placement: Placement, ranks: Sequence[int]
) -> Outcomes:
    """Check that `ranks` together compute exactly the pairs of their own tokens.

    ranks: a group of ranks that includes this one.
    """
    placed_context = context.with_changed_problem(
        parallel=replace(context.case.problem.parallel, placement=placement, rank=0)
    )
    if placed_context is None:
        return
    pair_counts = yield from _count_pairs_by_local_expert(placed_context, manager)
    counts: list[Any] = [None] * context.world_size
    num_pairs = int((placed_context.sample.inputs.routing.topk_ids_TK >= 0).sum())
    dist.all_gather_object(counts, (num_pairs, int(pair_counts.sum())))
    own_pairs, computed_pairs = (sum(counts[rank][i] for rank in ranks) for i in (0, 1))
    description = f"pairs computed by ranks {', '.join(map(str, ranks))}"
    yield f"{computed_pairs} {description}", f"{own_pairs} {description}"


def _check_copies_share_pairs(context: ScenarioContext, manager: object) -> Outcomes:
    """Check that the pairs of a copied expert are divided evenly among its copies.

    Every rank has a copy of every expert except expert 0, which is on rank 0 alone. Experts
    therefore have different numbers of copies.
    """
    experts, world_size = tuple(range(context.case.problem.experts)), context.world_size
    placement = Placement((experts, *(experts[1:],) * (world_size - 1)))
    placed_context = context.with_changed_problem(
        parallel=replace(context.case.problem.parallel, placement=placement, rank=0)
    )
    if placed_context is None:
        return
    pair_counts = yield from _count_pairs_by_local_expert(placed_context, manager)
    num_computed = int(pair_counts[1 if context.rank == 0 else 0 :].sum())
    num_sent = int((placed_context.sample.inputs.routing.topk_ids_TK > 0).sum())
    counts: list[Any] = [None] * world_size
    dist.all_gather_object(counts, (num_sent, num_computed))
    num_sources = 1 if context.part.requires.replicated_input else world_size
    total = sum(count for count, _ in counts[:num_sources])
    computed = [count for _, count in counts]
    # The tokens of a source rank use the copies in turn, so the counts of two copies differ by at
    # most top_k pairs per source rank.
    tolerance = num_sources * context.case.problem.top_k
    is_even = all(abs(count - total / world_size) <= tolerance for count in computed)
    description = f"{total} pairs with copied experts, {computed} by rank"
    yield f"{description}: even {is_even and sum(computed) == total}", f"{description}: even True"


def _count_pairs_by_local_expert(
    context: ScenarioContext, manager: object
) -> Generator[tuple[str, str], None, torch.Tensor]:
    """Make a correct call; return the number of pairs of each local expert, int64."""
    kernel = context.make_kernel_on(manager)
    apply, num_local = kernel.experts.apply, len(context.case.problem.placement.slots[context.rank])
    pair_counts = torch.zeros(num_local, dtype=torch.int64)

    def apply_and_count(tokens: Any, **kwargs: Any) -> None:
        if isinstance(tokens, StandardTokens):
            ids_TK = tokens.routing.topk_ids_TK
            pair_counts.add_(torch.bincount(ids_TK[ids_TK >= 0].long(), minlength=num_local))
        else:
            pair_counts.add_(tokens.counts_e)
        apply(tokens, **kwargs)

    kernel.experts.apply = apply_and_count  # type: ignore[method-assign]
    yield context.make_correct_call(kernel)
    return pair_counts
