"""TorchGroup: the manager of one process group, for the parts over torch.distributed.

    manager = TorchGroup(group, deadline_s=2.0)
    kernel = make_kernel("TorchAll2AllPrepareAndFinalize", "TorchExperts", problem, group=manager)
    ...
    manager.destroy()

It creates its own communicator, so that it shares neither traffic nor timeouts with the caller's
group. Creating and destroying managers is collective: every rank of the group must do it, in the
same order.
"""

import re
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from traceback import clear_frames
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from modular_kernel.errors import CommunicationError, StateError, UnsupportedError
from modular_kernel.utils import forks
from modular_kernel.utils.argument_checks import expect
from prepare_finalize.common.device_status import DeviceStatus
from prepare_finalize.common.watchdog import Watchdog
from prepare_finalize.rendezvous.at_exit import Communicator
from prepare_finalize.rendezvous.connect import (
    check_device_type,
    check_process,
    connect,
    deadline_of,
    member_group,
    new_prefix_store,
    run_with_timeout,
    supported_device,
)
from prepare_finalize.rendezvous.failure_log import FailureBoard, LastCalls, culprits
from prepare_finalize.rendezvous.hosts import Hosts, find_hosts
from prepare_finalize.rendezvous.store_rounds import Meeting

_GRACE_S = 1.0  # time after the deadline in which ranks publish their failure records
_MIN_GRACE_S = 0.3  # minimum of that time, for an exchange that ended after its deadline
_POLL_S = 20e-6
_ABORT_PATIENCE_S = 2.0
_MAX_STEPS = 64  # number of steps whose layer and call are kept for errors


