"""Tables of the records of `mk bench`, for a terminal and in Markdown."""

from collections.abc import Iterable, Iterator, Sequence

from modular_kernel.measure.records import FAILED, REFUSED, WRONG, Report, Row, min_time_us
from modular_kernel.text import format_count

_COLUMNS = (
    "shape", "T", "routing", "layer", "us", "floor us", "/ floor", "/ best peer", "error",
    "eager us", "launches", "host us", "allocs", "mode", "note",
)  # fmt: skip
# Columns that are omitted if the terminal is too narrow, the last of this list first.
OPTIONAL_COLUMNS = (
    "/ floor", "/ best peer", "floor us", "host us", "launches", "error", "routing", "note",
    "mode", "eager us", "allocs",
)  # fmt: skip
METHOD_NOTES = """\
- A layer is timed from x, top-k ids and weights to y. This includes index computation, quantization
  of x, both GEMMs, activation and weighted sum, and excludes the router and its top-k. Times are
  microseconds.
- On a GPU, a time is the median over replays of a CUDA graph, divided by the number of calls in the
  graph. Timing starts after 25 ms of replays. Each call has its own input and, if a call touches
  less than twice the size of the L2 cache, its own weights. In the record, `eager` marks calls that
  were not captured, `+flush` calls that were timed one by one after the cache was overwritten, and
  `cpu` wall-clock time.
- Before a layer is timed, some rows of its output are compared with a float64 reference. If its
  error is more than twice that of plain torch in the same number format, the layer is WRONG and has
  no time. The last output of the timed replays is compared, too.\
"""

PREPARED_NOTE = "prepared: kernel.prepare_weights was called once before timing"


def layer_label(row: Row) -> str:
    """Return the name of the row's layer, with its scheme if it is quantized."""
    return row.layer if row.quant == "none" else f"{row.layer} {row.quant}"


