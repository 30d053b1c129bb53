"""Scenarios of consistent calls: limits of shared memory and nearest copies of experts.

Parts of the fault scenario "misunderstood".
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from modular_kernel.contracts import Call
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.spec.placement import Placement
from modular_kernel.tensors import ContiguousTokens, Routing
from modular_kernel.testing.cases.scenario_names import prefers_near_copies, shares_memory
from modular_kernel.testing.verify.problem_scenarios import Lines
from modular_kernel.testing.verify.scenario_context import RIGHT, ScenarioContext, outcome_of
from modular_kernel.workspace import Workspace

_IN_FLIGHT = 2  # maximum number of calls in flight with shared memory


def rejects_meta_tokens(on: ScenarioContext, kernel: FusedMoEModularKernel) -> tuple[str, str]:
    """Pass tensors that the group cannot move to the part itself, bypassing the kernel."""
    meta, i = torch.device("meta"), on.sample.inputs
    specs = kernel.workspace_specs(len(i.x_TH))
    call = Call(Workspace(specs, torch.device("cpu")), torch.zeros(1, dtype=torch.int32))
    tokens = i.x_TH.to(meta), routing_on(meta, i.routing)
    prepare = kernel.prepare_finalize.prepare
    return outcome_of(lambda: str(prepare(*tokens, weights=i.weights, call=call))), "DeviceError"


def routing_on(device: torch.device, routing: Routing) -> Routing:
    """Return the routing on another device, without adapters."""
    return Routing(routing.topk_weights_TK.to(device), routing.topk_ids_TK.to(device))


def too_many_in_flight(on: ScenarioContext, kernel: FusedMoEModularKernel) -> Lines:
    """Start one call more than fits in shared memory: every rank refuses it and recovers."""
    if not shares_memory(on.part):
        return
    pending = [on.begun(kernel) for _ in range(_IN_FLIGHT)]
    yield outcome_of(lambda: type(on.begun(kernel)).__name__), "UnsupportedError"
    for each in pending:
        yield outcome_of(lambda each=each: on.judged(each.finish())), RIGHT  # type: ignore[misc]
    yield _nest_call(on, kernel)
    yield on.goes(kernel)


def _nest_call(on: ScenarioContext, kernel: FusedMoEModularKernel) -> tuple[str, str]:
    """Run a second call between dispatch and experts of the first: each has its own buffers."""
    apply = kernel.experts.apply

    def behind_another(tokens: Any, **given: Any) -> None:
        kernel.experts.apply = apply  # type: ignore[method-assign]
        on.begun(kernel, torch.zeros_like(on.sample.inputs.x_TH)).finish()
        apply(tokens, **given)

    kernel.experts.apply = behind_another  # type: ignore[method-assign]
    return on.goes(kernel)


def uses_nearest_copies(on: ScenarioContext, manager: object) -> Lines:
    """Check that each pair is computed by the nearest copy of its expert.

    With all experts on every rank no pair leaves its rank; with all experts on every host no pair
    leaves its host. Every copy gives the correct output, so the check counts the pairs computed on
    each rank.
    """
    if not prefers_near_copies(on.part):
        return
    parallel, world = on.case.problem.parallel, on.world_size
    experts = tuple(range(on.case.problem.experts))
    yield from _check_computed_near(on, manager, Placement((experts,) * world), (on.rank,))
    if parallel.hosts > 1:
        per_host = world // parallel.hosts
        first = on.rank // per_host * per_host
        dealt = Placement(tuple(experts[rank % per_host :: per_host] for rank in range(world)))
        yield from _check_computed_near(on, manager, dealt, range(first, first + per_host))


def _check_computed_near(
    on: ScenarioContext, manager: object, placement: Placement, near: Sequence[int]
) -> Lines:
    """Check that ranks `near`, which include this one, compute all of their own pairs."""
    placed = on.of(parallel=replace(on.case.problem.parallel, placement=placement, rank=0))
    if placed is None:
        return
    kernel = placed.over(manager)
    apply, row_counts = kernel.experts.apply, list[int]()

    def counted(tokens: Any, **given: Any) -> None:
        rows = tokens.routing.topk_ids_TK >= 0 if _has_ids(tokens) else tokens.counts_e
        row_counts.append(int(rows.sum()))
        apply(tokens, **given)

    kernel.experts.apply = counted  # type: ignore[method-assign]
    yield placed.goes(kernel)
    counts: list[Any] = [None] * on.world_size
    pairs = int((placed.sample.inputs.routing.topk_ids_TK >= 0).sum())
    dist.all_gather_object(counts, (pairs, sum(row_counts)))
    own_pairs, computed_pairs = (sum(counts[rank][at] for rank in near) for at in (0, 1))
    who = f"pairs computed by ranks {', '.join(map(str, near))}"
    yield f"{computed_pairs} {who}", f"{own_pairs} {who}"


def _has_ids(tokens: object) -> bool:
    return isinstance(tokens, ContiguousTokens)