class TorchGroup:
    """Exchanges over one process group, each with a deadline.

    - group: a ProcessGroup of torch.distributed; None is the default one.
    - deadline_s: timeout of an exchange from its start; None means MK_DEADLINE_S, or 10 s.
    - device: "cpu" (a gloo backend) or "cuda" (NCCL); None selects what the group supports, a GPU
      first.
    - history: number of exchanges that `last_calls` keeps.
    - checked: ranks agree on the host before every call, so that every error is raised before a row
      is sent. False: they do so in the first call of each layer only, and on the device afterwards
      (`device_agreement`), as they also do for problems with `graph`.

    Raises ConfigurationError if the group cannot be used, and CommunicationError if a rank does not
    take part. After that this manager cannot be used, and the caller's group is unchanged.
    """

    def __init__(
        self,
        group: object | None = None,
        *,
        deadline_s: float | None = None,
        device: str | None = None,
        history: int = 1024,
        checked: bool = True,
    ) -> None:
        expect("checked", checked, bool)
        self._generation = forks.generation()
        self.checked = checked
        self.deadline_s = deadline_of(deadline_s)
        process_group = member_group(group)
        self.rank, self.world_size = process_group.rank(), process_group.size()
        self.device = supported_device(process_group, device)
        self.step = 0
        self.layers = 0
        # Largest number of row counts that a rank sends in a call of any layer. Calls of all layers
        # exchange as many, because gloo ends the process if sizes differ.
        self.max_counts = self.world_size
        self.hosts = Hosts((0,), ("",))  # until they are found
        self._calls_by_step: dict[int, tuple[int, int]] = {}  # step -> (layer, call)
        self._refusal: Exchange | None = None
        self._in_flight: WeakSet[Exchange] = WeakSet()
        self._lock = threading.Lock()  # guards _in_flight from the watchdog
        self.order = 0  # digest of the sequence of exchanges so far
        self.last_calls = LastCalls(self.rank, history)
        self._failure: CommunicationError | None = None
        self._closing_thread: int | None = None  # the thread that determines the failed ranks
        self._knows_culprits = threading.Event()
        self.device_status: DeviceStatus | None = None  # of calls without agreement on the host
        self._watchdog: Watchdog | None = None
        self._destroyed = False
        self._communicator = Communicator(self, device=self.device)
        # Unless the launcher serves the store, the job's first rank does.
        ranks = dist.get_process_group_ranks(process_group)
        self._store_rank = tuple(
            r for r, world_rank in enumerate(ranks) if world_rank == 0 and r != self.rank
        )
        store = self._store = self._open_store(process_group)
        self._board = FailureBoard(store, self.rank, self.world_size)
        self._communicator.group = self._connect(store)
        self.hosts = self._find_hosts(store)

    def _open_store(self, process_group: dist.ProcessGroup) -> PrefixStore:
        try:
            return new_prefix_store(process_group, self.deadline_s)
        except RuntimeError as error:
            raise CommunicationError(
                "process group's store",
                got=first_sentence(error),
                need=f"an answer within {self.deadline_s:g} s",
                rank=self.rank,
                phase="construct",
                peers=self._store_rank,
            ) from error

    def _connect(self, store: Store) -> Any:
        record = self.last_calls.begin(0, "construct", 0)
        started = time.monotonic()
        try:
            group = connect(self.device, store, self.rank, self.world_size, self.deadline_s)
        except RuntimeError as error:
            raise self._failed(record, started, error) from error
        self.last_calls.end(record)
        return group

    def _find_hosts(self, store: Store) -> Hosts:
        meeting = Meeting(PrefixStore("hosts", store), self.rank, self.world_size, self.deadline_s)
        try:
            return find_hosts(meeting, self.rank)
        except CommunicationError:
            self._close_connections()
            raise

    def check_device(self, device: torch.device | str) -> None:
        """Raise DeviceError unless tensors on `device` can be exchanged."""
        check_device_type(device, self.device)

    def next_layer(self) -> int:
        """Return the number of a new part; every rank must create its parts in the same order."""
        self.layers += 1
        return self.layers

    def next_step(self, layer: int = 0, call: int = 0) -> int:
        """Return the number of the call that begins; it is the same on every rank.

        layer, call: numbers by which errors name the call.
        """
        self._check_open()
        self.step += 1
        self._calls_by_step[self.step] = layer, call
        self._calls_by_step.pop(self.step - _MAX_STEPS, None)
        return self.step

    def all_gather(
        self, out: torch.Tensor, local: torch.Tensor, *, step: int, phase: str
    ) -> "Exchange":
        """out (W * n, ...) = `local` (n, ...) of all ranks, concatenated."""
        return self._start(
            lambda: self._communicator.group._allgather_base(out, local), (out, local), step, phase
        )

    def all_to_all(
        self,
        out: torch.Tensor,
        inputs: torch.Tensor,
        *,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        step: int,
        phase: str,
    ) -> "Exchange":
        """Send input_splits[r] rows of `inputs` to rank r; receive output_splits[r] rows."""
        splits = list(output_splits), list(input_splits)
        return self._start(
            lambda: self._communicator.group.alltoall_base(out, inputs, *splits),
            (out, inputs),
            step,
            phase,
        )

    def block_exchange(
        self, received: torch.Tensor, sent: torch.Tensor, *, rows: int | None = None, phase: str
    ) -> "Callable[[int], Exchange]":
        """Return a function that starts an exchange of blocks in the step that it is called with.

        It sends block `sent[r]` to each other rank r, and receives its block in `received[r]`.

        received: (W, ...), contiguous.
        sent: (W, ...). Over NCCL, blocks may be the same memory. Over gloo, it is contiguous.
        rows: number of rows of each block that are needed; None means all. Over NCCL, only those
            are exchanged, and none with this rank itself. gloo exchanges everything.
        """
        if self.device == "cpu":
            ones = [1] * self.world_size
            return lambda step: self.all_to_all(
                received, sent, output_splits=ones, input_splits=ones, step=step, phase=phase
            )
        received_blocks, sent_blocks = (
            [blocks[r, : 0 if r == self.rank else rows] for r in range(self.world_size)]
            for blocks in (received, sent)
        )

        def launch() -> Any:
            return self._communicator.group.alltoall(received_blocks, sent_blocks)

        return lambda step: self._start(launch, (received, sent), step, phase)

    def all_reduce(self, tensor: torch.Tensor, *, step: int, phase: str) -> "Exchange":
        """Sum over ranks, in place."""
        return self._start(
            lambda: self._communicator.group.allreduce([tensor]), (tensor,), step, phase
        )

    def send_refusal(self, counts: torch.Tensor, *, step: int, reason: str) -> None:
        """Contribute to an all-gather of counts without waiting for it."""
        gathered = counts.new_empty(self.world_size * counts.numel())
        self._refusal = self.all_gather(gathered, counts, step=step, phase="counts")
        self.last_calls.end(self._refusal.record, f"refused: {reason}")

    def break_off(self, error: Exception) -> None:
        """Close the manager after an error on this rank between exchanges, and notify peers."""
        if isinstance(error, CommunicationError) or self._failure is not None or self._destroyed:
            return
        if self._generation != forks.generation():  # the connections are the parent's
            return
        reason = f"broke off its call: {type(error).__name__}"
        record = self.last_calls.begin(self.step, "combine", 0)
        self.last_calls.end(record, f"failed: {reason}")
        self._board.post({**record, "waited_s": 0.0, "broke_off": reason}, time.monotonic())
        what, got, need = "exchange between ranks", f"this rank {reason}", "calls that end"
        self._failure = self._error(what, got, need, "combine", self.step, ())
        self._close_connections()

    def watch(self, status: DeviceStatus) -> None:
        """Keep the status of calls that the host does not wait for, and a watchdog on a GPU."""
        self.device_status = status
        if self.device == "cuda":
            self._watchdog = Watchdog(self, status)

    def expire(self, waited_s: float) -> None:
        """Close the manager because a call on the device has not ended for `waited_s` seconds.

        Its output, and that of all later calls, is NaN. Later use of the manager raises an error
        that names the ranks that may be at fault.
        """
        if self._failure is not None or self._destroyed:
            return
        phase = "dispatch" if self.device_status is None else self.device_status.phase()
        record = self.last_calls.begin(self.step, phase, 0)
        error = RuntimeError("a call on the device did not end in time")
        self._failed(record, time.monotonic() - waited_s, error)

    def _wait_for_calls(self) -> None:
        """Wait until the calls on the device have ended, or the manager has failed."""
        status, end = self.device_status, time.monotonic() + self.deadline_s
        while status is not None and not self.failed and len(set(status.progress())) > 1:
            if time.monotonic() > end:
                self.expire(self.deadline_s)
                return
            time.sleep(_POLL_S)

    def is_capturing(self) -> bool:
        """Return whether the current CUDA stream is captured in a graph."""
        return self.device == "cuda" and torch.cuda.is_current_stream_capturing()

    def check_failure(self) -> None:
        """Raise CommunicationError if an exchange failed, after which the manager is closed."""
        if self.failed:
            self._check_open()

    @property
    def failed(self) -> bool:
        """Whether an exchange failed, after which the manager cannot be used."""
        return self._failure is not None

    def fail(self, error: CommunicationError) -> None:
        """Close the manager: its later use raises an error that names `error` as the cause."""
        self._failure = error
        self._close_connections()

    def disagreement(
        self, got: str, need: str, *, step: int, peers: Sequence[int]
    ) -> CommunicationError:
        """Return the error for a call that is impossible according to the exchanged counts.

        Every rank receives the same counts and raises the same error, so no rank waits, and the
        manager remains usable.
        """
        return self._error("ranks of one call", got, need, "counts", step, peers)

    def device_disagreement(
        self, got: str, need: str, *, layer: int, call: int, peers: Sequence[int]
    ) -> CommunicationError:
        """Return the error for a call whose headers contradict each other.

        Every rank compares the same headers and raises the same error.
        """
        # A call replayed from a CUDA graph has no step.
        steps = (step for step, known in self._calls_by_step.items() if known == (layer, call))
        what, step = "ranks of one call", next(steps, 0)
        return self._error(what, got, need, "dispatch", step, peers, call_of_layer=(layer, call))

    def _error(
        self,
        what: str,
        got: str,
        need: str,
        phase: str,
        step: int,
        peers: Sequence[int],
        *,
        call_of_layer: tuple[int, int] | None = None,
    ) -> CommunicationError:
        layer, call = call_of_layer or self._calls_by_step.get(step, (0, 0))
        if layer:
            what = f"{what}, call {call} of layer {layer}"
        if peers and len(self.hosts) > 1:
            got = f"{got}; {_describe_hosts(self.hosts, peers)}"
        error = CommunicationError(
            what, got=got, need=need, rank=self.rank, phase=phase, step=step, peers=peers
        )
        error.layer, error.call = layer, call
        return error

    def write_last_calls(self, path: str | Path) -> None:
        """Write this rank's last exchanges as JSON lines."""
        self.last_calls.write(path)

    def destroy(self) -> None:
        """Close the communicator; later exchanges raise UnsupportedError.

        Raises StateError if it cannot be closed within the deadline, because a CUDA graph still
        holds calls of this manager; it is then closed once the graph is reset.
        """
        check_process(self._generation)
        if self._watchdog is not None:
            self._wait_for_calls()
            self._watchdog.stop()
        group = self._communicator.close()
        was_destroyed, self._destroyed = self._destroyed, True
        if self.device == "cuda" and group is not None and not was_destroyed:
            try:
                run_with_timeout(group.shutdown, max(self.deadline_s, _ABORT_PATIENCE_S))
            except RuntimeError as error:
                raise StateError(
                    "destroy",
                    got=f"a communicator in use: {first_sentence(error)}",
                    need="no CUDA graph with calls of this manager: reset graphs first",
                ) from error

    def _check_open(self) -> None:
        check_process(self._generation)
        if self._failure is not None:
            failure = self._wait_for_culprits(self._failure)
            got = f"a manager that failed before: {failure.got}"
            subject, position = "exchange between ranks", (failure.phase, failure.step)
            raise self._error(subject, got, "a new one", *position, failure.peers)
        if self._destroyed:
            raise UnsupportedError("exchange", got="a destroyed manager", need="a new one")

    def _wait_for_culprits(self, failure: CommunicationError) -> CommunicationError:
        """Return `failure`, or the one that names the failed ranks once they are known.

        The thread that determines them takes part in no other call.
        """
        if self._closing_thread not in (None, threading.get_ident()):
            self._knows_culprits.wait(self.deadline_s + _GRACE_S + _ABORT_PATIENCE_S)
            failure = self._failure or failure
        return failure

    def _start(
        self,
        launch: Callable[[], Any],
        tensors: tuple[torch.Tensor, ...],
        step: int,
        phase: str,
    ) -> "Exchange":
        self._check_open()
        self.order = zlib.crc32(f"{step} {phase}".encode(), self.order)
        record = self.last_calls.begin(step, phase, tensors[-1].nbytes)
        started = time.monotonic()
        try:
            work = launch()
        except RuntimeError as error:
            raise self._failed(record, started, error) from error
        exchange = Exchange(self, work, tensors, record, started)
        with self._lock:
            self._in_flight.add(exchange)
        return exchange

    def _wait(self, exchange: "Exchange") -> None:
        self._check_open()
        try:
            self._wait_for(exchange.work, exchange.started_s + self.deadline_s)
        except RuntimeError as error:
            raise self._failed(exchange.record, exchange.started_s, error) from error
        self._finished(exchange)

    def _wait_on_stream(self, exchange: "Exchange") -> None:
        work = exchange.work
        self._check_open()  # the watchdog may have closed the manager, and dropped the work
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failed(exchange.record, exchange.started_s, error) from error
        self._finished(exchange)

    def _finished(self, exchange: "Exchange") -> None:
        with self._lock:
            self._in_flight.discard(exchange)
        exchange.work = None  # a reference to the work would keep connections open
        self.last_calls.end(exchange.record)

    def _wait_for(self, work: Any, until_s: float) -> None:
        """Raise RuntimeError if the exchange failed or did not finish in time."""
        if self.device == "cpu":
            # Wait slightly longer than gloo's own timeout, at which gloo releases its threads.
            remaining_s = max(0.0, until_s - time.monotonic()) + 0.25
            work.wait(timedelta(seconds=remaining_s))
            return
        while not work.is_completed():
            if time.monotonic() > until_s:
                raise RuntimeError("the exchange did not end in time")
            time.sleep(_POLL_S)
        work.wait()

    def _close_connections(self) -> None:
        """Close every connection, so that ranks waiting for this one fail now.

        gloo closes its connections once nothing refers to the communicator. Exchanges in flight do.
        """
        if self.device_status is not None and self.device == "cuda":
            # Calls that the host has not waited for end without their data.
            with suppress(RuntimeError):
                self.device_status.poison()
        with self._lock:
            in_flight = list(self._in_flight)
        for exchange in in_flight:
            exchange.work = None
            if exchange.record["ended_s"] is None:
                self.last_calls.end(exchange.record, "failed: given up")
        group = self._communicator.close()
        if self.device == "cuda" and group is not None:
            # Aborting waits while a CUDA graph holds the communicator.
            with suppress(RuntimeError):
                run_with_timeout(group.abort, _ABORT_PATIENCE_S)

    def _unreachable_ranks(self, store_rank: int) -> tuple[int, ...]:
        """Return the unreachable ranks if the rank that serves the store does not answer.

        These are all ranks of its host, or that rank alone if the host is this rank's or not known.
        """
        index_W = self.hosts.index_W
        same_host = len(index_W) <= store_rank or index_W[store_rank] == index_W[self.rank]
        return (store_rank,) if same_host else self.hosts.ranks_on(index_W[store_rank])

    def _failed(
        self, record: dict[str, Any], started_s: float, error: RuntimeError
    ) -> CommunicationError:
        """Close connections, collect the failures of peers, and return an error naming culprits."""
        reason, position = first_sentence(error), (record["phase"], record["step"])
        need = f"every rank within {self.deadline_s:g} s"
        preliminary = self._error("exchange between ranks", reason, need, *position, ())
        with self._lock:
            is_first = self._closing_thread is None
            if is_first:
                # Other threads wait until the culprits are known.
                self._closing_thread, self._failure = threading.get_ident(), preliminary
        if not is_first:
            return self._wait_for_culprits(self._failure or preliminary)
        try:
            return self._name_culprits(record, started_s, error)
        finally:
            self._knows_culprits.set()

    def _name_culprits(
        self, record: dict[str, Any], started_s: float, error: RuntimeError
    ) -> CommunicationError:
        elapsed_s = record["waited_s"] = time.monotonic() - started_s
        reason = first_sentence(error)
        self.last_calls.end(record, f"failed: {reason}")
        need = f"every rank within {self.deadline_s:g} s"
        position = record["phase"], record["step"]
        clear_frames(error.__traceback__)  # frames may hold references to the communicator
        self._close_connections()
        end_time = max(time.monotonic() + _MIN_GRACE_S, started_s + self.deadline_s + _GRACE_S)
        failed = self._board.post(record, end_time)
        peers = self._store_rank
        cause = "the group's store, which may run on that rank, does not answer"
        if failed is None and peers and not self._board.ended:
            peers = self._unreachable_ranks(peers[0])
        if failed is not None:
            failed.setdefault(self.rank, record)
            peers, cause = culprits(self.rank, self.world_size, failed, self.deadline_s)
        got = f"{cause}; after {elapsed_s:.2f} s: {reason}"
        self._failure = self._error("exchange between ranks", got, need, *position, peers)
        return self._failure


