"""Generate the selection table of the documentation: pairings for ten models on four machines.

For each model, machine and phase (prefill or decode), the table has the pairing that `mk plan
--packages all` recommends if the weights of all MoE layers of the model are in memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from modular_kernel.models.registry import MODELS
from modular_kernel.perf_model.accuracy import compare_exchange_records
from modular_kernel.perf_model.estimate import (
    Estimate,
    PairingEstimates,
    distribute_over_ranks,
    estimate_pairings,
)
from modular_kernel.perf_model.experts_records import ARCH, find_time_correction, recorded_layers
from modular_kernel.perf_model.experts_time import MODELED_EXPERTS_PART
from modular_kernel.perf_model.hardware import Cluster
from modular_kernel.perf_model.machines import parse_machine
from modular_kernel.perf_model.recommend import PHASE_TOKENS, select_best
from modular_kernel.spec.problem import Problem

# Number of MoE layers of each model, without layers for multi-token prediction.
MOE_LAYERS = {
    "deepseek-v3": 58,
    "kimi-k2": 60,
    "glm-4.5": 89,
    "qwen3-coder-480b-a35b": 62,
    "qwen3-235b-a22b": 94,
    "minimax-m2.5": 62,
    "gpt-oss-120b": 36,
    "mixtral-8x7b": 32,
    "qwen3-30b-a3b": 48,
    "gpt-oss-20b": 24,
}
CLUSTERS = ("4xh200", "8xh200", "2x8xh200", "8xb200")
# Larger errors of estimates are listed individually. A test checks that there are none.
ERROR_LIMIT = 0.35


@dataclass(frozen=True)
class Selection:
    """The recommendation for a model, a machine and a phase.

    best: the recommended pairing, or None.
    other_exchange, other_experts: the fastest pairing with another PrepareAndFinalize, and with
        another experts part.
    reason: the reason why no pairing is recommended, or "".
    """

    model: str
    cluster_name: str
    phase: str
    best: Estimate | None = None
    other_exchange: Estimate | None = None
    other_experts: Estimate | None = None
    reason: str = ""


@dataclass(frozen=True)
class RecordError:
    """The error of the estimate for one recorded time.

    part: a part of a recommended pairing.
    ranks: number of ranks of an exchange; 1 for a layer on one GPU.
    label: the scheme, and for an exchange also the measured quantity.
    error: predicted / measured - 1.
    """

    model: str
    part: str
    ranks: int
    tokens: int
    label: str
    error: float


@cache
def select_all_pairings() -> tuple[Selection, ...]:
    """Select a pairing for each model, machine and phase, in this order."""
    return tuple(
        select_pairing(model, cluster_name, phase)
        for model in MOE_LAYERS
        for cluster_name in CLUSTERS
        for phase in PHASE_TOKENS
    )


def select_pairing(model: str, cluster_name: str, phase: str) -> Selection:
    """Select the pairing for one model, machine and phase.

    cluster_name: the machine, in the syntax of `--machine`.
    """
    cluster = parse_machine(cluster_name)
    experts = MODELS[model].experts
    if experts < cluster.gpus:
        reason = f"{experts} experts, too few for {cluster.gpus} ranks"
        return Selection(model, cluster_name, phase, reason=reason)
    problem = problem_of(model, cluster, PHASE_TOKENS[phase])
    result = estimate_pairings(problem, cluster, layers=MOE_LAYERS[model])
    best = select_best(result)
    if best is None:
        return Selection(model, cluster_name, phase, reason=_explain_missing_selection(result))
    other_exchange = (e for e in result.estimates if e.prepare_finalize != best.prepare_finalize)
    other_experts = (e for e in result.estimates if e.experts_part != best.experts_part)
    return Selection(
        model, cluster_name, phase, best, next(other_exchange, None), next(other_experts, None)
    )


def problem_of(model: str, cluster: Cluster, tokens: int) -> Problem:
    """Return the problem of the model's layer with `tokens` tokens on each GPU of the machine.

    Raises ConfigurationError if a rank would have no expert.
    """
    problem = Problem(tokens=tokens, **MODELS[model].problem_fields())  # type: ignore[arg-type]
    return distribute_over_ranks(problem, cluster.gpus, cluster.per_host)


def _explain_missing_selection(result: PairingEstimates) -> str:
    """Return the reason why no pairing is recommended."""
    if not result.too_large:
        return "no valid pairing has an estimate"
    reasons_for_all_layers = [
        reason for _, reason in result.too_large if not reason.startswith("[")
    ]
    minimum = min(map(_parse_gigabytes, reasons_for_all_layers), default=float("inf"))
    if minimum == float("inf"):
        return "no pairing fits, even with one layer"
    gpu_memory = (result.machine.memory or 0) / 1e9
    return f"no pairing fits: {minimum:.1f} GB or more are needed, a GPU has {gpu_memory:.1f} GB"


def _parse_gigabytes(reason: str) -> float:
    return float(reason.partition(" GB")[0])


def compare_with_records() -> list[RecordError]:
    """Compare estimates with the recorded times of the parts of recommended pairings, on H200.

    The record of an experts part is the time of a whole layer on one GPU. It is used if its hidden
    and intermediate size, top-k and scheme equal the model's. The number of experts may differ. It
    is compared with an estimate from the records of other layers. The record of an exchange is used
    if it has the model's hidden size, experts and top-k, and one rank per GPU of the machine.
    """
    distinct_errors = dict.fromkeys(
        error
        for selection in select_all_pairings()
        if selection.best is not None and _has_records(selection)
        for error in (
            *_iter_experts_errors(selection, selection.best),
            *_iter_exchange_errors(selection, selection.best),
        )
    )
    return list(distinct_errors)


def _has_records(selection: Selection) -> bool:
    return parse_machine(selection.cluster_name).gpu.arch == ARCH


def _iter_experts_errors(selection: Selection, best: Estimate) -> Iterator[RecordError]:
    problem = best.problem
    for layer in recorded_layers():
        recorded = layer.problem
        sizes = recorded.hidden, recorded.intermediate, recorded.top_k
        if (
            layer.experts_part != best.experts_part
            or layer.quant != problem.quant
            or sizes != (problem.hidden, problem.intermediate, problem.top_k)
        ):
            continue
        correction = find_time_correction(
            layer.experts_part, recorded, layer.rows, ignored_shape=layer.shape
        )
        if correction is not None:
            error = correction.correct(layer.predicted_us / 1e6) * 1e6 / layer.us - 1
            yield RecordError(
                selection.model, layer.experts_part, 1, layer.tokens, layer.quant, error
            )


def _iter_exchange_errors(selection: Selection, best: Estimate) -> Iterator[RecordError]:
    problem, world = best.problem, best.problem.parallel.world_size
    for comparison in compare_exchange_records():
        measured = comparison.measured
        recorded = measured.problem
        if (
            measured.part == best.prepare_finalize
            and recorded.parallel.world_size == world
            and (recorded.hidden, recorded.experts, recorded.top_k)
            == (problem.hidden, problem.experts, problem.top_k)
        ):
            label = f"{recorded.quant}, {measured.quantity}"
            yield RecordError(
                selection.model, measured.part, world, recorded.tokens, label, comparison.error
            )


def format_selection_tables() -> str:
    """Return a Markdown table of recommended pairings for each machine."""
    return "\n\n".join(_format_machine_table(cluster_name) for cluster_name in CLUSTERS)


def _format_machine_table(cluster_name: str) -> str:
    columns = "model | phase | pairing | us | Mtok/s | GB | other exchange | other experts"
    lines = [f"## {cluster_name}", "", f"| {columns} |", "|---|---|---|---:|---:|---:|---|---|"]
    for selection in select_all_pairings():
        if selection.cluster_name == cluster_name:
            cells = selection.model, selection.phase, *_format_cells(selection)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _format_cells(selection: Selection) -> tuple[str, ...]:
    best = selection.best
    if best is None:
        return selection.reason, "", "", "", "", ""
    return (
        f"`{best.prepare_finalize}` x `{best.experts_part}`",
        f"{best.seconds * 1e6:.0f}",
        f"{best.tokens_per_second / 1e6:.2f}",
        f"{best.memory.total / 1e9:.1f}",
        _format_ratio(best, selection.other_exchange, "prepare_finalize"),
        _format_ratio(best, selection.other_experts, "experts_part"),
    )


def _format_ratio(best: Estimate, alternative: Estimate | None, part_field: str) -> str:
    if alternative is None:
        return ""
    ratio = alternative.seconds / best.seconds
    return f"`{getattr(alternative, part_field)}` {ratio:.2f} x"


def format_record_errors() -> str:
    """Return a Markdown table of errors by model and part, and a list of errors > ERROR_LIMIT."""
    errors = compare_with_records()
    magnitudes_by_key: dict[tuple[str, str, int], list[float]] = {}
    for e in errors:
        magnitudes_by_key.setdefault((e.model, e.part, e.ranks), []).append(abs(e.error))
    limit = f"{ERROR_LIMIT * 100:.0f} %"
    lines = [f"| model | part | GPUs | records | beyond {limit} | worst |"]
    lines += ["|---|---|---:|---:|---:|---:|"]
    for (model, part, ranks), magnitudes in magnitudes_by_key.items():
        num_beyond = sum(error > ERROR_LIMIT for error in magnitudes)
        worst = f"{max(magnitudes) * 100:.0f} %"
        lines.append(
            f"| {model} | `{part}` | {ranks} | {len(magnitudes)} | {num_beyond} | {worst} |"
        )
    large_errors = [e for e in errors if abs(e.error) > ERROR_LIMIT]
    if not large_errors:
        return "\n".join([*lines, "", f"None of the {len(errors)} errors is beyond {limit}."])
    lines += ["", f"Beyond {limit}, {len(large_errors)} of {len(errors)} records:", ""]
    lines += ["| model | part | GPUs | scheme | tokens | error |", "|---|---|---:|---|---:|---:|"]
    for e in sorted(large_errors, key=lambda e: (e.model, e.part, e.ranks, e.tokens)):
        cells = f"{e.model} | `{e.part}` | {e.ranks} | {e.label} | {e.tokens}"
        lines.append(f"| {cells} | {e.error * 100:+.0f} % |")
    return "\n".join(lines)


def format_layer_times(model: str) -> str:
    """Return a Markdown table of the recorded times of a model's layer on one H200.

    Layers with the model's hidden and intermediate size and top-k are included, in 16 bits and in
    the model's scheme. Each row has the times of `TritonExperts` and of the fastest part.
    """
    model_spec = MODELS[model]
    sizes = model_spec.hidden, model_spec.intermediate, model_spec.top_k
    times: dict[tuple[str, int, int], dict[str, float]] = {}
    for layer in recorded_layers():
        problem = layer.problem
        if sizes == (problem.hidden, problem.intermediate, problem.top_k) and layer.quant in (
            "none",
            model_spec.quant,
        ):
            key = layer.quant, problem.experts, layer.tokens
            times.setdefault(key, {})[layer.experts_part] = layer.us
    columns = "scheme | experts | tokens | `TritonExperts`, us | fastest part | us"
    lines = [f"| {columns} |", "|---|---:|---:|---:|---|---:|"]
    for (quant, experts, tokens), us_by_part in sorted(times.items()):
        fastest = min(us_by_part, key=us_by_part.__getitem__)
        triton_us = (
            f"{us_by_part[MODELED_EXPERTS_PART]:.0f}" if MODELED_EXPERTS_PART in us_by_part else ""
        )
        row = (
            quant,
            str(experts),
            str(tokens),
            triton_us,
            f"`{fastest}`",
            f"{us_by_part[fastest]:.0f}",
        )
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)
