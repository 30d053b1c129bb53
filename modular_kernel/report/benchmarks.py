"""The document of benchmark results, with the origin, a summary and a figure of each record."""

from collections.abc import Sequence

from modular_kernel.bench.tables import label, summary
from modular_kernel.measure.records import Report, Row, min_time_us
from modular_kernel.report.curves import figure
from modular_kernel.report.pages.document import Block, Document, Heading, Items, Table, Text
from modular_kernel.report.records import BenchmarkRecord

_ABOUT = (
    "The records in `docs/benchmarks`, newest first: the time of a whole layer in microseconds for "
    "each number of tokens. Each record is a single run of `make bench` or `mk bench`, so a ratio "
    "of two records includes run-to-run variation. [Benchmarks](benchmarks/README.md) describes "
    "the method and how to measure."
)
MAX_PANELS = 20  # a figure with more panels, including the legend, is not drawn
_RATIOS = ("ours / floor", "ours / best peer")


def benchmarks_document(records: Sequence[BenchmarkRecord], *, cells: bool) -> Document:
    """Build the document of all records, newest first.

    cells: whether to include tables with the times of all cells.
    """
    plotted = [record for record in records if record.report is not None and record.report.rows]
    plotted.sort(key=date_of, reverse=True)
    without_figure = [record for record in records if record not in plotted]
    blocks: list[Block] = [Heading(1, "Benchmark results")]
    if records:
        blocks.append(Text(_ABOUT))
    for record in plotted:
        assert record.report is not None
        blocks += _record(record.name, record.report, cells=cells)
    if not records:
        location = "Records are in `docs/benchmarks` of a checkout; a wheel has none."
        blocks.append(
            Text(
                f"No records were found. {location} `mk report --docs FOLDER` reads other folders."
            )
        )
    if without_figure:
        blocks += [
            Heading(2, "Records without a figure"),
            Items([f"`{record.name}.json`" for record in without_figure]),
        ]
    return tuple(blocks)


def date_of(record: BenchmarkRecord) -> str:
    """Return the date of a record's measurement; "" if unknown."""
    return str(record.report.environment.get("date", "")) if record.report is not None else ""


def _record(name: str, report: Report, *, cells: bool) -> list[Block]:
    blocks: list[Block] = [Heading(2, name), Text(origin(report))]
    lines = summary(report)
    if lines:
        blocks.append(Items(lines))
    plot = figure(name, report)
    if plot is not None and len(plot.panels) <= MAX_PANELS:
        blocks.append(plot)
    if cells:
        for operands, routing in dict.fromkeys((r.operands, r.routing) for r in report.rows):
            rows = [r for r in report.rows if (r.operands, r.routing) == (operands, routing)]
            blocks += [Heading(3, f"{name}, {operands}, {routing} routing"), _cells(rows)]
    return blocks


def origin(report: Report) -> str:
    """Describe where, when and with which versions a report was measured."""
    env = report.environment
    parts = [env.get("device"), str(env.get("date", ""))[:16].replace("T", " ")]
    parts += [f"{name} {env[name]}" for name in ("torch", "triton", "version") if env.get(name)]
    shapes = len(dict.fromkeys(row.shape for row in report.rows))
    counts = f"{len(report.rows)} rows, {shapes} shapes"
    return ", ".join([str(fact) for fact in parts if fact] + [counts]) + "."


def _cells(rows: Sequence[Row]) -> Table:
    """Build a table with a row per shape and token count and a column per layer."""
    names = list(dict.fromkeys(label(row) for row in rows))
    columns = ["shape", "T", "floor", *names, *_RATIOS]
    lines = []
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group]
        times = {label(row): _us(row.us) if row.is_timed else row.status for row in members}
        floor = min((row.floor_us for row in members if row.floor_us), default=None)
        ours, peer = min_time_us(members, ours=True), min_time_us(members, ours=False)
        cells = [times.get(name, "") for name in names]
        lines.append(
            [group[0], str(group[1]), _us(floor), *cells, _over(ours, floor), _over(ours, peer)]
        )
    nonempty = [i for i, name in enumerate(columns) if i < 2 or any(line[i] for line in lines)]
    lines = [[line[i] for i in nonempty] for line in lines]
    names = [columns[i] for i in nonempty]
    return Table(names, lines, numeric=frozenset(names[1:]))


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _over(ours: float | None, other: float | None) -> str:
    return "" if ours is None or not other else f"{ours / other:.2f}"
