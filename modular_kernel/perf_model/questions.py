"""The selection table of the docs: recommended pairings for ten models on four machines.

A question is a model, a machine and a phase. Its answer is the pairing that `mk plan` recommends
with `--packages all` if the weights of all MoE layers of the model are in memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from modular_kernel.errors import ConfigurationError
from modular_kernel.models.registry import MODELS
from modular_kernel.perf_model.compare import Compared, cells_of, compare
from modular_kernel.perf_model.error_tables import DATA, RECORDS
from modular_kernel.perf_model.estimate import Estimate, SizeResult, over_ranks, size
from modular_kernel.perf_model.experts_records import ARCH, factor, recorded_layers
from modular_kernel.perf_model.experts_time import PART
from modular_kernel.perf_model.hardware import Cluster
from modular_kernel.perf_model.machines import parse_machine
from modular_kernel.perf_model.recommend import PHASE_TOKENS, best_of
from modular_kernel.spec.problem import Problem

# Number of MoE layers of each model, without layers for multi-token prediction.
LAYERS = {
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
LIMIT = 0.35  # of errors; a test checks it, and larger ones would be listed one by one


@dataclass(frozen=True)
class Answer:
    """The answer to one question.

    best: the recommended pairing; None if there is none. other_exchange, other_experts: the fastest
    pairing with another PrepareAndFinalize, and with another experts part. reason: why there is no
    recommended pairing.
    """

    model: str
    cluster: str
    phase: str
    best: Estimate | None = None
    other_exchange: Estimate | None = None
    other_experts: Estimate | None = None
    reason: str = ""


@dataclass(frozen=True)
class RecordError:
    """The error of the estimate for one recorded time.

    part: a part of a recommended pairing. ranks: 1 for a layer on one GPU, else those of the
    exchange. quant: the scheme, with the quantity for an exchange. error: predicted / measured - 1.
    """

    model: str
    part: str
    ranks: int
    tokens: int
    quant: str
    error: float


@cache
def answers() -> tuple[Answer, ...]:
    """Answer the question for each model, machine and phase, in this order."""
    return tuple(
        answer(model, cluster, phase)
        for model in LAYERS
        for cluster in CLUSTERS
        for phase in PHASE_TOKENS
    )


def answer(model: str, cluster_name: str, phase: str) -> Answer:
    """Answer one question. cluster_name: a machine in the syntax of `--machine`."""
    cluster = parse_machine(cluster_name)
    try:
        problem = problem_of(model, cluster, PHASE_TOKENS[phase])
    except ConfigurationError as error:
        return Answer(model, cluster_name, phase, reason=str(error))
    result = size(problem, cluster, layers=LAYERS[model])
    best = best_of(result)
    if best is None:
        return Answer(model, cluster_name, phase, reason=_reason(result))
    exchange = (e for e in result.estimates if e.prepare_finalize != best.prepare_finalize)
    experts = (e for e in result.estimates if e.experts_part != best.experts_part)
    return Answer(model, cluster_name, phase, best, next(exchange, None), next(experts, None))


def problem_of(model: str, cluster: Cluster, tokens: int) -> Problem:
    """Return the model's layer with `tokens` tokens on each GPU of the machine.

    Raises ConfigurationError if a rank would hold no expert.
    """
    problem = Problem(tokens=tokens, **MODELS[model].problem_fields())  # type: ignore[arg-type]
    return over_ranks(problem, cluster.gpus, cluster.per_host)


def _reason(result: SizeResult) -> str:
    """Return why no pairing is recommended."""
    if not result.too_large:
        return "no valid pair has an estimate"
    for_all_layers = [reason for _, reason in result.too_large if not reason.startswith("[")]
    minimum = min(map(_gigabytes, for_all_layers), default=float("inf"))
    if minimum == float("inf"):
        return "no pair fits, even with one layer"
    return f"no pair fits: {minimum:.1f} GB or more, of {(result.machine.memory or 0) / 1e9:.1f} GB"


def _gigabytes(reason: str) -> float:
    return float(reason.partition(" GB")[0])


def record_errors() -> list[RecordError]:
    """Compare estimates with the recorded times of the parts of recommended pairings, on H200.

    A record of an experts part is the time of a whole layer on one GPU. It is used if it has the
    model's hidden and intermediate size, top-k and scheme; it may have all or one rank's experts.
    It is compared with an estimate from the records of other layers. A record of an exchange is
    used if it has the model's hidden size, experts and top-k, and the ranks of a machine.
    """
    distinct_errors = dict.fromkeys(
        error
        for entry in answers()
        if entry.best is not None and _has_records(entry)
        for error in (*_experts_errors(entry, entry.best), *_exchange_errors(entry, entry.best))
    )
    return list(distinct_errors)


def _has_records(entry: Answer) -> bool:
    return parse_machine(entry.cluster).gpu.arch == ARCH


def _experts_errors(entry: Answer, best: Estimate) -> Iterator[RecordError]:
    problem = best.problem
    for layer in recorded_layers():
        recorded = layer.problem
        sizes = recorded.hidden, recorded.intermediate, recorded.top_k
        if (
            layer.experts != best.experts_part
            or layer.quant != problem.quant
            or sizes != (problem.hidden, problem.intermediate, problem.top_k)
        ):
            continue
        estimated = factor(layer.experts, recorded, layer.rows, without_shape=layer.shape)
        if estimated is not None:
            error = estimated.corrected(layer.predicted_us / 1e6) * 1e6 / layer.us - 1
            yield RecordError(entry.model, layer.experts, 1, layer.tokens, layer.quant, error)


def _exchange_errors(entry: Answer, best: Estimate) -> Iterator[RecordError]:
    problem, world = best.problem, best.problem.parallel.world_size
    for compared in _exchanges():
        cell = compared.cell
        recorded = cell.problem
        if (
            cell.part == best.prepare_finalize
            and recorded.parallel.world_size == world
            and (recorded.hidden, recorded.experts, recorded.top_k)
            == (problem.hidden, problem.experts, problem.top_k)
        ):
            quant = f"{recorded.quant}, {cell.quantity}"
            yield RecordError(entry.model, cell.part, world, recorded.tokens, quant, compared.error)


@cache
def _exchanges() -> tuple[Compared, ...]:
    cells = [cell for name in RECORDS for cell in cells_of(DATA / name)]
    return compare([cell for cell in cells if cell.problem.parallel.world_size > 1])


def selection_markdown() -> str:
    """Return a table of answers for each machine, as Markdown."""
    return "\n\n".join(_machine_table(cluster) for cluster in CLUSTERS)


def _machine_table(cluster: str) -> str:
    columns = "model | phase | take | us | Mtok/s | GB | other exchange | other experts"
    lines = [f"## {cluster}", "", f"| {columns} |", "|---|---|---|---:|---:|---:|---|---|"]
    for entry in answers():
        if entry.cluster == cluster:
            lines.append(f"| {entry.model} | {entry.phase} | {' | '.join(_cells(entry))} |")
    return "\n".join(lines)


def _cells(entry: Answer) -> tuple[str, ...]:
    best = entry.best
    if best is None:
        return entry.reason, "", "", "", "", ""
    return (
        f"`{best.prepare_finalize}` x `{best.experts_part}`",
        f"{best.seconds * 1e6:.0f}",
        f"{best.tokens_per_second / 1e6:.2f}",
        f"{best.memory.total / 1e9:.1f}",
        _ratio(best, entry.other_exchange, "prepare_finalize"),
        _ratio(best, entry.other_experts, "experts_part"),
    )


def _ratio(best: Estimate, other: Estimate | None, part: str) -> str:
    return "" if other is None else f"`{getattr(other, part)}` {other.seconds / best.seconds:.2f} x"


def records_markdown() -> str:
    """Return the errors by model and part, then each error beyond LIMIT, as Markdown."""
    errors = record_errors()
    groups: dict[tuple[str, str, int], list[float]] = {}
    for entry in errors:
        groups.setdefault((entry.model, entry.part, entry.ranks), []).append(abs(entry.error))
    limit = f"{LIMIT * 100:.0f} %"
    lines = [f"| model | part | GPUs | records | beyond {limit} | worst |"]
    lines += ["|---|---|---:|---:|---:|---:|"]
    for (model, part, ranks), magnitudes in groups.items():
        beyond = sum(error > LIMIT for error in magnitudes)
        worst = f"{max(magnitudes) * 100:.0f} %"
        lines.append(f"| {model} | `{part}` | {ranks} | {len(magnitudes)} | {beyond} | {worst} |")
    large_errors = [entry for entry in errors if abs(entry.error) > LIMIT]
    if not large_errors:
        return "\n".join([*lines, "", f"None of the {len(errors)} errors is beyond {limit}."])
    lines += ["", f"Beyond {limit}, {len(large_errors)} of {len(errors)} records:", ""]
    lines += ["| model | part | GPUs | scheme | tokens | error |", "|---|---|---:|---|---:|---:|"]
    for entry in sorted(large_errors, key=lambda e: (e.model, e.part, e.ranks, e.tokens)):
        cells = f"{entry.model} | `{entry.part}` | {entry.ranks} | {entry.quant} | {entry.tokens}"
        lines.append(f"| {cells} | {entry.error * 100:+.0f} % |")
    return "\n".join(lines)


def layer_times_markdown(model: str) -> str:
    """Return the recorded times of a model's layer on one H200 as Markdown.

    There is a row for each recorded layer with the model's hidden and intermediate size and top-k,
    in 16 bits and in the model's scheme. It has the times of `TritonExperts` and of the fastest
    experts part.
    """
    published = MODELS[model]
    sizes = published.hidden, published.intermediate, published.top_k
    times: dict[tuple[str, int, int], dict[str, float]] = {}
    for layer in recorded_layers():
        problem = layer.problem
        if sizes == (problem.hidden, problem.intermediate, problem.top_k) and layer.quant in (
            "none",
            published.quant,
        ):
            key = layer.quant, problem.experts, layer.tokens
            times.setdefault(key, {})[layer.experts] = layer.us
    head = "scheme | experts | tokens | `TritonExperts`, us | fastest part | us"
    lines = [f"| {head} |", "|---|---:|---:|---:|---|---:|"]
    for (quant, experts, tokens), by_part in sorted(times.items()):
        fastest = min(by_part, key=by_part.__getitem__)
        ours = f"{by_part[PART]:.0f}" if PART in by_part else ""
        row = quant, str(experts), str(tokens), ours, f"`{fastest}`", f"{by_part[fastest]:.0f}"
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)
