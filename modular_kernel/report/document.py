"""A document as data: what the pages say, before it is Markdown or HTML.

Texts are plain, with two marks that both forms know: `code`, and [words](target).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    """level: 1 is the page's title."""

    level: int
    text: str


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Items:
    """A list."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Table:
    """One text for each column in each row. numeric: names of columns that are set flush right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Code:
    """A block that is run, or says in its first line why it is not."""

    language: str
    text: str


@dataclass(frozen=True)
class Figure:
    """A drawing. name: of its file without suffix, where it gets one. caption: what it shows."""

    name: str
    svg: str
    caption: str


Block = Heading | Text | Items | Table | Code | Figure
Document = tuple[Block, ...]
