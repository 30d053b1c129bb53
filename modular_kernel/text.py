"""Formatting of messages: untrusted text, counts with nouns, ranges of numbers, and HTML.

Text from downloaded files or other packages is untrusted: control characters could recolor, clear
or forge lines of a terminal or a log, and bidirectional marks could reorder words.
"""

from collections.abc import Iterable, Sequence
from html import escape


def escape_nonprintable(
    text: object, *, max_chars: int | None = None, keep_lines: bool = False
) -> str:
    """Return str(text) with every non-printable character replaced by an escape such as "\\x1b".

    Non-printable characters are control characters, bidirectional marks, separators other than the
    space, lone surrogates and unassigned code points.

    max_chars: maximum number of characters. Longer text is truncated and ends with "...".
    keep_lines: whether to keep line breaks and tabs, for multi-line messages that quote untrusted
        text.
    """
    string = str(text)
    if max_chars is not None and len(string) > max_chars:
        string = f"{string[:max_chars]}..."
    if string.isprintable():
        return string
    allowed = "\n\t" if keep_lines else ""
    return "".join(c if c.isprintable() or c in allowed else _escape(c) for c in string)


def render_notebook_html(
    caption: str, columns: Sequence[str] = (), rows: Iterable[Sequence[object]] = ()
) -> str:
    """Return the HTML of an object in a notebook: a caption, and a table if there are rows."""
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    table = f"<table><tr>{head}</tr>{body}</table>" if body else ""
    return f"<p>{escape(caption)}</p>{table}"


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 case" or "2 cases"."""
    return f"{number} {pluralize(noun, number)}"


def format_counts(numbers: Sequence[int], noun: str) -> str:
    """Return numbers followed by a noun, such as "1 case" or "1, 2 cases"."""
    return f"{', '.join(map(str, numbers))} {noun if [*numbers] == [1] else pluralize(noun, 0)}"


def pluralize(noun: str, number: int) -> str:
    """Return the noun in the plural, or in the singular if the number is 1."""
    return noun if number == 1 else f"{noun}s"


def format_ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text with ranges, such as "0 to 3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    ranges = [format_span(first, last) for first, last in runs]
    return ", ".join(ranges[:8]) + (", ..." if len(ranges) > 8 else "")


def format_span(first: object, last: object) -> str:
    """Return "first to last", or only one of them if they are equal."""
    return str(first) if first == last else f"{first} to {last}"


def format_layers(layers: Sequence[int] | None) -> str:
    """Return sorted layer numbers as text, such as "layers 3 to 60". None means every layer."""
    if layers is None:
        return "every layer"
    return f"{pluralize('layer', len(layers))} {format_ranges(layers)}"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
