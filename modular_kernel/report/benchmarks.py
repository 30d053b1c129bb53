"""The page of benchmark results (docs/benchmark-results.md), from records of `mk bench --json`.

For each record, the page has the device and the versions, a summary, and a figure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modular_kernel.bench.tables import layer_label, summary
from modular_kernel.errors import ConfigurationError
from modular_kernel.measure.records import SCHEMA, Report, Row, min_time_us
from modular_kernel.report.curves import draw_figure
from modular_kernel.report.pages.document import Block, BulletList, Document, Heading, Table, Text
from modular_kernel.utils import json_files

_INTRODUCTION = (
    "The records in `docs/benchmarks`, newest first: the time of a whole layer in microseconds for "
    "each number of tokens. Each record is a single run of `make bench` or `mk bench`, so a ratio "
    "of two records includes run-to-run variation. [Benchmarks](benchmarks/README.md) describes "
    "the method and how to measure."
)
MAX_PANELS = 20  # a figure with more panels, including the legend, is omitted
_RATIOS = ("ours / floor", "ours / best peer")


@dataclass(frozen=True)
class BenchmarkRecord:
    """A file in the folder of records, as `mk bench --json` and `make bench` write them.

    name: file name without suffix.
    report: None if the file has another format.
    """

    name: str
    report: Report | None


def read_records(folder: Path) -> tuple[BenchmarkRecord, ...]:
    """Read every *.json in `folder`, sorted by name. Returns () if the folder does not exist.

    Raises ConfigurationError for a file that is not JSON.
    """
    return tuple(
        BenchmarkRecord(path.stem, _read_report(path)) for path in sorted(folder.glob("*.json"))
    )


def _read_report(path: Path) -> Report | None:
    text = path.read_text(encoding="utf-8")
    try:
        record = json_files.parse(text, allow_constants=True)
    except ValueError as error:
        raise ConfigurationError(str(path), got=str(error), need="JSON") from error
    if isinstance(record, dict) and record.get("schema") == SCHEMA:
        return Report.from_json(text)
    return None


def build_benchmarks_document(records: Sequence[BenchmarkRecord], *, cells: bool) -> Document:
    """Build the document of all records, newest first.

    cells: whether to include tables with the times of all cells.
    """
    plotted = [record for record in records if record.report is not None and record.report.rows]
    plotted.sort(key=get_date, reverse=True)
    without_figure = [record for record in records if record not in plotted]
    blocks: list[Block] = [Heading(1, "Benchmark results")]
    if records:
        blocks.append(Text(_INTRODUCTION))
    for record in plotted:
        assert record.report is not None
        blocks += _make_record_blocks(record.name, record.report, cells=cells)
    if not records:
        location = "Records are in `docs/benchmarks` of a checkout; a wheel has none."
        text = f"No records were found. {location} `mk report --docs FOLDER` reads other folders."
        blocks.append(Text(text))
    if without_figure:
        blocks += [
            Heading(2, "Records without a figure"),
            BulletList([f"`{record.name}.json`" for record in without_figure]),
        ]
    return tuple(blocks)


def get_date(record: BenchmarkRecord) -> str:
    """Return the date of a record's measurement, or "" if it is unknown."""
    return str(record.report.environment.get("date", "")) if record.report is not None else ""


def _make_record_blocks(name: str, report: Report, *, cells: bool) -> list[Block]:
    blocks: list[Block] = [Heading(2, name), Text(describe_origin(report))]
    lines = summary(report)
    if lines:
        blocks.append(BulletList(lines))
    plot = draw_figure(name, report)
    if plot is not None and len(plot.panels) <= MAX_PANELS:
        blocks.append(plot)
    if cells:
        for operands, routing in dict.fromkeys((r.operands, r.routing) for r in report.rows):
            rows = [r for r in report.rows if (r.operands, r.routing) == (operands, routing)]
            blocks += [
                Heading(3, f"{name}, {operands}, {routing} routing"),
                _make_cells_table(rows),
            ]
    return blocks


def describe_origin(report: Report) -> str:
    """Return a sentence with the device, date, versions and size of a report."""
    env = report.environment
    details = [env.get("device"), str(env.get("date", ""))[:16].replace("T", " ")]
    details += [f"{name} {env[name]}" for name in ("torch", "triton", "version") if env.get(name)]
    shapes = len(dict.fromkeys(row.shape for row in report.rows))
    counts = f"{len(report.rows)} rows, {shapes} shapes"
    return ", ".join([str(detail) for detail in details if detail] + [counts]) + "."


def _make_cells_table(rows: Sequence[Row]) -> Table:
    """Build a table with a row per shape and token count, and a column per layer."""
    names = list(dict.fromkeys(layer_label(row) for row in rows))
    columns = ["shape", "T", "floor", *names, *_RATIOS]
    table_rows = []
    for group in dict.fromkeys(row.group for row in rows):
        group_rows = [row for row in rows if row.group == group]
        times = {
            layer_label(row): _format_us(row.us) if row.is_timed else row.status
            for row in group_rows
        }
        floor = min((row.floor_us for row in group_rows if row.floor_us), default=None)
        ours, peer = min_time_us(group_rows, ours=True), min_time_us(group_rows, ours=False)
        cells = [times.get(name, "") for name in names]
        table_rows.append(
            [
                group[0],
                str(group[1]),
                _format_us(floor),
                *cells,
                _format_ratio(ours, floor),
                _format_ratio(ours, peer),
            ]
        )
    nonempty_columns = [
        i
        for i, name in enumerate(columns)
        if i < 2 or any(table_row[i] for table_row in table_rows)
    ]
    table_rows = [[table_row[i] for i in nonempty_columns] for table_row in table_rows]
    names = [columns[i] for i in nonempty_columns]
    return Table(names, table_rows, numeric=frozenset(names[1:]))


def _format_us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _format_ratio(numerator: float | None, denominator: float | None) -> str:
    return "" if numerator is None or not denominator else f"{numerator / denominator:.2f}"
