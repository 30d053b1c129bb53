"""Inputs of a profiled call on each rank, and the load that their routing puts on the rank.

The load is the number of rows and of (token, expert) pairs that the rank receives and processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.measure.cases import assign_adapter_slots, make_weights, quantize
from modular_kernel.measure.routing_patterns import RoutingKind, count_load, draw_routing
from modular_kernel.measure.stage_roofline import RankLoad
from modular_kernel.spec.placement import pairs_to_slots, rank_tiers
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing

_SEED = 11


@dataclass(frozen=True)
class ProfileInputs:
    """Arguments of a call on one rank, and the load of the rank.

    A call overwrites x_TH if the problem is inplace.
    """

    x_TH: torch.Tensor
    weights: ExpertWeights
    routing: Routing
    load: RankLoad


def make_inputs(
    problem: Problem, device: torch.device, kind: RoutingKind, *, replicated: bool
) -> ProfileInputs:
    """Draw the inputs of one rank, with fixed seeds.

    x is standard normal, and weights are normal with a standard deviation of 1 / sqrt(fan-in).

    problem: the problem of this rank.
    kind: distribution of tokens over experts.
    replicated: whether all ranks pass the same tokens.

    Raises ConfigurationError for a problem without tokens.
    """
    if problem.tokens < 1:
        raise ConfigurationError("tokens to profile", got=problem.tokens, need=">= 1")
    rank, world_size = problem.parallel.rank, problem.parallel.world_size
    # Draw on the CPU, so that every rank can reproduce the routing of all ranks.
    routings = [
        _draw_routing(problem, kind, 0 if replicated else source) for source in range(world_size)
    ]
    unquantized = make_weights(replace(problem, quant="none"), device, rank)
    generator = torch.Generator(device).manual_seed(_SEED + (0 if replicated else rank))
    x_TH = torch.randn(problem.tokens, problem.hidden, device=device, generator=generator)
    routing = Routing(
        routings[rank].topk_weights_TK.to(device),
        routings[rank].topk_ids_TK.to(device),
        assign_adapter_slots(problem, device),
    )
    if world_size > 1:
        load = load_of_rank(routings, problem, replicated=replicated)
    else:
        load = _compute_single_rank_load(routings[rank], problem, unquantized.expert_map)
    return ProfileInputs(x_TH.to(problem.dtype), quantize(unquantized, problem), routing, load)


def _draw_routing(problem: Problem, kind: RoutingKind, rank: int) -> Routing:
    return draw_routing(problem, kind, torch.Generator().manual_seed(_SEED * 1000 + rank))


def _compute_single_rank_load(
    routing: Routing, problem: Problem, expert_map: torch.Tensor | None
) -> RankLoad:
    load = count_load(routing, problem, None if expert_map is None else expert_map.cpu())
    return RankLoad(problem.tokens, problem.tokens, load.pairs, load.touched)


def load_of_rank(routings: Sequence[Routing], problem: Problem, *, replicated: bool) -> RankLoad:
    """Return the load of the rank `problem.parallel.rank`.

    A row is sent once to each other rank that has one of its experts. If an expert has several
    copies, `pairs_to_slots` selects one, as in the all-to-all part.

    routings: the routing of each rank, on the CPU.
    replicated: whether all ranks pass the same tokens. In this case no rows are dispatched, but
        each rank receives the sums of the other ranks.
    """
    rank, per_host = problem.parallel.rank, problem.parallel.ranks_per_host
    touched: set[int] = set()
    rows = pairs = sent = received = 0
    for source, routing in enumerate(routings):
        first_token = 0 if replicated else source
        tables = problem.placement.tables(tiers=() if replicated else rank_tiers(source, per_host))
        rank_TK, slot_TK, _ = pairs_to_slots(
            routing.topk_ids_TK, tables, first_token=first_token, together=not replicated
        )
        if replicated and source != rank:
            continue
        local_TK = rank_TK == rank
        received_rows = int(local_TK.any(1).sum())
        touched |= set(slot_TK[local_TK].tolist())
        pairs += int(local_TK.sum())
        rows += received_rows
        if source != rank:
            received += received_rows
        elif not replicated:
            other_ranks = (r for r in range(len(routings)) if r != rank)
            sent = sum(int((rank_TK == other).any(1).sum()) for other in other_ranks)
    if replicated:
        received = problem.tokens  # at least one row of sums per token
    return RankLoad(len(routings[rank].topk_ids_TK), rows, pairs, len(touched), sent, received)
