"""Sentences and table cells of a profile, shared by the text output and the HTML report."""

from collections.abc import Sequence

from modular_kernel.profiling.events import UNATTRIBUTED
from modular_kernel.profiling.report import PairProfile, Profile, RankProfile, StageRow
from modular_kernel.replay import stages

ABSENT = "-"
COLUMNS = (
    *("stage", "entered", "launches", "host us", "device us", "MB", "MB link", "GFLOP"),
    *("floor us", "% of floor", "bound"),
)
# Columns that are dropped on a narrow terminal, the last one first.
OPTIONAL = (
    *("% of floor", "floor us", "launches", "bound", "host us", "MB", "MB link", "GFLOP"),
    "entered",
)
COMPARED = ("stage", "A us", "B us", "B - A us", "B / A")


def name_of(row: StageRow) -> str:
    """Return the name of a row to print.

    The time that a scope spends outside of its stages is called, for example, "(rest of experts)".
    """
    if row.stage == UNATTRIBUTED:
        return "(launch unknown)"
    short_name = row.stage.removeprefix(stages.PREFIX)
    return short_name if row.is_stage else f"(rest of {short_name})"


def cells(rank: RankProfile) -> list[tuple[str, ...]]:
    """Return the cells of a table with COLUMNS: a row for each stage, and one for their sum.

    The percentage of the roofline is omitted if kernels were interpreted.
    """
    show_percent = rank.is_timed
    staged = [row for row in rank.rows if row.is_stage]
    # On a GPU, time outside stages is shown only if it includes device work.
    unstaged_rows = [row for row in rank.rows if not row.is_stage and row.us > 0]
    rows = [_cells(row, show_percent=show_percent) for row in (*staged, *unstaged_rows)]
    counts = [row.launches for row in staged if row.launches is not None]
    floors = [row.floor.us for row in staged if row.floor is not None]
    total = (
        "sum of stages",
        str(sum(row.entered for row in staged)),
        str(sum(counts)) if counts else ABSENT,
        number(sum(row.host_us for row in staged)),
        number(rank.sum_us) if counts else ABSENT,
        *(ABSENT,) * 3,
        number(sum(floors)) if floors else ABSENT,
        number(100 * sum(floors) / rank.sum_us)
        if show_percent and floors and rank.sum_us
        else ABSENT,
        "",
    )
    return [*rows, total]


def _cells(row: StageRow, *, show_percent: bool) -> tuple[str, ...]:
    work = row.work
    return (
        name_of(row),
        str(row.entered),
        ABSENT if row.launches is None else str(row.launches),
        number(row.host_us),
        number(row.device_us),
        number(None if work is None else work.bytes / 1e6),
        number(work.link / 1e6 if work is not None and work.link else None),
        number(work.flops / 1e9 if work is not None and work.flops else None),
        number(None if row.floor is None else row.floor.us),
        number(row.percent if show_percent else None),
        "" if row.floor is None else row.floor.bound,
    )


def number(value: float | None) -> str:
    """Format a number with about three significant digits, or None as ABSENT."""
    if value is None:
        return ABSENT
    size = abs(value)
    return f"{value:.0f}" if size >= 1000 else f"{value:.1f}" if size >= 10 else f"{value:.3g}"


def sentences(pair: PairProfile) -> list[str]:
    """Summarize the slowest rank of a pairing in sentences."""
    rank = pair.slowest
    rank_text = (
        f" (rank {rank.rank}, the slowest of {len(pair.ranks)})" if len(pair.ranks) > 1 else ""
    )
    return [line for line in (
        f"End to end{rank_text}: {_total(rank)}",
        _eager(rank),
        _furthest(rank),
        _memory(rank),
        *([_clocks(pair)] if len(pair.ranks) > 1 else []),
    ) if line]  # fmt: skip


