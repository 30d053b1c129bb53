"""Lay tables out for the width there is: columns, fewer columns, or a record for each row."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

_GAP = 2  # between columns
_EDGES = 3  # a space before the first column, two behind the last
_PROSE = 24  # a cell of words that is longer may be folded, and takes at least so much


@dataclass(frozen=True)
class Layout:
    """Which columns are shown, in the order given, and which of those may fold their words.

    columns: indices; () where even the columns that cannot be left out do not fit.
    """

    columns: tuple[int, ...]
    folding: frozenset[int]


def layout(
    columns: Sequence[str], cells: Sequence[Sequence[str]], width: int, optional: Sequence[str] = ()
) -> Layout:
    """Choose the columns that fit `width` characters without cutting or folding a name.

    optional: columns that may be left out, the least useful last.
    """
    natural, folding = [], set()
    for index, column in enumerate(columns):
        texts = [line for row in cells for line in row[index].splitlines() or [""]]
        widest = max(map(len, (column, *texts)))
        words = max(len(word) for text in (column, *texts) for word in text.split() or [""])
        if widest > _PROSE and any(" " in text for text in texts):
            folding.add(index)
            widest = max(_PROSE, len(column), words)
        natural.append(widest)
    for dropped in range(len(optional) + 1):
        gone = set(optional[len(optional) - dropped :])
        shown = tuple(i for i, column in enumerate(columns) if column not in gone)
        if sum(natural[i] + _GAP for i in shown) - _GAP + _EDGES <= width:
            return Layout(shown, frozenset(folding))
    return Layout((), frozenset(folding))


def records(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[str]:
    """Write each row as lines of `column  value`, a blank line between rows."""
    names = max(map(len, columns)) + _GAP
    lines: list[str] = []
    for row in cells:
        for column, value in zip(columns, row, strict=True):
            if value:
                lines += folded(f"{column:<{names}}{value}", width, indent=names)
        lines.append("")
    return lines


def folded(text: str, width: int, *, indent: int | None = None) -> list[str]:
    """Fold a line between words; a word that is longer than `width` stays whole.

    indent: of what follows the first line; None means two more than that line's own.
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
        drop_whitespace=True,
        replace_whitespace=False,
    )
