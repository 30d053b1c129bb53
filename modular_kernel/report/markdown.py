"""Render documents as Markdown, for the generated files under docs/."""

from functools import cache
from textwrap import fill

from jinja2 import Environment, PackageLoader, StrictUndefined

from modular_kernel.report.pages.document import Document, Table

_LINE_WIDTH = 100


def render_markdown(document: Document, *, figures: str) -> str:
    """Return the text of a Markdown file.

    figures: folder of the SVG figures, relative to the file.
    """
    template = _make_environment().get_template("page.md")
    return template.render(document=document, figures=figures)


@cache
def _make_environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("modular_kernel", "report/pages"),
        autoescape=False,  # Markdown, not HTML
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "alignments": _get_alignments,
        "escape_cell": lambda cell: cell.replace("|", r"\|"),
        "kind": lambda block: type(block).__name__,
        "wrap": _wrap,
    }
    return environment


def _get_alignments(table: Table) -> list[str]:
    return ["---:" if column in table.numeric else "---" for column in table.columns]


def _wrap(text: str, indent: str = "") -> str:
    """Wrap text only between words, because parts of names and paths must not be separated."""
    return fill(
        text,
        _LINE_WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
