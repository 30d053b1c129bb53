"""Lays out tables that must fit a line width, by dropping columns or printing a record per row.

In this module, prose is text of several words, whose lines may be wrapped. Names and numbers are
neither wrapped nor truncated.
"""

import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_MIN_PROSE_WIDTH = 24  # characters of a column with prose
_UNLIMITED_WIDTH = 10_000  # characters
_NUMBER_PATTERN = re.compile(r"[-+~]?[\d.,]*( ?%)?")  # also "" and "-"
_STYLES = {  # text of a cell -> rich style
    **dict.fromkeys(("ok", "valid", "passed"), "green"),
    **dict.fromkeys(("refused", "failed", "FAILED", "MISSED"), "bold red"),
}


def fit_table(
    columns: Sequence[str], cells: Sequence[Sequence[str]], width: int, optional: Sequence[str] = ()
) -> "Table | None":
    """Return a table of at most `width` characters, or None if it does not fit.

    optional: columns that may be dropped, the last one first.
    """
    from rich.console import Console

    console = Console(width=_UNLIMITED_WIDTH, height=25)
    for count in range(len(optional), -1, -1):
        indices = [i for i, column in enumerate(columns) if column not in optional[count:]]
        table = _build_table(columns, cells, indices)
        if console.measure(table).maximum <= width:
            for column in table.columns:
                column.max_width = None  # prose may use the remaining width
            return table
    return None


def measure_table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    """Return the minimum width of a table with all columns, in characters."""
    from rich.console import Console

    table = _build_table(columns, cells, range(len(columns)))
    return Console(width=_UNLIMITED_WIDTH, height=25).measure(table).maximum


def _build_table(
    columns: Sequence[str], cells: Sequence[Sequence[str]], indices: Sequence[int]
) -> "Table":
    """Build a table of the columns `indices`, where columns with prose have their minimum width."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index in indices:
        column_cells = [row[index] for row in cells]
        prose_width = _compute_prose_width(columns[index], column_cells)
        table.add_column(
            columns[index],
            justify="right" if all(map(_NUMBER_PATTERN.fullmatch, column_cells)) else "left",
            overflow="fold",
            no_wrap=prose_width is None,
            max_width=prose_width,
        )
    for row in cells:
        table.add_row(*(Text(row[i], style=_STYLES.get(row[i], "")) for i in indices))
    return table


def _compute_prose_width(column: str, cells: Sequence[str]) -> int | None:
    """Return the minimum width of a column with prose; None for a column with names or numbers."""
    from rich.cells import cell_len

    lines = [line for cell in cells for line in cell.splitlines()]
    if not any(" " in line for line in lines) or max(map(cell_len, lines)) <= _MIN_PROSE_WIDTH:
        return None
    words = [column, *(word for line in lines for word in line.split())]
    return max(_MIN_PROSE_WIDTH, *map(cell_len, words))


def format_records(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[str]:
    """Format each row as one line per column, with its name and value, followed by a blank line."""
    name_width = max(map(len, columns)) + 2
    lines: list[str] = []
    for row in cells:
        for column, value in zip(columns, row, strict=True):
            if value:
                lines += wrap_line(f"{column:<{name_width}}{value}", width, indent=name_width)
        lines.append("")
    return lines


def wrap_line(text: str, width: int, *, indent: int | None = None) -> list[str]:
    """Wrap a line between words. A word longer than `width` is not split.

    indent: indentation of the continuation lines. None indents them by two more than the first
        line.
    """
    if len(text) <= width:
        return [text]
    if indent is None:
        indent = len(text) - len(text.lstrip(" ")) + 2
    return textwrap.wrap(
        text,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
