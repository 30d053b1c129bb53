"""`mk plan`: recommends a pairing for a layer on a described machine, without running anything.

`modular_kernel.perf_model` estimates the times from a roofline of the experts, and from the latency
and bandwidth of the exchange between ranks.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from click.exceptions import Exit

from modular_kernel.cli import output
from modular_kernel.cli.command import POSITIVE, IntegerRange, NumberRange, option
from modular_kernel.cli.file_options import FilePath, FileUse
from modular_kernel.cli.machine_options import PlannedMachineOptions, apply_cluster
from modular_kernel.cli.machine_setup import prepare_host
from modular_kernel.cli.options import (
    TOKENS_LIST,
    AsJson,
    DescribedProblemOptions,
    Prepared,
    ProblemOptions,
    make_not_prepared_error,
    refuse_combination,
    split_by_scheme,
)
from modular_kernel.cli.plan_output import (
    make_compared_row,
    make_record,
    print_cases,
    print_compared,
)
from modular_kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from modular_kernel.perf_model.accuracy import Accuracy
    from modular_kernel.perf_model.estimate import PairingEstimates
    from modular_kernel.perf_model.hardware import Cluster
    from modular_kernel.perf_model.recommend import Recommendation
    from modular_kernel.spec.problem import Machine, Problem

_DEFAULT_GPU, _DEFAULT_GPUS_PER_HOST = "h200", 8
_GIGA, _TERA, _MICRO = 1e9, 1e12, 1e-6


@dataclass(frozen=True, kw_only=True)
class PlannedProblemOptions(DescribedProblemOptions):
    """Options of the `Problem` of one rank."""

    tokens: Annotated[
        int | None, option("Tokens on each rank.  [default: 128 for decode, 4096 for prefill]")
    ] = None


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Options of the workload, and rates that replace those of the described machine."""

    phase: Annotated[
        Literal["prefill", "decode"] | None,
        option(
            "Recommend a pairing for this phase only.  [default: both; with --tokens or "
            "--tokens-list, decode for up to 256 tokens on each rank, and prefill for more]"
        ),
    ] = None
    tokens_list: Annotated[
        tuple[int, ...] | None,
        option(
            "Several numbers of tokens on each rank, such as 1,128,4096, with tables for each; "
            "replaces --tokens.",
            type=TOKENS_LIST,
        ),
    ] = None
    routing: Annotated[str, option("Routing pattern: uniform, zipf, zipfA or hotN (hot1).")] = (
        "uniform"
    )
    layers: Annotated[
        int, option("Number of MoE layers whose weights must fit together.", type=IntegerRange(1))
    ] = 1
    link: Annotated[
        float | None,
        option("Bandwidth from one GPU to others of its host, in GB/s.", type=POSITIVE),
    ] = None
    link_latency: Annotated[
        float | None, option("Latency of an exchange within a host, in us.", type=NumberRange(0))
    ] = None
    net: Annotated[
        float | None, option("Bandwidth from one GPU to other hosts, in GB/s.", type=POSITIVE)
    ] = None
    net_latency: Annotated[
        float | None, option("Latency of an exchange between hosts, in us.", type=NumberRange(0))
    ] = None
    bandwidth: Annotated[
        float | None, option("Memory bandwidth of a GPU, in TB/s.", type=POSITIVE)
    ] = None
    peak: Annotated[
        float | None,
        option(
            "Peak rate of 16-bit GEMMs in TFLOP/s. 8-bit GEMMs have twice this rate.", type=POSITIVE
        ),
    ] = None
    groups: Annotated[
        int, option("Group-limited routing: number of groups into which the experts are divided.")
    ] = 1
    topk_groups: Annotated[
        int, option("Group-limited routing: number of groups that a token selects.")
    ] = 1
    prepared: Prepared = False
    rows: Annotated[
        int, option("Rows of each table; 0 shows every pairing.", type=IntegerRange(0))
    ] = 8

    def apply_to(self, cluster: "Cluster") -> "Cluster":
        """Return the machine with the rates that the options set."""
        from modular_kernel.perf_model.hardware import make_peak_rates

        gpu, inside, between = cluster.gpu, cluster.inside, cluster.between
        if self.bandwidth is not None:
            gpu = replace(gpu, bandwidth=self.bandwidth * _TERA, measured=False)
        if self.peak is not None:
            rates = make_peak_rates(self.peak, 2 * self.peak, fp8="float8_e4m3fn" in gpu.flops)
            gpu = replace(gpu, flops=rates, measured=False)
        if self.link is not None:
            inside = replace(inside, bandwidth=self.link * _GIGA)
        if self.link_latency is not None:
            inside = replace(inside, latency=self.link_latency * _MICRO)
        if self.net is not None:
            between = replace(between, bandwidth=self.net * _GIGA)
        if self.net_latency is not None:
            between = replace(between, latency=self.net_latency * _MICRO)
        return replace(cluster, gpu=gpu, inside=inside, between=between)

    def list_phases(self, options: ProblemOptions) -> list[tuple[str, int]]:
        """Return (phase, tokens per rank) for each table."""
        from modular_kernel.perf_model.recommend import PHASE_TOKENS, phase_of

        token_counts = self.tokens_list
        if token_counts is None and options.tokens is not None:
            token_counts = (options.tokens,)
        if token_counts is not None:
            return [(self.phase or phase_of(tokens), tokens) for tokens in token_counts]
        return [(p, tokens) for p, tokens in PHASE_TOKENS.items() if self.phase in (None, p)]


