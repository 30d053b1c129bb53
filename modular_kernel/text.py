"""Safe display of untrusted text: downloaded files, and names and messages of packages.

Control characters could recolor, clear or forge lines of a terminal or a log; bidirectional marks
could reorder words.
"""

from collections.abc import Iterable, Sequence
from html import escape


def printable(text: object, *, max_chars: int | None = None, keep_lines: bool = False) -> str:
    """Return str(text) with every non-printable character replaced by its escape, as "\\x1b".

    This covers control characters, bidirectional marks, separators other than the space, lone
    surrogates and unassigned code points. max_chars: a longer text is cut there and ends in "...".
    keep_lines: keep line breaks and tabs, for our own text around untrusted text.
    """
    string = str(text)
    if max_chars is not None and len(string) > max_chars:
        string = f"{string[:max_chars]}..."
    if string.isprintable():
        return string
    allowed = "\n\t" if keep_lines else ""
    return "".join(c if c.isprintable() or c in allowed else _escape(c) for c in string)


def notebook_html(
    caption: str, columns: Sequence[str] = (), rows: Iterable[Sequence[object]] = ()
) -> str:
    """Return an object's HTML for notebooks: a caption, and a table if there are rows."""
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    table = f"<table><tr>{head}</tr>{body}</table>" if body else ""
    return f"<p>{escape(caption)}</p>{table}"


def counted(number: int, noun: str) -> str:
    """Return the number with its noun, in the plural unless it is 1: "1 case", "2 cases"."""
    return f"{number} {plural(noun, number)}"


def counted_list(numbers: Sequence[int], noun: str) -> str:
    """Return the numbers with one noun, singular only for a single 1: "1 case", "1, 2 cases"."""
    return f"{', '.join(map(str, numbers))} {noun if [*numbers] == [1] else plural(noun, 0)}"


def plural(noun: str, number: int) -> str:
    """Return the noun in the plural unless the number is 1: "rank", "ranks"."""
    return noun if number == 1 else f"{noun}s"


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as ranges, such as "0 to 3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a} to {b}" for a, b in runs]
    return ", ".join(texts[:8]) + (", ..." if len(texts) > 8 else "")


def layers_text(layers: Sequence[int] | None) -> str:
    """Return sorted numbers of layers, such as "layers 3 to 60"; None means every layer."""
    if layers is None:
        return "every layer"
    return f"{plural('layer', len(layers))} {ranges(layers)}"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
