"""A whole layer's time in a world of ranks, for each pairing that can serve it there."""

from dataclasses import dataclass, replace

from modular_kernel.catalog import check_all, load_catalog, packages_of
from modular_kernel.measure.adapter_work import adapter_bytes
from modular_kernel.measure.roofline import expert_bytes
from modular_kernel.measure.routing import RoutingKind
from modular_kernel.perf_model.exchange_time import (
    OTHERS,
    TRAFFIC,
    ExchangeTime,
    Traffic,
    exchange_time,
)
from modular_kernel.perf_model.experts_time import PART, ExpertsTime, experts_time
from modular_kernel.perf_model.hardware import Cluster
from modular_kernel.perf_model.load import rank_load
from modular_kernel.types import Machine, Parallel, Problem

_HOPPER = (9, 0)


@dataclass(frozen=True)
class Estimate:
    """Seconds of one layer. weights: bytes of one rank's experts. ours: whether it is a pairing of
    installed parts; otherwise a library's exchange with our experts."""

    pairing: str
    problem: Problem
    exchange: ExchangeTime
    experts: ExpertsTime
    weights: float
    source: str
    ours: bool = True

    @property
    def seconds(self) -> float:
        """dispatch, experts and combine one after the other: nothing overlaps."""
        return self.exchange.dispatch + self.experts.seconds + self.exchange.combine

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks, through this one layer; of one where all have the same tokens."""
        return self.problem.tokens * self._distinct / self.seconds

    @property
    def _distinct(self) -> int:
        return 1 if self.exchange.dispatch_bytes == 0 else self.problem.parallel.world_size


@dataclass(frozen=True)
class Sized:
    """estimates: fastest first. without: pairings that are valid there and have no model, or that
    are refused, each with a reason."""

    estimates: tuple[Estimate, ...]
    without: tuple[tuple[str, str], ...]


def in_world(problem: Problem, world_size: int) -> Problem:
    """Return the same layer with its experts in blocks over so many ranks."""
    return replace(problem, parallel=Parallel(world_size))


def size(
    problem: Problem, cluster: Cluster, *, routing: str = "uniform", others: bool = False
) -> Sized:
    """Estimate every pairing for problem.tokens tokens on each of its ranks.

    others: exchanges of libraries by themselves, too.
    """
    machine = _described(cluster)
    kind, found, without = RoutingKind.parse(routing), list[Estimate](), list[tuple[str, str]]()
    for verdict in check_all(problem, machine):
        traffic = traffic_of(verdict.prepare_finalize)
        if not verdict.ok:
            if len({r.rule for r in verdict.rejections} & {"format", "reduce"}) == 0:
                without.append((verdict.pairing, str(verdict.rejections[0])))
        elif traffic is None or verdict.experts != PART:
            whose = verdict.prepare_finalize if traffic is None else verdict.experts
            without.append((verdict.pairing, f"no measured efficiency of {whose}"))
        else:
            found.append(_estimate(verdict.pairing, problem, cluster, kind, traffic))
    if others and problem.parallel.world_size > 1:
        for name, traffic in OTHERS.items():
            made = _estimate(f"{name} x {PART}", problem, cluster, kind, traffic)
            found.append(replace(made, ours=False))
    return Sized(tuple(sorted(found, key=lambda e: e.seconds)), tuple(without))


def traffic_of(prepare_finalize: str) -> Traffic | None:
    """Return what is known of a part's exchange: by itself, or by name."""
    declared = getattr(load_catalog().prepare_finalize(prepare_finalize), "traffic", None)
    return declared if isinstance(declared, Traffic) else TRAFFIC.get(prepare_finalize)


def _estimate(
    pairing: str, problem: Problem, cluster: Cluster, kind: RoutingKind, traffic: Traffic
) -> Estimate:
    world = problem.parallel.world_size
    # Where all ranks have the same tokens, the world's tokens are one rank's.
    tokens = problem.tokens if traffic.rows != "sum" else max(1, round(problem.tokens / world))
    load = rank_load(
        experts=problem.experts, top_k=problem.top_k, world_size=world, tokens=tokens, kind=kind
    )
    held = -(-problem.experts // world)
    slots = 0 if problem.adapters is None else problem.adapters.adapters
    return Estimate(
        pairing,
        problem,
        exchange_time(problem, traffic, load, cluster),
        experts_time(problem, load, cluster.gpu),
        held * expert_bytes(problem, problem.scheme) + slots * adapter_bytes(problem),
        traffic.source,
    )


def _described(cluster: Cluster) -> Machine:
    """Describe a Hopper GPU with every package that some part asks for."""
    packages = packages_of(load_catalog()) | {"triton", "ml_dtypes"}
    return Machine("cuda", _HOPPER, packages, name=cluster.gpu.name)