def _total(rank: RankProfile) -> str:
    total = rank.total
    description = {
        "graph": "a planned call in a CUDA graph",
        "eager": "a planned call, not in a graph",
        "cpu": "a planned call by the wall clock",
        "interpreter": "a planned call of interpreted Triton kernels, not a meaningful time",
    }[total.mode]
    text = (
        f"{number(total.us)} us, {description} (median of {len(total.samples_us)}, "
        f"IQR {total.spread:.1%})"
    )
    if rank.is_timed:
        share = _percent(rank.floor.us, total.us)
        text += f". Roofline: {number(rank.floor.us)} us, {share} of peak"
    text += "."
    if total.host_us is not None:
        text += (
            f" Host time of a planned call outside a graph: {number(total.host_us)} us,"
            f" with {total.allocations or 0:g} allocations."
        )
    return text


def _eager(rank: RankProfile) -> str:
    call, clock = rank.call, "device" if rank.call.launches is not None else "host"
    launches = "" if call.launches is None else f" in {call.launches} launches"
    text = (
        f"Stages: {number(rank.sum_us)} us of {clock} time{launches} in the median of "
        f"{rank.calls} traced eager calls, {rank.coverage:.1%} of that call's busy time. This is "
        f"{rank.sum_to_span:.1%} of the {number(call.span_us)} us from its first work to its last, "
        f"and {rank.sum_to_total:.1%} of the end-to-end time. Host time of the call: "
        f"{number(call.host_us)} us."
    )
    if rank.load.link_rows:
        text += " The time of an exchange includes waiting for other ranks."
    return text


def _furthest(rank: RankProfile) -> str:
    furthest, lowest = rank.furthest, rank.min_percent
    if furthest is None or furthest.floor is None:
        return ""
    text = (
        f"Largest gap to the roofline: {name_of(furthest)}, {number(furthest.us)} us against "
        f"{number(furthest.floor.us)} us ({furthest.floor.bound}), a potential gain of "
        f"{number(furthest.lost_us)} us."
    )
    if lowest is not None and lowest.stage != furthest.stage:
        text += f" Lowest percentage of roofline: {name_of(lowest)}, {number(lowest.percent)} %."
    return text


def _memory(rank: RankProfile) -> str:
    memory = rank.memory
    text = f"Memory: {number(memory.workspace / 2**20)} MiB of workspace in the plan"
    if memory.prepared:
        prepared = number(memory.prepared / 2**20)
        text += f", {prepared} MiB of prepared weights in addition to the weights"
    if memory.peak is None:
        return text + "."
    return text + f"; peak {number(memory.peak / 2**20)} MiB, including outputs."


def _clocks(pair: PairProfile) -> str:
    if pair.barrier_spread_us is None:
        return ""
    return (
        "Clocks: the traces of all ranks are shifted to a common time base. By these clocks, ranks "
        f"leave a common barrier within {number(pair.barrier_spread_us)} us of each other, which "
        "includes any difference between clocks."
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ABSENT


def comparison_rows(profile: Profile) -> list[tuple[str, ...]]:
    """Return the cells of a table with the columns COMPARED: each stage, and the totals."""
    first, second = (pair.slowest for pair in profile.pairs)
    first_times, second_times = (
        {name_of(row): row.us for row in rank.rows if row.is_stage} for rank in (first, second)
    )
    rows = [
        _comparison_row(name, first_times.get(name), second_times.get(name))
        for name in dict.fromkeys((*first_times, *second_times))
    ]
    rows.append(_comparison_row("sum of stages", first.sum_us, second.sum_us))
    rows.append(_comparison_row("total (planned)", first.total.us, second.total.us))
    return rows


def _comparison_row(name: str, a: float | None, b: float | None) -> tuple[str, ...]:
    if a is None or b is None:
        return name, number(a), number(b), ABSENT, ABSENT
    return name, number(a), number(b), number(b - a), number(b / a if a else None)


def difference(profile: Profile) -> str:
    """Describe the difference of the outputs of two pairings; "" for one pairing."""
    if profile.difference is None:
        return ""
    return f"Outputs on the same inputs differ by {profile.difference:.2e} of the first's RMS."


def description(profile: Profile) -> Sequence[tuple[str, str]]:
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
