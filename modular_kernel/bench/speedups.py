"""Speedups over the best peer, for the tables and the plot of `make bench`.

A speedup is the time of the fastest peer in a case divided by our time, so a speedup above 1 means
that our layer is faster. The tables have a column for each of our four layers:

- FusedMoE with default arguments
- the layer that `mk.compose` builds
- the fastest part that uses this project's GEMM kernels
- the fastest part that uses the GEMM kernels of another library
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modular_kernel.bench.candidates import ComposedLayer, DefaultLayer
from modular_kernel.measure.records import FAILED, OURS, SKIPPED, WRONG, Report, Row
from modular_kernel.text import format_count

DEFAULT, COMPOSED, OWN_KERNELS, OTHER_LIBRARY = (
    "FusedMoE, defaults",
    "composed",
    "own kernels alone",
    "parts over other libraries",
)
COLUMNS = (DEFAULT, COMPOSED, OWN_KERNELS, OTHER_LIBRARY)
MARGIN = 0.01  # our layer counts as slower if it takes longer by more than this fraction
SCHEME_NAMES = {
    "bfloat16": "bf16",
    "fp8/fp8": "fp8",
    "int4/bfloat16": "int4",
    "fp4/bfloat16": "mxfp4",
}
_PANEL_INCHES = (3.6, 2.9)


def get_column_name(row: Row) -> str | None:
    """Return the name of the column for a row of our layers, or None for baselines and peers."""
    if row.origin != OURS:
        return None
    if row.layer == DefaultLayer.name:
        return DEFAULT
    if row.layer == ComposedLayer.name:
        return COMPOSED
    return OTHER_LIBRARY if row.library else OWN_KERNELS


@dataclass(frozen=True)
class CaseTimes:
    """The fastest times of one case in microseconds.

    ours: our times, by column.
    peer, peer_name: time and name of the fastest peer or baseline; None and "" if there is none.
    """

    shape: str
    tokens: int
    routing: str
    operands: str
    ours: dict[str, float]
    peer: float | None
    peer_name: str = ""

    def speedup(self, column: str) -> float | None:
        """Return the best peer's time divided by ours, or None if either is missing."""
        ours = self.ours.get(column)
        return self.peer / ours if ours and self.peer else None

    def __str__(self) -> str:
        return f"{self.shape}, {format_count(self.tokens, 'token')}, {self.routing}"


def collect_case_times(rows: Iterable[Row]) -> list[CaseTimes]:
    """Return the cases in which any layer was timed, in the order of the rows."""
    groups: dict[tuple[str, int, str, str], list[Row]] = {}
    for row in rows:
        if row.is_comparable:
            groups.setdefault(row.group, []).append(row)
    cases = []
    for (shape, tokens, routing, operands), members in groups.items():
        ours: dict[str, float] = {}
        peers: list[tuple[float, str]] = []
        for row in members:
            assert row.us is not None
            column = get_column_name(row)
            if column is None:
                peers.append((row.us, row.layer))
            else:
                ours[column] = min(row.us, ours.get(column, math.inf))
        peer, name = min(peers, default=(None, ""))
        cases.append(CaseTimes(shape, tokens, routing, operands, ours, peer, name))
    return cases


@dataclass(frozen=True)
class SpeedupSummary:
    """Speedups of one column over all cases with one type of operands.

    cases: number of cases with a speedup.
    mean: geometric mean of the speedups.
    num_slower: number of cases in which our layer is slower than the best peer by more than MARGIN.
    worst: the case with the smallest speedup.
    """

    operands: str
    column: str
    cases: int
    mean: float
    num_slower: int
    worst: CaseTimes

    @property
    def min_speedup(self) -> float:
        speedup = self.worst.speedup(self.column)
        assert speedup is not None
        return speedup


def summarize_speedups(cases: Sequence[CaseTimes]) -> list[SpeedupSummary]:
    """Summarize the speedups of each type of operands and column with speedups."""
    results = []
    for operands in dict.fromkeys(case.operands for case in cases):
        for column in COLUMNS:
            speedups = [
                (speedup, case)
                for case in cases
                if case.operands == operands and (speedup := case.speedup(column)) is not None
            ]
            if not speedups:
                continue
            mean = math.exp(sum(math.log(speedup) for speedup, _ in speedups) / len(speedups))
            num_slower = sum(1 / speedup > 1 + MARGIN for speedup, _ in speedups)
            worst = min(speedups, key=lambda pair: pair[0])[1]
            results.append(SpeedupSummary(operands, column, len(speedups), mean, num_slower, worst))
    return results


