"""What calls keep to that every rank means alike; parts of the scene "misunderstood"."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from modular_kernel.contracts import Call
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.spec.placement import Placement
from modular_kernel.tensors import ContiguousTokens, Routing
from modular_kernel.testing.cases.scenario_names import goes_near, shares_memory
from modular_kernel.testing.verify.problem_scenarios import Lines
from modular_kernel.testing.verify.scenario_context import RIGHT, Stage, said
from modular_kernel.workspace import Workspace

_IN_FLIGHT = 2  # calls that shared memory has room for


def elsewhere(on: Stage, kernel: FusedMoEModularKernel) -> tuple[str, str]:
    """Give a part by itself what a kernel would not let pass: tokens that the group cannot move."""
    meta, i = torch.device("meta"), on.sample.inputs
    specs = kernel.workspace_specs(len(i.x_TH))
    call = Call(Workspace(specs, torch.device("cpu")), torch.zeros(1, dtype=torch.int32))
    tokens = i.x_TH.to(meta), routing_on(meta, i.routing)
    prepare = kernel.prepare_finalize.prepare
    return said(lambda: str(prepare(*tokens, weights=i.weights, call=call))), "DeviceError"


def routing_on(device: torch.device, routing: Routing) -> Routing:
    """Return the routing on another device; no adapters."""
    return Routing(routing.topk_weights_TK.to(device), routing.topk_ids_TK.to(device))


def too_many(on: Stage, kernel: FusedMoEModularKernel) -> Lines:
    """Start one call more than shared memory has room for: every rank refuses it, and goes on."""
    if not shares_memory(on.part):
        return
    pending = [on.begun(kernel) for _ in range(_IN_FLIGHT)]
    yield said(lambda: type(on.begun(kernel)).__name__), "UnsupportedError"
    for each in pending:
        yield said(lambda each=each: on.judged(each.finish())), RIGHT  # type: ignore[misc]
    yield _within(on, kernel)
    yield on.goes(kernel)


def _within(on: Stage, kernel: FusedMoEModularKernel) -> tuple[str, str]:
    """Make a call of other tokens between another's arrival and its experts: each has its room."""
    apply = kernel.experts.apply

    def behind_another(tokens: Any, **given: Any) -> None:
        kernel.experts.apply = apply  # type: ignore[method-assign]
        on.begun(kernel, torch.zeros_like(on.sample.inputs.x_TH)).finish()
        apply(tokens, **given)

    kernel.experts.apply = behind_another  # type: ignore[method-assign]
    return on.goes(kernel)


def nearest(on: Stage, manager: object) -> Lines:
    """Where every rank has every expert, no pair leaves its rank; where every host has, its host.

    Every copy gives the right output: what tells is how many pairs are computed where.
    """
    if not goes_near(on.part):
        return
    parallel, world = on.case.problem.parallel, on.world_size
    experts = tuple(range(on.case.problem.experts))
    yield from _stays(on, manager, Placement((experts,) * world), (on.rank,))
    if parallel.hosts > 1:
        per_host = world // parallel.hosts
        first = on.rank // per_host * per_host
        dealt = Placement(tuple(experts[rank % per_host :: per_host] for rank in range(world)))
        yield from _stays(on, manager, dealt, range(first, first + per_host))


def _stays(on: Stage, manager: object, placement: Placement, near: Sequence[int]) -> Lines:
    """Pairs of the ranks `near`, of which this is one, are computed by these."""
    placed = on.of(parallel=replace(on.case.problem.parallel, placement=placement, rank=0))
    if placed is None:
        return
    kernel = placed.over(manager)
    apply, came = kernel.experts.apply, list[int]()

    def counted(tokens: Any, **given: Any) -> None:
        rows = tokens.routing.topk_ids_TK >= 0 if _has_ids(tokens) else tokens.counts_e
        came.append(int(rows.sum()))
        apply(tokens, **given)

    kernel.experts.apply = counted  # type: ignore[method-assign]
    yield placed.goes(kernel)
    told: list[Any] = [None] * on.world_size
    pairs = int((placed.sample.inputs.routing.topk_ids_TK >= 0).sum())
    dist.all_gather_object(told, (pairs, sum(came)))
    own, here = (sum(told[rank][at] for rank in near) for at in (0, 1))
    who = f"pairs computed by ranks {', '.join(map(str, near))}"
    yield f"{here} {who}", f"{own} {who}"


def _has_ids(tokens: object) -> bool:
    return isinstance(tokens, ContiguousTokens)
