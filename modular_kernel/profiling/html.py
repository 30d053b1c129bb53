"""The profile report as one self-contained HTML file, with embedded styles and figures."""

from collections.abc import Iterator, Sequence

from modular_kernel.profiling import summary
from modular_kernel.profiling.report import PairProfile, Profile, RankProfile
from modular_kernel.profiling.timeline import color, timeline
from modular_kernel.replay import stages
from modular_kernel.report.pages import html
from modular_kernel.report.pages.document import (
    Bar,
    Bars,
    Collapsible,
    Facts,
    Heading,
    Items,
    Note,
    PageBlock,
    Table,
    Text,
    Tiles,
)


def page(profile: Profile) -> str:
    """Render a profile: first the end-to-end time of each pairing, then its stages."""
    title = " against ".join(pair.pairing for pair in profile.pairs)
    return html.page(f"mk profile: {title}", [Heading(1, title), *_blocks(profile)])


def _blocks(profile: Profile) -> Iterator[PageBlock]:
    for pair in profile.pairs:
        if len(profile.pairs) > 1:
            yield Text(pair.pairing)
        yield _tiles(pair.slowest)
    yield Text(f"{profile.problem} on {profile.machine}")
    if profile.missing:
        yield Note("Not measured, or with a caveat:", profile.missing)
    if len(profile.pairs) > 1:
        yield from _comparison(profile)
    for pair in profile.pairs:
        yield from _pair_blocks(pair)
    yield Heading(2, "Method")
    yield Facts(summary.description(profile))


def _comparison(profile: Profile) -> Iterator[PageBlock]:
    first, second = profile.pairs
    yield Heading(2, f"A: {first.pairing}, B: {second.pairing}")
    yield Text(f"{summary.difference(profile)} Totals were timed in the order A, B, B, A.")
    yield _stage_comparison(first.slowest, second.slowest)
    yield _table(summary.COMPARED, summary.comparison_rows(profile), totals=2)


def _pair_blocks(pair: PairProfile) -> Iterator[PageBlock]:
    yield Heading(2, pair.pairing)
    yield Items(summary.sentences(pair))
    yield from _rank_blocks(pair.slowest)
    for rank in pair.ranks:
        if rank is not pair.slowest:
            yield Collapsible(
                f"Rank {rank.rank}: {summary.number(rank.total.us)} us", list(_rank_blocks(rank))
            )
    files = [rank.trace.name for rank in pair.ranks] + ([pair.merged.name] if pair.merged else [])
    yield Text(f"Traces, for ui.perfetto.dev: {', '.join(f'`{name}`' for name in files)}")


def _tiles(rank: RankProfile) -> Tiles:
    furthest = rank.furthest
    return Tiles(
        [
            (f"{summary.number(rank.total.us)} us", f"planned call ({rank.total.mode})"),
            (f"{summary.number(rank.sum_us)} us", "sum of stages, eager"),
            (f"{rank.coverage:.1%}", "of the call is in stages"),
            (
                summary.name_of(furthest) if furthest else summary.ABSENT,
                "largest gap to its roofline",
            ),
        ]
    )


def _rank_blocks(rank: RankProfile) -> Iterator[PageBlock]:
    yield _bars(rank)
    yield timeline(rank.call)
    yield _table(summary.COLUMNS, summary.cells(rank), totals=1)


def _bars(rank: RankProfile) -> Bars:
    return Bars(
        "Time of each stage; the dark line is its roofline",
        [
            Bar(
                summary.name_of(row),
                row.us,
                f"{summary.number(row.us)} us",
                color(row.stage),
                None if row.floor is None else row.floor.us,
            )
            for row in rank.rows
            if row.is_stage
        ],
    )


def _stage_comparison(first: RankProfile, second: RankProfile) -> Bars:
    """Return a bar chart of the stages of two pairings, with the bars of a stage adjacent."""
    times = {
        letter: {row.stage: row.us for row in profile.rows if row.is_stage}
        for letter, profile in (("A", first), ("B", second))
    }
    return Bars(
        "Stages of A and B",
        [
            Bar(
                f"{letter} {name.removeprefix(stages.PREFIX)}",
                times[letter][name],
                f"{summary.number(times[letter][name])} us",
                color(name),
            )
            for name in dict.fromkeys((*times["A"], *times["B"]))
            for letter in "AB"
            if name in times[letter]
        ],
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, totals: int) -> Table:
    return Table(columns, rows, frozenset(columns[1:]), totals)
