"""HTML rendering of documents as one self-contained file, without external resources.

The only script filters a `MatrixPicture`. Where scripts are disabled, the picture shows the first
scheme and number of ranks.
"""

import json
import re
from collections.abc import Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from modular_kernel.report.pages.document import Bars, Heading, MatrixPicture, PageBlock
from modular_kernel.report.pages.plots import Scale, line, text

_MAX_LISTED_LEVEL = 2  # of the headings in the table of contents
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_CODE = re.compile(r"(`[^`]+`)")


def page(title: str, document: Sequence[PageBlock]) -> str:
    """Render an HTML file. `Contents` in the document becomes the table of contents."""
    listed = [b for b in document if isinstance(b, Heading) and 1 < b.level <= _MAX_LISTED_LEVEL]
    return (
        _templates()
        .get_template("page.html")
        .render(
            title=title, document=document, contents=[(block, _anchor(block)) for block in listed]
        )
    )


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("modular_kernel", "report/pages"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "anchor": _anchor,
        "inline": _inline,
        "matrix_data": _matrix_data,
        "matrix_svg": _matrix_svg,
        "kind": lambda block: type(block).__name__,
        "logarithmic": lambda block: _scale(block).log,
        "places": _places,
        "verdict": _verdict,
    }
    return environment


def _anchor(heading: Heading) -> str:
    return re.sub(r"\W+", "-", heading.text).strip("-").lower()


def _verdict(text: str) -> str:
    """Return the CSS class of a table cell: "yes" or "no" if it starts with that, else ""."""
    first = text.partition(":")[0]
    return {"yes": "yes", "no": "no"}.get(first, "")


def _inline(text: str) -> Markup:
    """Render inline markup. Links become plain text, because the page has no other files."""
    parts = []
    for piece in _CODE.split(text):
        if piece.startswith("`") and len(piece) > 2:
            parts.append(Markup("<code>{}</code>").format(piece[1:-1]))
        else:
            parts.append(escape(_LINK.sub(lambda match: match[1], piece)))
    return Markup("").join(parts)


def _scale(block: Bars) -> Scale:
    """Return the scale of the bars and marks, in percent of the width."""
    values = [v for bar in block.bars for v in (bar.value, bar.mark) if v is not None and v > 0]
    return Scale.over(values, 0.0, 100.0, zero=True)


def _places(block: Bars) -> list[tuple[float, float | None]]:
    """Return the positions of the end of each bar and of its mark, in percent."""
    scale = _scale(block)
    return [
        (scale.at(bar.value), None if bar.mark is None else scale.at(bar.mark))
        for bar in block.bars
    ]


_SQUARE, _LEFT, _TOP = 26, 260, 190  # of the matrix: size of a square, margins for the names


def _matrix_data(block: MatrixPicture) -> Markup:
    """Return the JSON that the script reads. "<" is escaped, so that no text ends the element."""
    data = {"texts": block.texts, "refusals": block.refusals, "cells": block.cells}
    return Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def _matrix_svg(block: MatrixPicture) -> Markup:
    """Draw the squares for the first scheme and number of ranks."""
    refusals = block.cells[f"{block.schemes[0]} {block.world_sizes[0]}"]
    width = _LEFT + _SQUARE * len(block.columns) + 110
    height = _TOP + _SQUARE * len(block.rows) + 8
    shapes = []
    for index, name in enumerate(block.columns):
        x = _LEFT + _SQUARE * (index + 0.65)
        shapes.append(text(x, _TOP - 8, name, f' transform="rotate(-55 {x:.1f} {_TOP - 8})"'))
    for row, name in enumerate(block.rows):
        y = _TOP + _SQUARE * row
        label = name.removesuffix("PrepareAndFinalize") or name
        shapes.append(text(_LEFT - 8, y + 17, label, ' text-anchor="end"'))
        shapes.append(line(0, y, width, y))
        for column, experts in enumerate(block.columns):
            refusal = block.refusals[refusals[row * len(block.columns) + column]]
            lines = [block.texts[index] for index in refusal] or ["valid"]
            pair = f"{name} x {experts}"
            position = f'x="{_LEFT + _SQUARE * column + 2}" y="{y + 2}"'
            css_class = "refused" if refusal else "valid"
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
