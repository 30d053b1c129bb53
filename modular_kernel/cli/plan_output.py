"""Text and JSON output of `mk plan`."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from modular_kernel.cli import output
from modular_kernel.text import format_count, format_layers, pluralize

if TYPE_CHECKING:
    from modular_kernel.cli.plan import PlanCase
    from modular_kernel.perf_model.accuracy import Accuracy
    from modular_kernel.perf_model.compare import Comparison, Summary
    from modular_kernel.perf_model.estimate import Estimate
    from modular_kernel.perf_model.hardware import Cluster, Gpu, Link
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
        "cases": [
            _make_label_fields(case) | {"layer": case.layer_name, "problem": case.problem}
            for case in cases
        ],
        "machines": {case.name: case.cluster for case in cases},
        "recommendations": [
            _make_label_fields(case)
            | _make_recommendation_record(case.recommendation)
            | {"accuracy": case.accuracy}
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
    from modular_kernel.perf_model.recommend import explain_runner_up

    runner_up = recommendation.runner_up
    return {
        "pairing": recommendation.best.pairing,
        "layer_us": recommendation.best.seconds * 1e6,
        "tokens_per_second": recommendation.best.tokens_per_second,
        "memory_bytes": recommendation.best.memory.total,
        "runner_up": None if runner_up is None else runner_up.pairing,
        "runner_up_us": None if runner_up is None else runner_up.seconds * 1e6,
        "runner_up_reason": None
        if runner_up is None
        else explain_runner_up(recommendation.best, runner_up),
        "close": recommendation.is_close,
        "would_change": recommendation.changes,
    }


def print_cases(cases: "Sequence[PlanCase]", routing: str, max_rows: int) -> None:
    """Print the layers, the recommendations, a table for each case, and the assumptions.

    max_rows: maximum number of pairings in a table. 0 prints all.
    """
    for line in dict.fromkeys(line for case in cases for line in _list_subjects(case)):
        output.print_line(line)
    for case in cases:
        output.print_line()
        _print_recommendation(case)
    output.print_line()
    _print_tables(cases, max_rows)
    output.print_line("\nAssumptions:")
    for assumption in _list_assumptions(cases, routing):
        output.print_line(f"- {assumption}")


def _print_tables(cases: "Sequence[PlanCase]", max_rows: int) -> None:
    """Print the table of each case, and the pairings that it lacks.

    Pairings that every table lacks for the same reason are printed once, after the last table.
    """
    notes_by_case = [_list_notes(case) for case in cases]
    common_notes = [
        note for note in notes_by_case[0] if all(note in notes for notes in notes_by_case)
    ]
    for index, (case, notes) in enumerate(zip(cases, notes_by_case, strict=True)):
        if index:
            output.print_line()
        _print_table(case, max_rows)
        for note in notes:
            if note not in common_notes:
                output.print_line(note)
    if common_notes and len(cases) > 1:
        output.print_line("\nIn all tables:")
    for note in common_notes:
        output.print_line(note)


def _list_subjects(case: "PlanCase") -> list[str]:
    """Return a line with the layer and a line with the machine."""
    problem, layers = case.problem, "layer"
    if case.layers is not None:
        layers = format_layers(case.layers)
    scheme = problem.quant if problem.scheme.quantized else "no quantization"
    dtype = str(problem.dtype).removeprefix("torch.")
    sizes = (
        f"hidden {problem.hidden}, intermediate {problem.intermediate}, "
        f"{format_count(problem.experts, 'expert')}, top-k {problem.top_k}, {dtype}, {scheme}"
    )
    ranks = format_count(problem.parallel.world_size, "rank")
    return [
        f"{layers}: {case.layer_name}: {sizes}",
        f"machine {case.name}: {ranks} on {case.cluster}; {case.packages_text}",
    ]


def _format_title(case: "PlanCase") -> str:
    problem = case.problem
    ranks, tokens = problem.parallel.world_size, f"{problem.tokens:,}"
    tokens = f"{tokens} {pluralize('token', problem.tokens)}"
    total = f", {ranks * problem.tokens:,} in all" if ranks > 1 else ""
    location = f"on each of {ranks} ranks" if ranks > 1 else "on one GPU"
    layers = "" if case.layers is None else f"{format_layers(case.layers)} ({problem.quant}): "
    return f"{layers}{case.phase} on {case.name}, {tokens} {location}{total}"


def _print_recommendation(case: "PlanCase") -> None:
    recommendation, accuracy = case.recommendation, case.accuracy
    if recommendation is None or accuracy is None:
        reason = "every pairing is refused"
        if case.result.too_large:
            reason = "no valid pairing fits in memory"
        elif case.result.unestimated:
            reason = "no valid pairing has an estimate"
        output.print_line(f"{_format_title(case)}: no recommendation, {reason}")
        _print_nearest_refusal(case)
        return
    best, limit = recommendation.best, case.machine.memory or 0
    output.print_line(f"{_format_title(case)}:")
    output.print_line(f"  take {best.pairing}")
    time = _format_time_and_rate(best, accuracy)
    output.print_line(f"    estimate: {time}; {accuracy.summary}")
    for reason in accuracy.reasons:
        output.print_line(f"      {reason}")
    layers = f", {case.num_layers} layers" if case.num_layers > 1 else ""
    output.print_line(f"    memory of a rank{layers}: {best.memory}, of {limit / _GIGA:.0f} GB")
    if recommendation.runner_up is not None:
        _print_runner_up(recommendation, recommendation.runner_up, accuracy)
    for change in recommendation.changes:
        output.print_line(f"  {change}")


def _format_time_and_rate(estimate: "Estimate", accuracy: "Accuracy") -> str:
    """Return the time and the throughput, with two digits if only their magnitude is known."""
    us, million_tokens = estimate.seconds * 1e6, estimate.tokens_per_second / _MEGA
    if not accuracy.is_rough:
        return f"{us:,.0f} us a layer, {million_tokens:.2f} million tokens/s"
    us, million_tokens = (float(f"{number:.1e}") for number in (us, million_tokens))
    return f"about {us:,.0f} us a layer, {million_tokens:g} million tokens/s"


def _print_runner_up(
    recommendation: "Recommendation", runner_up: "Estimate", accuracy: "Accuracy"
) -> None:
    from modular_kernel.perf_model.accuracy import ORDER_OF_MAGNITUDE
    from modular_kernel.perf_model.recommend import explain_runner_up

    best = recommendation.best
    ratio = runner_up.seconds / best.seconds
    advice = ""
    if recommendation.is_close:
        advice = "; within the error of the estimates: time both"
    elif accuracy.is_rough and runner_up.prepare_finalize != best.prepare_finalize:
        advice = f"; estimates of these exchanges show the {ORDER_OF_MAGNITUDE}: time both"
    output.print_line(
        f"  runner-up: {runner_up.pairing}, {ratio:.2f} x the time: "
        f"{explain_runner_up(best, runner_up)}{advice}"
    )


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
    for caveat in dict.fromkeys(
        f"{e.prepare_finalize}: {e.caveat}" for e in shown_estimates if e.caveat
    ):
        output.print_line(f"caveat of {caveat}")


def _list_notes(case: "PlanCase") -> list[str]:
    """Return the pairings that a table lacks, with the reasons."""
    too_large, unestimated = case.result.too_large, case.result.unestimated
    return [
        *_group_by_reason("does not fit", too_large),
        *_group_by_reason("no estimate", unestimated),
    ]


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


def _group_by_reason(heading: str, reasons: Iterable[tuple[str, str]]) -> list[str]:
    """Return one line for each reason, with the pairings that have it."""
    pairings_by_reason: dict[str, list[str]] = {}
    for pairing, reason in reasons:
        pairings_by_reason.setdefault(reason, []).append(pairing)
    lines = []
    for reason, pairings in pairings_by_reason.items():
        experts = ", ".join(pairing.partition(" x ")[2] for pairing in pairings)
        exchanges = {pairing.partition(" x ")[0] for pairing in pairings}
        names = f"{exchanges.pop()} x {experts}" if len(exchanges) == 1 else ", ".join(pairings)
        lines.append(f"{heading}: {names}: {reason}")
    return lines


def _list_assumptions(cases: "Sequence[PlanCase]", routing: str) -> list[str]:
    """Return the assumptions of all cases, each once."""
    estimates = [estimate for case in cases for estimate in case.result.estimates]
    machine_lines = dict.fromkeys(
        line for case in cases for line in _list_machine_assumptions(case.name, case.cluster)
    )
    return [
        *machine_lines,
        f"routing {routing}: expected loads; the most loaded rank determines the time",
        "Mtok/s: million different tokens of all ranks a second",
        "GB: of a rank: weights of its experts, workspace, exchange buffers, prepared weights",
        "rows out: rows of a token that a dispatch sends to other hosts",
        "bound: whether compute or memory bandwidth limits the experts",
        "dispatch, experts and combine run one after another, without overlap",
        "calls are replayed from CUDA graphs; router, shared experts and attention are excluded",
        *_list_prepared_caveats(estimates),
        *_list_sources((e.experts_part, e.correction.source) for e in estimates),
        *_list_sources((e.prepare_finalize, e.source) for e in estimates),
    ]


def _list_machine_assumptions(name: str, cluster: "Cluster") -> list[str]:
    gpu = cluster.gpu
    rates = ", ".join(f"{operand} {rate / _TERA:.0f}" for operand, rate in gpu.flops.items())
    sizes = f"{gpu.bandwidth / _TERA:g} TB/s, {gpu.memory / _GIGA:g} GB"
    lines = [f"{name}: {gpu.name}, {_describe_source_of_rates(gpu)}; {sizes}, TFLOP/s: {rates}"]
    if cluster.per_host > 1:
        inside = _format_link(cluster.inside)
        lines.append(
            f"{name}: link of one GPU to the {cluster.per_host - 1} others of its host: {inside}"
        )
    if cluster.hosts > 1:
        lines.append(f"{name}: link of one GPU to other hosts: {_format_link(cluster.between)}")
    return lines


def _describe_source_of_rates(gpu: "Gpu") -> str:
    from modular_kernel.perf_model.hardware import NAMED_GPUS

    if gpu.measured:
        return "rates measured"
    if any(gpu == named_gpu for named_gpu, _ in NAMED_GPUS.values()):
        return "not measured: the share of its data sheet's rates that an H200 reached"
    return "not measured: rates as given"


def _list_sources(parts_and_sources: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each source, with the parts that have it, in the order of `mk list`.

    parts_and_sources: (part, source) of each estimate.
    """
    from modular_kernel.catalog import load_catalog

    catalog = load_catalog()
    order = [*catalog.names("prepare_finalize"), *catalog.names("experts")]
    parts_by_source: dict[str, set[str]] = {}
    for part, source in parts_and_sources:
        parts_by_source.setdefault(source, set()).add(part)
    return [
        f"{', '.join(p.removesuffix(_SUFFIX) for p in sorted(parts, key=order.index))}: {source}"
        for source, parts in parts_by_source.items()
    ]


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
