"""SVG elements, scales and colors of figures, with light and dark styles.

Coordinates have one decimal, so that the text of a figure is identical on every machine.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

COLORS = (
    "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e",
    "#8c564b", "#e377c2", "#17becf", "#7f7f7f", "#bcbd22",
)  # fmt: skip
# Maximum ratio of the values on a linear scale, which would hide the small values of a wider range.
_MAX_LINEAR_RATIO = 50.0
# (ratio of max to min, ticks in each decade). The first entry with a larger ratio is used.
_TICKS = (
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
    """An axis that maps values in [low, high] to positions in [start, end]."""

    low: float
    high: float
    start: float
    end: float
    log: bool = True

    @classmethod
    def from_values(
        cls, values: Iterable[float], start: float, end: float, *, from_zero: bool = False
    ) -> "Scale":
        """Create a logarithmic scale from the minimum to the maximum of positive values.

        from_zero: whether to create a linear scale from 0 instead. If the values span decades, the
            scale is nevertheless logarithmic, from half the minimum.
        """
        values = list(values) or [1.0]
        low, high = min(values), max(values)
        if from_zero and high < low * _MAX_LINEAR_RATIO:
            return cls(0.0, high, start, end, log=False)
        low = low / 2 if from_zero else low
        return cls(low, high if high > low else low * 2, start, end)

    def position(self, value: float) -> float:
        """Return the position of a value. Values below the scale map to its start."""
        if value <= self.low:
            return self.start
        if self.log:
            fraction = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            fraction = (value - self.low) / (self.high - self.low)
        return self.start + fraction * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round numbers for the ticks of a logarithmic scale."""
        low, high = self.low, self.high
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = next(steps for ratio, steps in _TICKS if high / low < ratio)
        return [s * 10.0**p for p in powers for s in steps if low <= s * 10.0**p <= high]


def make_svg_element(
    shapes: Sequence[str], width: int, height: int, title: str, attributes: str = ""
) -> str:
    """Return an <svg> element.

    attributes: additional attributes, such as XMLNS in a file, or x and y inside another SVG.
    """
    return (
        f'<svg {attributes}viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}" '
        f'font-family="sans-serif" font-size="11">\n<style>{_STYLE}</style>\n'
        f'<rect width="{width}" height="{height}" class="page"/>\n' + "\n".join(shapes) + "\n</svg>"
    )


def make_svg_text(x: float, y: float, content: str, attributes: str = "") -> str:
    """Return a <text> element that starts at (x, y)."""
    return f'<text class="ink" x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(content)}</text>'


def make_svg_line(
    x1: float, y1: float, x2: float, y2: float, attributes: str = ' class="grid"'
) -> str:
    """Return a <line> element, by default a grid line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{attributes}/>'


def make_svg_shape_with_tooltip(shape: str, attributes: str, title: str) -> str:
    """Return an SVG element such as <circle> with `title` as its tooltip."""
    return f"<{shape} {attributes}><title>{escape(title)}</title></{shape}>"