@dataclass(frozen=True)
class PlanCase:
    """The estimates of all pairings for one machine, phase and number of tokens.

    name: name of the machine.
    layer_name: name of the layer, such as its model.
    packages_text: the machine's packages, and whether they are assumed.
    accuracy: how well the estimate of the recommended pairing is known; None without one.
    num_layers: number of layers whose weights must fit together.
    layers: the layers with the quantization scheme of the problem; None if all layers have it.
    """

    name: str
    layer_name: str
    packages_text: str
    cluster: "Cluster"
    machine: "Machine"
    phase: str
    problem: "Problem"
    result: "PairingEstimates"
    recommendation: "Recommendation | None"
    accuracy: "Accuracy | None"
    num_layers: int
    layers: tuple[int, ...] | None = None


def plan(
    *,
    options: PlannedProblemOptions,
    machine_options: PlannedMachineOptions,
    workload: WorkloadOptions,
    compare: Annotated[
        tuple[Path, ...],
        option(
            "Only compare estimates with the measured times in this file; may be repeated.",
            type=FilePath(FileUse.READ),
        ),
    ] = (),
    as_json: AsJson = None,
) -> None:
    """Recommend a pairing for prefill and one for decode on a machine, without running anything.

    Estimates the time and memory of every pairing that `mk check` accepts with the same options. A
    pairing without an estimate is listed with the reason. A pairing that exceeds the memory of a
    GPU is refused. All rows of a table are for the same work, that is, the same number of distinct
    tokens per rank. If the layers of a config.json are quantized differently, there is a table for
    each scheme.

    Without --machine, plans for one host with 8 H200, or for as many H200 as --world-size, 8 on
    each host. Without --model, sizes that are not given have default values, which the first line
    shows. --prepared adds the memory of prepared weights. "Plan for a machine" in the documentation
    gives the formulas, the records and the errors of the estimates.

    --compare FILE prints the errors of the estimates for a record of `mk bench` or `mk exchange`.
    It can be combined with --json only.

    Exits with 1 if no pairing has an estimate. With --compare, exits with 1 if an estimate is off
    by more than 25 %; rows that were used to fit the estimates or were timed eagerly are ignored.
    Exits with 2 on bad usage.
    """
    if compare:
        refuse_combination("--compare", (options, machine_options, workload))
        _print_comparison(compare, as_json=as_json)
        return
    prepare_host(quiet=True)
    _check_options(options)
    cases = [
        replace(case, layers=layers)
        for name, cluster in _parse_machines(options, machine_options)
        for layers, scheme_options in split_by_scheme(options)
        for case in _make_cases(
            name, workload.apply_to(cluster), scheme_options, machine_options, workload
        )
    ]
    if workload.prepared:
        _check_prepared(cases)
    record = make_record(cases, workload.routing)
    output.print_result(
        record, as_json, lambda: print_cases(cases, workload.routing, workload.rows)
    )
    if not any(case.result.estimates for case in cases):
        raise Exit(1)


