"""A pool of processes that act as ranks, started once and used for many runs.

    with RankPool(4) as pool:                      # gloo on the CPU; "nccl": one GPU per rank
        sums = pool.run(function, 3, timeout=60)   # function(rank, world_size, group, 3) on each

The process group persists between runs. After a failure, the next run uses a new process group with
the next generation number. If a rank died or did not answer, the next run also uses new processes.
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
from modular_kernel.settings import hide_gpus, read_settings, use_host_id
from modular_kernel.testing.ranks.closing import Closeable

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext  # not on all systems

Backend = Literal["gloo", "nccl"]
Result = TypeVar("Result")

_PRELOAD = ["modular_kernel.testing.mutation.preload"]  # imported before processes are forked
_STOP = b""  # sent instead of a task to end a process
DIED, NO_ANSWER = "died", "did not answer"  # prefixes of the failure of a lost rank


class RankError(ModularKernelError):
    """Raised if a run fails on any rank.

    Attributes:
        failures: maps each failed rank to a traceback, or to a message that starts with DIED or
            NO_ANSWER. Ranks that died come first, then the others in the order of their failures.
        results: maps each rank that returned to its result.
    """

    def __init__(self, failures: Mapping[int, str], results: Mapping[int, Any]) -> None:
        # Peers of a rank that died may have failed before the parent noticed its death.
        ranks = sorted(failures, key=lambda rank: not failures[rank].startswith(DIED))
        self.failures, self.results = {rank: failures[rank] for rank in ranks}, dict(results)
        lines = (f"rank {rank}: {failure}" for rank, failure in self.failures.items())
        super().__init__("\n".join(lines))

    @property
    def rank(self) -> int:
        """The first failed rank, where the cause most likely is."""
        return next(iter(self.failures))


@dataclass(frozen=True)
class _Task:
    """The message that makes a rank run a function.

    generation: number of the process group in which to run.
    """

    generation: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class _RankConfig:
    """The configuration of a rank process."""

    rank: int
    world_size: int
    backend: Backend
    host: str  # simulated host name; "" if all ranks are on one host
    folder: str  # contains stack traces and the store of the process group
    listener_folder: str  # contains the sockets of the parent's multiprocessing
    group_timeout: float  # seconds after which a collective that waits for a peer raises an error
    uses_interpreter: bool  # whether TRITON_INTERPRET is set


@dataclass
class _RankProcess:
    """A process, and the parent's end of the pipe to it."""

    process: BaseProcess
    pipe: Connection

    def end(self) -> None:
        """Kill the process, even if it is stopped, and release its resources."""
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.process.close()


