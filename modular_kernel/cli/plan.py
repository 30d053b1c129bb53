"""`mk plan`: analytic time estimates of a layer on clusters other than this machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from click.exceptions import Exit

from modular_kernel.cli import output
from modular_kernel.cli.command import IntegerList, option
from modular_kernel.cli.file_options import FilePath, FileUse
from modular_kernel.cli.options import (
    TOKENS_LIST,
    AsJson,
    Prepared,
    ProblemOptions,
    not_prepared_error,
    options_by_scheme,
    refuse_combination,
)
from modular_kernel.errors import ConfigurationError
from modular_kernel.text import counted, layers_text

if TYPE_CHECKING:
    from modular_kernel.perf_model.estimate import Estimate, SizeResult
    from modular_kernel.perf_model.hardware import Cluster, Link

_WORLD_SIZES = (1, 8, 16, 32, 64)
_TOKENS = (1, 128, 4096)
_MAX_WORLD_SIZE = 4096
_GIGA, _TERA = 1e9, 1e12


def _as_list(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Command-line description of the cluster and the workload.

    Fields are in the units of the options (GB/s, us, TB/s, TFLOP/s); `cluster` converts them to
    bytes per second, seconds and flops per second.
    """

    worlds: Annotated[
        tuple[int, ...] | None,
        option(
            f"Numbers of ranks, such as 8,64,256.  [default: of {_as_list(_WORLD_SIZES)}, those "
            "that have an expert for each rank]",
            type=IntegerList(_MAX_WORLD_SIZE, "8,64"),
        ),
    ] = None
    tokens_list: Annotated[
        tuple[int, ...] | None,
        option(
            f"Tokens of each rank.  [default: --tokens, or {_as_list(_TOKENS)}]", type=TOKENS_LIST
        ),
    ] = None
    routing: Annotated[str, option("Routing pattern: uniform, zipf, zipfA or hotN (hot1).")] = (
        "uniform"
    )
    per_host: Annotated[int, option("GPUs per host.")] = 8
    link: Annotated[float, option("Bandwidth of one GPU to others of its host, in GB/s.")] = 393
    link_latency: Annotated[float, option("Latency of an exchange within a host, in us.")] = 0
    net: Annotated[float, option("Bandwidth of one GPU to other hosts, in GB/s.")] = 50
    net_latency: Annotated[float, option("Latency of an exchange between hosts, in us.")] = 20
    bandwidth: Annotated[float, option("Memory bandwidth of a GPU, in TB/s.")] = 4.8
    groups: Annotated[int, option("Group-limited routing: number of groups of experts.")] = 1
    topk_groups: Annotated[int, option("Group-limited routing: number of groups per token.")] = 1
    prepared: Prepared = False
    peak: Annotated[
        float | None,
        option(
            "Peak of 16-bit products in TFLOP/s; 8-bit: twice that.  [default: a measured H200]"
        ),
    ] = None

    def cluster(self) -> "Cluster":
        from modular_kernel.perf_model.hardware import Cluster, Gpu, Link

        gpu = replace(Gpu(), bandwidth=self.bandwidth * _TERA)
        if self.peak is not None:
            rates = {name: self.peak * _TERA * (1 if "16" in name else 2) for name in Gpu().flops}
            gpu = replace(gpu, name="custom", flops=rates)
        within_host = Link(self.link * _GIGA, self.link_latency * 1e-6)
        between_hosts = Link(self.net * _GIGA, self.net_latency * 1e-6)
        return Cluster(gpu, within_host, between_hosts, self.per_host)

    def tokens(self, options: ProblemOptions) -> tuple[int, ...]:
        """Return the token counts per rank: of --tokens-list, of --tokens, or the default."""
        if self.tokens_list is not None:
            return self.tokens_list
        return _TOKENS if options.tokens is None else (options.tokens,)

    def world_sizes(self, options: ProblemOptions) -> tuple[int, ...]:
        """Return the numbers of ranks: of --world-size, of --worlds, or the default."""
        if options.world_size is not None:
            if self.worlds is not None:
                raise ConfigurationError("--worlds", got="--world-size too", need="one of the two")
            return (options.world_size,)
        if self.worlds is not None:
            return self.worlds
        experts = options.problem().experts
        return tuple(world_size for world_size in _WORLD_SIZES if world_size <= experts)


