"""Sentences and table cells of a profile, for the text output and the HTML report."""

from collections.abc import Sequence

from modular_kernel.profiling.events import UNATTRIBUTED
from modular_kernel.profiling.report import PairProfile, Profile, RankProfile, StageRow
from modular_kernel.replay import stages

ABSENT = "-"  # text of a cell without a value
STAGE_COLUMNS = (
    *("stage", "entered", "launches", "host us", "device us", "MB", "MB link", "GFLOP"),
    *("floor us", "% of floor", "bound"),
)
# Columns that are dropped on a narrow terminal, starting with the last one.
OPTIONAL_COLUMNS = (
    *("% of floor", "floor us", "launches", "bound", "host us", "MB", "MB link", "GFLOP"),
    "entered",
)
COMPARISON_COLUMNS = ("stage", "A us", "B us", "B - A us", "B / A")


def format_row_name(row: StageRow) -> str:
    """Return the name of a row, such as "gemm2".

    The time of a scope outside of its stages is named, for example, "(rest of experts)".
    """
    if row.stage == UNATTRIBUTED:
        return "(launch unknown)"
    short_name = row.stage.removeprefix(stages.PREFIX)
    return short_name if row.is_stage else f"(rest of {short_name})"


def make_stage_cells(rank: RankProfile) -> list[tuple[str, ...]]:
    """Return the cells of a table with STAGE_COLUMNS: a row for each stage, and a row of sums.

    If kernels were interpreted, the percentages of the roofline are ABSENT.
    """
    show_percent = rank.is_timed
    stage_rows = [row for row in rank.rows if row.is_stage]
    # On a GPU, scopes are shown only if they have device work outside of their stages.
    scope_rows = [row for row in rank.rows if not row.is_stage and row.us > 0]
    rows = [_make_row_cells(row, show_percent=show_percent) for row in (*stage_rows, *scope_rows)]
    launches = [row.launches for row in stage_rows if row.launches is not None]
    floors = [row.floor.us for row in stage_rows if row.floor is not None]
    percent = ABSENT
    if show_percent and floors and rank.sum_us:
        percent = format_number(100 * sum(floors) / rank.sum_us)
    total = (
        "sum of stages",
        str(sum(row.entered for row in stage_rows)),
        str(sum(launches)) if launches else ABSENT,
        format_number(sum(row.host_us for row in stage_rows)),
        format_number(rank.sum_us) if launches else ABSENT,
        *(ABSENT,) * 3,
        format_number(sum(floors)) if floors else ABSENT,
        percent,
        "",
    )
    return [*rows, total]


def _make_row_cells(row: StageRow, *, show_percent: bool) -> tuple[str, ...]:
    work = row.work
    return (
        format_row_name(row),
        str(row.entered),
        ABSENT if row.launches is None else str(row.launches),
        format_number(row.host_us),
        format_number(row.device_us),
        format_number(None if work is None else work.bytes / 1e6),
        format_number(work.link / 1e6 if work is not None and work.link else None),
        format_number(work.flops / 1e9 if work is not None and work.flops else None),
        format_number(None if row.floor is None else row.floor.us),
        format_number(row.percent_of_floor if show_percent else None),
        "" if row.floor is None else row.floor.bound,
    )


def format_number(value: float | None) -> str:
    """Format a number with about three significant digits, or None as ABSENT."""
    if value is None:
        return ABSENT
    magnitude = abs(value)
    if magnitude >= 1000:
        return f"{value:.0f}"
    return f"{value:.1f}" if magnitude >= 10 else f"{value:.3g}"


def describe_slowest_rank(pair: PairProfile) -> list[str]:
    """Return sentences about the slowest rank of a pairing."""
    rank = pair.slowest
    rank_text = (
        f" (rank {rank.rank}, the slowest of {len(pair.ranks)})" if len(pair.ranks) > 1 else ""
    )
    return [sentence for sentence in (
        f"End to end{rank_text}: {_describe_total(rank)}",
        _describe_stages(rank),
        _describe_largest_gap(rank),
        _describe_memory(rank),
        *([_describe_clocks(pair)] if len(pair.ranks) > 1 else []),
    ) if sentence]  # fmt: skip


def _describe_total(rank: RankProfile) -> str:
    total = rank.total
    description = {
        "graph": "a planned call in a CUDA graph",
        "eager": "a planned call, not in a graph",
        "cpu": "a planned call by the wall clock",
        "interpreter": "a planned call of interpreted Triton kernels, not a meaningful time",
    }[total.mode]
    text = (
        f"{format_number(total.us)} us, {description} (median of {len(total.samples_us)}, "
        f"IQR {total.spread:.1%})"
    )
    if rank.is_timed:
        share = _format_percent(rank.floor.us, total.us)
        text += f". Roofline: {format_number(rank.floor.us)} us, {share} of peak"
    text += "."
    if total.host_us is not None:
        text += (
            f" Host time of a planned call outside a graph: {format_number(total.host_us)} us,"
            f" with {total.allocations or 0:g} allocations."
        )
    return text


