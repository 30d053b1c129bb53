"""A pool of processes that stand for ranks: started once, used for many runs.

    with RankPool(4) as pool:                       # gloo on the CPU; "nccl": one GPU a rank
        sums = pool.run(function, 3, timeout=60)    # function(rank, world, group, 3) on each

A process group lives from run to run. After a failure the next run gets a fresh one, and fresh
processes too where one was lost: a rank that died, that did not answer, or that waited for it.
"""

import datetime
import faulthandler
import math
import multiprocessing
import multiprocessing.util
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist

from modular_kernel.errors import ConfigurationError, ModularKernelError
from modular_kernel.settings import hide_gpus, host_called, read_settings
from modular_kernel.testing.ranks.closing import Closing

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext  # not everywhere

Backend = Literal["gloo", "nccl"]
R = TypeVar("R")

_PRELOAD = ["modular_kernel.testing.mutation.preload"]
_STOP = b""  # instead of a task: end
DIED, SILENT = "died", "did not answer"  # how what became of a rank begins


class RankError(ModularKernelError):
    """A run failed. failures: by rank, a traceback or what became of it; one that died comes first,
    else the first to fail. results: of the ranks that did return.
    """

    def __init__(self, failures: Mapping[int, str], results: Mapping[int, Any]) -> None:
        # Peers may have noticed a death, and failed, before the parent saw it.
        order = sorted(failures, key=lambda rank: not failures[rank].startswith(DIED))
        self.failures, self.results = {rank: failures[rank] for rank in order}, dict(results)
        told = (f"rank {rank}: {text}" for rank, text in self.failures.items())
        super().__init__("\n".join(told))

    @property
    def rank(self) -> int:
        """The rank to look at first."""
        return next(iter(self.failures))


@dataclass(frozen=True)
class _Task:
    """What a rank is sent. generation: of the process group; a new number means a new group."""

    generation: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class _Place:
    """What a process is told once."""

    rank: int
    world_size: int
    backend: Backend
    host: str  # a name of it; "" where all are on one
    folder: str
    listener: str  # the folder of the parent's multiprocessing, where ranks are asked for
    seconds: float  # deadline of a collective
    interpreter: bool


@dataclass
class _Rank:
    """A process and the parent's end of its pipe."""

    process: BaseProcess
    pipe: Connection

    def end(self) -> None:
        """Kill it, whatever it is doing (a stopped one too), and leave nothing of it."""
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.process.close()


