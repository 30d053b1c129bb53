"""Benchmark of transports over ranks.

Each transport is verified before it is timed, and a failure of one does not stop the others. Every
rank writes the result of each case to its own file at once, so that no result is lost if a rank
crashes or hangs later.
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
    distance,
)
from modular_kernel.bench.all2all.parts import PartTransport
from modular_kernel.bench.all2all.peers import load_peers
from modular_kernel.bench.all2all.records import ExchangeRow, row_of
from modular_kernel.bench.all2all.timing import Repeats, event_gap_us, time_transport
from modular_kernel.errors import ModularKernelError
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.measure.records import FAILED, OK, REFUSED, SKIPPED, WRONG
from modular_kernel.spec.problem import Machine

_START_S = 60.0  # seconds to start processes and communicators, in addition to the ranks' limits
_NO_ANSWER = "no answer"
_EXIT_STATUS = 3  # exit status of a rank that its RunWatch terminated


class RankRunner(Protocol):
    """Interface of a pool of ranks, such as modular_kernel.testing.ranks.pool.RankPool."""

    world_size: int

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float) -> list[Any]: ...

    def collect(self, read: Callable[[int], Any]) -> list[Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ExchangeOffer:
    """A transport to measure, which each rank creates with `make`.

    cells: the cases to run. alone: see Transport. path: the --peer file that defines the transport;
    None for one of our parts. seconds: time limit for a case, including `open`; a rank that exceeds
    it terminates its process.
    """

    name: str
    origin: str
    cells: tuple[ExchangeCase, ...]
    machine: Machine
    alone: bool = False
    path: Path | None = None
    seconds: float = 60.0  # some libraries compile in the first call

    def make(self) -> Transport:
        if self.path is None:
            return PartTransport(self.name, self.machine)
        return next(peer for peer in load_peers(self.path) if peer.name == self.name)


@dataclass(frozen=True)
class RankTask:
    """A task that is sent to the ranks. folder: each rank writes {rank}.jsonl there."""

    offer: ExchangeOffer
    repeats: Repeats
    folder: str


def run(
    offers: Iterable[ExchangeOffer],
    new_pool: Callable[[], RankRunner],
    *,
    link: TransportLink,
    repeats: Repeats,
    deadline_s: float | None = None,
) -> Iterator[tuple[ExchangeRow, ...]]:
    """Measure all offers; yield the rows of each.

    new_pool: starts the ranks; called at the start, and after each offer that has to run alone.
    link: the model for the floors. deadline_s: seconds after which no offer is started; the others
    are skipped.
    """
    started, pool = time.monotonic(), new_pool()
    try:
        for offer in offers:
            if deadline_s is not None and time.monotonic() - started > deadline_s:
                skips = [_skip_report("the deadline had passed")]
                yield tuple(
                    row_of(offer.name, offer.origin, cell, skips, link) for cell in offer.cells
                )
                continue
            yield tuple(_run_batches(offer, pool, link, repeats))
            if offer.alone:
                pool.close()
                pool = new_pool()
    finally:
        pool.close()


def _run_batches(
    offer: ExchangeOffer, pool: RankRunner, link: TransportLink, repeats: Repeats
) -> Iterator[ExchangeRow]:
    """Measure the cases of an offer in batches, and yield their rows.

    Cases of one format and capacity form a batch. They share the buffers of one `open`, and a
    failed case fails those after it. If the first case of a batch hangs, the other batches are
    skipped, because each would hang until its timeout.
    """
    has_hung = False
    for _, cells in groupby(offer.cells, key=lambda cell: (cell.quant, cell.capacity)):
        batch = replace(offer, cells=tuple(cells))
        if has_hung:
            skips = [_skip_report("after a hang")]
            yield from (row_of(offer.name, offer.origin, cell, skips, link) for cell in batch.cells)
            continue
        rows = _run_batch(batch, pool, link, repeats)
        has_hung = rows[0].status == FAILED and rows[0].note.startswith(_NO_ANSWER)
        yield from rows


def _run_batch(
    offer: ExchangeOffer, pool: RankRunner, link: TransportLink, repeats: Repeats
) -> tuple[ExchangeRow, ...]:
    """Measure the cases of an offer, all of one format and capacity, on all ranks."""
    failure = ""
    with tempfile.TemporaryDirectory(prefix="mk-exchange-") as folder:
        seconds = _START_S + 2 * len(offer.cells) + offer.seconds
        try:
            pool.run(measure, RankTask(offer, repeats, folder), timeout=seconds)
        except ModularKernelError as error:
            failure = _error_line(error)
        reports = pool.collect(lambda rank: _read(Path(folder, f"{rank}.jsonl")))
    rows, intact = [], True
    for index, cell in enumerate(offer.cells):
        cell_reports = [by_cell[index] for by_cell in reports if index in by_cell]
        if len(cell_reports) < pool.world_size:  # the first incomplete case caused the failure
            reason = {"note": failure or "a rank reported nothing", "error": None}
            cell_reports = (
                cell_reports if intact and cell_reports else [{"status": SKIPPED, **reason}]
            )
            cell_reports += [{"status": FAILED, **reason}] if intact else []
        intact = intact and all(report["status"] != FAILED for report in cell_reports)
        rows.append(row_of(offer.name, offer.origin, cell, cell_reports, link))
    return tuple(rows)


def _error_line(error: ModularKernelError) -> str:
    """Return the line of the error's message that names a dead rank, or else its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    dead = [line for line in lines if "died: " in line]
    return (dead or lines[-1:] or [type(error).__name__])[0][:300]