def _check_options(options: ProblemOptions) -> None:
    """Raise ConfigurationError for options that an estimate would ignore."""
    if options.expert_map or options.local_experts is not None:
        got = "--expert-map or --local-experts"
        raise ConfigurationError("mk plan", got=got, need="a layer on all ranks")
    if options.placement not in (None, "linear"):
        raise ConfigurationError("--placement", got=options.placement, need="linear in mk plan")


def _parse_machines(
    options: ProblemOptions, machine_options: PlannedMachineOptions
) -> list[tuple[str, "Cluster"]]:
    """Return (name, machine) for each machine of --machine, or for the default machine."""
    if machine_options.machine is None:
        from modular_kernel.perf_model.machines import parse_machine

        per_host = options.ranks_per_host or _DEFAULT_GPUS_PER_HOST
        hosts = -(-(options.world_size or per_host) // per_host)
        name = f"{hosts}x{per_host}x{_DEFAULT_GPU}" if hosts > 1 else f"{per_host}x{_DEFAULT_GPU}"
        return [(name, parse_machine(name))]
    names = list(dict.fromkeys(machine_options.machine.split(",")))
    clusters = [(name, replace(machine_options, machine=name).parse_cluster()) for name in names]
    return [(name, cluster) for name, cluster in clusters if cluster is not None]


def _make_cases(
    name: str,
    cluster: "Cluster",
    options: ProblemOptions,
    machine_options: PlannedMachineOptions,
    workload: WorkloadOptions,
) -> list[PlanCase]:
    from modular_kernel.perf_model.accuracy import describe_accuracy
    from modular_kernel.perf_model.estimate import estimate_pairings, machines_with_all_packages
    from modular_kernel.perf_model.load import Groups
    from modular_kernel.perf_model.recommend import recommend

    machine = machine_options.resolve_machine(cluster)
    packages_text = machine_options.describe_packages(cluster, machine)
    layer_options = apply_cluster(options, cluster)
    problem, layer_name = layer_options.problem(), layer_options.describe_layer()
    estimate = partial(
        estimate_pairings,
        cluster=cluster,
        routing=workload.routing,
        groups=Groups(workload.groups, workload.topk_groups),
        prepared=workload.prepared,
        layers=workload.layers,
    )
    cases = []
    for phase, tokens in workload.list_phases(options):
        phase_problem = problem.with_tokens(tokens)
        result = estimate(phase_problem, machine=machine)
        results_with_all_packages = [
            estimate(phase_problem, machine=variant)
            for variant in machines_with_all_packages(cluster)
        ]
        estimate_at = lambda count: estimate(problem.with_tokens(count), machine=machine)  # noqa: E731
        recommendation = recommend(phase, result, estimate_at, results_with_all_packages)
        accuracy = None
        if recommendation is not None:
            accuracy = describe_accuracy(recommendation.best, cluster)
        cases.append(
            PlanCase(
                name,
                layer_name,
                packages_text,
                cluster,
                machine,
                phase,
                phase_problem,
                result,
                recommendation,
                accuracy,
                workload.layers,
            )
        )
    return cases


def _check_prepared(cases: list[PlanCase]) -> None:
    """Raise ConfigurationError if no part of a valid pairing prepares weights of the scheme."""
    if any(case.result.parts_with_prepared_weights for case in cases):
        return
    estimates = [estimate for case in cases for estimate in case.result.estimates]
    if estimates:
        parts = ", ".join(dict.fromkeys(estimate.experts_part for estimate in estimates))
        raise make_not_prepared_error(cases[0].problem.quant, parts)


def _print_comparison(paths: tuple[Path, ...], *, as_json: str | None) -> None:
    from modular_kernel.perf_model.compare import (
        MAX_ACCURATE_ERROR,
        compare,
        read_measurements,
        summarize,
    )

    results = compare([cell for path in paths for cell in read_measurements(path)])
    rows: list[dict[str, Any]] = [make_compared_row(result) for result in results]
    record = {"within": MAX_ACCURATE_ERROR, "cells": rows, "summaries": summarize(results)}
    output.print_result(record, as_json, lambda: print_compared(rows, summarize(results)))
    if not results or any(result.is_mispredicted for result in results):
        raise Exit(1)
