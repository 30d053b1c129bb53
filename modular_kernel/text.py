"""Makes text that others wrote fit to be shown: downloaded files, names and messages of packages.

Control characters would recolor, clear or forge lines of a terminal or a log; marks of direction
would show words in another order than they have.
"""

from collections.abc import Iterable, Sequence
from html import escape


def printable(text: object, *, most: int | None = None, lines: bool = False) -> str:
    """Return str(text) with every character that is not printable as its escape, such as "\\x1b".

    That holds for control characters, marks of direction, separators other than the space, lone
    surrogates and what Unicode has not assigned. most: characters to keep before "..." is put.
    lines: keep line ends and tabs, for text of our own around what came from elsewhere.
    """
    words = str(text)
    if most is not None and len(words) > most:
        words = f"{words[:most]}..."
    if words.isprintable():
        return words
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else _escape(c) for c in words)


def notebook_html(
    caption: str, columns: Sequence[str] = (), rows: Iterable[Sequence[object]] = ()
) -> str:
    """Return what a notebook shows of an object: a line, and a table where there are rows."""
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    table = f"<table><tr>{head}</tr>{body}</table>" if body else ""
    return f"<p>{escape(caption)}</p>{table}"


def counted(number: int, noun: str) -> str:
    """Return the number with its noun, in the plural unless it is 1: "1 case", "2 cases"."""
    return f"{number} {plural(noun, number)}"


def all_counted(numbers: Sequence[int], noun: str) -> str:
    """Return the numbers with one noun, in the singular where 1 is all: "1 case", "1, 2 cases"."""
    return f"{', '.join(map(str, numbers))} {noun if [*numbers] == [1] else plural(noun, 0)}"


def plural(noun: str, number: int) -> str:
    """Return the noun in the plural unless the number is 1: "rank", "ranks"."""
    return noun if number == 1 else f"{noun}s"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