class RankPool(Closing):
    """`world_size` processes of one thread each, torch imported, in one process group.

    backend: gloo on the CPU, or nccl with GPU r for rank r. group_timeout: seconds after which a
    collective that waits for a peer raises. grace: seconds that ranks have to come back after
    another one failed; then they are killed. ranks_per_host: that blocks of so many ranks are to
    take for hosts of their own; None: all are on one. Processes start with the first run.
    ConfigurationError where there are fewer GPUs than ranks, or a block would be incomplete.
    """

    def __init__(
        self,
        world_size: int,
        backend: Backend = "gloo",
        *,
        group_timeout: float = 60,
        grace: float = 2,
        ranks_per_host: int | None = None,
    ) -> None:
        if world_size < 1:
            raise ConfigurationError("world_size", got=world_size, need=">= 1")
        if backend not in ("gloo", "nccl"):
            raise ConfigurationError("backend", got=backend, need="gloo or nccl")
        if backend == "nccl" and torch.cuda.device_count() < world_size:
            need = f"{world_size}, one for each rank"
            raise ConfigurationError("GPUs", got=torch.cuda.device_count(), need=need)
        if ranks_per_host is not None and (ranks_per_host < 1 or world_size % ranks_per_host):
            need = f"a divisor of the {world_size} ranks"
            raise ConfigurationError("ranks_per_host", got=ranks_per_host, need=need)
        self.world_size, self.backend, self.grace = world_size, backend, grace
        self.ranks_per_host = ranks_per_host
        self._group_timeout = group_timeout
        self._context = _context(backend)
        self._folder: tempfile.TemporaryDirectory[str] | None = tempfile.TemporaryDirectory(
            prefix="mk-ranks-"
        )
        self._ranks: list[_Rank] = []
        self._generation = 0
        self._raised_at: dict[int, float] = {}  # in the last run, by the clock ranks share

    @property
    def hosts(self) -> int:
        """How many hosts the ranks stand for."""
        return self.world_size // (self.ranks_per_host or self.world_size)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank; empty before the first run and after `close`."""
        return tuple(rank.process.pid or 0 for rank in self._ranks)

    def run(self, function: Callable[..., R], *arguments: Any, timeout: float = 120) -> list[R]:
        """function(rank, world_size, group, *arguments) on every rank; the results by rank.

        function and arguments must be picklable, and so must be what it returns: RankError if
        not, or if a rank raises, dies, or does not answer within `timeout` seconds.
        """
        if self._folder is None:
            raise ConfigurationError("pool", got="a run after close()", need="an open pool")
        task = _pickled(_Task(self._generation, function, arguments))
        if not self._ranks:
            self._start()
        results: dict[int, R] = {}
        failures: dict[int, str] = {}
        self._raised_at = {}
        try:
            self._send(task, failures)
            self._collect(results, failures, time.monotonic() + timeout)
        except BaseException:  # such as a keyboard interrupt: ranks are still at work
            self._end()
            raise
        if failures:
            self._recover(results, failures)
            raise RankError(self._by_time(failures), results)
        return [results[rank] for rank in range(self.world_size)]

    def collect(self, read: Callable[[int], R]) -> list[R]:
        """Return read(rank) by rank, of what they left in files: called in this process."""
        return [read(rank) for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes and remove the pool's files. May be called again."""
        for rank in self._ranks:
            try:
                rank.pipe.send_bytes(_STOP)
            except OSError:
                continue  # it is dead already
        deadline = time.monotonic() + self.grace
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self._end()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        assert self._folder is not None
        interpreter = read_settings().triton_interpret
        for rank in range(self.world_size):
            ours, theirs = self._context.Pipe()
            place = _Place(
                rank,
                self.world_size,
                self.backend,
                host=f"host {rank // self.ranks_per_host}" if self.ranks_per_host else "",
                folder=self._folder.name,
                listener=multiprocessing.util.get_temp_dir(),
                seconds=self._group_timeout,
                interpreter=interpreter,
            )
            process = self._context.Process(
                target=_serve, args=(place, theirs), name=f"rank {rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours))

    def _send(self, task: bytes, failures: dict[int, str]) -> None:
        for number, rank in enumerate(self._ranks):
            try:
                rank.pipe.send_bytes(task)
            except OSError:
                failures[number] = self._epitaph(number)

    def _collect(self, results: dict[int, R], failures: dict[int, str], deadline: float) -> None:
        """Fill `results` and `failures` until every rank has answered or time is up."""
        pending = set(range(self.world_size)) - set(failures)
        while pending:
            if failures:
                deadline = min(deadline, time.monotonic() + self.grace)
            pipes = {self._ranks[number].pipe: number for number in pending}
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            for number in sorted(pipes[pipe] for pipe in ready if isinstance(pipe, Connection)):
                pending.remove(number)
                self._receive(number, results, failures)
            if not ready:
                self._give_up(pending, failures)
                return

    def _receive(self, number: int, results: dict[int, R], failures: dict[int, str]) -> None:
        try:
            good, value = pickle.loads(self._ranks[number].pipe.recv_bytes())
        except (EOFError, OSError):
            failures[number] = self._epitaph(number)
        # What a rank returns may need anything to be unpickled, which then fails in any way.
        except Exception as error:  # noqa: BLE001
            failures[number] = f"returned what cannot be unpickled: {error!r}"
        else:
            if good:
                results[number] = value
            else:
                self._raised_at[number], failures[number] = value

    def _by_time(self, failures: Mapping[int, str]) -> dict[int, str]:
        """Return the first that raised first, whoever was heard first: others fail because of
        it.
        """
        order = sorted(failures, key=lambda rank: self._raised_at.get(rank, math.inf))
        return {rank: failures[rank] for rank in order}

    def _epitaph(self, number: int) -> str:
        process = self._ranks[number].process
        process.join(self.grace)
        code = process.exitcode
        how = "closed its pipe" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            how = f"killed by signal {signal.Signals(-code).name}"
        return f"{DIED}: {how}\n{self._trace(number)}".rstrip()

    def _give_up(self, pending: set[int], failures: dict[int, str]) -> None:
        """Name the ranks that do not answer, and where each of them is."""
        waited = bool(failures)
        for number in pending:
            process = self._ranks[number].process
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.2)  # for the traces to be written; a stopped process writes none
        for number in sorted(pending):
            text = f"{SILENT} after another rank failed" if waited else SILENT
            trace = self._trace(number) or "(no trace: it does not take signals)"
            failures[number] = f"{text}\n{trace}"

    def _trace(self, number: int) -> str:
        """Where a rank was when it was asked, or when it crashed; empty if it told nothing."""
        assert self._folder is not None
        path = _trace_path(self._folder.name, number)
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _recover(self, results: Mapping[int, Any], failures: Mapping[int, str]) -> None:
        """Give the next run a group of its own, and processes that surely follow."""
        self._generation += 1
        lost = [text for text in failures.values() if text.startswith((SILENT, DIED))]
        if lost or self.backend == "nccl":  # an aborted communicator may hold its process up
            self._end()

    def _end(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._ranks = []


def _context(backend: Backend) -> "ForkServerContext | SpawnContext":
    """How ranks are started. This process is not forked itself: a thread of it may hold a lock."""
    if backend == "nccl":  # what is imported in advance may have touched the driver
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _pickled(value: object) -> bytes:
    # By value: nothing is shared between processes, so nothing outlives them.
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise ConfigurationError("a run", got=repr(error), need="what pickle takes") from error


def _trace_path(folder: str, rank: int) -> Path:
    return Path(folder) / f"trace-of-rank-{rank}"


def _serve(place: _Place, pipe: Connection) -> None:
    """Serve as a rank: a task, an answer, and again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair, who ends us
    torch.set_num_threads(1)
    if place.backend == "gloo":
        hide_gpus()  # ranks on the CPU, also on a machine that has GPUs
    generation: int | None = None
    failed: list[BaseException] = []
    called = host_called(place.host or read_settings().host_id)
    with called, _trace_path(place.folder, place.rank).open("w") as traces:
        faulthandler.enable(file=traces)
        faulthandler.register(signal.SIGUSR1, file=traces)
        while message := _next(pipe):
            try:
                task: _Task = pickle.loads(message)
                if generation != task.generation:
                    _join(place, task.generation)
                    generation = task.generation
                value = task.function(
                    place.rank, place.world_size, dist.group.WORLD, *task.arguments
                )
                answer = pickle.dumps((True, value))
            # Whatever it is, the parent is told, and this rank goes on.
            except BaseException as error:  # noqa: BLE001
                now = time.monotonic()
                # Kept until that is sent: what its frames hold may hang as it is freed.
                failed.append(error)
                answer = pickle.dumps((False, (now, traceback.format_exc())))
            try:
                pipe.send_bytes(answer)
            except OSError:
                message = None
                break  # nobody is there to hear it
            failed.clear()
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()
    if message is None:  # who would have removed it was killed
        for folder in (place.folder, place.listener):
            shutil.rmtree(folder, ignore_errors=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()


def _next(pipe: Connection) -> bytes | None:
    try:
        return pipe.recv_bytes()
    except (EOFError, OSError):  # the parent is gone
        return None


def _join(place: _Place, generation: int) -> None:
    """Leave the old process group and join the one of this generation."""
    if read_settings().triton_interpret is not place.interpreter:
        need = "as it was when this process first started ranks"
        raise ConfigurationError("TRITON_INTERPRET", got=f"{place.interpreter} now", need=need)
    if dist.is_initialized():
        dist.destroy_process_group()
    device = None
    if place.backend == "nccl":
        device = torch.device("cuda", place.rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        place.backend,
        init_method=f"file://{place.folder}/store-{generation}",
        rank=place.rank,
        world_size=place.world_size,
        timeout=datetime.timedelta(seconds=place.seconds),
        device_id=device,
    )
