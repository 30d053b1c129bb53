"""The record of `mk exchange`, with one row per transport and case, and its tables.

`bench.all2all.cases` explains dispatch, combine, transports and cases.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from modular_kernel.bench.all2all.cases import ExchangeCase, TransportLink
from modular_kernel.measure.records import EXCHANGE_SCHEMA, FAILED, OK, REFUSED, SKIPPED, WRONG
from modular_kernel.utils import json_files

# In ascending order. The status of a row is the worst status of its ranks.
_SEVERITY = (OK, SKIPPED, REFUSED, WRONG, FAILED)


@dataclass(frozen=True, kw_only=True)
class ExchangeRow:
    """Result of one transport in one case. Times are set only if the status is ok.

    Fields that end in `_us` are times in microseconds: each rank measures a median, and the field
    has the maximum over ranks. `_rows` and `_bytes` are the rows and bytes that the busiest rank
    receives from other ranks. `_gbs` is the bytes divided by the time, in GB/s. `_floor_us` is the
    roofline (see `TransportLink`). The prefix `pair` means a dispatch followed by a combine.

    error: maximum relative error of a row, see `cases.max_row_error`.

    For origin, status and note, see measure.records.Row. The other fields are as in `ExchangeCase`
    and `ExchangeTimes`.
    """

    transport: str
    origin: str
    world_size: int
    tokens: int
    capacity: int
    hidden: int
    experts: int
    top_k: int
    quant: str
    status: str = SKIPPED
    note: str = ""
    error: float | None = None
    dispatch_us: float | None = None
    combine_us: float | None = None
    pair_us: float | None = None
    spread: float | None = None
    mode: str = ""
    dispatch_rows: int = 0
    combine_rows: int = 0
    dispatch_bytes: int = 0
    combine_bytes: int = 0
    dispatch_gbs: float | None = None
    combine_gbs: float | None = None
    dispatch_floor_us: float | None = None
    combine_floor_us: float | None = None


def make_row(
    transport: str,
    origin: str,
    case: ExchangeCase,
    reports: Sequence[dict[str, Any]],
    link: TransportLink,
) -> ExchangeRow:
    """Combine the reports of all ranks on one case into a row.

    The row has the most informative note (see `_get_note_priority`). If several notes are equally
    informative, the row has the earliest of them.

    reports: a dict for each rank with `status`, `note`, `error`, the times, and `at`, the time of
        the report by a clock that all ranks share.
    """
    received, sent = case.remote_rows
    dispatch_bytes, combine_bytes = received * case.row_bytes, sent * 2 * case.hidden
    worst = max(reports, key=lambda report: _SEVERITY.index(report["status"]))
    reports_with_notes = [r for r in reports if r["status"] == worst["status"] and r["note"]]
    reports_with_notes.sort(
        key=lambda report: (_get_note_priority(report["note"]), report.get("at", math.inf))
    )
    times: dict[str, Any] = {}
    errors = [report["error"] for report in reports if report.get("error") is not None]
    if worst["status"] == OK:
        for name in ("dispatch_us", "combine_us", "pair_us", "spread"):
            times[name] = max(report[name] for report in reports)
        times["dispatch_gbs"] = dispatch_bytes / times["dispatch_us"] / 1e3
        times["combine_gbs"] = combine_bytes / times["combine_us"] / 1e3
        times["mode"] = reports[0]["mode"]
    sizes = {f.name: getattr(case, f.name) for f in fields(case)}
    return ExchangeRow(
        transport=transport,
        origin=origin,
        **sizes,
        status=worst["status"],
        note=reports_with_notes[0]["note"] if reports_with_notes else "",
        error=max(errors, default=None),
        dispatch_rows=received,
        combine_rows=sent,
        dispatch_bytes=dispatch_bytes,
        combine_bytes=combine_bytes,
        dispatch_floor_us=link.floor_us(dispatch_bytes),
        combine_floor_us=link.floor_us(combine_bytes),
        **times,
    )


def _get_note_priority(note: str) -> int:
    """Return the sort key of a note: 0 if a rank died, 1 for an error, 2 for a hang."""
    if "died: " in note:
        return 0
    return 2 if note.startswith(("no answer", "another rank")) else 1


@dataclass(frozen=True)
class ExchangeReport:
    """A benchmark run.

    environment: device, versions, link model and method.
    """

    environment: dict[str, Any]
    rows: tuple[ExchangeRow, ...] = ()
    schema: str = EXCHANGE_SCHEMA

    def to_json(self) -> str:
        return json.dumps(_replace_infinities(asdict(self)), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "ExchangeReport":
        """Parse the output of `to_json`. Raises ConfigurationError for anything else."""
        record = json_files.parse_record(text, EXCHANGE_SCHEMA, "record of exchanges")
        return cls(record["environment"], tuple(ExchangeRow(**row) for row in record["rows"]))

    def write(self, path: Path) -> None:
        """Write the file atomically, so that an interrupted run leaves a complete file."""
        json_files.write(path, self.to_json() + "\n")

    def with_rows_from(self, others: Iterable["ExchangeReport"]) -> "ExchangeReport":
        """Return a report with this report's environment and the rows of all reports."""
        rows = [*self.rows, *(row for other in others for row in other.rows)]
        return ExchangeReport(self.environment, tuple(rows))


