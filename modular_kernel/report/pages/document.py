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
    """One text for each column in each row. numeric: names of columns that are set flush right.

    totals: how many of the last rows are sums.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[str] = frozenset()
    totals: int = 0


@dataclass(frozen=True)
class Code:
    """A block that is run, or says in its first line why it is not."""

    language: str
    text: str


@dataclass(frozen=True)
class Figure:
    """A drawing. name: of its file without suffix, where it gets one. caption: what it shows.

    panels: the drawing in pieces, which a page sets beside or below each other by its width.
    """

    name: str
    svg: str
    caption: str
    panels: Sequence[str] = ()


@dataclass(frozen=True)
class Tiles:
    """What a page says first: a value and what it is, each."""

    values: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Facts:
    """Names with a text each."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Note:
    """What a reader must know before the figures below."""

    title: str
    texts: Sequence[str]


@dataclass(frozen=True)
class Bar:
    """One bar: a value in any unit, the text at its end, and a mark on the way, such as a floor."""

    name: str
    value: float
    text: str
    color: str
    mark: float | None = None


@dataclass(frozen=True)
class Bars:
    """Bars on one scale, logarithmic where values span decades."""

    caption: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Contents:
    """The place of the table of contents."""


@dataclass(frozen=True)
class Fold:
    """Blocks that are shown on demand."""

    title: str
    blocks: Sequence["PageBlock"]


Block = Heading | Text | Items | Table | Code | Figure
Document = tuple[Block, ...]
# What HTML alone has.
PageBlock = Block | Tiles | Facts | Note | Bars | Contents | Fold
