"""Layout of tables for a given width, with all columns, fewer columns, or a record per row."""

import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_PROSE_WIDTH = 24  # minimum width of a column with prose, whose lines may be folded
_UNLIMITED = 10_000  # characters
_NUMBER = re.compile(r"[-+~]?[\d.,]*( ?%)?")  # also "" and "-"
_STYLES = {  # verdict in a cell -> rich style
    **dict.fromkeys(("ok", "valid", "passed"), "green"),
    **dict.fromkeys(("refused", "failed", "FAILED", "MISSED"), "bold red"),
}


def fit_table(
    columns: Sequence[str], cells: Sequence[Sequence[str]], width: int, optional: Sequence[str] = ()
) -> "Table | None":
    """Return a table of at most `width` characters that neither truncates nor folds a name.

    optional: columns that may be dropped, the last one first. Returns None if the table does not
    fit even without them.
    """
    from rich.console import Console

    console = Console(width=_UNLIMITED, height=25)
    for count in range(len(optional), -1, -1):
        indices = [i for i, column in enumerate(columns) if column not in optional[count:]]
        table = _table(columns, cells, indices)
        if console.measure(table).maximum <= width:
            for column in table.columns:
                column.max_width = None  # prose may use the width that is left
            return table
    return None


def _table(
    columns: Sequence[str], cells: Sequence[Sequence[str]], indices: Sequence[int]
) -> "Table":
    """Build a table of the columns `indices`; those with prose have their minimum width."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index in indices:
        texts = [row[index] for row in cells]
        prose_width = _prose_width(columns[index], texts)
        table.add_column(
            columns[index],
            justify="right" if all(map(_NUMBER.fullmatch, texts)) else "left",
            overflow="fold",
            no_wrap=prose_width is None,
            max_width=prose_width,
        )
    for row in cells:
        table.add_row(*(Text(row[i], style=_STYLES.get(row[i], "")) for i in indices))
    return table


def _prose_width(column: str, texts: Sequence[str]) -> int | None:
    """Return the minimum width of a column with prose; None for a column with names or numbers."""
    from rich.cells import cell_len

    lines = [line for text in texts for line in text.splitlines()]
    if not any(" " in line for line in lines) or max(map(cell_len, lines)) <= _PROSE_WIDTH:
        return None
    words = [column, *(word for line in lines for word in line.split())]
    return max(_PROSE_WIDTH, *map(cell_len, words))


def format_records(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[str]:
    """Format each row as lines with a column's name and its value, followed by a blank line."""
    name_width = max(map(len, columns)) + 2
    lines: list[str] = []
    for row in cells:
        for column, value in zip(columns, row, strict=True):
            if value:
                lines += fold(f"{column:<{name_width}}{value}", width, indent=name_width)
        lines.append("")
    return lines


def fold(text: str, width: int, *, indent: int | None = None) -> list[str]:
    """Fold a line between words. A word longer than `width` is not split, unlike with rich.

    indent: indentation of the continuation lines; None uses that of the first line plus two.
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