def _describe_stages(rank: RankProfile) -> str:
    call, clock = rank.call, "device" if rank.call.launches is not None else "host"
    launches = "" if call.launches is None else f" in {call.launches} launches"
    text = (
        f"Stages: {format_number(rank.sum_us)} us of {clock} time{launches} in the median of "
        f"{rank.calls} traced eager calls, {rank.coverage:.1%} of that call's busy time. This is "
        f"{rank.sum_to_span:.1%} of the {format_number(call.span_us)} us from its first work to "
        f"its last, and {rank.sum_to_total:.1%} of the end-to-end time. Host time of the call: "
        f"{format_number(call.host_us)} us."
    )
    if rank.load.link_rows:
        text += " The time of an exchange includes waiting for other ranks."
    return text


def _describe_largest_gap(rank: RankProfile) -> str:
    largest_gap, lowest = rank.largest_gap_row, rank.lowest_percent_row
    if largest_gap is None or largest_gap.floor is None:
        return ""
    us, floor_us = format_number(largest_gap.us), format_number(largest_gap.floor.us)
    text = (
        f"Largest gap to the roofline: {format_row_name(largest_gap)}, {us} us against "
        f"{floor_us} us ({largest_gap.floor.bound}), a potential gain of "
        f"{format_number(largest_gap.gap_us)} us."
    )
    if lowest is not None and lowest.stage != largest_gap.stage:
        percent = format_number(lowest.percent_of_floor)
        text += f" Lowest percentage of roofline: {format_row_name(lowest)}, {percent} %."
    return text


def _describe_memory(rank: RankProfile) -> str:
    memory = rank.memory
    text = f"Memory: {format_number(memory.workspace / 2**20)} MiB of workspace in the plan"
    if memory.prepared:
        prepared = format_number(memory.prepared / 2**20)
        text += f", {prepared} MiB of prepared weights in addition to the weights"
    if memory.peak is None:
        return text + "."
    return text + f"; peak {format_number(memory.peak / 2**20)} MiB, including outputs."


def _describe_clocks(pair: PairProfile) -> str:
    if pair.barrier_spread_us is None:
        return ""
    spread_us = format_number(pair.barrier_spread_us)
    return (
        "Clocks: the traces of all ranks are shifted to a common time base. By these clocks, ranks "
        f"leave a common barrier within {spread_us} us of each other, which includes any "
        "difference between clocks."
    )


def _format_percent(numerator: float, denominator: float) -> str:
    return f"{100 * numerator / denominator:.1f} %" if denominator else ABSENT


def make_comparison_rows(profile: Profile) -> list[tuple[str, ...]]:
    """Return the cells of a table with COMPARISON_COLUMNS: a row for each stage, and totals."""
    first, second = (pair.slowest for pair in profile.pairs)
    first_times, second_times = (
        {format_row_name(row): row.us for row in rank.rows if row.is_stage}
        for rank in (first, second)
    )
    rows = [
        _make_comparison_row(name, first_times.get(name), second_times.get(name))
        for name in dict.fromkeys((*first_times, *second_times))
    ]
    rows.append(_make_comparison_row("sum of stages", first.sum_us, second.sum_us))
    rows.append(_make_comparison_row("total (planned)", first.total.us, second.total.us))
    return rows


def _make_comparison_row(name: str, a: float | None, b: float | None) -> tuple[str, ...]:
    if a is None or b is None:
        return name, format_number(a), format_number(b), ABSENT, ABSENT
    return (
        name,
        format_number(a),
        format_number(b),
        format_number(b - a),
        format_number(b / a if a else None),
    )


def describe_difference(profile: Profile) -> str:
    """Describe the difference between the outputs of two pairings. Returns "" for one pairing."""
    if profile.difference is None:
        return ""
    return f"Outputs on the same inputs differ by {profile.difference:.2e} of the first's RMS."


def describe_profile(profile: Profile) -> Sequence[tuple[str, str]]:
    """Return (name, text) pairs that describe the problem and the environment."""
    env, peaks = profile.environment, profile.peaks
    rates = ", ".join(f"{name} {rate / 1e12:.3g} Tflop/s" for name, rate in peaks.flops.items())
    link = f", link {profile.link / 1e9:.3g} GB/s" if profile.link else ""
    load = profile.pairs[0].slowest.load
    return (
        ("problem", str(profile.problem)),
        ("machine", str(profile.machine)),
        ("ranks", str(len(profile.pairs[0].ranks))),
        ("routing", f"{profile.routing}: {load.pairs} pairs, {load.touched} experts touched"),
        ("measured peaks", f"{rates}, memory {peaks.bandwidth / 1e12:.3g} TB/s{link}"),
        ("made", f"{env['date']}, torch {env['torch']}, triton {env['triton']}"),
        *((state.name, str(state)) for state in profile.states),
        ("command", str(env["command"])),
    )
