"""Run functions on the ranks that a launcher started, with the interface of `RankPool`.

    torchrun --nnodes 2 --nproc-per-node 8 ... -m modular_kernel test

Every rank must run the same command, and thus the same tasks in the same order. The ranks exchange
results through the launcher's store. All ranks therefore have the same results and exit with the
same status, and only rank 0 needs to report. After a failure, the ranks join a new process group. A
counter, the generation, distinguishes the groups.
"""

import pickle
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from modular_kernel.errors import ConfigurationError
from modular_kernel.settings import LauncherEnvironment, hide_gpus, read_settings
from modular_kernel.testing.ranks.closing import Closeable
from modular_kernel.testing.ranks.pool import NO_ANSWER, Backend, RankError, RankPool
from modular_kernel.utils.host_memory import boot_id

Result = TypeVar("Result")
_MIN_POLL_S, _MAX_POLL_S = 0.001, 0.05  # shortest and longest pause between polls of the store


class LaunchedRanks(Closeable):
    """The ranks of a launcher, including this process, with the interface of `RankPool`.

    Construction is collective. Raises ConfigurationError if this host has no GPU LOCAL_RANK or if
    the commands differ, and RankError if the store or a rank does not respond. This process cannot
    terminate a rank. After a rank has not responded, all later runs are refused, and the launcher
    must be restarted.

    launcher: the result of `read_launcher`.
    backend: gloo on the CPU, or nccl with GPU LOCAL_RANK.
    group_timeout: seconds after which a collective that waits for a peer raises an error.
    grace: additional seconds for ranks to respond after another rank has failed.
    command: the command line of this rank, which must be the same on all ranks.
    """

    def __init__(
        self,
        launcher: LauncherEnvironment,
        backend: Backend = "gloo",
        *,
        group_timeout: float = 60,
        grace: float = 5,
        command: str = "",
    ) -> None:
        if backend == "nccl" and torch.cuda.device_count() <= launcher.local_rank:
            need = (
                f"at least {launcher.local_rank + 1}, because LOCAL_RANK is {launcher.local_rank}"
            )
            raise ConfigurationError("GPUs", got=torch.cuda.device_count(), need=need)
        if backend == "gloo":
            hide_gpus()
            torch.set_num_threads(1)
        self.rank, self.world_size = launcher.rank, launcher.world_size
        self.ranks_per_host = launcher.ranks_per_host
        self.backend, self.grace = backend, grace
        self._launcher, self._group_timeout = launcher, group_timeout
        self._generation, self._joined_generation = 0, -1
        self._exchange_number = 0
        self._unresponsive_ranks: dict[int, str] = {}
        self._store = self._connect()
        self._hosts = self._exchange_hosts(command)

    @property
    def hosts(self) -> int:
        """The number of distinct hosts, identified by boot id or MK_HOST_ID."""
        return len(set(self._hosts))

    def run(
        self, function: Callable[..., Result], *arguments: Any, timeout: float = 120
    ) -> list[Result]:
        """Run function(rank, world_size, group, *arguments) on every rank; return results by rank.

        Collective: every rank must call `run` with the same function, in the same order. Results
        must be picklable. If a rank raises an error or does not respond within `timeout` seconds,
        raises the same RankError on every rank that responds.
        """
        if self._unresponsive_ranks:
            raise RankError(self._unresponsive_ranks, {})
        started = time.monotonic()
        task = f"{function.__module__}.{function.__qualname__}"
        outcome = self._run_local(function, arguments, started)
        outcomes = self._exchange("run", (*outcome, task), started + timeout)
        checked_outcomes = {
            rank: _check_same_run(task, *outcome) for rank, outcome in outcomes.items()
        }
        results = {rank: value for rank, (is_ok, value) in checked_outcomes.items() if is_ok}
        failures = {rank: value for rank, (is_ok, value) in checked_outcomes.items() if not is_ok}
        failed_ranks = sorted(failures, key=lambda rank: failures[rank][0])
        messages = {rank: failures[rank][1] for rank in failed_ranks}
        missing_ranks = [rank for rank in range(self.world_size) if rank not in checked_outcomes]
        if missing_ranks:
            suffix = " after another rank failed" if messages else ""
            self._unresponsive_ranks = dict.fromkeys(missing_ranks, f"{NO_ANSWER}{suffix}")
            messages |= self._unresponsive_ranks
        if messages:
            self._generation += 1
            raise RankError(messages, results)
        return [results[rank] for rank in range(self.world_size)]

    def collect(self, read: Callable[[int], Result], *, timeout: float = 120) -> list[Result]:
        """Call read(rank) on each rank; return the results by rank. All ranks must call this."""
        return self.run(_call_read, read, timeout=timeout)

    def close(self) -> None:
        """Leave the process group. A later run joins a new group."""
        self._announce_exit()
        if self._joined_generation < 0:
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        self._joined_generation = -1
        self._generation += 1

    def _connect(self) -> Store:
        """Connect to the launcher's store. Raises RankError if it does not respond in time."""
        from torch.distributed.rendezvous import rendezvous

        timeout = timedelta(seconds=self._group_timeout)
        try:
            store, _, _ = next(iter(rendezvous("env://", timeout=timeout)))
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]  # C++ stack frames follow
            address = self._launcher.address
            message = f"rank {self.rank} cannot connect to the store at {address}: {reason}"
            raise RankError({self.rank: message}, {}) from error
        return PrefixStore("modular_kernel", store)

    def _exchange_hosts(self, command: str) -> list[str]:
        """Exchange host and command with all ranks; return the host of each rank.

        Raises RankError if a rank does not respond, and ConfigurationError if the commands differ.
        """
        message = (True, (_get_host_name(), command), "")
        messages = self._exchange("meet", message, time.monotonic() + self._group_timeout)
        missing_ranks = [rank for rank in range(self.world_size) if rank not in messages]
        if missing_ranks:
            raise RankError(dict.fromkeys(missing_ranks, NO_ANSWER), {})
        commands = {rank: value[1] for rank, (_, value, _) in messages.items()}
        if len(set(commands.values())) > 1:
            got = "; ".join(
                f"rank {rank}: {command_line}" for rank, command_line in sorted(commands.items())
            )
            self._announce_exit()
            need = "the same command on all ranks"
            raise ConfigurationError("commands of ranks", got=got, need=need)
        return [messages[rank][1][0] for rank in range(self.world_size)]

    def _announce_exit(self) -> None:
        """Announce that this rank no longer needs the store.

        Rank 0 may host the store, so it waits up to `grace` seconds for the announcements of the
        other ranks.
        """
        with suppress(RuntimeError):  # the store may already be shut down
            self._store.set(self._make_key("left", self._exchange_number, self.rank), "")
            other_keys = [
                self._make_key("left", self._exchange_number, rank)
                for rank in range(1, self.world_size)
            ]
            waits = self.rank == 0 and not self._unresponsive_ranks
            deadline = time.monotonic() + (self.grace if waits else 0)
            while time.monotonic() < deadline and not self._store.check(other_keys):
                time.sleep(_MIN_POLL_S)

    def _run_local(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], started: float
    ) -> tuple[bool, Any]:
        """Run the function on this rank; return (True, result) or (False, (seconds, traceback))."""
        try:
            self._join()
            return True, function(self.rank, self.world_size, dist.group.WORLD, *arguments)
        except KeyboardInterrupt:
            raise
        # The error is sent to the other ranks, and later runs remain possible.
        except BaseException:  # noqa: BLE001
            return False, (time.monotonic() - started, traceback.format_exc())

    def _join(self) -> None:
        """Join the process group of the current generation. A failed group is never reused."""
        if self._joined_generation == self._generation:
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        device = None
        if self.backend == "nccl":
            device = torch.device("cuda", self._launcher.local_rank)
            torch.cuda.set_device(device)
        dist.init_process_group(
            self.backend,
            store=PrefixStore(f"group/{self._generation}", self._store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self._group_timeout),
            device_id=device,
        )
        self._joined_generation = self._generation

    def _exchange(
        self, kind: str, message: tuple[bool, Any, str], deadline: float
    ) -> dict[int, Any]:
        """Send `message`; return the messages that arrive before `deadline`, by rank.

        After a rank has failed, waits at most group_timeout + grace seconds for the others. Raises
        RankError if the store fails.

        kind: prefix of the keys in the store.
        message: (whether the rank succeeded, value, name of the task).
        deadline: a `time.monotonic()` value.
        """
        self._exchange_number += 1
        received: dict[int, Any] = {}
        pause = _MIN_POLL_S
        try:
            key = self._make_key(kind, self._exchange_number, self.rank)
            self._store.set(key, _pickle(message))  # type: ignore[arg-type]
            while len(received) < self.world_size and time.monotonic() < deadline:
                self._poll(kind, received)
                if any(not is_ok for is_ok, _, _ in received.values()):
                    deadline = min(deadline, time.monotonic() + self._group_timeout + self.grace)
                if len(received) < self.world_size:
                    time.sleep(pause)
                    pause = min(2 * pause, _MAX_POLL_S)
            self._delete_previous_run_message(complete=len(received) == self.world_size)
        except RuntimeError as error:
            self._unresponsive_ranks = {
                self.rank: f"the store at {self._launcher.address} failed: {error}"
            }
            raise RankError(self._unresponsive_ranks, {}) from error
        return received

    def _poll(self, kind: str, received: dict[int, Any]) -> None:
        """Add the messages that have arrived since the last poll to `received`."""
        for rank in range(self.world_size):
            key = self._make_key(kind, self._exchange_number, rank)
            if rank not in received and self._store.check([key]):
                received[rank] = _unpickle(self._store.get(key))

    def _delete_previous_run_message(self, *, complete: bool) -> None:
        """Delete this rank's message of the previous run, which all ranks have read.

        complete: whether all ranks have answered the current run; if not, nothing is deleted.
        """
        if complete and self._exchange_number > 1:
            self._store.delete_key(self._make_key("run", self._exchange_number - 1, self.rank))

    @staticmethod
    def _make_key(kind: str, run: int, rank: int) -> str:
        return f"{kind}/{run}/{rank}"


