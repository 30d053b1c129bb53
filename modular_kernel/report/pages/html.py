"""HTML rendering of documents as one self-contained file, without scripts or external resources."""

import re
from collections.abc import Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from modular_kernel.report.pages.document import Bars, Heading, PageBlock
from modular_kernel.report.pages.plots import Scale

_LISTED = 2  # levels of headings in the table of contents
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_CODE = re.compile(r"(`[^`]+`)")


def page(title: str, document: Sequence[PageBlock]) -> str:
    """Render the HTML file; `Contents` in the document becomes the table of contents."""
    listed = [b for b in document if isinstance(b, Heading) and 1 < b.level <= _LISTED]
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
        "kind": lambda block: type(block).__name__,
        "logarithmic": lambda block: _scale(block).log,
        "places": _places,
        "verdict": _verdict,
    }
    return environment


def _anchor(heading: Heading) -> str:
    return re.sub(r"\W+", "-", heading.text).strip("-").lower()


def _verdict(text: str) -> str:
    """Return the CSS class of a table cell that starts with "yes" or "no", else ""."""
    first = text.partition(":")[0]
    return {"yes": "yes", "no": "no"}.get(first, "")


def _inline(text: str) -> Markup:
    """Render inline markup. Links are reduced to their text: a page has no other files to link."""
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
