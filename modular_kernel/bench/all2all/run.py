"""Runs the benchmark of `mk exchange`: dispatch and combine of several transports over ranks.

The main process sends the transports one by one to a pool of ranks and reads the results. Each
transport is verified before it is timed. If it fails, the other transports still run. A rank
immediately writes the result of each case to its own file, so that a later crash or hang does not
lose it.
"""

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
import torch.distributed as dist

from modular_kernel.bench.all2all.cases import (
    ExchangeCase,
    ExchangeInputs,
    RankContext,
    Transport,
    TransportLink,
    load_transports,
    max_row_error,
)
from modular_kernel.bench.all2all.parts import PartTransport
from modular_kernel.bench.all2all.records import ExchangeRow, make_row
from modular_kernel.bench.all2all.timing import Repeats, measure_event_gap, time_transport
from modular_kernel.errors import ModularKernelError
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.measure.records import FAILED, OK, REFUSED, SKIPPED, WRONG
from modular_kernel.spec.problem import Machine

_START_SECONDS = 60.0  # added to the time limit of a batch, to start processes and communicators
_HANG_NOTE = "no answer"  # start of the note of a rank that hung
_HANG_EXIT_STATUS = 3  # exit status of a rank that its HangWatchdog terminated


class RankRunner(Protocol):
    """Interface of a pool of ranks, such as modular_kernel.testing.ranks.pool.RankPool."""

    world_size: int

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float) -> list[Any]: ...

    def collect(self, read: Callable[[int], Any]) -> list[Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class TransportJob:
    """A transport to measure, which each rank creates with `make`, and the cases to run.

    needs_fresh_ranks: see Transport.
    path: the --peer file that defines the transport; None for one of our parts.
    seconds: time limit for a case, including `open`. A rank that exceeds it terminates its process.
    """

    name: str
    origin: str
    cases: tuple[ExchangeCase, ...]
    machine: Machine
    needs_fresh_ranks: bool = False
    path: Path | None = None
    seconds: float = 60.0  # some libraries compile in the first call

    def make(self) -> Transport:
        if self.path is None:
            return PartTransport(self.name, self.machine)
        return next(peer for peer in load_transports(self.path) if peer.name == self.name)


@dataclass(frozen=True)
class RankTask:
    """The argument of `measure_on_rank`.

    folder: folder in which each rank writes {rank}.jsonl.
    """

    job: TransportJob
    repeats: Repeats
    folder: str


def run(
    jobs: Iterable[TransportJob],
    make_pool: Callable[[], RankRunner],
    *,
    link: TransportLink,
    repeats: Repeats,
    start_limit_s: float | None = None,
) -> Iterator[tuple[ExchangeRow, ...]]:
    """Measure the transport of each job, and yield its rows.

    make_pool: starts the ranks. It is called at the start, and after each job that needs fresh
        ranks.
    link: model of the link, for rooflines.
    start_limit_s: seconds after which no job is started. The rows of the remaining jobs are
        skipped.
    """
    started, pool = time.monotonic(), make_pool()
    try:
        for job in jobs:
            if start_limit_s is not None and time.monotonic() - started > start_limit_s:
                skip_reports = [_make_skip_report("the deadline had passed")]
                yield tuple(
                    make_row(job.name, job.origin, case, skip_reports, link) for case in job.cases
                )
                continue
            yield tuple(_run_batches(job, pool, link, repeats))
            if job.needs_fresh_ranks:
                pool.close()
                pool = make_pool()
    finally:
        pool.close()


def _run_batches(
    job: TransportJob, pool: RankRunner, link: TransportLink, repeats: Repeats
) -> Iterator[ExchangeRow]:
    """Measure the cases of a job in batches, and yield their rows.

    A batch consists of the cases of one format and capacity. These cases share the buffers of one
    `open`, so the cases after a failed case are skipped. If the first case of a batch hangs, the
    remaining batches are skipped, because they would also hang until their time limits.
    """
    has_hung = False
    for _, cases in groupby(job.cases, key=lambda case: (case.quant, case.capacity)):
        batch = replace(job, cases=tuple(cases))
        if has_hung:
            skip_reports = [_make_skip_report("after a hang")]
            yield from (
                make_row(job.name, job.origin, case, skip_reports, link) for case in batch.cases
            )
            continue
        rows = _run_batch(batch, pool, link, repeats)
        has_hung = rows[0].status == FAILED and rows[0].note.startswith(_HANG_NOTE)
        yield from rows


def _run_batch(
    job: TransportJob, pool: RankRunner, link: TransportLink, repeats: Repeats
) -> tuple[ExchangeRow, ...]:
    """Measure the cases of a job, which have the same format and capacity, on all ranks."""
    failure = ""
    with tempfile.TemporaryDirectory(prefix="mk-exchange-") as folder:
        seconds = _START_SECONDS + 2 * len(job.cases) + job.seconds
        try:
            pool.run(measure_on_rank, RankTask(job, repeats, folder), timeout=seconds)
        except ModularKernelError as error:
            failure = _select_error_line(error)
        reports = pool.collect(lambda rank: _read_reports(Path(folder, f"{rank}.jsonl")))
    rows, none_failed = [], True
    for index, case in enumerate(job.cases):
        case_reports = [by_case[index] for by_case in reports if index in by_case]
        # A rank crashed or hung in the first case that not all ranks reported. That case failed,
        # and all later cases are skipped.
        if len(case_reports) < pool.world_size:
            reason = {"note": failure or "a rank reported nothing", "error": None}
            case_reports = (
                case_reports if none_failed and case_reports else [{"status": SKIPPED, **reason}]
            )
            case_reports += [{"status": FAILED, **reason}] if none_failed else []
        none_failed = none_failed and all(report["status"] != FAILED for report in case_reports)
        rows.append(make_row(job.name, job.origin, case, case_reports, link))
    return tuple(rows)


def _select_error_line(error: ModularKernelError) -> str:
    """Return the line of the error's message that names a dead rank, or its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    dead_rank_lines = [line for line in lines if "died: " in line]
    return (dead_rank_lines or lines[-1:] or [type(error).__name__])[0][:300]


def _read_reports(path: Path) -> dict[int, dict[str, Any]]:
    """Read a rank's file and return its first report on each case."""
    reports: dict[int, dict[str, Any]] = {}
    if not path.exists():
        return reports
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            report = json.loads(line)
        except json.JSONDecodeError:  # the writer was killed while it wrote this line
            break
        reports.setdefault(report["case"], report)
    return reports


# The functions and classes below run on the ranks.


def measure_on_rank(rank: int, world_size: int, group: Any, task: RankTask) -> None:
    """Measure a batch on this rank, and immediately write each result to this rank's file."""
    on_gpu = task.job.machine.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    context = RankContext(rank, world_size, group, device)
    with Path(task.folder, f"{rank}.jsonl").open("w", encoding="utf-8") as file:
        writer = ResultWriter(file)
        with HangWatchdog(task.job.seconds, writer) as watchdog:
            for report in _measure_batch(task, task.job.cases, context, writer):
                writer.write(report)
                writer.case_index += 1
                watchdog.restart()


class ResultWriter:
    """Writes a rank's result file.

    The main process reads only the first report on a case. A rank that fails writes its report
    before it communicates with the other ranks, because they may be blocked in another collective.

    case_index: index of the current case.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.case_index = 0

    def write(self, result: dict[str, Any]) -> None:
        self._file.write(
            json.dumps({"case": self.case_index, "at": time.monotonic(), **result}) + "\n"
        )
        self._file.flush()

    def report_failure(self, note: str, error: float | None = None) -> dict[str, Any]:
        """Return the report of a failed case, and write it if this rank failed.

        note: the reason, or "" if another rank failed.
        """
        report = {"status": FAILED, "note": note or "another rank failed", "error": error}
        if note:
            self.write(report)
        return report


class HangWatchdog:
    """Context manager that terminates this process after `seconds` without progress.

    A rank that hangs inside a library cannot be interrupted in any other way.
    """

    def __init__(self, seconds: float, writer: ResultWriter) -> None:
        self._seconds, self._writer = seconds, writer
        self._deadline = time.monotonic() + seconds
        self._done = threading.Event()

    def __enter__(self) -> "HangWatchdog":
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def restart(self) -> None:
        """Report progress, which restarts the time limit."""
        self._deadline = time.monotonic() + self._seconds

    def _watch(self) -> None:
        while not self._done.wait(0.1):
            if time.monotonic() > self._deadline:
                self._writer.report_failure(f"{_HANG_NOTE} within {self._seconds:g} s")
                os._exit(_HANG_EXIT_STATUS)


def measure_event_gap_on_rank(rank: int, world_size: int, group: Any) -> float | None:
    on_gpu = torch.cuda.is_available() and dist.get_backend(group) == "nccl"
    return measure_event_gap(torch.device("cuda" if on_gpu else "cpu"))


def _measure_batch(
    task: RankTask, cases: Sequence[ExchangeCase], context: RankContext, writer: ResultWriter
) -> Iterator[dict[str, Any]]:
    """Measure the cases on this rank, and yield a report on each."""
    transport, reason, report = None, "", _make_skip_report("after a failure")
    try:
        transport = task.job.make()
        reason = transport.refusal(cases[0])
        if reason:
            report = {"status": REFUSED, "note": reason, "error": None}
        else:
            with prefer_torch_reference(enabled=not transport.interpreted):
                transport.open(cases[0], context)
    # A peer can raise any exception. The other transports must still be measured.
    except Exception as error:  # noqa: BLE001
        reason = _format_error(error)
        writer.report_failure(reason)
    if not _is_true_on_all_ranks(context, not reason) or transport is None:
        if report["status"] == SKIPPED:
            yield writer.report_failure("")
            cases = cases[1:]
        yield from (report for _ in cases)
        _close(transport)
        return
    skip_reason = ""
    for case in cases:
        with prefer_torch_reference(enabled=not transport.interpreted):
            report = (
                _make_skip_report(skip_reason)
                if skip_reason
                else _measure_case(transport, case, context, task, writer)
            )
        if report["status"] == FAILED:
            skip_reason = "after a failure"
        yield report
    _close(transport)


def _measure_case(
    transport: Transport,
    case: ExchangeCase,
    context: RankContext,
    task: RankTask,
    writer: ResultWriter,
) -> dict[str, Any]:
    """Verify the transport in one case, time it, and return the report.

    After each step, the ranks agree on whether the step succeeded on every rank, because they could
    otherwise wait for a failed rank in a collective.
    """
    failure_note, error, times = "", float("inf"), None
    inputs = ExchangeInputs.from_case(
        case, 0 if transport.replicated else context.rank, context.device
    )
    try:
        transport.load(inputs)
        error = max(_run_and_check(transport, inputs) for _ in range(2))
    except Exception as exception:  # noqa: BLE001  a peer can raise anything
        failure_note = _format_error(exception)
        writer.report_failure(failure_note)
    if not _is_true_on_all_ranks(context, not failure_note):
        return writer.report_failure("")
    if not _is_true_on_all_ranks(context, error <= case.bound):
        error_note = f"a row is {error:.1e} away from x, more than {case.bound:.1e}"
        status = WRONG if error > case.bound else SKIPPED
        return {"status": status, "note": error_note if status == WRONG else "", "error": error}
    try:
        times = time_transport(
            transport, inputs, context, task.repeats, partial(_is_true_on_all_ranks, context)
        )
        transport.raise_async_errors()
    except Exception as exception:  # noqa: BLE001  a peer can raise anything
        failure_note = _format_error(exception)
        writer.report_failure(failure_note, error)
    if not _is_true_on_all_ranks(context, not failure_note):
        return writer.report_failure("", error)
    assert times is not None
    error = max(error, times.error)
    if error > case.bound:
        return {"status": WRONG, "note": f"a replay is {error:.1e} away from x", "error": error}
    return {"status": OK, "note": transport.note, **asdict(replace(times, error=error))}


def _run_and_check(transport: Transport, inputs: ExchangeInputs) -> float:
    """Run a dispatch and a combine, and return the maximum relative error of a row."""
    transport.dispatch()
    transport.identity()
    out = transport.combine()
    transport.raise_async_errors()
    error = max_row_error(out, transport.compute_expected(inputs))
    out.fill_(float("nan"))  # so that NaN remains where the next `combine` does not write
    return error


def _is_true_on_all_ranks(context: RankContext, ok: bool) -> bool:
    all_ok = torch.tensor([float(ok)], device=context.device)
    dist.all_reduce(all_ok, op=dist.ReduceOp.MIN, group=context.group)
    return bool(all_ok.item())


def _close(transport: Transport | None) -> None:
    try:
        if transport is not None:
            transport.close()
    except Exception:  # noqa: BLE001, S110  the results of the transport are already written
        pass


def _make_skip_report(reason: str) -> dict[str, Any]:
    return {"status": SKIPPED, "note": reason, "error": None}


def _format_error(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