AnyRanks = RankPool | LaunchedRanks


def _call_read(
    rank: int, _world_size: int, _group: object, read: Callable[[int], Result]
) -> Result:
    return read(rank)


def _check_same_run(task: str, is_ok: bool, value: Any, actual: str) -> tuple[bool, Any]:
    """Return the outcome of a rank, or a failure if the rank ran another function."""
    if actual != task:
        return False, (0.0, f"ran {actual} instead of {task}: all ranks must run the same command")
    return is_ok, value


def _pickle(outcome: tuple[bool, Any, str]) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:  # noqa: BLE001  __reduce__ may raise anything
        message = f"its result cannot be pickled: {error!r}"
        return pickle.dumps((False, (0.0, message), outcome[2]))


def _unpickle(data: bytes) -> tuple[bool, Any, str]:
    try:
        outcome: tuple[bool, Any, str] = pickle.loads(data)
    except Exception as error:  # noqa: BLE001  unpickling may raise anything
        return False, (0.0, f"its result cannot be unpickled: {error!r}"), "?"
    return outcome


def _get_host_name() -> str:
    """Return the first of MK_HOST_ID, the boot id and the host name that is known.

    The name is used only to count hosts. Parts determine on their own which ranks share memory.
    """
    return read_settings().host_id or boot_id()
