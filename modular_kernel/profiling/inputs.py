"""ProfileInputs of a profiled call, by rank, and what their routing asks of the rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.measure.cases import make_weights, quantized, slots_in_turn
from modular_kernel.measure.routing_patterns import RoutingKind, draw, load_of
from modular_kernel.measure.stage_roofline import RankLoad
from modular_kernel.spec.placement import near_ranks, pairs_to_slots
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing

_SEED = 11


@dataclass(frozen=True)
class ProfileInputs:
    """A call's arguments on one rank, and their load. x_TH: read only, but for inplace problems."""

    x_TH: torch.Tensor
    weights: ExpertWeights
    routing: Routing
    load: RankLoad


def make_inputs(
    problem: Problem, device: torch.device, kind: RoutingKind, *, replicated: bool
) -> ProfileInputs:
    """Draw normal x, weights over the root of the fan-in, and routing of a kind.

    They are the same in every run.

    problem: the rank's own. replicated: every rank passes the same tokens. ConfigurationError for
    a problem without tokens.
    """
    if problem.tokens < 1:
        raise ConfigurationError("tokens to profile", got=problem.tokens, need=">= 1")
    rank, world = problem.parallel.rank, problem.parallel.world_size
    # Drawn on the CPU: every rank can draw what the others pass.
    routings = [_routing(problem, kind, 0 if replicated else each) for each in range(world)]
    plain = make_weights(replace(problem, quant="none"), device, rank)
    generator = torch.Generator(device).manual_seed(_SEED + (0 if replicated else rank))
    x_TH = torch.randn(problem.tokens, problem.hidden, device=device, generator=generator)
    own = Routing(
        routings[rank].topk_weights_TK.to(device),
        routings[rank].topk_ids_TK.to(device),
        slots_in_turn(problem, device),
    )
    if world > 1:
        load = load_of_rank(routings, problem, replicated=replicated)
    else:
        load = _load_alone(routings[rank], problem, plain.expert_map)
    return ProfileInputs(x_TH.to(problem.dtype), quantized(plain, problem), own, load)


def _routing(problem: Problem, kind: RoutingKind, rank: int) -> Routing:
    return draw(problem, kind, torch.Generator().manual_seed(_SEED * 1000 + rank))


def _load_alone(routing: Routing, problem: Problem, expert_map: torch.Tensor | None) -> RankLoad:
    load = load_of(routing, problem, None if expert_map is None else expert_map.cpu())
    return RankLoad(problem.tokens, problem.tokens, load.pairs, load.touched)


def load_of_rank(routings: Sequence[Routing], problem: Problem, *, replicated: bool) -> RankLoad:
    """Of rank `problem.parallel.rank`, where rank r passes routings[r] (on the CPU).

    A row crosses a link once to each other rank that holds one of its experts. Of an expert with
    copies any may be chosen; the choice here is that of the all-to-all part. replicated: all ranks
    pass the same tokens, of which none need travel, but the sums of all others come back.
    """
    rank, per_host = problem.parallel.rank, problem.parallel.ranks_per_host
    touched: set[int] = set()
    rows = pairs = out = back = 0
    for source, routing in enumerate(routings):
        first = 0 if replicated else source
        tables = problem.placement.tables(near=() if replicated else near_ranks(source, per_host))
        rank_TK, slot_TK, _ = pairs_to_slots(
            routing.topk_ids_TK, tables, first_token=first, together=not replicated
        )
        if replicated and source != rank:
            continue
        here_TK = rank_TK == rank
        arriving = int(here_TK.any(1).sum())
        touched |= set(slot_TK[here_TK].tolist())
        pairs += int(here_TK.sum())
        rows += arriving
        if source != rank:
            back += arriving
        elif not replicated:
            others = (r for r in range(len(routings)) if r != rank)
            out = sum(int((rank_TK == other).any(1).sum()) for other in others)
    if replicated:
        back = problem.tokens  # at the least one row of sums for each token
    return RankLoad(len(routings[rank].topk_ids_TK), rows, pairs, len(touched), out, back)
