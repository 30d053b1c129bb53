"""The result of `mk profile`: end-to-end times, and the stages of every rank with rooflines."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modular_kernel.measure.environment import Environment
from modular_kernel.measure.records import INTERPRETER
from modular_kernel.measure.roofline import Peaks, Roofline, compute_roofline, compute_work
from modular_kernel.measure.routing_patterns import Load
from modular_kernel.measure.stage_roofline import (
    RankLoad,
    StageWork,
    compute_stage_roofline,
    compute_stage_works,
)
from modular_kernel.process_status import ProcessState, get_all_states
from modular_kernel.profiling.chrome import Trace, barrier_spread_us
from modular_kernel.profiling.events import UNATTRIBUTED, CallTimes, find_calls, select_median_call
from modular_kernel.profiling.record import EndToEndTime, Memory, PairRecord, ProfileJob, RankRecord
from modular_kernel.spec.problem import Machine, Problem


@dataclass(frozen=True)
class StageRow:
    """One stage of one call on one rank, with the fields of StageTime.

    work: flops and bytes of the stage; None if there is no roofline model of the stage.
    floor: its roofline; None if there is no roofline model of the stage.
    """

    stage: str
    is_stage: bool
    entered: int
    host_us: float
    device_us: float | None
    launches: int | None
    us: float
    work: StageWork | None
    floor: Roofline | None

    @property
    def percent_of_floor(self) -> float | None:
        """Roofline divided by the measured time, in percent; 100 is optimal."""
        if self.floor is None or not self.us:
            return None
        return 100 * self.floor.us / self.us

    @property
    def gap_us(self) -> float | None:
        """Microseconds above the roofline; None without a roofline."""
        return None if self.floor is None else self.us - self.floor.us


@dataclass(frozen=True)
class RankProfile:
    """Profile of one pairing on one rank.

    call: the traced call with the median span.
    calls: number of traced calls.
    total: end-to-end time of planned calls.
    floor: roofline of the layer on this rank, without links.
    """

    rank: int
    trace: Path
    rows: tuple[StageRow, ...]
    call: CallTimes
    calls: int
    total: EndToEndTime
    memory: Memory
    load: RankLoad
    floor: Roofline

    @property
    def sum_us(self) -> float:
        """Sum of the stage times in microseconds."""
        return self.call.staged_us

    @property
    def coverage(self) -> float:
        """Fraction of the call's time that is in stages, 0 to 1."""
        return self.call.coverage

    @property
    def sum_to_span(self) -> float:
        """Sum of the stage times divided by the span of the traced call."""
        return _divide_or_nan(self.sum_us, self.call.span_us)

    @property
    def sum_to_total(self) -> float:
        """Sum of the stage times divided by the end-to-end time of a planned call."""
        return _divide_or_nan(self.sum_us, self.total.us)

    @property
    def is_timed(self) -> bool:
        """Whether the times are meaningful, which requires that kernels were not interpreted."""
        return self.total.mode != INTERPRETER

    @property
    def largest_gap_row(self) -> StageRow | None:
        """The stage with the most time above its roofline; None if kernels were interpreted."""
        rows = [row for row in self.rows if row.gap_us is not None and self.is_timed]
        return max(rows, key=lambda row: row.gap_us or 0.0, default=None)

    @property
    def lowest_percent_row(self) -> StageRow | None:
        """The stage with the lowest percentage of roofline; None if kernels were interpreted."""
        rows = [row for row in self.rows if row.percent_of_floor is not None and self.is_timed]
        return min(rows, key=lambda row: row.percent_of_floor or 0.0, default=None)


@dataclass(frozen=True)
class PairProfile:
    """Profile of one pairing on all ranks.

    merged_trace: trace file of all ranks; None for a single rank.
    barrier_spread_us: see `modular_kernel.profiling.chrome`.
    """

    pairing: str
    ranks: tuple[RankProfile, ...]
    merged_trace: Path | None
    barrier_spread_us: float | None

    @property
    def slowest(self) -> RankProfile:
        """The rank with the longest planned call, which determines the time of the layer."""
        return max(self.ranks, key=lambda rank: rank.total.us)


@dataclass(frozen=True)
class Profile:
    """The result of `mk profile`.

    link: bytes per second between two GPUs, if measured.
    difference: maximum over ranks of `RankRecord.difference`.
    missing: sentences about values that could not be measured.
    states: process-wide settings that affect which kernels run.
    """

    problem: Problem
    machine: Machine
    routing: str
    environment: Environment
    peaks: Peaks
    link: float | None
    pairs: tuple[PairProfile, ...]
    difference: float | None
    missing: tuple[str, ...]
    states: tuple[ProcessState, ...] = ()


def make_profile(
    job: ProfileJob,
    records: Sequence[RankRecord],
    traces: Sequence[Sequence[Trace]],
    merged_traces: Sequence[Path | None],
) -> Profile:
    """Build the profile from the records of all ranks.

    traces: parsed traces, indexed by pairing and rank.
    merged_traces: path of the merged trace of each pairing, or None.
    """
    problem, machine = job.problem, job.machine
    pairs = tuple(
        PairProfile(
            records[0].pairs[index].pairing,
            tuple(
                _make_rank_profile(record, record.pairs[index], trace, problem, machine)
                for record, trace in zip(records, rank_traces, strict=True)
            ),
            merged_traces[index],
            barrier_spread_us(rank_traces),
        )
        for index, rank_traces in enumerate(traces)
    )
    first_record = records[0]
    differences = [r.difference for r in records if r.difference is not None]
    return Profile(
        problem,
        machine,
        str(job.routing),
        first_record.environment,
        first_record.peaks,
        first_record.link,
        pairs,
        max(differences, default=None),
        tuple(_describe_missing(pairs, machine, first_record.link)),
        get_all_states(),
    )


