"""The report of a profile: a summary, a JSON record and an HTML page."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from trace_events import make_call_events, make_device_event

from modular_kernel.cli.output import to_json_types
from modular_kernel.measure.records import INTERPRETER
from modular_kernel.measure.roofline import Peaks
from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.measure.stage_roofline import RankLoad
from modular_kernel.profiling import html, summary
from modular_kernel.profiling.chrome import Trace
from modular_kernel.profiling.record import EndToEndTime, Memory, PairRecord, ProfileJob, RankRecord
from modular_kernel.profiling.report import Profile, make_profile, to_record
from modular_kernel.replay import stages
from modular_kernel.spec.problem import Machine, Problem

PROBLEM = Problem(tokens=10, hidden=32, intermediate=64, experts=4, top_k=2)
GPU = Machine("cuda", (9, 0), frozenset(), name="<a GPU & more>")
VOID_TAGS = {"meta", "br"}


def make_sample_profile(
    *pairs: str, ranks: int = 1, trace: Trace | None = None, machine: Machine = GPU
) -> Profile:
    """Return a profile with the sample call of `make_call_events` for each pair.

    In the sample call, the times of the stages add up to 1505 us. The GPU is used for 1550 us, from
    the start of the first kernel to the end of the last. The end-to-end time is 1500 us.
    """
    mode = "graph" if machine.device == "cuda" else "cpu"
    records = [
        RankRecord(
            rank=rank,
            environment={"device": "<x>", "date": "now", "torch": "2", "triton": None,
                         "command": 'mk "x" <y>'},
            peaks=Peaks({"bfloat16": 1e9}, 1e6, 1e6, 1e6, "given"),
            link=None,
            load=RankLoad(
                tokens=10, rows=9, pairs=18, touched=3,
                out=4 if ranks > 1 else 0, back=6 if ranks > 1 else 0,
            ),
            pairs=tuple(
                PairRecord(
                    pair, Path(f"{rank}.trace.json"),
                    EndToEndTime(1500.0 + rank, (1490.0, 1500.0 + rank, 1510.0), mode, 12.0, 0.0),
                    Memory(1 << 20, 3 << 20),
                )
                for pair in pairs
            ),
            difference=0.003 if len(pairs) > 1 else None,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    job = ProfileJob((("A", "B"),) * len(pairs), PROBLEM, machine, RoutingKind("uniform"), 1, ())
    sample_trace = trace or {"traceEvents": make_call_events()}
    merged = [Path("all.trace.json") if ranks > 1 else None for _ in pairs]
    return make_profile(job, records, [[sample_trace] * ranks for _ in pairs], merged)


def test_stage_has_its_work_and_floor() -> None:
    (rank,) = make_sample_profile("A x B").pairs[0].ranks
    rows = {row.stage: row for row in rank.rows}
    gemm2 = rows[stages.GEMM2]
    assert gemm2.work is not None
    assert gemm2.floor is not None
    # 2304 bytes of h, 3 experts of 4096 bytes, and 1152 bytes of rows, at 1 byte per microsecond.
    assert (gemm2.work.bytes, gemm2.floor.us) == (15744, pytest.approx(15744))
    assert gemm2.percent_of_floor == pytest.approx(100 * 15744 / 400)
    assert rows[stages.EXPERTS].floor is None


def test_largest_gap_is_the_most_time_above_a_roofline() -> None:
    """GEMM 1 (1100 us) has the largest gap, and the sort (5 us) the lowest percentage."""
    profile = make_sample_profile("A x B")
    rank = profile.pairs[0].slowest
    rows = tuple(
        replace(row, floor=replace(row.floor, us=us)) if row.floor else row
        for row, us in zip(rank.rows, (0, 0, 0.1, 0, 1000.0, 390.0), strict=True)
    )
    rank = replace(rank, rows=rows)
    assert rank.largest_gap_row is not None
    assert rank.largest_gap_row.stage == stages.GATHER_GEMM1
    assert rank.lowest_percent_row is not None
    assert rank.lowest_percent_row.stage == stages.SORT
    text = "\n".join(summary.describe_slowest_rank(replace(profile.pairs[0], ranks=(rank,))))
    assert "Largest gap to the roofline: permute+gemm1_activation, 1100 us against 1000" in text
    assert "Lowest percentage of roofline: sort, 2 %" in text


def test_interpreted_times_have_no_percentage() -> None:
    pair = make_sample_profile("A x B", machine=Machine("cpu", interpreter=True)).pairs[0]
    column = summary.STAGE_COLUMNS.index("% of floor")
    assert {row[column] for row in summary.make_stage_cells(pair.slowest)} > {summary.ABSENT}
    rank = replace(pair.slowest, total=replace(pair.slowest.total, mode=INTERPRETER))
    assert {row[column] for row in summary.make_stage_cells(rank)} == {summary.ABSENT}
    text = "\n".join(summary.describe_slowest_rank(replace(pair, ranks=(rank,))))
    assert "not a meaningful time" in text
    assert "floor" not in text


def test_summary_has_planned_and_eager_calls() -> None:
    profile = make_sample_profile("A x B")
    (rank,) = profile.pairs[0].ranks
    # Sum of the stage times, divided by the time from the first kernel to the last.
    assert rank.sum_to_span == pytest.approx(1505 / 1550)
    # Sum of the stage times, divided by the end-to-end time of a planned call.
    assert rank.sum_to_total == pytest.approx(1505 / 1500)
    text = "\n".join(summary.describe_slowest_rank(profile.pairs[0]))
    assert "1500 us, a planned call in a CUDA graph" in text
    assert "Stages: 1505 us of device time in 5 launches" in text
    assert "peak 3 MiB" in text
    assert profile.missing == ()


def test_slowest_rank_is_shown() -> None:
    profile = make_sample_profile("A x B", ranks=2)
    assert profile.pairs[0].slowest.rank == 1
    assert "rank 1, the slowest of 2" in summary.describe_slowest_rank(profile.pairs[0])[0]
    assert any("The link between ranks was not measured" in line for line in profile.missing)


def test_missing_measurements_are_noted() -> None:
    cpu = Machine("cpu", interpreter=True)
    missing = " ".join(make_sample_profile("A x B", machine=cpu).missing)
    assert "No GPU was traced" in missing
    assert "ran in the interpreter" in missing
    without_launch = {"traceEvents": [*make_call_events(), make_device_event("whose", 1710, 5, 77)]}
    assert "5.0 us of device work has no launch" in " ".join(
        make_sample_profile("A x B", trace=without_launch).missing
    )


def test_record_has_all_measurements() -> None:
    record = to_json_types(to_record(make_sample_profile("A x B", "C x D", ranks=2)))
    assert isinstance(record, dict)
    (rank, _) = record["pairs"][1]["ranks"]
    # 30 us of device time are in no stage.
    assert rank["coverage"] == pytest.approx(1505 / 1535)
    assert rank["furthest_from_floor"] in {row["stage"] for row in rank["stages"]}
    by_name = {row["stage"]: row for row in rank["stages"]}
    assert by_name[stages.GEMM2]["launches"] == 1
    assert by_name[stages.GEMM2]["percent_of_floor"] > 0
    assert record["output_difference"] == 0.003


class _PageChecker(HTMLParser):
    """A parser that collects tags closed in the wrong order, and external resources."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.faults: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.faults += [f"{tag} {k}" for k, v in attrs if k in ("src", "href") or "//" in (v or "")]
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}>")


