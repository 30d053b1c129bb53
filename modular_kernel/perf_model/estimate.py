"""Estimated time of a layer over several ranks, for each pairing that is valid there."""

from dataclasses import dataclass, replace

from modular_kernel.catalog import check_all, load_catalog, packages_of
from modular_kernel.measure.adapter_roofline import adapter_bytes
from modular_kernel.measure.prepared_weights import declared_bytes
from modular_kernel.measure.roofline import expert_bytes
from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.perf_model.exchange_time import (
    LIBRARIES,
    PART_OF_LIBRARY,
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
    """Estimated time of one layer with one pairing, in seconds.

    weights: bytes of one rank's experts. prepared: bytes of prepared weights, which are kept in
    addition. network_rows: rows per token that leave the host in a dispatch. installed: True for a
    pairing of installed parts, False for a library's exchange with our experts. caveat: limits of
    that library.
    """

    pairing: str
    problem: Problem
    exchange: ExchangeTime
    experts: ExpertsTime
    weights: float
    source: str
    network_rows: float
    installed: bool = True
    caveat: str = ""
    prepared: int = 0

    @property
    def total_weight_bytes(self) -> float:
        """Bytes of one rank's experts, including prepared weights."""
        return self.weights + self.prepared

    @property
    def seconds(self) -> float:
        """Sum of dispatch, experts and combine, without overlap."""
        return self.exchange.dispatch + self.experts.seconds + self.exchange.combine

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second through this layer, summed over ranks with different tokens."""
        return self.problem.tokens * self._distinct_inputs / self.seconds

    @property
    def _distinct_inputs(self) -> int:
        return 1 if self.exchange.dispatch_bytes == 0 else self.problem.parallel.world_size


@dataclass(frozen=True)
class SizeResult:
    """Result of `size`. estimates: fastest first.

    unestimated: (pairing, reason) of those that are refused, or valid but without a model.
    """

    estimates: tuple[Estimate, ...]
    unestimated: tuple[tuple[str, str], ...]


def over_ranks(problem: Problem, world_size: int, per_host: int | None = None) -> Problem:
    """Return the layer with its experts in contiguous blocks over `world_size` ranks.

    per_host: ranks of each host. It is ignored unless all hosts have that many.
    """
    full_hosts = per_host is not None and world_size > per_host and world_size % per_host == 0
    return replace(
        problem, parallel=Parallel(world_size, ranks_per_host=per_host if full_hosts else None)
    )


def size(
    problem: Problem,
    cluster: Cluster,
    *,
    routing: str = "uniform",
    others: bool = False,
    groups: Groups = ONE_GROUP,
    prepared: bool = False,
) -> SizeResult:
    """Estimate every pairing for problem.tokens tokens on each of its ranks.

    others: include the exchanges of libraries. groups: of group-limited routing. prepared: include
    the bytes of prepared weights; the time is that without them, see `experts_time`.
    """
    machine = _machine_of(cluster)
    kind, estimates, unestimated = (
        RoutingKind.parse(routing),
        list[Estimate](),
        list[tuple[str, str]](),
    )
    prepared_bytes = declared_bytes(PART, problem, machine) if prepared else 0
    request = SizeRequest(problem, cluster, kind, groups, prepared_bytes)
    for verdict in check_all(problem, machine):
        traffic = traffic_of(verdict.prepare_finalize)
        if not verdict.ok:
            if len({r.rule for r in verdict.rejections} & {"format", "reduce"}) == 0:
                unestimated.append((verdict.pairing, str(verdict.rejections[0])))
        elif traffic is None or verdict.experts != PART:
            unmodeled = verdict.prepare_finalize if traffic is None else verdict.experts
            unestimated.append((verdict.pairing, f"no measured efficiency of {unmodeled}"))
        else:
            estimates.append(request.estimate(verdict.pairing, traffic))
    if others and problem.parallel.world_size > 1:
        for name, traffic in LIBRARIES.items():
            pairing = f"{name} x {PART}"
            if traffic.rows == "host" and problem.parallel.hosts == 1:
                continue  # its parameters apply to several hosts
            refusal = _library_refusal(PART_OF_LIBRARY[name], problem, machine)
            if refusal:
                unestimated.append((pairing, refusal))
                continue
            estimate = request.estimate(pairing, traffic)
            estimates.append(replace(estimate, installed=False, caveat=caveat(name, problem)))
    return SizeResult(tuple(sorted(estimates, key=lambda e: e.seconds)), tuple(unestimated))


def traffic_of(prepare_finalize: str) -> Traffic | None:
    """Return the exchange model of a part, from its attribute `traffic` or from TRAFFIC."""
    declared = getattr(load_catalog().prepare_finalize(prepare_finalize), "traffic", None)
    return declared if isinstance(declared, Traffic) else TRAFFIC.get(prepare_finalize)


def _library_refusal(part: str, problem: Problem, machine: Machine) -> str:
    """Return the reason why a library does not support these ranks, or "".

    The part that uses the library is judged, by rules about ranks, experts, top_k and the hidden
    size, not by formats and dtypes.
    """
    rules = {"world_size", "hosts", "max_experts", "top_k", "hidden"}
    part_class = load_catalog().prepare_finalize(part)
    verdicts = (v for v in check_all(problem, machine) if v.prepare_finalize == part_class.__name__)
    verdict = next(verdicts, None)
    if verdict is None:
        return f"no experts part is installed to judge {part_class.__name__} with"
    return "; ".join(
        str(r) for r in verdict.rejections if r.rule in rules and part_class.__name__ in r.parties
    )


@dataclass(frozen=True)
class SizeRequest:
    """The arguments that all estimates of one `size` call share."""

    problem: Problem
    cluster: Cluster
    kind: RoutingKind
    groups: Groups
    prepared: int = 0

    def estimate(self, pairing: str, traffic: Traffic) -> Estimate:
        problem, cluster = self.problem, self.cluster
        world = problem.parallel.world_size
        # With "sum" all ranks have the same tokens: problem.tokens is the total over ranks.
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
        local_experts = -(-problem.experts // world)
        slots = 0 if problem.adapters is None else problem.adapters.adapters
        return Estimate(
            pairing,
            problem,
            exchange_time(problem, traffic, load, cluster),
            experts_time(problem, load, cluster.gpu),
            local_experts * expert_bytes(problem, problem.scheme) + slots * adapter_bytes(problem),
            traffic.source,
            network_rows(problem, traffic, load, cluster),
            prepared=self.prepared,
        )


def _machine_of(cluster: Cluster) -> Machine:
    """Return a Hopper GPU's Machine, with all optional packages."""
    packages = packages_of(load_catalog()) | {"triton", "ml_dtypes"}
    return Machine("cuda", _HOPPER, packages, name=cluster.gpu.name)