class RankPool(Closeable):
    """A pool of `world_size` processes, one per rank, in one process group.

    Each process has imported torch and uses one thread. The processes start in the first run.
    Raises ConfigurationError for invalid arguments, and if there are fewer GPUs than nccl ranks.

    backend: gloo on the CPU, or nccl with GPU r for rank r.
    group_timeout: seconds after which a collective that waits for a peer raises an error.
    grace: seconds for ranks to answer after another rank has failed, before they are killed.
    ranks_per_host: number of ranks per simulated host, a divisor of world_size; None means that all
        ranks are on one host.
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
        self._mp_context = _get_mp_context(backend)
        self._folder: tempfile.TemporaryDirectory[str] | None = tempfile.TemporaryDirectory(
            prefix="mk-ranks-"
        )
        self._ranks: list[_RankProcess] = []
        self._generation = 0
        self._raised_at: dict[int, float] = {}  # monotonic time, by rank, in the last run

    @property
    def hosts(self) -> int:
        """The number of simulated hosts."""
        return self.world_size // (self.ranks_per_host or self.world_size)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank; empty before the first run and after `close`."""
        return tuple(rank_process.process.pid or 0 for rank_process in self._ranks)

    def run(
        self, function: Callable[..., Result], *arguments: Any, timeout: float = 120
    ) -> list[Result]:
        """Run function(rank, world_size, group, *arguments) on every rank; return results by rank.

        The function, its arguments and its results must be picklable. Raises ConfigurationError if
        the function or its arguments are not, or if the pool is closed. Raises RankError if a
        result is not picklable, or if a rank raises an error, dies or does not answer within
        `timeout` seconds.
        """
        if self._folder is None:
            raise ConfigurationError("pool", got="a run after close()", need="an open pool")
        task = _pickle(_Task(self._generation, function, arguments))
        if not self._ranks:
            self._start()
        results: dict[int, Result] = {}
        failures: dict[int, str] = {}
        self._raised_at = {}
        try:
            self._send(task, failures)
            self._collect(results, failures, time.monotonic() + timeout)
        except BaseException:  # such as KeyboardInterrupt, while ranks still run
            self._end()
            raise
        if failures:
            self._recover(results, failures)
            raise RankError(self._sort_by_time(failures), results)
        return [results[rank] for rank in range(self.world_size)]

    def collect(self, read: Callable[[int], Result]) -> list[Result]:
        """Call read(rank) in this process for every rank, to read files that the ranks wrote."""
        return [read(rank) for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes and remove the pool's files. A second call does nothing."""
        for rank_process in self._ranks:
            try:
                rank_process.pipe.send_bytes(_STOP)
            except OSError:
                continue  # the process has ended
        deadline = time.monotonic() + self.grace
        for rank_process in self._ranks:
            rank_process.process.join(max(0.0, deadline - time.monotonic()))
        self._end()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        assert self._folder is not None
        uses_interpreter = read_settings().triton_interpret
        for rank in range(self.world_size):
            parent_end, child_end = self._mp_context.Pipe()
            config = _RankConfig(
                rank,
                self.world_size,
                self.backend,
                host=f"host {rank // self.ranks_per_host}" if self.ranks_per_host else "",
                folder=self._folder.name,
                listener_folder=multiprocessing.util.get_temp_dir(),
                group_timeout=self._group_timeout,
                uses_interpreter=uses_interpreter,
            )
            process = self._mp_context.Process(
                target=_run_worker, args=(config, child_end), name=f"rank {rank}", daemon=True
            )
            process.start()
            child_end.close()
            self._ranks.append(_RankProcess(process, parent_end))

    def _send(self, task: bytes, failures: dict[int, str]) -> None:
        for rank, rank_process in enumerate(self._ranks):
            try:
                rank_process.pipe.send_bytes(task)
            except OSError:
                failures[rank] = self._describe_exit(rank)

    def _collect(
        self, results: dict[int, Result], failures: dict[int, str], deadline: float
    ) -> None:
        """Fill `results` and `failures` until every rank has answered or the deadline passes.

        deadline: a `time.monotonic()` value.
        """
        pending = set(range(self.world_size)) - set(failures)
        while pending:
            if failures:
                deadline = min(deadline, time.monotonic() + self.grace)
            pipes = {self._ranks[rank].pipe: rank for rank in pending}
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            for rank in sorted(pipes[pipe] for pipe in ready if isinstance(pipe, Connection)):
                pending.remove(rank)
                self._receive(rank, results, failures)
            if not ready:
                self._record_unresponsive(pending, failures)
                return

    def _receive(self, rank: int, results: dict[int, Result], failures: dict[int, str]) -> None:
        try:
            is_ok, value = pickle.loads(self._ranks[rank].pipe.recv_bytes())
        except (EOFError, OSError):
            failures[rank] = self._describe_exit(rank)
        # Unpickling a result may raise anything.
        except Exception as error:  # noqa: BLE001
            failures[rank] = f"its result cannot be unpickled: {error!r}"
        else:
            if is_ok:
                results[rank] = value
            else:
                self._raised_at[rank], failures[rank] = value

    def _sort_by_time(self, failures: Mapping[int, str]) -> dict[int, str]:
        """Sort failures by the time of their error, because the first may cause the others."""
        ranks = sorted(failures, key=lambda rank: self._raised_at.get(rank, math.inf))
        return {rank: failures[rank] for rank in ranks}

    def _describe_exit(self, rank: int) -> str:
        process = self._ranks[rank].process
        process.join(self.grace)
        code = process.exitcode
        reason = "closed its pipe" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            reason = f"killed by signal {signal.Signals(-code).name}"
        return f"{DIED}: {reason}\n{self._read_trace(rank)}".rstrip()

    def _record_unresponsive(self, pending: set[int], failures: dict[int, str]) -> None:
        after_failure = bool(failures)
        for rank in pending:
            process = self._ranks[rank].process
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.2)  # time to write the traces
        for rank in sorted(pending):
            reason = f"{NO_ANSWER} after another rank failed" if after_failure else NO_ANSWER
            trace = (
                self._read_trace(rank) or "(no stack trace: the process does not handle signals)"
            )
            failures[rank] = f"{reason}\n{trace}"

    def _read_trace(self, rank: int) -> str:
        """Read the stack trace that a rank wrote on request or in a crash; "" if there is none."""
        assert self._folder is not None
        path = _get_trace_path(self._folder.name, rank)
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _recover(self, results: Mapping[int, Any], failures: Mapping[int, str]) -> None:
        """Prepare the next run: a new process group and, if necessary, new processes."""
        self._generation += 1
        is_lost = any(failure.startswith((NO_ANSWER, DIED)) for failure in failures.values())
        if is_lost or self.backend == "nccl":  # an aborted NCCL communicator may hang
            self._end()

    def _end(self) -> None:
        for rank_process in self._ranks:
            rank_process.end()
        self._ranks = []