def plan(
    *,
    options: ProblemOptions,
    cluster_options: ClusterOptions,
    compare: Annotated[
        tuple[Path, ...],
        option(
            "Only compare the model with the measured rows of this file; may be repeated.",
            type=FilePath(FileUse.READ),
        ),
    ] = (),
    as_json: AsJson = None,
) -> None:
    """Estimate the time of a layer on 1 to 4096 ranks for each pairing, without running it.

    The analytic model derives the time of experts from bytes and flops at a measured efficiency,
    and the time of exchanges from link latency and bytes. --tokens is the number of tokens per
    rank. A config.json whose layers are quantized differently is estimated once for each scheme.
    --prepared includes the memory of prepared weights. docs/sizing.md of the source tree
    gives the formulas, the fitted measurements and the errors of the model. `mk plan --compare
    FILE` prints these errors for the records in modular_kernel/perf_model/data, h200-layers.json
    and h200-exchange.json; --json is the only other option that --compare can be combined with.

    Exits with 1 if no pairing has an estimate, or if the model is more than 25 % off on a compared
    row that was neither fitted nor timed eagerly; exits with 2 on bad usage.
    """
    if compare:
        refuse_combination("--compare", (options, cluster_options))
        _compare(compare, as_json=as_json)
        return
    if options.ranks_per_host is not None:
        got = f"--ranks-per-host {options.ranks_per_host}"
        raise ConfigurationError("mk plan", got=got, need="--per-host: GPUs per host")
    groups = [
        (layers, _sizes(each, cluster_options)) for layers, each in options_by_scheme(options)
    ]
    cluster, routing = cluster_options.cluster(), cluster_options.routing
    by_group = [
        [
            _row(estimate, cluster) | ({} if layers is None else {"layers": layers})
            for result in results
            for estimate in result.estimates
        ]
        for layers, results in groups
    ]
    record = {"cluster": cluster, "routing": routing, "estimates": [*chain(*by_group)]}

    def show() -> None:
        for layers, results in groups:
            if layers is not None:
                output.line(f"{layers_text(layers)}:")
            _print(results, cluster, routing)

    output.print_result(record, as_json, show)
    if not all(by_group):
        raise Exit(1)


def _sizes(options: ProblemOptions, cluster_options: ClusterOptions) -> "list[SizeResult]":
    """Return the estimates of one scheme for each number of ranks and of tokens."""
    from modular_kernel.perf_model.estimate import over_ranks, size
    from modular_kernel.perf_model.experts_time import PART
    from modular_kernel.perf_model.load import Groups

    cluster, one_rank = cluster_options.cluster(), replace(options, world_size=None).problem()
    if one_rank.expert_map or one_rank.local_experts is not None:
        raise ConfigurationError(
            "mk plan", got="--expert-map or --local-experts", need="a layer on all ranks"
        )
    groups = Groups(cluster_options.groups, cluster_options.topk_groups)
    results = [
        size(
            over_ranks(one_rank.with_tokens(tokens), ranks, cluster_options.per_host),
            cluster,
            routing=cluster_options.routing,
            others=True,
            groups=groups,
            prepared=cluster_options.prepared,
        )
        for ranks in cluster_options.world_sizes(options)
        for tokens in cluster_options.tokens(options)
    ]
    estimates = [estimate for result in results for estimate in result.estimates]
    if (
        cluster_options.prepared
        and estimates
        and not any(estimate.prepared for estimate in estimates)
    ):
        raise not_prepared_error(one_rank.quant, PART)
    return results


def _row(estimate: "Estimate", cluster: "Cluster") -> dict[str, Any]:
    us = 1e6
    return {
        "ranks": estimate.problem.parallel.world_size,
        "tokens": estimate.problem.tokens,
        "pairing": estimate.pairing,
        "ours": estimate.installed,
        "dispatch_us": estimate.exchange.dispatch * us,
        "experts_us": estimate.experts.seconds * us,
        "combine_us": estimate.exchange.combine * us,
        "layer_us": estimate.seconds * us,
        "bound": estimate.experts.bound,
        "tokens_per_second": estimate.tokens_per_second,
        "weights_bytes": estimate.weights,
        "prepared_bytes": estimate.prepared,
        "fits": estimate.total_weight_bytes <= cluster.gpu.memory,
        "network_rows": estimate.network_rows,
        "caveat": estimate.caveat,
        "exchange_source": estimate.source,
        "experts_source": estimate.experts.source,
    }


def _print(results: "list[SizeResult]", cluster: "Cluster", routing: str) -> None:
    from modular_kernel.perf_model.exchange_time import LIBRARIES

    rows = []
    for result in results:
        for estimate in result.estimates:
            row = _row(estimate, cluster)
            times = [row[f"{name}_us"] for name in ("dispatch", "experts", "combine", "layer")]
            name = row["pairing"] if row["ours"] else f"({row['pairing']})"
            gigabytes = f"{estimate.total_weight_bytes / _GIGA:.1f}"
            rate = f"{row['tokens_per_second'] / 1e6:.2f}"
            labels = row["ranks"], row["tokens"], name
            sent = f"{row['network_rows']:.2f}"
            extras = sent, rate, gigabytes, row["bound"]
            rows.append((*labels, *(f"{us:.1f}" for us in times), *extras))
    columns = ("ranks", "tokens", "pairing", "dispatch", "experts", "combine", "layer us")
    extra = ("rows out", "Mtokens/s", "GB", "bound")
    output.table((*columns, *extra), rows, optional=("experts", "dispatch", "combine", *extra))
    for text in _assumptions(results, cluster, routing):
        output.line(f"- {text}")
    missing: dict[str, dict[str, None]] = {}
    for pairing, reason in (pair for result in results for pair in result.unestimated):
        if "no measured" in reason or pairing.partition(" x ")[0] in LIBRARIES:
            missing.setdefault(reason, {})[pairing] = None
    for reason, pairings in missing.items():
        names = ", ".join(pairings) if len(pairings) < 3 else counted(len(pairings), "pairing")
        output.line(f"no estimate for {names}: {reason}")
    for estimate in (
        estimate for result in results for estimate in result.estimates if estimate.caveat
    ):
        ranks = estimate.problem.parallel.world_size
        output.line(f"caveat: {estimate.pairing} on {ranks} ranks: {estimate.caveat}")


