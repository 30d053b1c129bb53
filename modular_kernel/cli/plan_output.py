"""Text and JSON output of `mk plan`."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from modular_kernel.cli import output
from modular_kernel.text import format_count, format_layers

if TYPE_CHECKING:
    from modular_kernel.cli.plan import PlanCase
    from modular_kernel.perf_model.compare import Comparison, Summary
    from modular_kernel.perf_model.estimate import Estimate
    from modular_kernel.perf_model.hardware import Link
    from modular_kernel.perf_model.recommend import Recommendation

# These suffixes end most part names. Tables show them only in the header.
_SUFFIX, _EXPERTS_SUFFIX = "PrepareAndFinalize", "Experts"
_GIGA, _TERA, _MEGA = 1e9, 1e12, 1e6
_REQUIRED_COLUMNS = (f"..{_SUFFIX}", f"..{_EXPERTS_SUFFIX}", "layer us", "Mtok/s", "GB")
# Columns that are dropped on a narrow terminal, starting with the last one.
_OPTIONAL_COLUMNS = (
    *("dispatch", "experts us", "combine"),
    *("weights", "workspace", "buffers", "prepared"),
    *("rows out", "bound"),
)


def make_record(cases: "Sequence[PlanCase]", routing: str) -> dict[str, Any]:
    """Return the JSON record of all cases."""
    return {
        "routing": routing,
        "machines": {case.name: case.cluster for case in cases},
        "recommendations": [
            _make_label_fields(case) | _make_recommendation_record(case.recommendation)
            for case in cases
            if case.recommendation is not None
        ],
        "estimates": [
            _make_label_fields(case) | _make_estimate_record(estimate)
            for case in cases
            for estimate in case.result.estimates
        ],
        "too_large": _make_reason_records(cases, "too_large"),
        "no_estimate": _make_reason_records(cases, "unestimated"),
    }


def _make_label_fields(case: "PlanCase") -> dict[str, Any]:
    return {
        "machine": case.name,
        "packages": case.machine.packages,
        "phase": case.phase,
        "ranks": case.problem.parallel.world_size,
        "tokens": case.problem.tokens,
        "layers": case.layers,
        "quant": case.problem.quant,
    }


def _make_reason_records(cases: "Sequence[PlanCase]", field: str) -> list[dict[str, Any]]:
    return [
        _make_label_fields(case) | {"pairing": pairing, "reason": reason}
        for case in cases
        for pairing, reason in getattr(case.result, field)
    ]


def _make_estimate_record(estimate: "Estimate") -> dict[str, Any]:
    us_per_s, memory = 1e6, estimate.memory
    return {
        "prepare_finalize": estimate.prepare_finalize,
        "experts": estimate.experts_part,
        "pairing": estimate.pairing,
        "world_tokens": estimate.world_tokens,
        "dispatch_us": estimate.exchange.dispatch * us_per_s,
        "experts_us": estimate.experts.seconds * us_per_s,
        "combine_us": estimate.exchange.combine * us_per_s,
        "layer_us": estimate.seconds * us_per_s,
        "tokens_per_second": estimate.tokens_per_second,
        "bound": estimate.experts.bound,
        "weights_bytes": memory.weights,
        "prepared_bytes": memory.prepared,
        "workspace_bytes": memory.workspace,
        "exchange_bytes": memory.exchange,
        "memory_bytes": memory.total,
        "network_rows": estimate.network_rows,
        "caveat": estimate.caveat,
        "exchange_source": estimate.source,
        "experts_source": f"{estimate.experts.source}; x {estimate.correction.factor:.2f} "
        f"+ {estimate.correction.start_seconds * us_per_s:.1f} us: {estimate.correction.source}",
    }


def _make_recommendation_record(recommendation: "Recommendation") -> dict[str, Any]:
    runner_up = recommendation.runner_up
    return {
        "pairing": recommendation.best.pairing,
        "layer_us": recommendation.best.seconds * 1e6,
        "tokens_per_second": recommendation.best.tokens_per_second,
        "memory_bytes": recommendation.best.memory.total,
        "runner_up": None if runner_up is None else runner_up.pairing,
        "runner_up_us": None if runner_up is None else runner_up.seconds * 1e6,
        "close": recommendation.is_close,
        "would_change": recommendation.changes,
    }


def print_cases(cases: "Sequence[PlanCase]", routing: str, max_rows: int) -> None:
    """Print the recommendations, then a table for each case, then the assumptions.

    max_rows: maximum number of pairings in a table. 0 prints all.
    """
    for case in cases:
        _print_recommendation(case)
    for case in cases:
        _print_table(case, max_rows)
    output.print_line()
    assumptions = (line for case in cases for line in _list_assumptions(case, routing))
    for assumption in dict.fromkeys(assumptions):
        output.print_line(f"- {assumption}")


def _format_title(case: "PlanCase") -> str:
    problem = case.problem
    ranks, tokens = problem.parallel.world_size, format_count(problem.tokens, "token")
    total = f", {ranks * problem.tokens} in all" if ranks > 1 else ""
    location = f"on each of {ranks} ranks" if ranks > 1 else "on one GPU"
    layers = "" if case.layers is None else f"{format_layers(case.layers)} ({problem.quant}): "
    return f"{layers}{case.phase} on {case.name}, {tokens} {location}{total}"


def _print_recommendation(case: "PlanCase") -> None:
    recommendation = case.recommendation
    if recommendation is None:
        reason = "every pairing is refused"
        if case.result.too_large:
            reason = "no valid pairing fits in memory"
        elif case.result.unestimated:
            reason = "no valid pairing has an estimate"
        output.print_line(f"{_format_title(case)}: no recommendation, {reason}")
        _print_nearest_refusal(case)
        return
    best, limit = recommendation.best, case.machine.memory or 0
    output.print_line(
        f"{_format_title(case)}: take {best.pairing}: {best.seconds * 1e6:.0f} us a layer, "
        f"{best.tokens_per_second / _MEGA:.2f} Mtokens/s, fits: {best.memory} of "
        f"{limit / _GIGA:.0f} GB"
    )
    if recommendation.runner_up is not None:
        runner_up = recommendation.runner_up
        ratio = runner_up.seconds / best.seconds
        close = ", within the error of the estimates: time both" if recommendation.is_close else ""
        output.print_line(f"  runner-up: {runner_up.pairing}, {ratio:.2f} x the time{close}")
    for change in recommendation.changes:
        output.print_line(f"  would change it: {change}")


def _print_nearest_refusal(case: "PlanCase") -> None:
    """Print the refusal with the fewest reasons if every pairing is refused."""
    result = case.result
    if result.estimates or result.too_large or result.unestimated or not result.refused:
        return
    verdict = min(result.refused, key=lambda verdict: len(verdict.rejections))
    output.print_line(f"  nearest: {verdict.pairing}: {'; '.join(map(str, verdict.rejections))}")


def _print_table(case: "PlanCase", max_rows: int) -> None:
    result = case.result
    shown_estimates = result.estimates[: max_rows or None]
    output.print_table(
        (*_REQUIRED_COLUMNS, *_OPTIONAL_COLUMNS),
        map(_format_cells, shown_estimates),
        title=_format_title(case),
        optional=_OPTIONAL_COLUMNS,
    )
    num_hidden = len(result.estimates) - len(shown_estimates)
    if num_hidden:
        output.print_line(
            f"{format_count(num_hidden, 'slower pairing')}: --rows 0 or --json shows them"
        )
    _print_by_reason("does not fit", result.too_large)
    _print_by_reason("no estimate", result.unestimated)
    for caveat in dict.fromkeys(
        f"{e.prepare_finalize}: {e.caveat}" for e in shown_estimates if e.caveat
    ):
        output.print_line(f"caveat of {caveat}")


def _format_cells(estimate: "Estimate") -> tuple[str, ...]:
    exchange, memory = estimate.exchange, estimate.memory
    times = exchange.dispatch, estimate.experts.seconds, exchange.combine
    sizes = memory.weights, memory.workspace, memory.exchange, memory.prepared
    return (
        estimate.prepare_finalize.removesuffix(_SUFFIX),
        estimate.experts_part.removesuffix(_EXPERTS_SUFFIX),
        f"{estimate.seconds * 1e6:.1f}",
        f"{estimate.tokens_per_second / _MEGA:.2f}",
        f"{memory.total / _GIGA:.1f}",
        *(f"{seconds * 1e6:.1f}" for seconds in times),
        *(f"{size / _GIGA:.1f}" if size else "" for size in sizes),
        f"{estimate.network_rows:.2f}" if estimate.network_rows else "",
        estimate.experts.bound,
    )


def _print_by_reason(heading: str, reasons: Iterable[tuple[str, str]]) -> None:
    """Print one line for each reason, with the pairings that have it."""
    pairings_by_reason: dict[str, list[str]] = {}
    for pairing, reason in reasons:
        pairings_by_reason.setdefault(reason, []).append(pairing)
    for reason, pairings in pairings_by_reason.items():
        experts = ", ".join(pairing.partition(" x ")[2] for pairing in pairings)
        exchanges = {pairing.partition(" x ")[0] for pairing in pairings}
        names = f"{exchanges.pop()} x {experts}" if len(exchanges) == 1 else ", ".join(pairings)
        output.print_line(f"{heading}: {names}: {reason}")


def _list_assumptions(case: "PlanCase", routing: str) -> list[str]:
    cluster, estimates = case.cluster, case.result.estimates
    gpu = cluster.gpu
    rates = ", ".join(f"{name} {rate / _TERA:.0f}" for name, rate in gpu.flops.items())
    sizes = f"{gpu.bandwidth / _TERA:g} TB/s, {gpu.memory / _GIGA:g} GB"
    measured = "measured" if gpu.measured else "by data sheet, at the H200's share of its peaks"
    packages = ", ".join(sorted(case.machine.packages)) or "none"
    return [
        f"packages of {case.name}: {packages} (--packages all: every one that a part needs)",
        f"GPU: {gpu.name}, {measured}; {sizes}, TFLOP/s: {rates}",
        f"link of one GPU within a host of {cluster.per_host}: {_format_link(cluster.inside)}",
        *(
            [f"link of one GPU between hosts: {_format_link(cluster.between)}"]
            * (cluster.hosts > 1)
        ),
        f"routing {routing}: expected loads; the most loaded rank determines the time",
        "Mtok/s: different tokens of all ranks",
        "GB: of a rank: weights of its experts, workspace, exchange buffers, prepared weights",
        "dispatch, experts and combine run one after another, without overlap",
        "calls are replayed from CUDA graphs; router, shared experts and attention are excluded",
        *_list_prepared_caveats(estimates),
        *_list_sources((e.experts_part, e.correction.source) for e in estimates),
        *_list_sources((e.prepare_finalize, e.source) for e in estimates),
    ]


def _list_sources(parts_and_sources: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each source, with the parts that have it.

    parts_and_sources: (part, source) of each estimate.
    """
    parts_by_source: dict[str, dict[str, None]] = {}
    for part, source in parts_and_sources:
        parts_by_source.setdefault(source, {})[part.removesuffix(_SUFFIX)] = None
    return [f"{', '.join(parts)}: {source}" for source, parts in parts_by_source.items()]