def _read(path: Path) -> dict[int, dict[str, Any]]:
    """Read a rank's file and return its first report on each case."""
    reports: dict[int, dict[str, Any]] = {}
    if not path.exists():
        return reports
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            report = json.loads(line)
        except json.JSONDecodeError:  # the writer was killed in this line
            break
        reports.setdefault(report["cell"], report)
    return reports


# --------------------------------------------------------------------------------- on the ranks


def measure(rank: int, world_size: int, group: Any, task: RankTask) -> None:
    """Measure a batch on this rank, and write each result to the rank's file at once."""
    cuda = task.offer.machine.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    context = RankContext(rank, world_size, group, device)
    with Path(task.folder, f"{rank}.jsonl").open("w", encoding="utf-8") as file:
        writer = ResultWriter(file)
        with RunWatch(task.offer.seconds, writer) as watch:
            for report in _measure_batch(task, task.offer.cells, context, writer):
                writer.write(report)
                writer.cell += 1
                watch.progress()


class ResultWriter:
    """Writer of a rank's result file. cell: index of the current case.

    Only the first report on a case counts. A rank that fails writes its report before it
    communicates with the other ranks, because they may be blocked in another collective.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.cell = 0

    def write(self, result: dict[str, Any]) -> None:
        self._file.write(json.dumps({"cell": self.cell, "at": time.monotonic(), **result}) + "\n")
        self._file.flush()

    def report_failure(self, note: str, error: float | None = None) -> dict[str, Any]:
        """Return the report of a failed case.

        note: the reason, or "" if another rank failed. With a reason, the report is also written.
        """
        report = {"status": FAILED, "note": note or "another rank failed", "error": error}
        if note:
            self.write(report)
        return report


class RunWatch:
    """Context manager that terminates this process after `seconds` without progress.

    A rank that hangs inside a library cannot be interrupted in any other way.
    """

    def __init__(self, seconds: float, writer: ResultWriter) -> None:
        self._seconds, self._writer = seconds, writer
        self._deadline = time.monotonic() + seconds
        self._done = threading.Event()

    def __enter__(self) -> "RunWatch":
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def progress(self) -> None:
        self._deadline = time.monotonic() + self._seconds

    def _watch(self) -> None:
        while not self._done.wait(0.1):
            if time.monotonic() > self._deadline:
                self._writer.report_failure(f"{_NO_ANSWER} within {self._seconds:g} s")
                os._exit(_EXIT_STATUS)


def event_gap(rank: int, world_size: int, group: Any) -> float | None:
    """Return `event_gap_us` of this rank's device."""
    cuda = torch.cuda.is_available() and dist.get_backend(group) == "nccl"
    return event_gap_us(torch.device("cuda" if cuda else "cpu"))