def _make_rank_profile(
    record: RankRecord, recorded: PairRecord, trace: Trace, problem: Problem, machine: Machine
) -> RankProfile:
    calls = find_calls(trace["traceEvents"], on_gpu=machine.device == "cuda")
    call = select_median_call(calls)
    names = [time.stage for time in call.times if time.is_stage]
    works = compute_stage_works(names, problem, problem.scheme, record.load)
    floors = {
        name: compute_stage_roofline(work, problem, problem.scheme, record.peaks, record.link)
        for name, work in works.items()
    }
    return RankProfile(
        rank=record.rank,
        trace=recorded.trace,
        rows=_make_stage_rows(call, works, floors),
        call=call,
        calls=len(calls),
        total=recorded.total,
        memory=recorded.memory,
        load=record.load,
        floor=_compute_layer_floor(record, problem),
    )


def _make_stage_rows(
    call: CallTimes, works: Mapping[str, StageWork], floors: Mapping[str, Roofline]
) -> tuple[StageRow, ...]:
    return tuple(
        StageRow(
            stage=time.stage,
            is_stage=time.is_stage,
            entered=time.entered,
            host_us=time.host_us,
            device_us=time.device_us,
            launches=time.launches,
            us=time.us,
            work=works.get(time.stage),
            floor=floors.get(time.stage),
        )
        for time in call.times
    )


def _compute_layer_floor(record: RankRecord, problem: Problem) -> Roofline:
    """Return the roofline of the layer on one rank.

    The layer has the flops of both GEMMs, and the bytes of x, y and the weights of experts with a
    token.
    """
    load = Load(record.load.pairs, record.load.touched, 0.0)
    work = compute_work(problem, problem.scheme, [load])
    return compute_roofline(work, problem, problem.scheme, record.peaks)


def _describe_missing(
    pairs: Sequence[PairProfile], machine: Machine, link: float | None
) -> list[str]:
    """Return sentences about values that could not be measured."""
    notes = []
    if machine.device != "cuda":
        notes.append(
            "No GPU was traced: there are no device times, launch counts or allocator peaks. Stage "
            "times are host times, and the total is wall-clock time without a CUDA graph."
        )
        if machine.interpreter:
            notes.append(
                "Triton kernels, if any, ran in the interpreter, so their times are meaningless."
            )
    ranks = [rank for pair in pairs for rank in pair.ranks]
    if len(pairs[0].ranks) > 1 and link is None:
        notes.append(
            "The link between ranks was not measured: rooflines of exchanges count only memory."
        )
    if machine.device == "cuda" and any(rank.total.mode == "eager" for rank in ranks):
        notes.append(
            "A pairing cannot be captured in a CUDA graph: its end-to-end time is of eager calls."
        )
    unattributed_us = sum(
        row.us for rank in ranks for row in rank.rows if row.stage == UNATTRIBUTED
    )
    if unattributed_us:
        notes.append(
            f"{unattributed_us:.1f} us of device work has no launch in the traces, so it belongs "
            "to no stage."
        )
    stages_without_model = {
        row.stage for rank in ranks for row in rank.rows if row.is_stage and row.floor is None
    }
    if stages_without_model:
        notes.append(f"There is no roofline model for {', '.join(sorted(stages_without_model))}.")
    return notes


def to_record(profile: Profile) -> dict[str, Any]:
    """Return the JSON record of a profile.

    The stages of the first pairing on rank 0 are repeated at the top level, because most profiles
    have only one pairing and one rank.
    """
    pairs = [_make_pair_record(pair) for pair in profile.pairs]
    return {
        "pairing": profile.pairs[0].pairing,
        "problem": profile.problem,
        "routing": profile.routing,
        "traces": [str(rank.trace) for rank in profile.pairs[0].ranks],
        "merged_trace": pairs[0]["merged_trace"],
        "stages": pairs[0]["ranks"][0]["stages"],
        "pairs": pairs,
        "output_difference": profile.difference,
        "missing": profile.missing,
        "states": profile.states,
        "environment": profile.environment,
        "peaks": profile.peaks,
        "link_bytes_per_s": profile.link,
    }


def _make_pair_record(pair: PairProfile) -> dict[str, Any]:
    return {
        "pairing": pair.pairing,
        "merged_trace": None if pair.merged_trace is None else str(pair.merged_trace),
        "barrier_spread_us": pair.barrier_spread_us,
        "slowest_rank": pair.slowest.rank,
        "ranks": [_make_rank_record(rank) for rank in pair.ranks],
    }


def _make_rank_record(rank: RankProfile) -> dict[str, Any]:
    largest_gap_row, lowest = rank.largest_gap_row, rank.lowest_percent_row
    return {
        "rank": rank.rank,
        "trace": str(rank.trace),
        "stages": [vars(row) | {"percent_of_floor": row.percent_of_floor} for row in rank.rows],
        "sum_of_stages_us": rank.sum_us,
        "coverage": rank.coverage,
        "call": {"span_us": rank.call.span_us, "host_us": rank.call.host_us},
        "traced_calls": rank.calls,
        "launches": rank.call.launches,
        "total": vars(rank.total) | {"spread": rank.total.spread},
        "sum_to_span": rank.sum_to_span,
        "sum_to_total": rank.sum_to_total,
        "furthest_from_floor": None if largest_gap_row is None else largest_gap_row.stage,
        "least_percent_of_floor": None if lowest is None else lowest.stage,
        "layer_floor": rank.floor,
        "load": rank.load,
        "workspace_bytes": rank.memory.workspace,
        "peak_bytes": rank.memory.peak,
        "prepared_bytes": rank.memory.prepared,
    }


def _divide_or_nan(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
