"""Estimate the time and memory of a layer over several ranks, for each valid pairing.

All estimates of one call of `estimate_pairings` are for the same work: problem.tokens distinct
tokens per rank. Some PrepareAndFinalize parts require replicated input, that is, the same tokens on
every rank. In a pairing with such a part, every rank therefore passes the tokens of all ranks,
problem.tokens * world_size.
"""

from dataclasses import dataclass, replace

from modular_kernel.catalog import collect_packages, load_catalog
from modular_kernel.compatibility.support import Verdict
from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.perf_model.exchange_time import (
    TRAFFIC_BY_PART,
    ExchangeTime,
    Traffic,
    exchange_time,
    find_caveat,
    network_rows,
    select_traffic,
)
from modular_kernel.perf_model.experts_records import ARCH, TimeCorrection, find_time_correction
from modular_kernel.perf_model.experts_time import MODELED_EXPERTS_PART, ExpertsTime, experts_time
from modular_kernel.perf_model.hardware import Cluster
from modular_kernel.perf_model.load import ONE_GROUP, Groups, rank_load
from modular_kernel.perf_model.machines import BASE_PACKAGES, DEEP_EP_1_PACKAGE
from modular_kernel.perf_model.memory import Memory, estimate_memory, prepared_bytes
from modular_kernel.perf_model.verdicts import judge_pairs_with_memory
from modular_kernel.spec.problem import Machine, Parallel, Problem

_NO_CORRECTION = TimeCorrection(
    1.0, "no recorded time in a similar scheme, so the model is not corrected"
)
_GIGA = 1e9


@dataclass(frozen=True)
class Estimate:
    """Estimated time of one layer with one pairing, and the memory of one rank.

    experts_part: name of the experts part.
    problem: the problem of one rank.
    world_tokens: number of distinct tokens of all ranks.
    experts: modeled time of the experts, corrected by `correction`.
    source: description of the source of the traffic model's parameters.
    network_rows: rows per token that a dispatch sends to other hosts.
    caveat: a limit of the exchange that the estimate ignores, or "".
    """

    prepare_finalize: str
    experts_part: str
    problem: Problem
    world_tokens: int
    exchange: ExchangeTime
    experts: ExpertsTime
    correction: TimeCorrection
    memory: Memory
    source: str
    network_rows: float
    caveat: str = ""

    @property
    def pairing(self) -> str:
        return f"{self.prepare_finalize} x {self.experts_part}"

    @property
    def seconds(self) -> float:
        """Sum of dispatch, experts and combine, without overlap."""
        return self.exchange.dispatch + self.experts.seconds + self.exchange.combine

    @property
    def tokens_per_second(self) -> float:
        """Distinct tokens per second through this layer, summed over all ranks."""
        return self.world_tokens / self.seconds


@dataclass(frozen=True)
class PairingEstimates:
    """Result of `estimate_pairings`, in which every pairing is in one of four fields.

    estimates: estimates, the fastest first.
    too_large: (pairing, reason) for pairings that exceed the machine's memory.
    unestimated: (pairing, reason) for valid pairings without a model or a record.
    refused: verdicts on all other pairings.
    parts_with_prepared_weights: names of the experts parts of valid pairings that would use
        prepared weights. It is empty unless `estimate_pairings` counts prepared weights.
    """

    problem: Problem
    machine: Machine
    estimates: tuple[Estimate, ...]
    too_large: tuple[tuple[str, str], ...]
    unestimated: tuple[tuple[str, str], ...]
    refused: tuple[Verdict, ...]
    parts_with_prepared_weights: frozenset[str] = frozenset()


def distribute_over_ranks(
    problem: Problem, world_size: int, per_host: int | None = None
) -> Problem:
    """Return the problem with its experts distributed in blocks over `world_size` ranks.

    per_host: ranks per host. It is ignored if all ranks are on one host, or if the last host is not
        full.
    """
    hosts_are_full = per_host is not None and world_size > per_host and world_size % per_host == 0
    return replace(
        problem, parallel=Parallel(world_size, ranks_per_host=per_host if hosts_are_full else None)
    )


def machines_with_all_packages(cluster: Cluster) -> tuple[Machine, ...]:
    """Return two Machines with the cluster's GPU and every optional package.

    The first has deep_ep 1 and the second deep_ep 2. Both versions use the same module name, so a
    machine can have only one of them.
    """
    packages = collect_packages(load_catalog()) | BASE_PACKAGES
    return cluster.machine(packages), cluster.machine(packages - {DEEP_EP_1_PACKAGE})


def estimate_pairings(
    problem: Problem,
    cluster: Cluster,
    machine: Machine | None = None,
    *,
    routing: str = "uniform",
    groups: Groups = ONE_GROUP,
    prepared: bool = False,
    layers: int = 1,
) -> PairingEstimates:
    """Estimate every valid pairing for problem.tokens tokens on each of its ranks.

    machine: machine that pairings are judged for; None uses the first of
        `machines_with_all_packages`.
    routing: distribution of tokens over experts, in the syntax of RoutingKind.parse.
    groups: expert groups of group-limited routing.
    prepared: whether to count the bytes of prepared weights. Times do not depend on this option
        (see `experts_time`).
    layers: number of layers whose weights must fit in memory together.
    """
    machine = machines_with_all_packages(cluster)[0] if machine is None else machine
    request = EstimateRequest(
        problem, cluster, machine, RoutingKind.parse(routing), groups, prepared, layers
    )
    estimates, too_large, unestimated, refused = list[Estimate](), [], [], []
    verdicts = judge_pairs_with_memory(load_catalog(), None, None, problem, machine)
    for verdict in verdicts:
        if not verdict.ok and {r.rule for r in verdict.rejections} != {"memory"}:
            refused.append(verdict)
        elif reason := request.explain_too_large(verdict):
            too_large.append((verdict.pairing, reason))
        elif reason := request.explain_missing_estimate(verdict):
            unestimated.append((verdict.pairing, reason))
        else:
            estimates.append(request.estimate(verdict.prepare_finalize, verdict.experts))
    estimates.sort(key=lambda estimate: estimate.seconds)
    valid = {verdict.experts for verdict in verdicts if verdict.ok}
    return PairingEstimates(
        problem,
        machine,
        tuple(estimates),
        tuple(too_large),
        tuple(unestimated),
        tuple(refused),
        frozenset(name for name in valid if prepared and prepared_bytes(name, problem, machine)),
    )


