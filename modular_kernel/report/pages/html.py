"""Render documents as one self-contained HTML file, without external resources.

The only script (matrix_filter.js) updates an `InteractiveMatrix` when the user selects a scheme and
a number of ranks. If scripts are disabled, the picture shows the first scheme and number of ranks.
"""

import json
import re
from collections.abc import Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from modular_kernel.report.pages.document import BarChart, Heading, InteractiveMatrix, PageBlock
from modular_kernel.report.pages.plots import Scale, make_svg_line, make_svg_text

_MAX_LISTED_LEVEL = 2  # maximum level of headings in the table of contents
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_CODE = re.compile(r"(`[^`]+`)")


def render_html(title: str, document: Sequence[PageBlock]) -> str:
    """Return the text of an HTML file."""
    listed_headings = [
        block
        for block in document
        if isinstance(block, Heading) and 1 < block.level <= _MAX_LISTED_LEVEL
    ]
    contents = [(heading, _make_anchor(heading)) for heading in listed_headings]
    template = _make_environment().get_template("page.html")
    return template.render(title=title, document=document, contents=contents)


@cache
def _make_environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("modular_kernel", "report/pages"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "anchor": _make_anchor,
        "inline": _render_inline,
        "matrix_data": _encode_matrix_data,
        "matrix_svg": _draw_matrix,
        "kind": lambda block: type(block).__name__,
        "logarithmic": lambda block: _make_scale(block).log,
        "positions": _compute_positions,
        "verdict": _get_verdict_class,
    }
    return environment


def _make_anchor(heading: Heading) -> str:
    return re.sub(r"\W+", "-", heading.text).strip("-").lower()


def _get_verdict_class(text: str) -> str:
    """Return the CSS class of a table cell: "yes" or "no" if its text starts with it, or ""."""
    first = text.partition(":")[0]
    return first if first in ("yes", "no") else ""


def _render_inline(text: str) -> Markup:
    """Render inline markup. Links become plain text, because the page is a single file."""
    parts = []
    for piece in _CODE.split(text):
        if piece.startswith("`") and len(piece) > 2:
            parts.append(Markup("<code>{}</code>").format(piece[1:-1]))
        else:
            parts.append(escape(_LINK.sub(lambda match: match[1], piece)))
    return Markup("").join(parts)


def _make_scale(block: BarChart) -> Scale:
    """Return the scale of a bar chart, in percent of its width."""
    values = [v for bar in block.bars for v in (bar.value, bar.mark) if v is not None and v > 0]
    return Scale.from_values(values, 0.0, 100.0, from_zero=True)


def _compute_positions(block: BarChart) -> list[tuple[float, float | None]]:
    """Return the positions of the end of each bar and of its mark, in percent."""
    scale = _make_scale(block)
    return [
        (scale.position(bar.value), None if bar.mark is None else scale.position(bar.mark))
        for bar in block.bars
    ]


# In pixels, for the picture of a matrix: size of a square, and margins for the names.
_SQUARE, _LEFT, _TOP = 26, 260, 190


def _encode_matrix_data(block: InteractiveMatrix) -> Markup:
    """Return the JSON that the script reads. "<" is escaped, so that no text closes the element."""
    data = {"reasons": block.reasons, "reason_sets": block.reason_sets, "cells": block.cells}
    return Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def _draw_matrix(block: InteractiveMatrix) -> Markup:
    """Draw the squares for the first scheme and number of ranks."""
    set_indices = block.cells[f"{block.schemes[0]} {block.world_sizes[0]}"]
    width = _LEFT + _SQUARE * len(block.columns) + 110
    height = _TOP + _SQUARE * len(block.rows) + 8
    shapes = []
    for index, name in enumerate(block.columns):
        x = _LEFT + _SQUARE * (index + 0.65)
        shapes.append(
            make_svg_text(x, _TOP - 8, name, f' transform="rotate(-55 {x:.1f} {_TOP - 8})"')
        )
    for row, name in enumerate(block.rows):
        y = _TOP + _SQUARE * row
        label = name.removesuffix("PrepareAndFinalize") or name
        shapes.append(make_svg_text(_LEFT - 8, y + 17, label, ' text-anchor="end"'))
        shapes.append(make_svg_line(0, y, width, y))
        for column, experts in enumerate(block.columns):
            reason_set = block.reason_sets[set_indices[row * len(block.columns) + column]]
            lines = [block.reasons[index] for index in reason_set] or ["valid"]
            pair = f"{name} x {experts}"
            position = f'x="{_LEFT + _SQUARE * column + 2}" y="{y + 2}"'
            css_class = "refused" if reason_set else "valid"
            size = f'width="{_SQUARE - 4}" height="{_SQUARE - 4}" rx="3"'
            title = escape("\n".join([pair, *lines]))
            shapes.append(
                f'<rect class="{css_class}" {position} {size} tabindex="0" '
                f'data-pair="{escape(pair)}">'
                f"<title>{title}</title></rect>"
            )
    frame = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    body = "\n".join(shapes)
    return Markup(  # names and texts are escaped above
        f'<svg {frame} role="group" aria-label="Compatibility of pairs" font-size="12">{body}</svg>'
    )
