"""A profile in words and cells: what the text table and the HTML report both show."""

from collections.abc import Sequence

from modular_kernel.profiling.events import NOWHERE
from modular_kernel.profiling.report import PairProfile, Profile, RankProfile, StageRow
from modular_kernel.replay import stages

ABSENT = "-"
COLUMNS = (
    *("stage", "entered", "launches", "host us", "device us", "MB", "MB link", "GFLOP"),
    *("floor us", "% of floor", "bound"),
)
# Left out where a terminal is narrow, the last one first.
OPTIONAL = (
    *("% of floor", "floor us", "launches", "bound", "host us", "MB", "MB link", "GFLOP"),
    "entered",
)
COMPARED = ("stage", "A us", "B us", "B - A us", "B / A")


def name_of(row: StageRow) -> str:
    """Return what the row is called: "(rest of experts)" for what is in no stage."""
    if row.stage == NOWHERE:
        return "(launch unknown)"
    plain = row.stage.removeprefix(stages.PREFIX)
    return plain if row.is_stage else f"(rest of {plain})"


def cells(rank: RankProfile) -> list[tuple[str, ...]]:
    """One row of COLUMNS for each stage, then the sum of the stages.

    Where kernels were interpreted, no share of a floor is shown: that time says nothing of it.
    """
    shares = rank.is_timed
    staged = [row for row in rank.rows if row.is_stage]
    # On a GPU a rest counts only if it launched something: the host's time in it is no stage's.
    rests = [row for row in rank.rows if not row.is_stage and row.us > 0]
    rows = [_cells(row, shares=shares) for row in (*staged, *rests)]
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
        number(100 * sum(floors) / rank.sum_us) if shares and floors and rank.sum_us else ABSENT,
        "",
    )
    return [*rows, total]


def _cells(row: StageRow, *, shares: bool) -> tuple[str, ...]:
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
        number(row.percent if shares else None),
        "" if row.floor is None else row.floor.bound,
    )


def number(value: float | None) -> str:
    """Three digits or more; ABSENT for None."""
    if value is None:
        return ABSENT
    size = abs(value)
    return f"{value:.0f}" if size >= 1000 else f"{value:.1f}" if size >= 10 else f"{value:.3g}"


def sentences(pair: PairProfile) -> list[str]:
    """Say what stands out of a pairing, on its slowest rank."""
    rank = pair.slowest
    where = f" (rank {rank.rank}, the slowest of {len(pair.ranks)})" if len(pair.ranks) > 1 else ""
    return [line for line in (
        f"Total that users get{where}: {_total(rank)}",
        _eager(rank),
        _furthest(rank),
        _memory(rank),
        *([_clocks(pair)] if len(pair.ranks) > 1 else []),
    ) if line]  # fmt: skip


def _total(rank: RankProfile) -> str:
    total = rank.total
    how = {
        "graph": "a planned call in a CUDA graph",
        "eager": "a planned call, not in a graph",
        "cpu": "a planned call by the wall clock",
        "interpreter": "a planned call of interpreted Triton kernels: no machine's speed",
    }[total.mode]
    text = (
        f"{number(total.us)} us, {how}, median of {len(total.samples_us)} "
        f"(middle half within {total.spread:.1%})"
    )
    if rank.is_timed:
        share = _percent(rank.floor.us, total.us)
        text += f"; {share} of the layer's floor of {number(rank.floor.us)} us"
    text += "."
    if total.host_us is not None:
        text += (
            f" A planned call outside a graph holds the host up for {number(total.host_us)} us,"
            f" with {total.allocations or 0:g} allocations."
        )
    return text


