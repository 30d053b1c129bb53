"""Records as SVG drawings, by the panels of `mk bench --plot`, without a library: time over tokens,
as a multiple of the floor where each row has one. Over decades of time, a tenth cannot be seen.

Numbers are written with one decimal, so that a drawing has the same bytes everywhere.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from modular_kernel.bench.tables import label
from modular_kernel.measure.records import OURS, Report, Row

_ACROSS = 3
_WIDTH, _HEIGHT = 380, 300  # of a panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 24, 28, 40  # room for its labels
_LEGEND = 20  # height of a line of the legend
_COLOURS = (
    "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e",
    "#8c564b", "#e377c2", "#17becf", "#7f7f7f", "#bcbd22",
)  # fmt: skip
_FLOOR = "floor"
# Up to which ratio of the ends, and where there is a tick in each decade.
_STEPS = (
    (2.0, (1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)),
    (5.0, (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7)),
    (100.0, (1, 2, 5)),
    (math.inf, (1,)),
)


@dataclass(frozen=True)
class _Point:
    """height: what is drawn, a multiple of the floor or the microseconds."""

    tokens: int
    height: float
    us: float


@dataclass(frozen=True)
class _Curve:
    """points: by tokens."""

    name: str
    points: Sequence["_Point"]
    ours: bool


@dataclass(frozen=True)
class _Panel:
    title: str
    curves: Sequence[_Curve]
    unit: str


def drawing(report: Report) -> str:
    """One panel for each shape, routing and kind of operands; a colour for each layer.

    "" if nothing in the report has a time.
    """
    panels = _panels(report)
    names = list(dict.fromkeys(c.name for p in panels for c in p.curves if c.name != _FLOOR))
    if not names:
        return ""
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    colours[_FLOOR] = "#000"
    across = min(_ACROSS, len(panels))
    width = across * _WIDTH
    legend_rows = math.ceil((len(names) + 1) / across)
    height = math.ceil(len(panels) / across) * _HEIGHT + legend_rows * _LEGEND + 8
    ours = {curve.name for panel in panels for curve in panel.curves if curve.ours}
    body = [_legend([_FLOOR, *names], colours, ours, across)]
    for index, panel in enumerate(panels):
        left = index % across * _WIDTH
        top = index // across * _HEIGHT + legend_rows * _LEGEND + 8
        body.append(f'<g transform="translate({left},{top})">\n{_drawn(panel, colours)}\n</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" font-family="sans-serif" font-size="11">\n'
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _panels(report: Report) -> list[_Panel]:
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in report.rows:
        if row.competes:
            groups.setdefault((row.shape, row.operands, row.routing), []).append(row)
    return [_panel(", ".join(name), rows) for name, rows in groups.items()]


def _panel(title: str, rows: Sequence[Row]) -> _Panel:
    over_floor = all(row.floor_us for row in rows)
    curves = []
    if over_floor:
        floors = sorted({(row.tokens, row.floor_us or 0.0) for row in rows})
        curves.append(_Curve(_FLOOR, [_Point(t, 1.0, us) for t, us in floors], ours=False))
    for name in dict.fromkeys(label(row) for row in rows):
        mine = sorted((r for r in rows if label(r) == name), key=lambda r: r.tokens)
        points = [_point(row, over_floor) for row in mine]
        curves.append(_Curve(name, points, mine[0].origin == OURS))
    return _Panel(title, curves, "time / floor" if over_floor else "microseconds")


def _point(row: Row, over_floor: bool) -> _Point:
    us = row.us or 0.0  # a row that competes has a time
    return _Point(row.tokens, us / (row.floor_us or us) if over_floor else us, us)


def _legend(names: Sequence[str], colours: dict[str, str], ours: set[str], across: int) -> str:
    parts = []
    for index, name in enumerate(names):
        x, y = index % across * _WIDTH + 10, index // across * _LEGEND + 15
        dash = _dash(name, name in ours)
        parts.append(
            f'<line x1="{x}" y1="{y - 4}" x2="{x + 26}" y2="{y - 4}" '
            f'stroke="{colours[name]}" stroke-width="2"{dash}/>'
            f'<text x="{x + 32}" y="{y}">{escape(name)}</text>'
        )
    return "\n".join(parts)


def _dash(name: str, ours: bool) -> str:
    """Ours are drawn through, others dotted, the floor dashed."""
    if ours:
        return ""
    return f' stroke-dasharray="{"6 4" if name == _FLOOR else "2 3"}"'


@dataclass(frozen=True)
class _Axis:
    """A logarithmic scale from `low` to `high`, drawn from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Iterable[float], start: float, end: float) -> "_Axis":
        values = list(values)
        low, high = min(values), max(values)
        return cls(low, high if high > low else low * 2, start, end)

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def _drawn(panel: _Panel, colours: dict[str, str]) -> str:
    points = [point for curve in panel.curves for point in curve.points]
    x = _Axis.over((point.tokens for point in points), _LEFT, _WIDTH - _RIGHT)
    heights = [point.height for point in points]
    y = _Axis.over((min(heights) * 0.95, max(heights) * 1.05), _HEIGHT - _BOTTOM, _TOP)
    lines = [_frame(panel), *_grid(x, y, sorted({point.tokens for point in points}))]
    lines += [_curve(curve, x, y, colours[curve.name]) for curve in panel.curves]
    return "\n".join(lines)


def _frame(panel: _Panel) -> str:
    middle, title = (_LEFT + _WIDTH - _RIGHT) / 2, escape(panel.title)
    return (
        f'<text x="{middle:.1f}" y="16" text-anchor="middle" font-weight="bold">{title}</text>'
        f'<text x="{middle:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">tokens</text>'
        f'<text x="12" y="{_HEIGHT / 2:.1f}" text-anchor="middle" '
        f'transform="rotate(-90 12 {_HEIGHT / 2:.1f})">{panel.unit}</text>'
    )


def _grid(x: _Axis, y: _Axis, tokens: Sequence[int]) -> list[str]:
    lines = []
    for number in tokens:
        at = x.at(number)
        lines.append(
            f'<line x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{_HEIGHT - _BOTTOM}" '
            f'stroke="#e4e4e4"/><text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 14}" '
            f'text-anchor="middle">{number}</text>'
        )
    for height in _ticks(y.low, y.high):
        at = y.at(height)
        lines.append(
            f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_WIDTH - _RIGHT}" y2="{at:.1f}" '
            f'stroke="#e4e4e4"/><text x="{_LEFT - 5}" y="{at + 4:.1f}" '
            f'text-anchor="end">{height:g}</text>'
        )
    return lines


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, the fewer the wider the range."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = next(steps for ratio, steps in _STEPS if high / low < ratio)
    return [s * 10.0**p for p in powers for s in steps if low <= s * 10.0**p <= high]


def _curve(curve: _Curve, x: _Axis, y: _Axis, colour: str) -> str:
    places = [(x.at(point.tokens), y.at(point.height)) for point in curve.points]
    path = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
    dash = _dash(curve.name, curve.ours)
    drawn = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>'
    if curve.name == _FLOOR:
        return drawn
    dots = [
        f'<circle cx="{left:.1f}" cy="{top:.1f}" r="2.2" fill="{colour}">'
        f"<title>{escape(curve.name)}, {point.tokens} tokens: {point.us:.1f} us</title></circle>"
        for (left, top), point in zip(places, curve.points, strict=True)
    ]
    return "\n".join([drawn, *dots])
