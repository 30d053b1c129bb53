"""The document model: blocks that are rendered as Markdown or HTML.

Texts may contain two kinds of markup, which both renderers support: `code` and [text](target).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    """A heading.

    level: 1 is the title of the page.
    """

    level: int
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class BulletList:
    """A bulleted list."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table. Each row has one text per column.

    numeric: names of right-aligned columns.
    totals: number of rows at the end that are sums.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[str] = frozenset()
    totals: int = 0


@dataclass(frozen=True)
class Code:
    """A code block. Tests run it unless its first line is a comment "not run: REASON"."""

    language: str
    text: str


@dataclass(frozen=True)
class Figure:
    """An SVG figure.

    name: file name without suffix.
    svg: the whole figure, for Markdown.
    panels: the same figure as separate SVGs, which an HTML page arranges according to its width.
    """

    name: str
    svg: str
    caption: str
    panels: Sequence[str] = ()


@dataclass(frozen=True)
class Tiles:
    """Key figures at the top of a page, as (value, description) pairs."""

    values: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class DefinitionList:
    """A definition list, as (name, text) pairs."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class WarningBox:
    """A warning box."""

    title: str
    texts: Sequence[str]


@dataclass(frozen=True)
class Bar:
    """A bar of a chart.

    value: length, in the unit of the chart.
    text: text at the end of the bar.
    mark: value of a mark on the bar, such as a roofline.
    """

    name: str
    value: float
    text: str
    color: str
    mark: float | None = None


@dataclass(frozen=True)
class BarChart:
    """A bar chart with a common scale, logarithmic if the values span decades."""

    caption: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class InteractiveMatrix:
    """Data of a diagram of the support matrix, with a square for each pair of a row and a column.

    The user selects the scheme and the number of ranks.

    reasons: distinct reasons of refusals.
    reason_sets: distinct sets of reasons, as indices into `reasons`. The first set is empty and
        belongs to valid pairs.
    cells: for each "SCHEME RANKS", the index into `reason_sets` of each pair, row by row.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    schemes: Sequence[str]
    world_sizes: Sequence[int]
    reasons: Sequence[str]
    reason_sets: Sequence[Sequence[int]]
    cells: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class TableOfContents:
    """The place of the table of contents."""


@dataclass(frozen=True)
class Collapsible:
    """Blocks under a title that the user can expand."""

    title: str
    blocks: Sequence["PageBlock"]


Block = Heading | Text | BulletList | Table | Code | Figure
Document = tuple[Block, ...]
# Blocks of HTML pages. Markdown documents only have blocks of type `Block`.
PageBlock = (
    Block
    | Tiles
    | DefinitionList
    | WarningBox
    | BarChart
    | InteractiveMatrix
    | TableOfContents
    | Collapsible
)
