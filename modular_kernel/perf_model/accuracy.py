"""How well an estimate is known: the errors of its parts for the times recorded in the package.

No layer over several ranks was measured as a whole. The exchange and the experts of a pairing were
measured separately, and so their errors are given separately.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from modular_kernel.perf_model.compare import Comparison, compare, read_measurements
from modular_kernel.perf_model.error_tables import DATA_FOLDER, RECORD_FILES
from modular_kernel.perf_model.estimate import Estimate
from modular_kernel.perf_model.experts_records import (
    RECORDED_ITEMSIZE,
    RecordedLayer,
    find_time_correction,
    recorded_layers,
)
from modular_kernel.perf_model.hardware import Cluster
from modular_kernel.spec.problem import Problem, dtype_name
from modular_kernel.text import format_count

ORDER_OF_MAGNITUDE = "order of magnitude only"
_SUFFIX = "PrepareAndFinalize"  # most names end with it


@dataclass(frozen=True)
class Accuracy:
    """What is known about the error of an estimate.

    summary: a few words, such as "order of magnitude only".
    reasons: one sentence each on the exchange, the experts and the GPU, without those that do not
        apply.
    is_rough: whether the estimate shows an order of magnitude only.
    worst: largest error of the parts' estimates for recorded times, as a fraction of these times;
        None if the exchange, the experts or the GPU was never measured, or is_rough.
    """

    summary: str
    reasons: tuple[str, ...]
    is_rough: bool
    worst: float | None


@dataclass(frozen=True)
class _PartAccuracy:
    """The same for one part.

    unknown: what was not measured, for a summary; "" if there are records.
    """

    reason: str
    worst: float = 0.0
    is_rough: bool = False
    unknown: str = ""


def describe_accuracy(estimate: Estimate, cluster: Cluster) -> Accuracy:
    """Describe how well an estimate for this machine is known."""
    parts = [_judge_experts(estimate)]
    if estimate.problem.parallel.world_size > 1:
        parts.insert(0, _judge_exchange(estimate, cluster))
    if not cluster.gpu.measured:
        name = cluster.gpu.name
        reason = f"GPU: {name} was not measured; times of an H200 are scaled by its rates"
        parts.append(_PartAccuracy(reason, unknown=f"not measured on {name}"))
    reasons = tuple(part.reason for part in parts)
    if any(part.is_rough for part in parts):
        return Accuracy(ORDER_OF_MAGNITUDE, reasons, True, None)
    if unknown := next((part.unknown for part in reversed(parts) if part.unknown), ""):
        return Accuracy(unknown, reasons, False, None)
    worst = max(part.worst for part in parts)
    summary = f"{'parts ' * (len(parts) > 1)}within {_format_percent(worst)} of records"
    return Accuracy(summary, reasons, False, worst)


def _judge_exchange(estimate: Estimate, cluster: Cluster) -> _PartAccuracy:
    name = estimate.prepare_finalize
    short_name, world_size = name.removesuffix(_SUFFIX), estimate.problem.parallel.world_size
    spans_hosts = world_size > cluster.per_host
    all_records = [c for c in compare_exchange_records() if c.measured.part == name]
    records = [c for c in all_records if _spans_hosts(c) == spans_hosts]
    if not records:
        scope = " between hosts" if spans_hosts and all_records else ""
        return _PartAccuracy(f"exchange: {short_name} was never measured{scope}", is_rough=True)
    worst = max(abs(record.error) for record in records)
    reason = (
        f"exchange: estimates of {short_name} are within {_format_percent(worst)} of "
        f"{format_count(len(records), 'record')} of {_format_world_sizes(records, world_size)}"
    )
    if any(record.measured.eager for record in records):
        return _PartAccuracy(f"{reason}; their host time varies (no CUDA graph)", is_rough=True)
    return _PartAccuracy(reason, worst)


def _spans_hosts(comparison: Comparison) -> bool:
    measured = comparison.measured
    return measured.problem.parallel.world_size > measured.cluster.per_host


def _format_world_sizes(records: Sequence[Comparison], world_size: int) -> str:
    """Return text such as "2 and 4 GPUs, none of 8"."""
    sizes = sorted({record.measured.problem.parallel.world_size for record in records})
    *first_sizes, last_size = map(str, sizes)
    sizes_text = f"{', '.join(first_sizes)} and {last_size}" if first_sizes else last_size
    missing = "" if world_size in sizes else f", none of {world_size}"
    return f"{sizes_text} GPUs{missing}"


def _judge_experts(estimate: Estimate) -> _PartAccuracy:
    part, problem = estimate.experts_part, estimate.problem
    scheme = problem.scheme.name
    scheme_text = "without quantization" if scheme == "none" else f"with {scheme}"
    if problem.dtype.itemsize != RECORDED_ITEMSIZE:
        scheme_text = f"in {dtype_name(problem.dtype)}"
    records = [
        layer
        for layer in recorded_layers()
        if layer.experts_part == part
        and layer.scheme == scheme
        and problem.dtype.itemsize == RECORDED_ITEMSIZE
    ]
    same_sizes = [layer for layer in records if _get_sizes(layer.problem) == _get_sizes(problem)]
    errors = [
        error for layer in same_sizes or records if (error := _compute_error(layer)) is not None
    ]
    if not errors:
        return _PartAccuracy(
            f"experts: {part} was never measured {scheme_text}",
            unknown=f"experts not measured {scheme_text}",
        )
    worst = max(errors)
    count = format_count(len(errors), "record")
    source = f"{count} of these sizes" if same_sizes else f"{count} of other sizes"
    return _PartAccuracy(
        f"experts: estimates of {part} {scheme_text} are within {_format_percent(worst)} of "
        f"{source} on one H200",
        worst,
    )


def _get_sizes(problem: Problem) -> tuple[int, int, int]:
    return problem.hidden, problem.intermediate, problem.top_k


def _compute_error(layer: RecordedLayer) -> float | None:
    """Return |error| of the time estimated from other shapes; None if there is no estimate."""
    correction = find_time_correction(
        layer.experts_part, layer.problem, layer.rows, ignored_shape=layer.shape
    )
    if correction is None:
        return None
    return abs(correction.correct(layer.predicted_us / 1e6) * 1e6 / layer.us - 1)


def _format_percent(fraction: float) -> str:
    return f"{math.ceil(fraction * 100)} %"


@cache
def compare_exchange_records() -> tuple[Comparison, ...]:
    """Compare the model with all exchanges in the records that ship with the package."""
    measurements = [time for name in RECORD_FILES for time in read_measurements(DATA_FOLDER / name)]
    return compare([m for m in measurements if m.problem.parallel.world_size > 1])
