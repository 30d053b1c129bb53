"""SVG figures of benchmark records, with the same panels as `mk bench --plot`.

A panel shows times as multiples of the roofline ("floor") if all of its rows have one. On an axis
of microseconds that covers decades, a difference of 10 % would be invisible.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from modular_kernel.bench.tables import layer_label
from modular_kernel.measure.records import OURS, Report, Row
from modular_kernel.report.pages.document import Figure
from modular_kernel.report.pages.plots import (
    COLORS,
    XMLNS,
    Scale,
    make_svg_element,
    make_svg_line,
    make_svg_shape_with_tooltip,
    make_svg_text,
)
from modular_kernel.text import format_count

_MAX_COLUMNS = 3
# In pixels.
_WIDTH, _HEIGHT = 380, 300  # size of a panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 24, 28, 40  # margins of a panel, for its labels
_LEGEND_HEIGHT = 20  # height of a line of the legend
_FLOOR = "floor"


@dataclass(frozen=True)
class _Point:
    """A point of a curve.

    y: the plotted value, which is time / floor or microseconds.
    """

    tokens: int
    y: float
    us: float


@dataclass(frozen=True)
class _Curve:
    """A curve of a panel.

    points: sorted by tokens.
    stroke: SVG attributes of the line.
    color: color of the dots; "" for no dots.
    """

    name: str
    points: Sequence[_Point]
    stroke: str
    color: str


@dataclass(frozen=True)
class _Panel:
    title: str
    curves: Sequence[_Curve]
    unit: str


def draw_figure(name: str, report: Report) -> Figure | None:
    """Draw a panel per shape, routing and operand type, with a color per layer.

    Returns None if the report has no timed row.
    """
    panels = _make_panels(report)
    curves = {curve.name: curve for panel in panels for curve in panel.curves}
    if not set(curves) - {_FLOOR}:
        return None
    columns = min(_MAX_COLUMNS, len(panels))
    legend = _draw_legend(list(curves.values()), columns)
    top = math.ceil(len(curves) / columns) * _LEGEND_HEIGHT + 8
    panel_svgs = [
        make_svg_element(
            _draw_legend(list(curves.values()), 1),
            _WIDTH,
            len(curves) * _LEGEND_HEIGHT + 8,
            "legend",
        ),
        *(make_svg_element(_draw_panel(panel), _WIDTH, _HEIGHT, panel.title) for panel in panels),
    ]
    placed_panels = [
        make_svg_element(
            _draw_panel(panel),
            _WIDTH,
            _HEIGHT,
            panel.title,
            f'x="{index % columns * _WIDTH}" y="{index // columns * _HEIGHT + top}" ',
        )
        for index, panel in enumerate(panels)
    ]
    height = math.ceil(len(panels) / columns) * _HEIGHT + top
    figure_svg = (
        make_svg_element([*legend, *placed_panels], columns * _WIDTH, height, name, XMLNS) + "\n"
    )
    caption = f"{name}: solid: ours; dotted: others; dashed: roofline."
    return Figure(name, figure_svg, caption, panel_svgs)


def _make_panels(report: Report) -> list[_Panel]:
    rows_by_panel: dict[tuple[str, str, str], list[Row]] = {}
    for row in report.rows:
        if row.is_comparable:
            rows_by_panel.setdefault((row.shape, row.operands, row.routing), []).append(row)
    names = list(dict.fromkeys(layer_label(row) for rows in rows_by_panel.values() for row in rows))
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    return [_make_panel(", ".join(name), rows, colors) for name, rows in rows_by_panel.items()]


def _make_panel(title: str, rows: Sequence[Row], colors: dict[str, str]) -> _Panel:
    relative_to_floor = all(row.floor_us for row in rows)
    curves = []
    if relative_to_floor:
        floors = sorted({(row.tokens, row.floor_us or 0.0) for row in rows})
        stroke = 'class="line" stroke-dasharray="6 4"'
        curves.append(_Curve(_FLOOR, [_Point(t, 1.0, us) for t, us in floors], stroke, ""))
    for name in dict.fromkeys(layer_label(row) for row in rows):
        layer_rows = sorted((r for r in rows if layer_label(r) == name), key=lambda r: r.tokens)
        dotted = "" if layer_rows[0].origin == OURS else ' stroke-dasharray="2 3"'
        stroke = f'stroke="{colors[name]}"{dotted}'
        points = [_make_point(row, relative_to_floor) for row in layer_rows]
        curves.append(_Curve(name, points, stroke, colors[name]))
    return _Panel(title, curves, "time / floor" if relative_to_floor else "microseconds")


def _make_point(row: Row, relative_to_floor: bool) -> _Point:
    us = row.us or 0.0  # `is_comparable` implies that there is a time
    return _Point(row.tokens, us / (row.floor_us or us) if relative_to_floor else us, us)


def _draw_legend(curves: Sequence[_Curve], columns: int) -> list[str]:
    shapes = []
    for index, curve in enumerate(curves):
        x, y = index % columns * _WIDTH + 10, index // columns * _LEGEND_HEIGHT + 15
        shapes.append(make_svg_line(x, y - 4, x + 26, y - 4, f' stroke-width="2" {curve.stroke}'))
        shapes.append(make_svg_text(x + 32, y, curve.name))
    return shapes


def _draw_panel(panel: _Panel) -> list[str]:
    points = [point for curve in panel.curves for point in curve.points]
    x_scale = Scale.from_values((point.tokens for point in points), _LEFT, _WIDTH - _RIGHT)
    values = [point.y for point in points]
    y_scale = Scale.from_values((min(values) * 0.95, max(values) * 1.05), _HEIGHT - _BOTTOM, _TOP)
    shapes = [
        *_draw_axis_labels(panel),
        *_draw_grid(x_scale, y_scale, sorted({point.tokens for point in points})),
    ]
    return shapes + [
        shape for curve in panel.curves for shape in _draw_curve(curve, x_scale, y_scale)
    ]


def _draw_axis_labels(panel: _Panel) -> list[str]:
    center_x, center_y = (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT / 2
    centered = ' text-anchor="middle"'
    return [
        make_svg_text(center_x, 16, panel.title, f'{centered} font-weight="bold"'),
        make_svg_text(center_x, _HEIGHT - 6, "tokens", centered),
        make_svg_text(
            12, center_y, panel.unit, f'{centered} transform="rotate(-90 12 {center_y:.1f})"'
        ),
    ]


def _draw_grid(x_scale: Scale, y_scale: Scale, tokens: Sequence[int]) -> list[str]:
    shapes, bottom = [], _HEIGHT - _BOTTOM
    for number in tokens:
        x = x_scale.position(number)
        shapes.append(make_svg_line(x, _TOP, x, bottom))
        shapes.append(make_svg_text(x, bottom + 14, str(number), ' text-anchor="middle"'))
    for value in y_scale.ticks():
        y = y_scale.position(value)
        shapes.append(make_svg_line(_LEFT, y, _WIDTH - _RIGHT, y))
        shapes.append(make_svg_text(_LEFT - 5, y + 4, f"{value:g}", ' text-anchor="end"'))
    return shapes


def _draw_curve(curve: _Curve, x_scale: Scale, y_scale: Scale) -> list[str]:
    positions = [
        (x_scale.position(point.tokens), y_scale.position(point.y)) for point in curve.points
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
    polyline = f'<polyline points="{path}" fill="none" stroke-width="1.5" {curve.stroke}/>'
    if not curve.color:
        return [polyline]
    dots = [
        make_svg_shape_with_tooltip(
            "circle",
            f'cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{curve.color}"',
            f"{curve.name}, {format_count(point.tokens, 'token')}: {point.us:.1f} us",
        )
        for (x, y), point in zip(positions, curve.points, strict=True)
    ]
    return [polyline, *dots]
