"""A whole layer's time in a world of ranks, for each pairing that can serve it there."""

from dataclasses import dataclass, replace

from modular_kernel.catalog import check_all, load_catalog, packages_of
from modular_kernel.measure.adapter_roofline import adapter_bytes
from modular_kernel.measure.prepared_weights import declared_bytes
from modular_kernel.measure.roofline import expert_bytes
from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.perf_model.exchange_time import (
    OTHERS,
    PARTS_OVER,
    TRAFFIC,
    ExchangeTime,
    Traffic,
    caveat,
    exchange_time,
    network_rows,
)
from modular_kernel.perf_model.experts_time import PART, ExpertsTime, experts_time
from modular_kernel.perf_model.hardware import Cluster
from modular_kernel.perf_model.load import ONE_GROUP, Groups, rank_load
from modular_kernel.spec.problem import Machine, Parallel, Problem

_HOPPER = (9, 0)


@dataclass(frozen=True)
class Estimate:
    """Seconds of one layer. weights: bytes of one rank's experts. prepared: bytes that are kept
    beside these where weights are prepared. network_rows: of a token, that leave the host in a
    dispatch. ours: whether it is a pairing of installed parts; otherwise a
    library's exchange with our experts. caveat: what that library is not made for."""

    pairing: str
    problem: Problem
    exchange: ExchangeTime
    experts: ExpertsTime
    weights: float
    source: str
    network_rows: float
    ours: bool = True
    caveat: str = ""
    prepared: int = 0

    @property
    def held(self) -> float:
        """Bytes of one rank's experts with what was prepared of them: it replaces nothing."""
        return self.weights + self.prepared

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


def in_world(problem: Problem, world_size: int, per_host: int | None = None) -> Problem:
    """Return the same layer with its experts in blocks over so many ranks.

    per_host: of each host, where whole hosts are that many; a last host with fewer is not told of.
    """
    whole = per_host is not None and world_size > per_host and world_size % per_host == 0
    return replace(
        problem, parallel=Parallel(world_size, ranks_per_host=per_host if whole else None)
    )


def size(
    problem: Problem,
    cluster: Cluster,
    *,
    routing: str = "uniform",
    others: bool = False,
    groups: Groups = ONE_GROUP,
    prepared: bool = False,
) -> Sized:
    """Estimate every pairing for problem.tokens tokens on each of its ranks.

    others: exchanges of libraries by themselves, too. groups: of group-limited routing. prepared:
    count what the experts prepare of weights; the time is that without, see experts_time.
    """
    machine = _described(cluster)
    kind, found, without = RoutingKind.parse(routing), list[Estimate](), list[tuple[str, str]]()
    kept = declared_bytes(PART, problem, machine) if prepared else 0
    asked = Asked(problem, cluster, kind, groups, kept)
    for verdict in check_all(problem, machine):
        traffic = traffic_of(verdict.prepare_finalize)
        if not verdict.ok:
            if len({r.rule for r in verdict.rejections} & {"format", "reduce"}) == 0:
                without.append((verdict.pairing, str(verdict.rejections[0])))
        elif traffic is None or verdict.experts != PART:
            whose = verdict.prepare_finalize if traffic is None else verdict.experts
            without.append((verdict.pairing, f"no measured efficiency of {whose}"))
        else:
            found.append(asked.estimate(verdict.pairing, traffic))
    if others and problem.parallel.world_size > 1:
        for name, traffic in OTHERS.items():
            pairing = f"{name} x {PART}"
            if traffic.rows == "host" and problem.parallel.hosts == 1:
                continue  # its numbers are of several hosts
            refused = _refused(PARTS_OVER[name], problem, machine)
            if refused:
                without.append((pairing, refused))
                continue
            made = asked.estimate(pairing, traffic)
            found.append(replace(made, ours=False, caveat=caveat(name, problem)))
    return Sized(tuple(sorted(found, key=lambda e: e.seconds)), tuple(without))


def traffic_of(prepare_finalize: str) -> Traffic | None:
    """Return what is known of a part's exchange: by itself, or by name."""
    declared = getattr(load_catalog().prepare_finalize(prepare_finalize), "traffic", None)
    return declared if isinstance(declared, Traffic) else TRAFFIC.get(prepare_finalize)


def _refused(part: str, problem: Problem, machine: Machine) -> str:
    """Say why a library cannot serve ranks so, by the part over it: "" where it can, in a format
    of its own, in the dtypes that it has."""
    rules = {"world_size", "hosts", "max_experts", "top_k", "hidden"}
    found = load_catalog().prepare_finalize(part)
    pairing = next(v for v in check_all(problem, machine) if v.prepare_finalize == found.__name__)
    return "; ".join(
        str(r) for r in pairing.rejections if r.rule in rules and found.__name__ in r.parties
    )


@dataclass(frozen=True)
class Asked:
    """What all estimates of one call of `size` have in common."""

    problem: Problem
    cluster: Cluster
    kind: RoutingKind
    groups: Groups
    prepared: int = 0

    def estimate(self, pairing: str, traffic: Traffic) -> Estimate:
        problem, cluster = self.problem, self.cluster
        world = problem.parallel.world_size
        # Where all ranks have the same tokens, the world's tokens are one rank's.
        tokens = problem.tokens if traffic.rows != "sum" else max(1, round(problem.tokens / world))
        load = rank_load(
            experts=problem.experts,
            top_k=problem.top_k,
            world_size=world,
            tokens=tokens,
            kind=self.kind,
            per_host=cluster.per_host,
            groups=self.groups,
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
            network_rows(problem, traffic, load, cluster),
            prepared=self.prepared,
        )


def _described(cluster: Cluster) -> Machine:
    """Describe a Hopper GPU with every package that some part asks for."""
    packages = packages_of(load_catalog()) | {"triton", "ml_dtypes"}
    return Machine("cuda", _HOPPER, packages, name=cluster.gpu.name)