def find_traffic(prepare_finalize: str) -> Traffic | None:
    """Return the traffic model that a PrepareAndFinalize declares or that TRAFFIC_BY_PART has."""
    declared = getattr(load_catalog().prepare_finalize(prepare_finalize), "traffic", None)
    return declared if isinstance(declared, Traffic) else TRAFFIC_BY_PART.get(prepare_finalize)


@dataclass(frozen=True)
class EstimateRequest:
    """The arguments of `estimate_pairings`, which its estimates share."""

    problem: Problem
    cluster: Cluster
    machine: Machine
    routing: RoutingKind
    groups: Groups
    prepared: bool = False
    layers: int = 1

    @property
    def world_size(self) -> int:
        return self.problem.parallel.world_size

    def problem_of(self, prepare_finalize: str) -> Problem:
        """Return the problem of one rank. With replicated input, it has the tokens of all ranks."""
        part = load_catalog().prepare_finalize(prepare_finalize)
        if not part.requires.replicated_input:
            return self.problem
        return self.problem.with_tokens(self.problem.tokens * self.world_size)

    def explain_too_large(self, verdict: Verdict) -> str:
        """Return the reason why a pairing does not fit in memory, or ""."""
        if not verdict.ok:
            return str(verdict.rejections[0])
        memory = self.estimate_memory(verdict.prepare_finalize, verdict.experts)
        limit = self.machine.memory
        if limit is None or memory.total <= limit:
            return ""
        layers = f" for {self.layers} layers" if self.layers > 1 else ""
        return f"{memory}{layers}, of {limit / _GIGA:.1f} GB"

    def explain_missing_estimate(self, verdict: Verdict) -> str:
        """Return the reason why a valid pairing has no estimate, or ""."""
        problem = self.problem_of(verdict.prepare_finalize)
        if problem is not self.problem:
            catalog = load_catalog()
            pair = verdict.prepare_finalize, verdict.experts
            (replicated,) = judge_pairs_with_memory(catalog, *pair, problem, self.machine)
            if not replicated.ok:
                return f"with the tokens of all ranks on every rank: {replicated.rejections[0]}"
        if self.world_size > 1 and find_traffic(verdict.prepare_finalize) is None:
            return f"no measured exchange of {verdict.prepare_finalize}"
        if self._find_correction(verdict.experts) is None:
            arch = self.machine.arch
            suffix = "" if arch in (None, ARCH) else f" on sm_{arch[0]}{arch[1]}"
            scheme = self.problem.scheme
            scheme_text = f"with {scheme.name}" if scheme.quantized else "in 16 bits"
            return f"no recorded time of {verdict.experts} {scheme_text}{suffix}"
        return ""

    def estimate_memory(self, prepare_finalize: str, experts: str) -> Memory:
        return estimate_memory(
            prepare_finalize,
            experts,
            self.problem_of(prepare_finalize),
            self.machine,
            prepared=self.prepared,
            layers=self.layers,
        )

    def _find_correction(self, experts: str) -> TimeCorrection | None:
        """Return the correction of an experts part's modeled time, or None without a record.

        The records are from one GPU architecture. For other architectures, they are used only for
        parts without a vendor library, because these run the same kernels.
        """
        packages = load_catalog().experts(experts).requires.packages
        if self.machine.arch != ARCH and not BASE_PACKAGES.issuperset(packages):
            return None
        problem = self.problem
        rows = problem.tokens * self.world_size * problem.top_k / problem.experts
        return find_time_correction(experts, problem, rows) or (
            _NO_CORRECTION if experts == MODELED_EXPERTS_PART else None
        )

    def estimate(self, prepare_finalize: str, experts: str) -> Estimate:
        """Estimate a pairing for which `explain_missing_estimate` returned ""."""
        problem, cluster = self.problem_of(prepare_finalize), self.cluster
        traffic = find_traffic(prepare_finalize) or TRAFFIC_BY_PART["MoEPrepareAndFinalizeNoEP"]
        correction = self._find_correction(experts)
        assert correction is not None
        load = rank_load(
            experts=problem.experts,
            top_k=problem.top_k,
            world_size=self.world_size,
            tokens=self.problem.tokens,
            kind=self.routing,
            per_host=cluster.per_host,
            groups=self.groups,
        )
        times = experts_time(problem, load, cluster.gpu)
        return Estimate(
            prepare_finalize,
            experts,
            problem,
            self.problem.tokens * self.world_size,
            exchange_time(problem, traffic, load, cluster),
            replace(times, seconds=correction.correct(times.seconds)),
            correction,
            self.estimate_memory(prepare_finalize, experts),
            select_traffic(traffic, self.world_size, cluster).source,
            network_rows(problem, traffic, load, cluster),
            find_caveat(prepare_finalize, problem),
        )
