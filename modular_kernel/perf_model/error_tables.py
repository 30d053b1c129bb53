"""Tables of the errors of `mk plan`'s estimates against the shipped records, for docs/sizing.md."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from modular_kernel.perf_model.compare import WITHIN, Compared, cells_of, compare
from modular_kernel.perf_model.experts_records import factor, recorded_layers
from modular_kernel.text import format_count

DATA = Path(__file__).with_name("data")
RECORDS = (
    *("h200-layers.json", "h200-exchange.json", "h200-exchange-libraries.json"),
    "published-exchange.json",
)


@dataclass(frozen=True)
class ErrorRow:
    """Errors of one part, predicted / measured - 1.

    ranks: number of GPUs, as text; "" for experts parts, whose records are of one GPU. kind:
    whether the model was fitted to the records; "" for experts parts.
    """

    part: str
    ranks: str
    kind: str
    errors: tuple[float, ...]

    @property
    def accurate(self) -> int:
        return sum(abs(error) <= WITHIN for error in self.errors)

    @property
    def mean(self) -> float:
        return fmean(map(abs, self.errors))

    @property
    def worst(self) -> float:
        return max(map(abs, self.errors))


def model_errors() -> list[ErrorRow]:
    """Return the errors of the model by part, number of ranks, and whether it was fitted."""
    groups: dict[tuple[int, str, str], list[float]] = {}
    for compared in compare([cell for name in RECORDS for cell in cells_of(DATA / name)]):
        world = compared.cell.problem.parallel.world_size
        key = _host_ranks(world), compared.cell.part, _kind(compared)
        groups.setdefault(key, []).append(compared.error)
    return [
        ErrorRow(part, _RANKS[ranks], kind, tuple(errors))
        for (ranks, part, kind), errors in sorted(groups.items())
    ]


_RANKS = {1: "1 GPU", 2: "2 GPUs", 4: "4 GPUs", 16: "16 to 256, published"}


def _host_ranks(world: int) -> int:
    """Return the number of ranks as a key of _RANKS, which is the same for all of several hosts."""
    return min(world, max(_RANKS))


def _kind(compared: Compared) -> str:
    kind = "fitted" if compared.cell.fitted else "predicted"
    return f"{kind}, eager" if compared.cell.eager else kind


def experts_errors() -> list[ErrorRow]:
    """Return the errors of the experts parts' factors.

    Each recorded layer is estimated from the records of other shapes.
    """
    groups: dict[str, list[float]] = {}
    for layer in recorded_layers():
        estimated = factor(layer.experts, layer.problem, layer.rows, without_shape=layer.shape)
        if estimated is not None:
            seconds = estimated.corrected(layer.predicted_us / 1e6)
            groups.setdefault(layer.experts, []).append(seconds * 1e6 / layer.us - 1)
    return [ErrorRow(part, "", "", tuple(errors)) for part, errors in sorted(groups.items())]


def markdown() -> str:
    """Return both tables as Markdown."""
    head = f"cells | within {WITHIN:.0%} | mean error | worst".replace("%", " %")
    model = [(f"`{row.part}`", row.ranks, row.kind, *_numbers(row)) for row in model_errors()]
    experts = [(f"`{row.part}`", *_numbers(row)) for row in experts_errors()]
    total = [error for row in experts_errors() for error in row.errors]
    lines = _table(f"part | ranks | | {head}", model, 3)
    lines += ["", f"Experts parts, {format_count(len(total), 'recorded layer')}:", ""]
    return "\n".join([*lines, *_table(f"experts part | {head}", experts, 1)])


def _numbers(row: ErrorRow) -> tuple[str, ...]:
    shares = f"{row.mean * 100:.0f} %", f"{row.worst * 100:.0f} %"
    return (str(len(row.errors)), str(row.accurate), *shares)


def _table(head: str, rows: Iterable[Sequence[str]], labels: int) -> list[str]:
    rule = "|".join(["---"] * labels + ["---:"] * 4)
    return [f"| {head} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows)]
