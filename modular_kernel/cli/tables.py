"""Layout of tables for a given width: all columns, fewer columns, or a record per row."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

_GAP = 2  # between columns
_EDGES = 3  # one space before the first column, two after the last
_PROSE = 24  # minimum width of a column with foldable text; longer text is folded


@dataclass(frozen=True)
class Layout:
    """The columns to show.

    columns: indices in order; () if even the required columns do not fit. folding: indices of
    columns whose text may be folded.
    """

    columns: tuple[int, ...]
    folding: frozenset[int]


def layout(
    columns: Sequence[str], cells: Sequence[Sequence[str]], width: int, optional: Sequence[str] = ()
) -> Layout:
    """Choose the columns that fit into `width` characters without truncating or folding a name.

    optional: columns that may be dropped, starting with the last.
    """
    natural, folding = [], set()
    for index, column in enumerate(columns):
        texts = [line for row in cells for line in row[index].splitlines() or [""]]
        widest = max(map(len, (column, *texts)))
        longest_word = max(len(word) for text in (column, *texts) for word in text.split() or [""])
        if widest > _PROSE and any(" " in text for text in texts):
            folding.add(index)
            widest = max(_PROSE, len(column), longest_word)
        natural.append(widest)
    for dropped in range(len(optional) + 1):
        hidden = set(optional[len(optional) - dropped :])
        shown = tuple(i for i, column in enumerate(columns) if column not in hidden)
        if sum(natural[i] + _GAP for i in shown) - _GAP + _EDGES <= width:
            return Layout(shown, frozenset(folding))
    return Layout((), frozenset(folding))


def records(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[str]:
    """Format each row as lines of `column  value`, with a blank line after each row."""
    names = max(map(len, columns)) + _GAP
    lines: list[str] = []
    for row in cells:
        for column, value in zip(columns, row, strict=True):
            if value:
                lines += folded(f"{column:<{names}}{value}", width, indent=names)
        lines.append("")
    return lines


def folded(text: str, width: int, *, indent: int | None = None) -> list[str]:
    """Fold a line between words; a word longer than `width` is not split.

    indent: indentation of the continuation lines; None means that of the first line plus two.
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
