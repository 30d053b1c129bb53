"""Scales, ticks, colors and SVG primitives of figures, with light and dark styles.

Coordinates have one decimal, so that a figure has the same bytes on every machine.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

COLORS = (
    "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e",
    "#8c564b", "#e377c2", "#17becf", "#7f7f7f", "#bcbd22",
)  # fmt: skip
DECADES = 50.0  # from this ratio of max to min on, a linear scale would hide the small values
# Ticks in each decade, after the ratio of max to min below which they are used.
_STEPS = (
    (2.0, (1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)),
    (5.0, (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7)),
    (100.0, (1, 2, 5)),
    (math.inf, (1,)),
)
_STYLE = (
    ".ink{fill:#1d2330}.page{fill:#fff}.line{stroke:#1d2330}.grid{stroke:#d9dee7}"
    "@media(prefers-color-scheme:dark){"
    ".ink{fill:#e4e8f0}.page{fill:#161a22}.line{stroke:#e4e8f0}.grid{stroke:#3a4356}}"
)


XMLNS = 'xmlns="http://www.w3.org/2000/svg" '


@dataclass(frozen=True)
class Scale:
    """A logarithmic or linear axis that maps [low, high] to [start, end]."""

    low: float
    high: float
    start: float
    end: float
    log: bool = True

    @classmethod
    def over(
        cls, values: Iterable[float], start: float, end: float, *, zero: bool = False
    ) -> "Scale":
        """Create a scale that covers positive values. It is logarithmic from the minimum.

        zero: whether to prefer a linear scale from 0. If the values span decades, the scale is then
        logarithmic from half the minimum.
        """
        values = list(values) or [1.0]
        low, high = min(values), max(values)
        if zero and high < low * DECADES:
            return cls(0.0, high, start, end, log=False)
        low = low / 2 if zero else low
        return cls(low, high if high > low else low * 2, start, end)

    def at(self, value: float) -> float:
        """Return the position of a value. Values below the scale map to its start."""
        if value <= self.low:
            return self.start
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round numbers for the ticks of a logarithmic scale."""
        low, high = self.low, self.high
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = next(steps for ratio, steps in _STEPS if high / low < ratio)
        return [s * 10.0**p for p in powers for s in steps if low <= s * 10.0**p <= high]


def svg(shapes: Sequence[str], width: int, height: int, title: str, more: str = "") -> str:
    """Return an SVG element.

    more: additional attributes, such as XMLNS in a file, or x and y inside another SVG.
    """
    return (
        f'<svg {more}viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}" '
        f'font-family="sans-serif" font-size="11">\n<style>{_STYLE}</style>\n'
        f'<rect width="{width}" height="{height}" class="page"/>\n' + "\n".join(shapes) + "\n</svg>"
    )


def text(x: float, y: float, words: str, more: str = "") -> str:
    """Return a text element that starts at (x, y). more: additional attributes."""
    return f'<text class="ink" x="{x:.1f}" y="{y:.1f}"{more}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, more: str = ' class="grid"') -> str:
    """Return a line element. more: additional attributes, by default those of a grid line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{more}/>'


def with_tooltip(shape: str, attributes: str, title: str) -> str:
    """Return a shape with a tooltip."""
    return f"<{shape} {attributes}><title>{escape(title)}</title></{shape}>"