def _measure_batch(
    task: RankTask, cells: Sequence[ExchangeCase], context: RankContext, writer: ResultWriter
) -> Iterator[dict[str, Any]]:
    """Measure the cases on this rank, and yield a report on each."""
    transport, reason, report = None, "", _skip_report("after a failure")
    try:
        transport = task.offer.make()
        reason = transport.refusal(cells[0])
        if reason:
            report = {"status": REFUSED, "note": reason, "error": None}
        else:
            with prefer_torch_reference(enabled=not transport.interpreted):
                transport.open(cells[0], context)
    # A peer can raise anything, and the other transports must still be measured.
    except Exception as error:  # noqa: BLE001
        reason = _short_error(error)
        writer.report_failure(reason)
    if not _all_ranks(context, not reason) or transport is None:
        if report["status"] == SKIPPED:
            yield writer.report_failure("")
            cells = cells[1:]
        yield from (report for _ in cells)
        _close(transport)
        return
    broken = ""
    for cell in cells:
        with prefer_torch_reference(enabled=not transport.interpreted):
            report = (
                _skip_report(broken)
                if broken
                else _measure_cell(transport, cell, context, task, writer)
            )
        if report["status"] == FAILED:
            broken = "after a failure"
        yield report
    _close(transport)


def _measure_cell(
    transport: Transport,
    cell: ExchangeCase,
    context: RankContext,
    task: RankTask,
    writer: ResultWriter,
) -> dict[str, Any]:
    """Verify the transport in one case, time it, and return the report.

    After each step, ranks exchange whether it succeeded, so that none waits for a failed rank.
    """
    note, error, times = "", float("inf"), None
    inputs = ExchangeInputs.of(cell, 0 if transport.replicated else context.rank, context.device)
    try:
        transport.load(inputs)
        error = max(_run_and_check(transport, inputs) for _ in range(2))
    except Exception as failure:  # noqa: BLE001  as above
        note = _short_error(failure)
        writer.report_failure(note)
    if not _all_ranks(context, not note):
        return writer.report_failure("")
    if not _all_ranks(context, error <= cell.bound):
        reason = f"a row is {error:.1e} away from x, more than {cell.bound:.1e}"
        status = WRONG if error > cell.bound else SKIPPED
        return {"status": status, "note": reason if status == WRONG else "", "error": error}
    try:
        times = time_transport(
            transport, inputs, context, task.repeats, partial(_all_ranks, context)
        )
        transport.settle()
    except Exception as failure:  # noqa: BLE001  as above
        note = _short_error(failure)
        writer.report_failure(note, error)
    if not _all_ranks(context, not note):
        return writer.report_failure("", error)
    assert times is not None
    error = max(error, times.error)
    if error > cell.bound:
        return {"status": WRONG, "note": f"a replay is {error:.1e} away from x", "error": error}
    return {"status": OK, "note": transport.note, **asdict(replace(times, error=error))}


def _run_and_check(transport: Transport, inputs: ExchangeInputs) -> float:
    """Run a dispatch and a combine; return the error of the result."""
    transport.dispatch()
    transport.identity()
    out = transport.combine()
    transport.settle()
    error = distance(out, transport.expected(inputs))
    out.fill_(float("nan"))  # so that values which the next call does not write are detected
    return error


def _all_ranks(context: RankContext, ok: bool) -> bool:
    """Return whether `ok` is true on all ranks."""
    all_ok = torch.tensor([float(ok)], device=context.device)
    dist.all_reduce(all_ok, op=dist.ReduceOp.MIN, group=context.group)
    return bool(all_ok.item())


def _close(transport: Transport | None) -> None:
    try:
        if transport is not None:
            transport.close()
    except Exception:  # noqa: BLE001, S110  its rows are already reported
        pass


def _skip_report(reason: str) -> dict[str, Any]:
    return {"status": SKIPPED, "note": reason, "error": None}


def _short_error(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