def _assumptions(results: "list[SizeResult]", cluster: "Cluster", routing: str) -> list[str]:
    gpu = cluster.gpu
    rates = ", ".join(f"{name} {rate / _TERA:.0f}" for name, rate in gpu.flops.items())
    estimates = [estimate for result in results for estimate in result.estimates]
    sources = dict.fromkeys((e.pairing.split(" x ")[0], e.source) for e in estimates)
    efficiencies = dict.fromkeys(e.experts.source for e in estimates)
    return [
        f"GPU: {gpu.name}, {gpu.bandwidth / _TERA:g} TB/s, TFLOP/s: {rates}",
        f"link of one GPU within a host of {cluster.per_host}: {_link_text(cluster.inside)}",
        f"link of one GPU between hosts: {_link_text(cluster.between)}",
        f"routing {routing}: expected loads; the most loaded rank determines the time",
        "placement: consecutive experts on each rank",
        "rows out: expected rows per token that leave the host in a dispatch",
        "dispatch, experts and combine run one after another, without overlap",
        "calls are replayed from CUDA graphs; router, shared experts and attention are excluded",
        *_prepared_lines(estimates),
        *(f"efficiency of the experts: {source}" for source in efficiencies),
        *(f"{name}: {source}" for name, source in sources),
        "pairings in parentheses: the exchange of a library with our experts",
        "ReplicatedEP: all ranks have the same tokens; other parts: each rank has its own",
    ]


def _link_text(link: "Link") -> str:
    latency = f" and {link.latency * 1e6:g} us" if link.latency else ""
    return f"{link.bandwidth / _GIGA:g} GB/s{latency}"


def _prepared_lines(estimates: "list[Estimate]") -> list[str]:
    """Describe the memory of prepared weights; [] if no estimate includes any."""
    by_ranks = {
        estimate.problem.parallel.world_size: f"{estimate.prepared / _GIGA:.1f}"
        for estimate in estimates
        if estimate.prepared
    }
    if not by_ranks:
        return []
    sizes = ", ".join(f"{size} on each of {ranks}" for ranks, size in by_ranks.items())
    note = f"GB includes prepared weights, {sizes}, in addition to w1 and w2"
    return [
        f"{note}, which some calls read",
        "times are those of calls without prepared weights, excluding the time to prepare them",
    ]


def _compare(paths: tuple[Path, ...], *, as_json: str | None) -> None:
    from modular_kernel.perf_model.compare import WITHIN, cells_of, compare, summaries

    results = compare([cell for path in paths for cell in cells_of(path)])
    rows = [
        {
            "cell": result.cell.label,
            "ranks": result.cell.problem.parallel.world_size,
            "quant": result.cell.problem.quant,
            "tokens": result.cell.problem.tokens,
            "measured_us": result.cell.us,
            "predicted_us": round(result.predicted_us, 2),
            "error": round(result.error, 4),
            "fitted": result.cell.fitted,
            "eager": result.cell.eager,
        }
        for result in results
    ]

    def show() -> None:
        columns = ("cell", "ranks", "scheme", "tokens", "measured us", "model us", "error", "")
        output.table(columns, [_error_row(row) for row in rows])
        for summary in summaries(results):
            output.line(
                f"{summary.quantity}: {summary.accurate} of {summary.count} within {WITHIN:.0%}, "
                f"mean {summary.mean:.1%}, worst {summary.worst:.1%}"
            )

    output.print_result(
        {"within": WITHIN, "cells": rows, "summaries": summaries(results)}, as_json, show
    )
    if not results or any(result.is_mispredicted for result in results):
        raise Exit(1)


def _error_row(row: dict[str, Any]) -> tuple[object, ...]:
    labels = row["cell"], row["ranks"], row["quant"], row["tokens"]
    times = f"{row['measured_us']:.1f}", f"{row['predicted_us']:.1f}"
    return *labels, *times, f"{row['error']:+.1%}", _kind(row)


def _kind(row: dict[str, Any]) -> str:
    return ", ".join(name for name in ("fitted", "eager") if row[name])
