"""Markdown rendering of documents, for generated files in the repository."""

from collections.abc import Iterable
from textwrap import fill

from modular_kernel.report.pages.document import (
    Block,
    Code,
    Document,
    Figure,
    Heading,
    Items,
    Table,
    Text,
)

_WIDTH = 100
_NOTICE = "<!-- Made by `mk report --write`: change what it is made from, not this file. -->"


def markdown(document: Document, *, figures: str) -> str:
    """Render a document as the text of a Markdown file.

    figures: folder of the SVG figures, relative to the file.
    """
    return "\n\n".join([_NOTICE, *(_block(block, figures) for block in document)]) + "\n"


def _block(block: Block, figures: str) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {text}"
        case Text(text):
            return _wrapped(text)
        case Items(texts):
            return "\n".join(_wrapped(f"- {text}", indent="  ") for text in texts)
        case Code(language, text):
            return f"```{language}\n{text.strip()}\n```"
        case Figure(name, _, caption):
            return f"![{caption}]({figures}/{name}.svg)"
        case Table():
            return _table(block)


def _wrapped(text: str, *, indent: str = "") -> str:
    """Wrap the text without breaking words, which may be names or paths."""
    return fill(
        text,
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _table(table: Table) -> str:
    rule = ["---:" if column in table.numeric else "---" for column in table.columns]
    return "\n".join(map(_row, [table.columns, rule, *table.rows]))


def _row(cells: Iterable[str]) -> str:
    escaped = [cell.replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"
