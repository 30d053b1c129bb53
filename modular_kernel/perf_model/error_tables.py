"""Generate the tables of docs/sizing.md, which compare estimates with recorded times."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from modular_kernel.perf_model.compare import (
    MAX_ACCURATE_ERROR,
    Comparison,
    compare,
    read_measurements,
)
from modular_kernel.perf_model.experts_records import find_time_correction, recorded_layers
from modular_kernel.text import format_count

DATA_FOLDER = Path(__file__).with_name("data")
RECORD_FILES = (
    *("h200-layers.json", "h200-exchange.json", "h200-exchange-libraries.json"),
    "published-exchange.json",
)


@dataclass(frozen=True)
class ErrorRow:
    """Errors of one part.

    ranks: text of the number of GPUs; "" for experts parts, whose records are of one GPU.
    kind: "fitted" if the model was fitted to the records, and otherwise "predicted", followed by ",
        eager" for eager calls; "" for experts parts.
    errors: predicted / measured - 1.
    """

    part: str
    ranks: str
    kind: str
    errors: tuple[float, ...]

    @property
    def accurate_count(self) -> int:
        return sum(abs(error) <= MAX_ACCURATE_ERROR for error in self.errors)

    @property
    def mean(self) -> float:
        return fmean(map(abs, self.errors))

    @property
    def worst(self) -> float:
        return max(map(abs, self.errors))


def compute_model_errors() -> list[ErrorRow]:
    """Return the errors of the model by part, number of ranks, and whether it was fitted."""
    errors_by_key: dict[tuple[int, str, str], list[float]] = {}
    for comparison in compare(
        [time for name in RECORD_FILES for time in read_measurements(DATA_FOLDER / name)]
    ):
        world = comparison.measured.problem.parallel.world_size
        key = _get_ranks_key(world), comparison.measured.part, _format_kind(comparison)
        errors_by_key.setdefault(key, []).append(comparison.error)
    return [
        ErrorRow(part, _RANKS_TEXT[ranks], kind, tuple(errors))
        for (ranks, part, kind), errors in sorted(errors_by_key.items())
    ]


_RANKS_TEXT = {1: "1 GPU", 2: "2 GPUs", 4: "4 GPUs", 16: "16 to 256, published"}


def _get_ranks_key(world: int) -> int:
    return min(world, max(_RANKS_TEXT))


def _format_kind(comparison: Comparison) -> str:
    kind = "fitted" if comparison.measured.fitted else "predicted"
    return f"{kind}, eager" if comparison.measured.eager else kind


def compute_experts_errors() -> list[ErrorRow]:
    """Return the errors of the estimated times of experts parts.

    The time of each recorded layer is estimated from the records of other shapes.
    """
    errors_by_part: dict[str, list[float]] = {}
    for layer in recorded_layers():
        correction = find_time_correction(
            layer.experts_part, layer.problem, layer.rows, ignored_shape=layer.shape
        )
        if correction is not None:
            seconds = correction.correct(layer.predicted_us / 1e6)
            errors_by_part.setdefault(layer.experts_part, []).append(seconds * 1e6 / layer.us - 1)
    return [
        ErrorRow(part, "", "", tuple(errors)) for part, errors in sorted(errors_by_part.items())
    ]


def format_error_tables() -> str:
    """Return both tables as Markdown."""
    columns = f"cells | within {MAX_ACCURATE_ERROR:.0%} | mean error | worst".replace("%", " %")
    model_rows = [
        (f"`{row.part}`", row.ranks, row.kind, *_format_numbers(row))
        for row in compute_model_errors()
    ]
    experts_rows = [(f"`{row.part}`", *_format_numbers(row)) for row in compute_experts_errors()]
    experts_errors = [error for row in compute_experts_errors() for error in row.errors]
    lines = _format_table(f"part | ranks | | {columns}", model_rows, 3)
    lines += ["", f"Experts parts, {format_count(len(experts_errors), 'recorded layer')}:", ""]
    return "\n".join([*lines, *_format_table(f"experts part | {columns}", experts_rows, 1)])


def _format_numbers(row: ErrorRow) -> tuple[str, ...]:
    shares = f"{row.mean * 100:.0f} %", f"{row.worst * 100:.0f} %"
    return (str(len(row.errors)), str(row.accurate_count), *shares)


def _format_table(columns: str, rows: Iterable[Sequence[str]], num_labels: int) -> list[str]:
    alignments = "|".join(["---"] * num_labels + ["---:"] * 4)
    return [f"| {columns} |", f"|{alignments}|", *(f"| {' | '.join(row)} |" for row in rows)]
