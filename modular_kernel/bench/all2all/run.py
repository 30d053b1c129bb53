"""Runs transports over ranks: checked before they are timed, and no failure stops the others.

Every rank writes what became of a cell into a file of its own at once, so that what was measured
before a rank died, or hung and was ended, is not lost.
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
    Place,
    Transport,
    TransportLink,
    distance,
)
from modular_kernel.bench.all2all.parts import PartTransport
from modular_kernel.bench.all2all.peers import load_peers
from modular_kernel.bench.all2all.records import ExchangeRow, row_of
from modular_kernel.bench.all2all.timing import Repeats, event_gap_us, time_transport
from modular_kernel.errors import ModularKernelError
from modular_kernel.machine import torch_twins
from modular_kernel.measure.records import FAILED, OK, REFUSED, SKIPPED, WRONG
from modular_kernel.spec.problem import Machine

_START_S = 60.0  # processes, communicators; beyond what a rank's own watch ends
_HANG = "no answer"
_CODE = 3  # of a process that its watch ended


class RankRunner(Protocol):
    """What a pool of ranks does; modular_kernel.testing.ranks.pool.RankPool is one."""

    world_size: int

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float) -> list[Any]: ...

    def collect(self, read: Callable[[int], Any]) -> list[Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ExchangeOffer:
    """A transport that ranks make for themselves: a part's, or one of a file of peers.

    cells: those it is to serve. seconds: that one of them may take, `open` included; a rank that
    takes longer ends its process.
    """

    name: str
    origin: str
    cells: tuple[ExchangeCase, ...]
    machine: Machine
    alone: bool = False
    path: Path | None = None
    seconds: float = 60.0  # some libraries compile at a first call

    def make(self) -> Transport:
        if self.path is None:
            return PartTransport(self.name, self.machine)
        return next(each for each in load_peers(self.path) if each.name == self.name)


@dataclass(frozen=True)
class RankTask:
    """What a rank is sent. folder: where it writes {rank}.jsonl."""

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
    """Yield the rows of each offer in turn.

    An offer whose turn came after `deadline_s` is skipped.
    """
    started, pool = time.monotonic(), new_pool()
    try:
        for offer in offers:
            if deadline_s is not None and time.monotonic() - started > deadline_s:
                told = [_skipped("the deadline had passed")]
                yield tuple(
                    row_of(offer.name, offer.origin, cell, told, link) for cell in offer.cells
                )
                continue
            yield tuple(_by_batches(offer, pool, link, repeats))
            if offer.alone:
                pool.close()
                pool = new_pool()
    finally:
        pool.close()


def _by_batches(
    offer: ExchangeOffer, pool: RankRunner, link: TransportLink, repeats: Repeats
) -> Iterator[ExchangeRow]:
    """Cells of one capacity and format share what `open` made, and what goes wrong. After a hang
    in the first cell of some, no others are tried: each would take as long."""
    hung = False
    for _, cells in groupby(offer.cells, key=lambda cell: (cell.quant, cell.capacity)):
        part = replace(offer, cells=tuple(cells))
        if hung:
            told = [_skipped("after a hang")]
            yield from (row_of(offer.name, offer.origin, cell, told, link) for cell in part.cells)
            continue
        rows = _rows(part, pool, link, repeats)
        hung = rows[0].status == FAILED and rows[0].note.startswith(_HANG)
        yield from rows


def _rows(
    offer: ExchangeOffer, pool: RankRunner, link: TransportLink, repeats: Repeats
) -> tuple[ExchangeRow, ...]:
    trouble = ""
    with tempfile.TemporaryDirectory(prefix="mk-exchange-") as folder:
        seconds = _START_S + 2 * len(offer.cells) + offer.seconds
        try:
            pool.run(measure, RankTask(offer, repeats, folder), timeout=seconds)
        except ModularKernelError as error:
            trouble = _gist(error)
        told = pool.collect(lambda rank: _read(Path(folder, f"{rank}.jsonl")))
    rows, reached = [], True
    for index, cell in enumerate(offer.cells):
        of_ranks = [of_rank[index] for of_rank in told if index in of_rank]
        if len(of_ranks) < pool.world_size:  # the first cell that is missing is what broke it
            why = {"note": trouble or "a rank told nothing", "error": None}
            of_ranks = of_ranks if reached and of_ranks else [{"status": SKIPPED, **why}]
            of_ranks += [{"status": FAILED, **why}] if reached else []
        reached = reached and all(one["status"] != FAILED for one in of_ranks)
        rows.append(row_of(offer.name, offer.origin, cell, of_ranks, link))
    return tuple(rows)


def _gist(error: ModularKernelError) -> str:
    """Name the rank that died, if one did; else return the end of a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    died = [line for line in lines if "died: " in line]
    return (died or lines[-1:] or [type(error).__name__])[0][:300]


def _read(path: Path) -> dict[int, dict[str, Any]]:
    """Read what a rank told of each cell first."""
    found: dict[int, dict[str, Any]] = {}
    if not path.exists():
        return found
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            told = json.loads(line)
        except json.JSONDecodeError:  # its writer was ended
            break
        found.setdefault(told["cell"], told)
    return found


# --------------------------------------------------------------------------------- on the ranks