@dataclass(eq=False)
class Exchange:
    """An exchange in flight, with references to its tensors until it is waited for."""

    manager: TorchGroup
    work: Any
    tensors: tuple[torch.Tensor, ...]
    record: dict[str, Any]
    started_s: float

    def wait(self) -> None:
        """Wait until the tensors may be used; raise CommunicationError if the exchange failed."""
        self.manager._wait(self)

    def wait_on_stream(self) -> None:
        """Make later work on the current CUDA stream wait for the exchange, but not the host.

        On a CPU this is `wait`.
        """
        if self.manager.device == "cpu":
            self.wait()
        else:
            self.manager._wait_on_stream(self)


def _describe_hosts(hosts: Hosts, peers: Sequence[int]) -> str:
    """Describe on which hosts the ranks are, and whether they are all ranks of a host."""
    host_indices = sorted({hosts.index_W[peer] for peer in peers})
    parts = []
    for host in host_indices:
        host_ranks = [peer for peer in peers if hosts.index_W[peer] == host]
        prefix = "all of" if len(host_ranks) == len(hosts.ranks_on(host)) else "on"
        ranks = ", ".join(map(str, host_ranks))
        parts.append(
            f"rank{'s' if len(host_ranks) > 1 else ''} {ranks}: {prefix} host {hosts.names[host]}"
        )
    return "; ".join(parts)


def first_sentence(error: RuntimeError) -> str:
    """Return the first sentence of the message, without torch's source location."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r"^\[\S+\] ", "", lines[0]).split(". ")[0][:200]