def _format_link(link: "Link") -> str:
    latency = f" and {link.latency * 1e6:g} us" if link.latency else ""
    return f"{link.bandwidth / _GIGA:.0f} GB/s{latency}"


def _list_prepared_caveats(estimates: "Sequence[Estimate]") -> list[str]:
    if not any(estimate.memory.prepared for estimate in estimates):
        return []
    return ["times are those of calls without prepared weights, whose memory is counted"]


def make_compared_row(result: "Comparison") -> dict[str, Any]:
    """Return the JSON record of one comparison of an estimate with a measured time."""
    return {
        "cell": result.measured.label,
        "ranks": result.measured.problem.parallel.world_size,
        "quant": result.measured.problem.quant,
        "tokens": result.measured.problem.tokens,
        "measured_us": result.measured.us,
        "predicted_us": round(result.predicted_us, 2),
        "error": round(result.error, 4),
        "fitted": result.measured.fitted,
        "eager": result.measured.eager,
    }


def print_compared(rows: Sequence[dict[str, Any]], summaries: "Iterable[Summary]") -> None:
    """Print the comparisons of estimates with measured times, and their summaries."""
    from modular_kernel.perf_model.compare import MAX_ACCURATE_ERROR

    columns = ("cell", "ranks", "scheme", "tokens", "measured us", "model us", "error", "")
    output.print_table(columns, [_format_error_cells(row) for row in rows])
    for summary in summaries:
        output.print_line(
            f"{summary.group}: {summary.accurate} of {summary.count} within "
            f"{MAX_ACCURATE_ERROR:.0%}, mean {summary.mean:.1%}, worst {summary.worst:.1%}"
        )


def _format_error_cells(row: dict[str, Any]) -> tuple[object, ...]:
    labels = row["cell"], row["ranks"], row["quant"], row["tokens"]
    times = f"{row['measured_us']:.1f}", f"{row['predicted_us']:.1f}"
    flags = ", ".join(name for name in ("fitted", "eager") if row[name])
    return *labels, *times, f"{row['error']:+.1%}", flags