def measure(rank: int, world_size: int, group: Any, task: RankTask) -> None:
    """Every cell of an offer, of one capacity and format, each told as soon as it is known."""
    cuda = task.offer.machine.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    place = Place(rank, world_size, group, device)
    with Path(task.folder, f"{rank}.jsonl").open("w", encoding="utf-8") as file:
        teller = Teller(file)
        with RunWatch(task.offer.seconds, teller) as watch:
            for told in _batch(task, task.offer.cells, place, teller):
                teller.tell(told)
                teller.cell += 1
                watch.progress()


class Teller:
    """A rank's file, and the cell it is at. What it told first of a cell counts: a rank that fails
    says so before it asks the others, who may be waiting for it somewhere else."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.cell = 0

    def tell(self, told: dict[str, Any]) -> None:
        self._file.write(json.dumps({"cell": self.cell, "at": time.monotonic(), **told}) + "\n")
        self._file.flush()

    def failed(self, note: str, error: float | None = None) -> dict[str, Any]:
        """Return the row of a cell that failed, told at once if this rank knows why."""
        told = {"status": FAILED, "note": note or "another rank failed", "error": error}
        if note:
            self.tell(told)
        return told


class RunWatch:
    """Ends this process, a rank of a pool, when there was no progress for `seconds`: whoever waits
    inside a library cannot be called back."""

    def __init__(self, seconds: float, teller: Teller) -> None:
        self._seconds, self._teller = seconds, teller
        self._until = time.monotonic() + seconds
        self._done = threading.Event()

    def __enter__(self) -> "RunWatch":
        threading.Thread(target=self._look, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def progress(self) -> None:
        self._until = time.monotonic() + self._seconds

    def _look(self) -> None:
        while not self._done.wait(0.1):
            if time.monotonic() > self._until:
                self._teller.failed(f"{_HANG} within {self._seconds:g} s")
                os._exit(_CODE)


def gap(rank: int, world_size: int, group: Any) -> float | None:
    """`event_gap_us` of a rank's device."""
    cuda = torch.cuda.is_available() and dist.get_backend(group) == "nccl"
    return event_gap_us(torch.device("cuda" if cuda else "cpu"))


def _batch(
    task: RankTask, cells: Sequence[ExchangeCase], place: Place, teller: Teller
) -> Iterator[dict[str, Any]]:
    transport, note, told = None, "", _skipped("after a failure")
    try:
        transport = task.offer.make()
        note = transport.refusal(cells[0])
        if note:
            told = {"status": REFUSED, "note": note, "error": None}
        else:
            with torch_twins(wanted=not transport.interpreted):
                transport.open(cells[0], place)
    # A peer can fail in any way; the others shall be measured.
    except Exception as error:  # noqa: BLE001
        note = _in_short(error)
        teller.failed(note)
    if not _all(place, not note) or transport is None:
        if told["status"] == SKIPPED:
            yield teller.failed("")
            cells = cells[1:]
        yield from (told for _ in cells)
        _close(transport)
        return
    broken = ""
    for cell in cells:
        with torch_twins(wanted=not transport.interpreted):
            told = _skipped(broken) if broken else _cell(transport, cell, place, task, teller)
        if told["status"] == FAILED:
            broken = "after a failure"
        yield told
    _close(transport)


def _cell(
    transport: Transport, cell: ExchangeCase, place: Place, task: RankTask, teller: Teller
) -> dict[str, Any]:
    """Check the transport, then time it.

    Ranks agree after each step, so a rank that fails is not waited for.
    """
    note, error, times = "", float("inf"), None
    given = ExchangeInputs.of(cell, 0 if transport.replicated else place.rank, place.device)
    try:
        transport.load(given)
        error = max(_checked(transport, given) for _ in range(2))
    except Exception as failure:  # noqa: BLE001  as above
        note = _in_short(failure)
        teller.failed(note)
    if not _all(place, not note):
        return teller.failed("")
    if not _all(place, error <= cell.bound):
        why = f"a row is {error:.1e} away from x, more than {cell.bound:.1e}"
        status = WRONG if error > cell.bound else SKIPPED
        return {"status": status, "note": why if status == WRONG else "", "error": error}
    try:
        times = time_transport(transport, given, place, task.repeats, partial(_all, place))
        transport.settle()
    except Exception as failure:  # noqa: BLE001  as above
        note = _in_short(failure)
        teller.failed(note, error)
    if not _all(place, not note):
        return teller.failed("", error)
    assert times is not None
    error = max(error, times.error)
    if error > cell.bound:
        return {"status": WRONG, "note": f"a replay is {error:.1e} away from x", "error": error}
    return {"status": OK, "note": transport.note, **asdict(replace(times, error=error))}


def _checked(transport: Transport, given: ExchangeInputs) -> float:
    transport.dispatch()
    transport.identity()
    out = transport.combine()
    transport.settle()
    error = distance(out, transport.expected(given))
    out.fill_(float("nan"))  # what the next call does not write cannot pass
    return error


def _all(place: Place, ok: bool) -> bool:
    """Whether all ranks say yes."""
    vote = torch.tensor([float(ok)], device=place.device)
    dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=place.group)
    return bool(vote.item())


def _close(transport: Transport | None) -> None:
    try:
        if transport is not None:
            transport.close()
    except Exception:  # noqa: BLE001, S110  its rows are told; the next one has its own
        pass


def _skipped(why: str) -> dict[str, Any]:
    return {"status": SKIPPED, "note": why, "error": None}


def _in_short(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
