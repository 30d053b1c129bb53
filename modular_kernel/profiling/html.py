"""The report of `mk profile` as one self-contained HTML file."""

from collections.abc import Iterator, Sequence

from modular_kernel.profiling import summary
from modular_kernel.profiling.report import PairProfile, Profile, RankProfile
from modular_kernel.profiling.timeline import draw_timeline, get_stage_color
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
    return html.render_html(
        f"mk profile: {title}", [Heading(1, title), *_iter_page_blocks(profile)]
    )


def _iter_page_blocks(profile: Profile) -> Iterator[PageBlock]:
    for pair in profile.pairs:
        if len(profile.pairs) > 1:
            yield Text(pair.pairing)
        yield _make_tiles(pair.slowest)
    yield Text(f"{profile.problem} on {profile.machine}")
    if profile.missing:
        yield WarningBox("Not measured, or with a caveat:", profile.missing)
    if len(profile.pairs) > 1:
        yield from _iter_comparison_blocks(profile)
    for pair in profile.pairs:
        yield from _iter_pair_blocks(pair)
    yield Heading(2, "Method")
    yield DefinitionList(summary.describe_profile(profile))


def _iter_comparison_blocks(profile: Profile) -> Iterator[PageBlock]:
    first, second = profile.pairs
    yield Heading(2, f"A: {first.pairing}, B: {second.pairing}")
    yield Text(f"{summary.describe_difference(profile)} Totals were timed in the order A, B, B, A.")
    yield _make_stage_comparison_chart(first.slowest, second.slowest)
    yield _make_table(summary.COMPARISON_COLUMNS, summary.make_comparison_rows(profile), totals=2)


def _iter_pair_blocks(pair: PairProfile) -> Iterator[PageBlock]:
    yield Heading(2, pair.pairing)
    yield BulletList(summary.describe_slowest_rank(pair))
    yield from _iter_rank_blocks(pair.slowest)
    for rank in pair.ranks:
        if rank is not pair.slowest:
            yield Collapsible(
                f"Rank {rank.rank}: {summary.format_number(rank.total.us)} us",
                list(_iter_rank_blocks(rank)),
            )
    files = [rank.trace.name for rank in pair.ranks] + (
        [pair.merged_trace.name] if pair.merged_trace else []
    )
    yield Text(f"Traces, for ui.perfetto.dev: {', '.join(f'`{name}`' for name in files)}")


def _make_tiles(rank: RankProfile) -> Tiles:
    largest_gap_row = rank.largest_gap_row
    return Tiles(
        [
            (f"{summary.format_number(rank.total.us)} us", f"planned call ({rank.total.mode})"),
            (f"{summary.format_number(rank.sum_us)} us", "sum of stages, eager"),
            (f"{rank.coverage:.1%}", "of the call is in stages"),
            (
                summary.format_row_name(largest_gap_row) if largest_gap_row else summary.ABSENT,
                "largest gap to its roofline",
            ),
        ]
    )


def _iter_rank_blocks(rank: RankProfile) -> Iterator[PageBlock]:
    yield _make_stage_chart(rank)
    yield draw_timeline(rank.call)
    yield _make_table(summary.STAGE_COLUMNS, summary.make_stage_cells(rank), totals=1)


def _make_stage_chart(rank: RankProfile) -> BarChart:
    return BarChart(
        "Time of each stage; the dark line is its roofline",
        [
            Bar(
                summary.format_row_name(row),
                row.us,
                f"{summary.format_number(row.us)} us",
                get_stage_color(row.stage),
                None if row.floor is None else row.floor.us,
            )
            for row in rank.rows
            if row.is_stage
        ],
    )


def _make_stage_comparison_chart(first: RankProfile, second: RankProfile) -> BarChart:
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
                get_stage_color(name),
            )
            for name in dict.fromkeys((*times["A"], *times["B"]))
            for letter in "AB"
            if name in times[letter]
        ],
    )


def _make_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, totals: int) -> Table:
    return Table(columns, rows, frozenset(columns[1:]), totals)