def _eager(rank: RankProfile) -> str:
    call, clock = rank.call, "the device" if rank.call.launches is not None else "the host"
    launches = "" if call.launches is None else f" in {call.launches} launches"
    text = (
        f"Stages, by one eager call of {rank.calls} traced: they sum to {number(rank.sum_us)} us "
        f"of {clock}{launches} and cover {rank.coverage:.1%} of its time. That is "
        f"{rank.sum_to_span:.1%} of the {number(call.span_us)} us from the call's first work to "
        f"its last, and {rank.sum_to_total:.1%} of the total. The host took "
        f"{number(call.host_us)} us for that call."
    )
    if rank.load.crossing:
        text += " Exchanges count the time that they wait for other ranks."
    return text


def _furthest(rank: RankProfile) -> str:
    most, least = rank.furthest, rank.least_percent
    if most is None or most.floor is None:
        return ""
    text = (
        f"Furthest from its floor: {name_of(most)}, {number(most.us)} us where "
        f"{number(most.floor.us)} ({most.floor.bound}) cannot be beaten: "
        f"{number(most.lost_us)} us to gain."
    )
    if least is not None and least.stage != most.stage:
        text += f" Lowest share of its floor: {name_of(least)}, {number(least.percent)} %."
    return text


def _memory(rank: RankProfile) -> str:
    memory = rank.memory
    text = f"Workspace: {number(memory.workspace / 2**20)} MiB held by the plan"
    if memory.prepared:
        once = f"{number(memory.prepared / 2**20)} MiB of weights prepared once, before"
        text = f"{once}, beside the others. {text}"
    if memory.peak is None:
        return text + "."
    return text + f"; {number(memory.peak / 2**20)} MiB at the peak, with outputs."


def _clocks(pair: PairProfile) -> str:
    if pair.barrier_spread_us is None:
        return ""
    return (
        "Clocks: every rank's times are of its machine's clock, put on one base. Ranks left "
        f"one barrier within {number(pair.barrier_spread_us)} us by it: what clocks may differ by, "
        "and how unequally the barrier let go."
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ABSENT


def compared(profile: Profile) -> list[tuple[str, ...]]:
    """One row of COMPARED for each stage of either pairing and for the totals; for two pairings."""
    first, second = (pair.slowest for pair in profile.pairs)
    mine, theirs = (
        {name_of(row): row.us for row in each.rows if row.is_stage} for each in (first, second)
    )
    rows = [
        _compared(name, mine.get(name), theirs.get(name))
        for name in dict.fromkeys((*mine, *theirs))
    ]
    rows.append(_compared("sum of stages", first.sum_us, second.sum_us))
    rows.append(_compared("total (planned)", first.total.us, second.total.us))
    return rows


def _compared(name: str, a: float | None, b: float | None) -> tuple[str, ...]:
    if a is None or b is None:
        return name, number(a), number(b), ABSENT, ABSENT
    return name, number(a), number(b), number(b - a), number(b / a if a else None)


def difference(profile: Profile) -> str:
    """How far the outputs of two pairings are apart; "" for one."""
    if profile.difference is None:
        return ""
    return f"Outputs on the same inputs differ by {profile.difference:.2e} of the first's RMS."


def facts(profile: Profile) -> Sequence[tuple[str, str]]:
    """Where and of what: pairs of a name and a text."""
    found, peaks = profile.environment, profile.peaks
    rates = ", ".join(f"{name} {rate / 1e12:.3g} Tflop/s" for name, rate in peaks.flops.items())
    link = f", link {profile.link / 1e9:.3g} GB/s" if profile.link else ""
    load = profile.pairs[0].slowest.load
    return (
        ("problem", str(profile.problem)),
        ("machine", str(profile.machine)),
        ("ranks", str(len(profile.pairs[0].ranks))),
        ("routing", f"{profile.routing}: {load.pairs} pairs, {load.touched} experts touched"),
        ("measured peaks", f"{rates}, memory {peaks.bandwidth / 1e12:.3g} TB/s{link}"),
        ("made", f"{found['date']}, torch {found['torch']}, triton {found['triton']}"),
        *((state.name, str(state)) for state in profile.states),
        ("command", str(found["command"])),
    )