@pytest.mark.parametrize("pairs", [("A x <B>",), ("A x <B>", "C x D")])
@pytest.mark.parametrize("ranks", [1, 2])
def test_page_is_well_formed_and_self_contained(pairs: tuple[str, ...], ranks: int) -> None:
    late_events = [event | {"ts": event.get("ts", 0) + 1e9} for event in make_call_events()]
    page = html.render_page(
        make_sample_profile(*pairs, ranks=ranks, trace={"traceEvents": late_events})
    )
    checker = _PageChecker()
    checker.feed(page)
    checker.close()
    assert (checker.faults, checker.open) == ([], [])
    assert not {"script", "link", "img", "iframe"} & set(checker.seen)
    assert re.findall(r"https?:|url\(|@import", page) == []
    assert "<B>" not in page
    assert "A x &lt;B&gt;" in page
    assert checker.seen.count("svg") == ranks * len(pairs)
    assert page.count("<figure>") == 2 * ranks * len(pairs) + (len(pairs) > 1)
    numbers = re.findall(r'(?:width|x1|x|y)="(-?[\d.]+|nan|inf)"', page)
    assert all(0 <= float(number) <= 1000 for number in numbers)
    shares = re.findall(r"(?:width|left):(-?[\d.]+|nan|inf)%;?[b\"]", page)
    assert len(shares) >= 5 * ranks * len(pairs)
    assert all(0 <= float(share) <= 100 for share in shares)
    # The times come first, before the tables and the description of the measurement.
    times_position = page.index('class="tiles"')
    assert times_position < page.index("<table>")
    assert times_position < page.index("<dl>")
