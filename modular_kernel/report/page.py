"""A document as one HTML file that needs nothing else: no network, no scripts, no other file."""

import re
from collections.abc import Sequence
from html import escape

from modular_kernel.report.document import (
    Block,
    Code,
    Document,
    Figure,
    Heading,
    Items,
    Table,
    Text,
)

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff;
       max-width: 1200px; margin: 2em auto; padding: 0 1em; }
h1, h2, h3 { line-height: 1.2; margin: 1.6em 0 .5em; }
nav ul { columns: 3; list-style: none; padding: 0; }
nav .level-1 { font-weight: bold; }
code, pre { font: 13px/1.4 ui-monospace, monospace; background: #f4f4f4; }
pre { padding: .8em; overflow-x: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; margin: .5em 0; }
th, td { border: 1px solid #ddd; padding: .25em .55em; text-align: left; vertical-align: top; }
th { background: #f4f4f4; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
td.yes { background: #e3f3e3; }
td.no { background: #fbeaea; }
figure { margin: 1em 0; }
svg { max-width: 100%; height: auto; }
"""
_LISTED = 2  # levels of headings in the table of contents
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_CODE = re.compile(r"(`[^`]+`)")


def page(title: str, document: Document) -> str:
    """Write the whole file, with a table of contents."""
    contents, body = [], []
    for number, block in enumerate(document):
        body.append(_block(block, _anchor(number)))
        if isinstance(block, Heading) and block.level <= _LISTED:
            link = f'<a href="#{_anchor(number)}">{_inline(block.text)}</a>'
            contents.append(f'<li class="level-{block.level}">{link}</li>\n')
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<nav><ul>\n{''.join(contents)}</ul></nav>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _anchor(number: int) -> str:
    return f"block-{number}"


def _block(block: Block, anchor: str) -> str:
    match block:
        case Heading(level, text):
            return f'<h{level} id="{anchor}">{_inline(text)}</h{level}>'
        case Text(text):
            return f"<p>{_inline(text)}</p>"
        case Items(texts):
            return "<ul>\n" + "".join(f"<li>{_inline(text)}</li>\n" for text in texts) + "</ul>"
        case Code(_, text):
            return f"<pre>{escape(text.strip())}</pre>"
        case Figure(_, svg, caption):
            return f"<figure>\n{svg}\n<figcaption>{_inline(caption)}</figcaption>\n</figure>"
        case Table():
            return _table(block)


def _table(table: Table) -> str:
    head = "".join(f"<th>{_inline(column)}</th>" for column in table.columns)
    rows = "".join(f"<tr>{_cells(table, row)}</tr>\n" for row in table.rows)
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{rows}</table></div>'


def _cells(table: Table, row: Sequence[str]) -> str:
    parts = []
    for column, text in zip(table.columns, row, strict=True):
        kind = "number" if column in table.numeric else _verdict(text)
        marked = f' class="{kind}"' if kind else ""
        parts.append(f"<td{marked}>{_inline(text)}</td>")
    return "".join(parts)


def _verdict(text: str) -> str:
    """Return the colour of a cell that says whether something is possible."""
    first = text.partition(":")[0]
    return {"yes": "yes", "no": "no"}.get(first, "")


def _inline(text: str) -> str:
    """`code` and [words](target). Other files are not at hand here: only the words are kept."""
    parts = []
    for piece in _CODE.split(text):
        if piece.startswith("`") and len(piece) > 2:
            parts.append(f"<code>{escape(piece[1:-1])}</code>")
        else:
            parts.append(_LINK.sub(lambda found: found[1], escape(piece)))
    return "".join(parts)
