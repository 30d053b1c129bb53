"""The document model: blocks that are rendered as Markdown or HTML.

Texts may contain two kinds of markup, which both renderers support: `code` and [text](target).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    """A heading. level: 1 is the title of the page."""

    level: int
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Items:
    """A bulleted list."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table with one text per column in each row.

    numeric: names of right-aligned columns. totals: number of rows at the end that are sums.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[str] = frozenset()
    totals: int = 0


@dataclass(frozen=True)
class Code:
    """A code block. The test suite runs it, unless its first line gives a reason not to."""

    language: str
    text: str


@dataclass(frozen=True)
class Figure:
    """An SVG figure.

    name: file name without suffix, in Markdown. caption: description. panels: the figure as
    separate panels, which an HTML page arranges according to its width.
    """

    name: str
    svg: str
    caption: str
    panels: Sequence[str] = ()


@dataclass(frozen=True)
class Tiles:
    """Highlights at the top of a page.

    values: (value, description) pairs.
    """

    values: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Facts:
    """A definition list. pairs: (name, text)."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Note:
    """A warning box."""

    title: str
    texts: Sequence[str]


@dataclass(frozen=True)
class Bar:
    """A bar with a value in any unit, a text at its end, and an optional mark such as a floor."""

    name: str
    value: float
    text: str
    color: str
    mark: float | None = None


@dataclass(frozen=True)
class Bars:
    """A bar chart with a common scale, logarithmic if the values span decades."""

    caption: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class MatrixPicture:
    """A picture with a square for each pair of a row and a column.

    The reader selects the scheme and the number of ranks.

    texts: distinct reasons of refusals. refusals: distinct refusals, each as indices of its texts;
    the first is empty and stands for valid pairs. cells: by "SCHEME RANKS", the index of the
    refusal of each pair, row by row.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    schemes: Sequence[str]
    world_sizes: Sequence[int]
    texts: Sequence[str]
    refusals: Sequence[Sequence[int]]
    cells: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Contents:
    """The position of the table of contents."""


@dataclass(frozen=True)
class Collapsible:
    """Collapsible blocks."""

    title: str
    blocks: Sequence["PageBlock"]


Block = Heading | Text | Items | Table | Code | Figure
Document = tuple[Block, ...]
# Blocks of HTML pages; some are not supported in Markdown.
PageBlock = Block | Tiles | Facts | Note | Bars | MatrixPicture | Contents | Collapsible
