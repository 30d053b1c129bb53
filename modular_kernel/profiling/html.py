"""The report of `mk profile` as one self-contained HTML file."""

from collections.abc import Iterator, Sequence

from modular_kernel.profiling import summary
from modular_kernel.profiling.report import PairProfile, Profile, RankProfile
from modular_kernel.profiling.timeline import draw_timeline, stage_color
from modular_kernel.replay import stages
from modular_kernel.report.pages import html
from modular_kernel.report.pages.document import (
    Bar,
    BarChart,
    BulletList,
    Collapsible,
    DefinitionList,
    Heading,
    PageBlock,
    Table,
    Text,
    Tiles,
    WarningBox,
)


def render_page(profile: Profile) -> str:
    """Render a profile as HTML: the end-to-end time of each pairing, and then its stages."""
    title = " against ".join(pair.pairing for pair in profile.pairs)
    return html.render_html(f"mk profile: {title}", [Heading(1, title), *_page_blocks(profile)])


def _page_blocks(profile: Profile) -> Iterator[PageBlock]:
    for pair in profile.pairs:
        if len(profile.pairs) > 1:
            yield Text(pair.pairing)
        yield _tiles(pair.slowest)
    yield Text(f"{profile.problem} on {profile.machine}")
    if profile.missing:
        yield WarningBox("Not measured, or with a caveat:", profile.missing)
    if len(profile.pairs) > 1:
        yield from _comparison_blocks(profile)
    for pair in profile.pairs:
        yield from _pair_blocks(pair)
    yield Heading(2, "Method")
    yield DefinitionList(summary.describe_profile(profile))


def _comparison_blocks(profile: Profile) -> Iterator[PageBlock]:
    first, second = profile.pairs
    yield Heading(2, f"A: {first.pairing}, B: {second.pairing}")
    yield Text(f"{summary.describe_difference(profile)} Totals were timed in the order A, B, B, A.")
    yield _stage_comparison_bars(first.slowest, second.slowest)
    yield _table(summary.COMPARISON_COLUMNS, summary.comparison_rows(profile), totals=2)


def _pair_blocks(pair: PairProfile) -> Iterator[PageBlock]:
    yield Heading(2, pair.pairing)
    yield BulletList(summary.describe_slowest_rank(pair))
    yield from _rank_blocks(pair.slowest)
    for rank in pair.ranks:
        if rank is not pair.slowest:
            yield Collapsible(
                f"Rank {rank.rank}: {summary.format_number(rank.total.us)} us",
                list(_rank_blocks(rank)),
            )
    files = [rank.trace.name for rank in pair.ranks] + (
        [pair.merged_trace.name] if pair.merged_trace else []
    )
    yield Text(f"Traces, for ui.perfetto.dev: {', '.join(f'`{name}`' for name in files)}")


def _tiles(rank: RankProfile) -> Tiles:
    largest_gap_row = rank.largest_gap_row
    return Tiles(
        [
            (f"{summary.format_number(rank.total.us)} us", f"planned call ({rank.total.mode})"),
            (f"{summary.format_number(rank.sum_us)} us", "sum of stages, eager"),
            (f"{rank.coverage:.1%}", "of the call is in stages"),
            (
                summary.row_name(largest_gap_row) if largest_gap_row else summary.ABSENT,
                "largest gap to its roofline",
            ),
        ]
    )


def _rank_blocks(rank: RankProfile) -> Iterator[PageBlock]:
    yield _stage_bars(rank)
    yield draw_timeline(rank.call)
    yield _table(summary.STAGE_COLUMNS, summary.stage_cells(rank), totals=1)


def _stage_bars(rank: RankProfile) -> BarChart:
    return BarChart(
        "Time of each stage; the dark line is its roofline",
        [
            Bar(
                summary.row_name(row),
                row.us,
                f"{summary.format_number(row.us)} us",
                stage_color(row.stage),
                None if row.floor is None else row.floor.us,
            )
            for row in rank.rows
            if row.is_stage
        ],
    )


def _stage_comparison_bars(first: RankProfile, second: RankProfile) -> BarChart:
    """Return a bar chart of the stages of two pairings, with the two bars of a stage adjacent."""
    times = {
        letter: {row.stage: row.us for row in profile.rows if row.is_stage}
        for letter, profile in (("A", first), ("B", second))
    }
    return BarChart(
        "Stages of A and B",
        [
            Bar(
                f"{letter} {name.removeprefix(stages.PREFIX)}",
                times[letter][name],
                f"{summary.format_number(times[letter][name])} us",
                stage_color(name),
            )
            for name in dict.fromkeys((*times["A"], *times["B"]))
            for letter in "AB"
            if name in times[letter]
        ],
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, totals: int) -> Table:
    return Table(columns, rows, frozenset(columns[1:]), totals)
