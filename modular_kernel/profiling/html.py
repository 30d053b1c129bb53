"""The report as one HTML file that needs nothing else: styles and pictures are inside."""

from collections.abc import Iterable, Sequence
from html import escape

from modular_kernel.profiling import svg, words
from modular_kernel.profiling.report import PairProfile, Profile, RankProfile

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --page: #fff; --soft: #eef1f6; --line: #ccd3df; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8f0; --page: #161a22; --soft: #222835; --line: #3a4356; }
}
body { font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: var(--ink);
  background: var(--page); max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; }
th { white-space: nowrap; } table { font-size: .9rem; }
tr.total td { font-weight: 600; border-top: 2px solid var(--line); }
.wide { overflow-x: auto; }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; }
.tile { background: var(--soft); border-radius: .5rem; padding: .6rem 1rem; min-width: 8rem; }
.tile b { display: block; font-size: 1.3rem; } .tile span { font-size: .85rem; }
.note { background: var(--soft); border-left: 4px solid #e8a33d; padding: .5rem 1rem; }
figure { margin: 1rem 0; } figcaption { font-size: .85rem; margin-bottom: .3rem; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--ink); }
svg .label { text-anchor: end; } svg .floor { stroke: var(--ink); stroke-width: 2.5; }
""".strip()


def page(profile: Profile) -> str:
    """Write the whole document."""
    title = " against ".join(pair.pairing for pair in profile.pairs)
    body = [
        f"<h1>{escape(title)}</h1>",
        _facts(words.facts(profile)),
        *([_notes(profile.missing)] if profile.missing else []),
        *([_comparison(profile)] if len(profile.pairs) > 1 else []),
        *(_pair(pair) for pair in profile.pairs),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>mk profile: {escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _facts(pairs: Iterable[tuple[str, str]]) -> str:
    inside = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs)
    return f"<dl>{inside}</dl>"


def _notes(lines: Sequence[str]) -> str:
    inside = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<div class="note">Not measured, or with a reserve:<ul>{inside}</ul></div>'


def _comparison(profile: Profile) -> str:
    first, second = profile.pairs
    return (
        f"<section><h2>A: {escape(first.pairing)}<br>B: {escape(second.pairing)}</h2>"
        f"<p>{escape(words.difference(profile))} Totals were timed in the order A, B, B, A.</p>"
        f"{svg.against(first.slowest, second.slowest)}"
        f"{_table(words.COMPARED, words.compared(profile), totals=2)}</section>"
    )


def _pair(pair: PairProfile) -> str:
    slowest = pair.slowest
    lines = "".join(f"<li>{escape(line)}</li>" for line in words.sentences(pair))
    others = [rank for rank in pair.ranks if rank is not slowest]
    files = [rank.trace.name for rank in pair.ranks] + ([pair.merged.name] if pair.merged else [])
    listed = ", ".join(f"<code>{escape(name)}</code>" for name in files)
    return (
        f"<section><h2>{escape(pair.pairing)}</h2>{_tiles(slowest)}<ul>{lines}</ul>"
        f"{_rank(slowest)}"
        + "".join(
            f"<details><summary>Rank {rank.rank}: {words.number(rank.total.us)} us</summary>"
            f"{_rank(rank)}</details>"
            for rank in others
        )
        + f"<p>Traces, for ui.perfetto.dev: {listed}</p></section>"
    )


def _tiles(rank: RankProfile) -> str:
    furthest = rank.furthest
    tiles = [
        (f"{words.number(rank.total.us)} us", f"planned call ({rank.total.mode})"),
        (f"{words.number(rank.sum_us)} us", "sum of stages, eager"),
        (f"{rank.coverage:.1%}", "of the call lies in stages"),
        (words.name_of(furthest) if furthest else words.ABSENT, "furthest from its floor"),
    ]
    inside = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for value, name in tiles
    )
    return f'<div class="tiles">{inside}</div>'


def _rank(rank: RankProfile) -> str:
    table = _table(words.COLUMNS, words.cells(rank), totals=1)
    return f"{svg.bars(rank)}{svg.timeline(rank.call)}{table}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, totals: int) -> str:
    """totals: how many of the last rows are sums."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = []
    for index, row in enumerate(rows):
        kind = ' class="total"' if index >= len(rows) - totals else ""
        lines.append(f"<tr{kind}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>")
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