def _get_mp_context(backend: Backend) -> "ForkServerContext | SpawnContext":
    """Return the multiprocessing context in which ranks are started.

    The context never forks this process, because another thread may hold a lock.
    """
    # CUDA cannot be used after a fork, and preloaded modules may have initialized it.
    if backend == "nccl":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _pickle(value: object) -> bytes:
    # Plain pickle copies tensors. torch's pickling would share memory that outlives the processes.
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise ConfigurationError(
            "a run", got=repr(error), need="a picklable function and arguments"
        ) from error


def _get_trace_path(folder: str, rank: int) -> Path:
    return Path(folder) / f"trace-of-rank-{rank}"


def _run_worker(config: _RankConfig, pipe: Connection) -> None:
    """Run tasks from the pipe and send back their answers, until a stop message arrives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    torch.set_num_threads(1)
    if config.backend == "gloo":
        hide_gpus()  # gloo ranks use the CPU even if there are GPUs
    generation: int | None = None
    errors: list[BaseException] = []
    host_name = use_host_id(config.host or read_settings().host_id)
    with host_name, _get_trace_path(config.folder, config.rank).open("w") as traces:
        faulthandler.enable(file=traces)
        faulthandler.register(signal.SIGUSR1, file=traces)
        while message := _receive_task(pipe):
            try:
                task: _Task = pickle.loads(message)
                if generation != task.generation:
                    _init_process_group(config, task.generation)
                    generation = task.generation
                value = task.function(
                    config.rank, config.world_size, dist.group.WORLD, *task.arguments
                )
                answer = pickle.dumps((True, value))
            # Any error is sent to the parent, and this rank continues.
            except BaseException as error:  # noqa: BLE001
                now = time.monotonic()
                # Keep the error until the answer is sent, because freeing objects in its frames may
                # hang.
                errors.append(error)
                answer = pickle.dumps((False, (now, traceback.format_exc())))
            try:
                pipe.send_bytes(answer)
            except OSError:
                message = None
                break  # the parent has ended
            errors.clear()
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()
    if message is None:  # the parent was killed before it could remove its files
        for folder in (config.folder, config.listener_folder):
            shutil.rmtree(folder, ignore_errors=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()


def _receive_task(pipe: Connection) -> bytes | None:
    try:
        return pipe.recv_bytes()
    except (EOFError, OSError):  # the parent has ended
        return None


def _init_process_group(config: _RankConfig, generation: int) -> None:
    if read_settings().triton_interpret is not config.uses_interpreter:
        need = "the same value as when this process first started ranks"
        raise ConfigurationError(
            "TRITON_INTERPRET", got=f"{config.uses_interpreter} now", need=need
        )
    if dist.is_initialized():
        dist.destroy_process_group()
    device = None
    if config.backend == "nccl":
        device = torch.device("cuda", config.rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        config.backend,
        init_method=f"file://{config.folder}/store-{generation}",
        rank=config.rank,
        world_size=config.world_size,
        timeout=datetime.timedelta(seconds=config.group_timeout),
        device_id=device,
    )