def make_terminal_table(rows: Iterable[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the column names and the cells of a table for a terminal.

    Rows of one case (shape, number of tokens and routing) are adjacent. Columns without any value
    are omitted.
    """
    rows = list(rows)
    groups = list(dict.fromkeys(row.group for row in rows))
    cells = [_format_cells(row) for row in sorted(rows, key=lambda row: groups.index(row.group))]
    nonempty = [i for i in range(len(_COLUMNS)) if any(row_cells[i] for row_cells in cells)]
    return (
        [_COLUMNS[i] for i in nonempty],
        [[row_cells[i] for i in nonempty] for row_cells in cells],
    )


def _format_cells(row: Row) -> tuple[str, ...]:
    return (
        row.shape, str(row.tokens), row.routing, layer_label(row), time_or_status(row),
        _format_number(row.floor_us, 1), _format_number(row.over_floor, 2),
        _format_number(row.over_best_peer, 2),
        "" if row.error is None else f"{row.error:.1e}",
        _format_number(row.eager_us, 1), "" if row.launches is None else str(row.launches),
        _format_number(row.host_us, 1), _format_number(row.allocations, 1), row.mode, row.note,
    )  # fmt: skip


def time_or_status(row: Row) -> str:
    """Format the time in microseconds, or the status of an untimed row."""
    if row.is_timed:
        return _format_number(row.us, 1)
    return row.status.upper() if row.status == WRONG else row.status


def format_row(row: Row) -> str:
    """Format a row as a log line."""
    head = f"{row.shape} T={row.tokens} {row.routing} {layer_label(row)}:"
    if not row.is_timed:
        return f"{head} {time_or_status(row)}, {row.note}"
    ratio = "" if row.over_floor is None else f" {row.over_floor:.2f} x the floor,"
    return f"{head} {row.us:.1f} us,{ratio} {row.mode}"


def _format_number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def markdown(report: Report) -> str:
    """Render the report as Markdown: environment, method, and a table per operand type and routing.

    Wrong and failed rows are listed at the end.
    """
    lines = [f"# Layers on {report.environment.get('device')}", "", *_describe_run(report), ""]
    lines += METHOD_NOTES.splitlines()
    lines += [f"- {PREPARED_NOTE}."] if any(row.prepared for row in report.rows) else []
    kinds = dict.fromkeys((row.operands, row.routing) for row in report.rows)
    for operands, routing in kinds:
        rows = [row for row in report.rows if (row.operands, row.routing) == (operands, routing)]
        lines += ["", f"## {operands}, {routing} routing", "", *_make_markdown_table(rows)]
    failures = [row for row in report.rows if row.status in (WRONG, FAILED)]
    if failures or report.stopped:
        lines += ["", "## Not timed", ""]
        lines += [f"- {format_row(row)}" for row in failures]
        lines += [f"- the run ended early: {report.stopped}"] if report.stopped else []
    return "\n".join(lines) + "\n"


def _describe_run(report: Report) -> list[str]:
    env, peaks = report.environment, report.peaks
    rates = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in peaks["flops"].items())
    memory_rates = f"copy {peaks['copy'] / 1e12:.4g}, read {peaks['read'] / 1e12:.4g}"
    versions = ", ".join(
        f"{name} {env[name]}" for name in ("torch", "triton", "cuda", "driver") if env.get(name)
    )
    return [
        f"- {env['date']}, modular-kernel {env['version']}, {versions}: `{env['command']}`",
        "- floor = max(flops / peak, bytes / bandwidth). Peaks, from the fastest square GEMMs of",
        f"  this run, in TFLOP/s: {rates}. Bandwidth in TB/s: {peaks['bandwidth'] / 1e12:.4g},",
        f"  {peaks['source']} ({memory_rates}). Bytes are those of x, y, and the weights of",
        "  experts with a token, each counted once.",
    ]


def _make_markdown_table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a Markdown table with a row per case and a column per layer."""
    names = list(dict.fromkeys(layer_label(row) for row in rows if row.status != REFUSED))
    head = ["shape", "T", "floor", *names, "best of ours / floor", "best of ours / best peer"]
    lines = [_format_markdown_row(head), _format_markdown_row(["---", *["---:"] * (len(head) - 1)])]
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group]
        cells = {layer_label(row): time_or_status(row) for row in members if row.status != REFUSED}
        # The rooflines of a group's rows differ only in the bytes of scales.
        floors = [row.floor_us for row in members if row.floor_us]
        floor = min(floors, default=None)
        ours, peer = min_time_us(members, ours=True), min_time_us(members, ours=False)
        times = [cells.get(name, "") for name in names]
        tail = [_format_ratio(ours, floor), _format_ratio(ours, peer)]
        lines.append(
            _format_markdown_row([group[0], str(group[1]), _format_number(floor, 1), *times, *tail])
        )
    return lines


def _format_markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _format_ratio(ours: float | None, reference: float | None) -> str:
    return "" if ours is None or not reference else f"{ours / reference:.2f}"


def ratios(report: Report) -> list[tuple[str, str]]:
    """Return pairs such as ("0.91 x", "the floor, bfloat16").

    A ratio is the geometric mean over cases of our best time divided by the roofline ("the floor")
    or by the best peer's time.
    """
    return [
        (f"{_compute_geometric_mean(values):.2f} x", f"{target}, {operands}")
        for operands, comparisons in _compare_by_operands(report)
        for target, values in comparisons.items()
    ]


def summary(report: Report) -> list[str]:
    """Return a line per operand type with the results of `ratios` and the ranges over cases.

    If any row has prepared weights, the first line explains the term "prepared".
    """
    lines = [PREPARED_NOTE] if any(row.prepared for row in report.rows) else []
    for operands, comparisons in _compare_by_operands(report):
        parts = [
            f"{_compute_geometric_mean(values):.2f} x {target} in geometric mean over "
            f"{format_count(len(values), 'case')} "
            f"({min(values):.2f} to {max(values):.2f})"
            for target, values in comparisons.items()
        ]
        lines.append(f"{operands}, best of ours: " + "; ".join(parts))
    return lines


def _compare_by_operands(report: Report) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Yield each operand type with the ratios of our best time to each comparison, one per case."""
    for operands in dict.fromkeys(row.operands for row in report.rows):
        rows = [row for row in report.rows if row.operands == operands]
        over_floor, over_peer = list[float](), list[float]()
        for group in dict.fromkeys(row.group for row in rows):
            members = [row for row in rows if row.group == group]
            ours, peer = min_time_us(members, ours=True), min_time_us(members, ours=False)
            floor = min((row.floor_us for row in members if row.floor_us), default=None)
            if ours and floor:
                over_floor.append(ours / floor)
            if ours and peer:
                over_peer.append(ours / peer)
        comparisons = {"the floor": over_floor, "the best peer's time": over_peer}
        if any(comparisons.values()):
            yield operands, {target: values for target, values in comparisons.items() if values}


def _compute_geometric_mean(values: Sequence[float]) -> float:
    product = 1.0
    for value in values:
        product *= value ** (1 / len(values))
    return product