def _replace_infinities(value: Any) -> Any:
    """Replace infinite numbers with None, because JSON has no infinity."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _replace_infinities(item) for key, item in value.items()}
    return (
        [_replace_infinities(item) for item in value] if isinstance(value, list | tuple) else value
    )


_COLUMNS = (
    "T", "transport", "dispatch", "floor", "GB/s", "combine", "floor", "GB/s",
    "pair", "mode", "error", "note",
)  # fmt: skip
# Columns that are omitted if the terminal is too narrow, the last of this list first. Columns with
# the same name, such as floor, are omitted together.
OPTIONAL_COLUMNS = ("mode", "GB/s", "floor", "error", "note")


def format_cells(row: ExchangeRow) -> list[str]:
    """Format a row as cells in the order of _COLUMNS."""
    status_text = row.status.upper() if row.status in (WRONG, FAILED) else row.status
    time_or_status = _format_number(row.dispatch_us) if row.status == OK else status_text
    return [
        str(row.tokens), row.transport,
        time_or_status, _format_number(row.dispatch_floor_us), _format_number(row.dispatch_gbs, 0),
        _format_number(row.combine_us), _format_number(row.combine_floor_us),
        _format_number(row.combine_gbs, 0),
        _format_number(row.pair_us), row.mode, "" if row.error is None else f"{row.error:.1e}",
        row.note[:160],
    ]  # fmt: skip


def format_row(row: ExchangeRow) -> str:
    """Format a row as a log line with units."""
    head = f"{row.transport} T={row.tokens} {row.quant}:"
    if row.status != OK:
        return f"{head} {row.status}, {row.note[:160]}"
    times = ("dispatch", row.dispatch_us), ("combine", row.combine_us), ("pair", row.pair_us)
    time_list = ", ".join(f"{name} {us:.1f} us" for name, us in times if us is not None)
    return f"{head} {time_list}, {row.mode}"


def make_detail_tables(
    rows: Iterable[ExchangeRow],
) -> Iterator[tuple[str, tuple[str, ...], list[list[str]]]]:
    """Yield the title, column names and cells of a table for each format of dispatched rows.

    Rows of the same case are adjacent, the fastest first. Refused rows are omitted.
    """
    visible_rows = [row for row in rows if row.status != REFUSED]
    visible_rows.sort(key=lambda row: (row.world_size, row.tokens, row.pair_us or float("inf")))
    for quant in dict.fromkeys(row.quant for row in visible_rows):
        cells = [format_cells(row) for row in visible_rows if row.quant == quant]
        yield f"{_format_name(quant)}, times in us", _COLUMNS, cells


def _format_name(quant: str) -> str:
    return "bfloat16" if quant == "none" else quant


def make_summary_tables(
    rows: Sequence[ExchangeRow],
) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield the title, column names and cells of a short table for each format of dispatched rows.

    A table has one row per transport and one column per number of tokens. A cell has the
    microseconds of dispatch, of combine, and of both. The last row has the rooflines.
    """
    for quant in dict.fromkeys(row.quant for row in rows):
        visible_rows = [row for row in rows if row.quant == quant and row.status != REFUSED]
        token_counts = sorted({row.tokens for row in visible_rows})
        cells: dict[str, dict[int, str]] = {"floor": {}}
        for row in visible_rows:
            cells.setdefault(row.transport, {})[row.tokens] = _format_short_cell(row)
            floors = row.dispatch_floor_us, row.combine_floor_us
            cells["floor"][row.tokens] = " / ".join(map(_format_number, floors))
        cells["floor"] = cells.pop("floor")  # move it to the end
        table_rows = [
            [name, *(cell_by_tokens.get(tokens, "") for tokens in token_counts)]
            for name, cell_by_tokens in cells.items()
        ]
        title = f"{_format_name(quant)}: dispatch / combine / pair, us"
        yield title, ["", *(f"T={tokens}" for tokens in token_counts)], table_rows


def _format_short_cell(row: ExchangeRow) -> str:
    if row.status != OK:
        return row.status.upper() if row.status in (WRONG, FAILED) else row.status
    return " / ".join(map(_format_number, (row.dispatch_us, row.combine_us, row.pair_us)))


def markdown(report: ExchangeReport) -> str:
    env = report.environment
    versions = ", ".join(f"{k} {v}" for k, v in env.get("versions", {}).items() if v)
    lines = [
        f"# Dispatch and combine on {env.get('world_size')} x {env.get('device')}",
        "",
        f"- {env.get('date')}, modular-kernel {env.get('version')}, {versions}",
        f"- `{env.get('command')}`",
        "- floor: the time to send the busiest rank its rows. A token is sent to a rank once,",
        "  even if several experts of the rank process it. The link has a bandwidth of",
        f"  {env.get('link_gbs')} GB/s and a latency of {env.get('latency_us')} us",
        f"- {env.get('method')}",
    ]
    if env.get("event_gap_us") is not None:
        gap = env["event_gap_us"]
        lines.append(f"- a graph of one trivial kernel between two events takes {gap:.1f} us here")
    for title, head, cells in make_summary_tables(report.rows):
        lines += [
            "",
            f"## {title}",
            "",
            _format_markdown_row(head),
            _format_markdown_row(["---"] * len(head)),
        ]
        lines += map(_format_markdown_row, cells)
    for title, names, cells in make_detail_tables(report.rows):
        lines += [
            "",
            f"## {title}",
            "",
            _format_markdown_row(names),
            _format_markdown_row(["---"] * len(names)),
        ]
        lines += map(_format_markdown_row, cells)
    refused = {row.transport: row.note for row in report.rows if row.status == REFUSED}
    if refused:
        lines += ["", "## Refused", ""]
        lines += [f"- {name}: {note}" for name, note in refused.items()]
    return "\n".join(lines) + "\n"


def _format_markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _format_number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"