def get_scheme_name(operands: str) -> str:
    """Return the short name of a scheme, such as int4 for the operands int4/bfloat16."""
    return SCHEME_NAMES.get(operands, operands)


def speedups_table(report: Report) -> list[str]:
    """Return the lines of a Markdown table of speedups, with a row for each scheme and column."""
    lines = [
        "| scheme | ours | cases | mean speedup | smallest speedup | slower by more than 1 % |",
        "|---|---|---:|---:|---|---:|",
    ]
    for summary in summarize_speedups(collect_case_times(report.rows)):
        worst = f"{summary.min_speedup:.2f} ({summary.worst}; {summary.worst.peer_name})"
        lines.append(
            f"| {get_scheme_name(summary.operands)} | {summary.column} | {summary.cases} "
            f"| {summary.mean:.2f} | {worst} | {summary.num_slower} |"
        )
    return lines


def layers_table(report: Report) -> list[str]:
    """Return the lines of a Markdown table with a row for each scheme and layer, including peers.

    The times of a layer are divided by those of the best peer in the same cases. A peer that is the
    fastest in every case has 1.00.
    """
    lines = [
        "| scheme | layer | origin | cases | time / best peer (geometric mean) | wrong or failed |",
        "|---|---|---|---:|---:|---:|",
    ]
    peers = {
        (c.shape, c.tokens, c.routing, c.operands): c.peer for c in collect_case_times(report.rows)
    }
    names = dict.fromkeys((row.operands, row.layer, row.quant) for row in report.rows)
    for operands, layer, quant in names:
        rows = [
            r for r in report.rows if (r.operands, r.layer, r.quant) == (operands, layer, quant)
        ]
        ratios = [
            row.us / peer
            for row in rows
            if row.is_comparable and row.us is not None and (peer := peers.get(row.group))
        ]
        failures = sum(row.status in (WRONG, FAILED) for row in rows)
        timed = sum(row.is_comparable for row in rows)
        if not timed and not failures:
            continue
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
        first = rows[0]
        origin = f"ours, GEMMs of {first.library}" if first.library else first.origin
        lines.append(
            f"| {get_scheme_name(operands)} | {layer} `{quant}` | {origin} | {timed} "
            f"| {'' if mean is None else f'{mean:.2f}'} | {failures or ''} |"
        )
    return lines


def cases_table(report: Report) -> list[str]:
    """Return the lines of a Markdown table with the microseconds of all cases."""
    lines = [
        f"| scheme | layer | routing | T | {' | '.join(COLUMNS)} | best peer | |",
        f"|---|---|---|---:|{'---:|' * len(COLUMNS)}---:|---|",
    ]
    for case in collect_case_times(report.rows):
        times = [case.ours.get(column) for column in COLUMNS] + [case.peer]
        cells = ["" if us is None else f"{us:.1f}" for us in times]
        lines.append(
            f"| {get_scheme_name(case.operands)} | {case.shape} | {case.routing} | {case.tokens} "
            f"| {' | '.join(cells)} | {case.peer_name} |"
        )
    return lines


def unmeasured_list(report: Report) -> list[str]:
    """Return the lines of a Markdown list of the layers that were not measured, with reasons."""
    lines = [f"- not installed: {name}" for name in report.missing]
    notes: dict[tuple[str, str, str, str], int] = {}
    for row in report.rows:
        if row.status in (WRONG, FAILED, SKIPPED):
            key = (get_scheme_name(row.operands), row.layer, row.status, row.note[:160])
            notes[key] = notes.get(key, 0) + 1
    for (scheme, layer, outcome, note), count in notes.items():
        lines.append(f"- {scheme}, {layer}: {outcome} in {count} cases: {note}")
    if report.stopped:
        lines.append(f"- the run ended early: {report.stopped}")
    return lines


