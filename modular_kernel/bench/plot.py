"""Plots the times of a benchmark over the number of tokens, for `mk bench --plot`."""

import math
from pathlib import Path
from typing import Any

from modular_kernel.bench.tables import layer_label
from modular_kernel.measure.records import OURS, Report, Row

_PANEL_INCHES = (5.0, 3.8)
_MAX_COLUMNS = 3


def plot(report: Report, path: Path) -> None:
    """Write the plot to `path`, with a panel for each shape, routing and type of operands.

    The suffix of `path` determines the format. Requires matplotlib (extra `bench`).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str, str], list[Row]] = {}
    for row in report.rows:
        if row.floor_us is not None:
            panels.setdefault((row.shape, row.routing, row.operands), []).append(row)
    columns = min(_MAX_COLUMNS, max(1, len(panels)))
    panel_rows = max(1, math.ceil(len(panels) / columns))
    size = _PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * panel_rows
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    colors: dict[str, str] = {}
    for index, (panel, rows) in enumerate(panels.items()):
        axes = figure.add_subplot(panel_rows, columns, index + 1)
        _draw_panel(axes, rows, colors)
        axes.set_title(", ".join(panel), fontsize=9)
    figure.suptitle(f"{report.environment.get('device')}, {report.environment.get('date')}")
    figure.savefig(path, dpi=120)


def _draw_panel(axes: Any, rows: list[Row], colors: dict[str, str]) -> None:
    """Draw the roofline and a line per layer.

    colors: color of each layer in all panels. New layers are added.
    """
    floors = {row.tokens: row.floor_us for row in rows}
    tokens = sorted(floors)
    axes.plot(tokens, [floors[t] for t in tokens], "k--", linewidth=1, label="floor")
    for name in dict.fromkeys(layer_label(row) for row in rows):
        points = sorted(
            (r for r in rows if layer_label(r) == name and r.is_timed), key=lambda r: r.tokens
        )
        if not points:
            continue
        color = colors.setdefault(name, f"C{len(colors) % 10}")
        style = "o-" if points[0].origin == OURS else "s:"
        point_tokens, times_us = [row.tokens for row in points], [row.us for row in points]
        axes.plot(
            point_tokens, times_us, style, color=color, markersize=3, linewidth=1.2, label=name
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens")
    axes.set_ylabel("microseconds")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize=7)