def merge_reports(reports: Sequence[Report]) -> Report:
    """Merge reports into one report with the environment and the peaks of the first.

    Its environment also has the days of all reports ("days"). If several reports have a row of the
    same layer in the same case, the first timed row is kept, or the first row if none was timed.
    """
    first, row_by_case = reports[0], dict[tuple[object, ...], Row]()
    for row in (row for report in reports for row in report.rows):
        key = (*row.group, row.layer, row.quant, row.prepared)
        if key not in row_by_case or (row.is_timed and not row_by_case[key].is_timed):
            row_by_case[key] = row
    rows = tuple(row_by_case.values())
    missing = tuple(dict.fromkeys(name for report in reports for name in report.missing))
    stopped = "; ".join(dict.fromkeys(r.stopped for r in reports if r.stopped))
    days = sorted({day for report in reports for day in list_days(report.environment)})
    environment = {**first.environment, "days": days} if len(days) > 1 else first.environment
    return Report(environment, first.peaks, rows, stopped, missing)


def list_days(environment: Mapping[str, Any]) -> list[str]:
    """Return the days on which the rows of a report were measured, such as ["2026-12-01"]."""
    return list(environment.get("days", [str(environment.get("date"))[:10]]))


def render_markdown(report: Report) -> str:
    """Render the whole comparison as Markdown."""
    env = report.environment
    versions = [f"{name} {env[name]}" for name in ("torch", "triton", "driver") if env.get(name)]
    lines = [
        f"# Our layers and public ones on {env.get('device')}",
        "",
        f"{' and '.join(list_days(env))}, {', '.join(versions)}. `{env.get('command')}`",
        "",
        *speedups_table(report),
        "",
        "## Layers",
        "",
        *layers_table(report),
        "",
        "## Not measured",
        "",
        *(unmeasured_list(report) or ["- nothing is missing"]),
        "",
        "## Cases",
        "",
        "Microseconds of a call.",
        "",
        *cases_table(report),
    ]
    return "\n".join(lines) + "\n"


def plot_speedups(report: Report, path: Path) -> None:
    """Plot the speedup over the best peer by tokens, with a panel for each scheme and routing.

    Requires matplotlib (extra `bench`). The suffix of `path` determines the file's format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = collect_case_times(report.rows)
    schemes = list(dict.fromkeys(case.operands for case in cases)) or [""]
    routings = list(dict.fromkeys(case.routing for case in cases)) or [""]
    shapes = list(dict.fromkeys(case.shape for case in cases))
    size = _PANEL_INCHES[0] * len(schemes), _PANEL_INCHES[1] * len(routings)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(routings), len(schemes), sharex=True, sharey="col", squeeze=False)
    for panel_row, routing in enumerate(routings):
        for panel_column, operands in enumerate(schemes):
            axes = panels[panel_row][panel_column]
            panel_cases = [c for c in cases if (c.operands, c.routing) == (operands, routing)]
            _draw_speedups(axes, panel_cases, shapes)
            axes.set_title(f"{get_scheme_name(operands)}, {routing} routing", fontsize=9)
            if panel_row == len(routings) - 1:
                axes.set_xlabel("tokens")
            if panel_column == 0:
                axes.set_ylabel("best peer's time / ours")
    handles, labels = panels[0][0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(
        f"{report.environment.get('device')}, {' and '.join(list_days(report.environment))}: "
        "solid FusedMoE with default arguments, dotted own kernels alone; above 1 we are faster",
        fontsize=9,
    )
    figure.savefig(path, dpi=120)


def _draw_speedups(axes: Any, cases: Sequence[CaseTimes], shapes: Sequence[str]) -> None:
    """Draw two lines per shape: FusedMoE with default arguments, and our own kernels."""
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--")
    for index, shape in enumerate(shapes):
        for column, style in ((DEFAULT, "o-"), (OWN_KERNELS, "s:")):
            points = sorted(
                (case.tokens, speedup)
                for case in cases
                if case.shape == shape and (speedup := case.speedup(column)) is not None
            )
            label = shape if column == DEFAULT else None
            axes.plot(
                [tokens for tokens, _ in points],
                [speedup for _, speedup in points],
                style,
                color=f"C{index % 10}",
                markersize=3,
                linewidth=1.2,
                label=label,
            )
    axes.set_xscale("log", base=2)
    axes.grid(visible=True, which="both", alpha=0.25)


def replace_section(text: str, name: str, lines: Sequence[str], *, filename: str) -> str:
    """Replace the text between `<!-- name:begin -->` and `<!-- name:end -->` with `lines`.

    filename: name of the file with this text, for the message.

    Raises ValueError unless `text` has each marker exactly once.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{filename}: got no section between {begin} and {end}, need one")
    before = text.partition(begin)[0]
    after = text.partition(end)[2]
    return f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}"
