"""TorchGroup: the manager of one process group, for the components over torch.distributed.

A manager owns the connections of a process group and can be shared by the components of many
layers. `TorchGroup` runs collectives, each with a deadline:

    manager = TorchGroup(group, timeout_s=2.0)
    kernel = make_kernel("TorchAll2AllPrepareAndFinalize", "TorchExperts", problem, group=manager)
    ...
    manager.destroy()

The manager creates a new communicator over the ranks of the group, so that it shares neither
traffic nor timeouts with the caller's group. Creating and destroying managers is collective: every
rank of the group must do it, in the same order.

If an exchange fails on this rank, the manager closes its connections, so that the exchanges of its
peers fail soon as well. It determines which ranks caused the failure (`rendezvous.failure_log`). It
then raises an error that names these ranks, now and in every later call.
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
    new_prefix_store,
    resolve_process_group,
    resolve_timeout,
    run_with_timeout,
    select_device_type,
)
from prepare_finalize.rendezvous.failure_log import ExchangeLog, FailureRecords, find_culprits
from prepare_finalize.rendezvous.hosts import Hosts, find_hosts
from prepare_finalize.rendezvous.store_collectives import StoreCollectives

_GRACE_S = 1.0  # time after the deadline in which ranks publish their failure records
_MIN_GRACE_S = 0.3  # minimum grace time, for an exchange that failed after its deadline
_POLL_S = 20e-6
_ABORT_TIMEOUT_S = 2.0
_MAX_STEPS = 64  # number of calls whose layer is remembered for error messages


class TorchGroup:
    """Collectives over one process group, each with a deadline.

    - group: a ProcessGroup of torch.distributed; None is the default group.
    - timeout_s: timeout of an exchange from its start, in seconds; None is MK_TIMEOUT_S, or 10 s.
    - device: "cpu" (a gloo backend) or "cuda" (NCCL); None is "cuda" if the group supports it.
    - history: number of exchanges that `last_calls` keeps.
    - checked: whether every call begins with a handshake on the host, so that errors are raised
      before a row is sent. If False, only the first call of each layer does. Later calls have a
      handshake on the device (`device_handshake`), as do layers of problems with `graph`.

    Methods that start an exchange take its step, the number of the call from `next_step`, and its
    phase, "counts", "dispatch" or "combine". Both are used in the log and in error messages.

    Raise ConfigurationError if the group cannot be used, and CommunicationError if a rank does not
    take part. After an error, the manager cannot be used, but the caller's group can.
    """

    def __init__(
        self,
        group: object | None = None,
        *,
        timeout_s: float | None = None,
        device: str | None = None,
        history: int = 1024,
        checked: bool = True,
    ) -> None:
        expect("checked", checked, bool)
        self._generation = forks.generation()
        self.checked = checked
        self.timeout_s = resolve_timeout(timeout_s)
        process_group = resolve_process_group(group)
        self.rank, self.world_size = process_group.rank(), process_group.size()
        self.device = select_device_type(process_group, device)
        self.step = 0  # number of the last call
        self.layers = 0  # number of layers that use this manager
        # Largest number of row counts that a rank sends in a handshake of any layer. All handshakes
        # have this size, because gloo ends the process if the sizes of ranks differ.
        self.max_counts = self.world_size
        self.hosts = Hosts((0,), ("",))  # replaced below, once the ranks are connected
        self._calls_by_step: dict[int, tuple[int, int]] = {}  # step -> (layer, call)
        self._refusal: Exchange | None = None
        self._in_flight: WeakSet[Exchange] = WeakSet()
        self._lock = threading.Lock()  # protects _in_flight and _failure_thread
        self.order = 0  # hash of the sequence of exchanges so far, compared by handshakes
        self.last_calls = ExchangeLog(self.rank, history)
        self._failure: CommunicationError | None = None
        self._failure_thread: int | None = None  # the thread that handles the first failure
        self._culprits_known = threading.Event()
        self.device_status: DeviceStatus | None = None  # of layers with a device handshake
        self._watchdog: Watchdog | None = None
        self._destroyed = False
        self._communicator = Communicator(self, device=self.device)
        # A tuple with the rank (in this group) that serves the store, which is rank 0 of the job
        # unless a launcher such as torchrun serves it. Empty if this rank, or no rank, serves it.
        ranks = dist.get_process_group_ranks(process_group)
        self._store_rank = tuple(
            r for r, world_rank in enumerate(ranks) if world_rank == 0 and r != self.rank
        )
        store = self._store = self._open_store(process_group)
        self._failure_records = FailureRecords(store, self.rank, self.world_size)
        self._communicator.group = self._connect(store)
        self.hosts = self._find_hosts(store)

    def _open_store(self, process_group: dist.ProcessGroup) -> PrefixStore:
        try:
            return new_prefix_store(process_group, self.timeout_s)
        except RuntimeError as error:
            raise CommunicationError(
                "process group's store",
                got=first_sentence(error),
                need=f"an answer within {self.timeout_s:g} s",
                rank=self.rank,
                phase="construct",
                peers=self._store_rank,
            ) from error

    def _connect(self, store: Store) -> Any:
        record = self.last_calls.begin(0, "construct", 0)
        started = time.monotonic()
        try:
            group = connect(self.device, store, self.rank, self.world_size, self.timeout_s)
        except RuntimeError as error:
            raise self._handle_failure(record, started, error) from error
        self.last_calls.end(record)
        return group

    def _find_hosts(self, store: Store) -> Hosts:
        collectives = StoreCollectives(
            PrefixStore("hosts", store), self.rank, self.world_size, self.timeout_s
        )
        try:
            return find_hosts(collectives, self.rank)
        except CommunicationError:
            self._close_connections()
            raise

    def check_device(self, device: torch.device | str) -> None:
        """Raise DeviceError unless tensors on `device` can be exchanged."""
        check_device_type(device, self.device)

    def next_layer(self) -> int:
        """Return the number of a new layer. Every rank must create its layers in the same order."""
        self._check_open()
        self.layers += 1
        return self.layers

    def next_step(self, layer: int = 0, call: int = 0) -> int:
        """Return the number of the call that begins, the same on every rank.

        layer, call: number of the layer, and of the call among its calls, for error messages.
        """
        self._check_open()
        self.step += 1
        self._calls_by_step[self.step] = layer, call
        self._calls_by_step.pop(self.step - _MAX_STEPS, None)
        return self.step

    def all_gather(
        self, out: torch.Tensor, local: torch.Tensor, *, step: int, phase: str
    ) -> "Exchange":
        """Start an all-gather: out (W * n, ...) = `local` (n, ...) of all ranks, concatenated."""
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
        """Start an all-to-all: send input_splits[r] rows to rank r, receive output_splits[r] rows.

        inputs, out: the rows to send and the received rows, ordered by rank.
        """
        splits = list(output_splits), list(input_splits)
        return self._start(
            lambda: self._communicator.group.alltoall_base(out, inputs, *splits),
            (out, inputs),
            step,
            phase,
        )

    def block_exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        *,
        peers: Sequence[int] | None = None,
        rows: int | None = None,
        phase: str,
    ) -> "Callable[[int], Exchange]":
        """Return a function that starts an exchange of blocks of equal size.

        The argument of the function is the step. The exchange sends block `sent[p]` to each other
        rank `peers[p]`, and writes the block from this rank to `received[p]`. Every rank of the
        group must start it.

        received: (P, ...), contiguous.
        sent: (P, ...). Over NCCL, blocks may overlap in memory. Over gloo, `sent` must be
            contiguous.
        peers: the ranks with which this rank exchanges blocks, in ascending order; None means all
            ranks of the group.
        rows: number of leading rows of each block that are needed; None means all. NCCL exchanges
            only these rows, and none with this rank itself. gloo exchanges all rows.
        """
        ranks = range(self.world_size)
        if self.device == "cpu":
            splits = [int(peers is None or r in peers) for r in ranks]
            return lambda step: self.all_to_all(
                received, sent, output_splits=splits, input_splits=splits, step=step, phase=phase
            )
        index = {r: p for p, r in enumerate(ranks if peers is None else peers) if r != self.rank}
        received_blocks, sent_blocks = (
            [blocks[index[r], :rows] if r in index else blocks[0, :0] for r in ranks]
            for blocks in (received, sent)
        )

        def launch() -> Any:
            return self._communicator.group.alltoall(received_blocks, sent_blocks)

        return lambda step: self._start(launch, (received, sent), step, phase)

    def all_reduce(self, tensor: torch.Tensor, *, step: int, phase: str) -> "Exchange":
        """Start an all-reduce: sum `tensor` over ranks, in place."""
        return self._start(
            lambda: self._communicator.group.allreduce([tensor]), (tensor,), step, phase
        )

    def send_refusal(self, counts: torch.Tensor, *, step: int, reason: str) -> None:
        """Start an all-gather of metadata that has a refusal, without waiting for it.

        reason: reason for the refusal, recorded in the log.
        """
        gathered = counts.new_empty(self.world_size * counts.numel())
        self._refusal = self.all_gather(gathered, counts, step=step, phase="counts")
        self.last_calls.end(self._refusal.record, f"refused: {reason}")

    def abort(self, error: Exception) -> None:
        """Close the manager after an error on this rank outside of exchanges, and notify peers."""
        if isinstance(error, CommunicationError) or self._failure is not None or self._destroyed:
            return
        if self._generation != forks.generation():  # the connections belong to the parent process
            return
        reason = f"aborted its call: {type(error).__name__}"
        record = self.last_calls.begin(self.step, "combine", 0)
        self.last_calls.end(record, f"failed: {reason}")
        self._failure_records.publish_and_collect(
            {**record, "waited_s": 0.0, "broke_off": reason}, time.monotonic()
        )
        subject, got, need = "exchange between ranks", f"this rank {reason}", "calls that end"
        self._failure = self._make_error(subject, got, need, "combine", self.step, ())
        self._close_connections()

    def set_device_status(self, status: DeviceStatus) -> None:
        """Set the status of calls with a device handshake; on a GPU, start a watchdog for them."""
        self.device_status = status
        if self.device == "cuda":
            self._watchdog = Watchdog(self, status)

    def close_after_timeout(self, waited_s: float) -> None:
        """Close the manager because a call on the device has not ended for `waited_s` seconds.

        The output of this call and of all later ones is NaN. Later use of the manager raises an
        error with the ranks that may have caused the failure.
        """
        if self._failure is not None or self._destroyed:
            return
        phase = "dispatch" if self.device_status is None else self.device_status.phase()
        record = self.last_calls.begin(self.step, phase, 0)
        error = RuntimeError("a call on the device did not end in time")
        self._handle_failure(record, time.monotonic() - waited_s, error)

    def _wait_for_calls(self) -> None:
        status, deadline = self.device_status, time.monotonic() + self.timeout_s
        while status is not None and not self.failed and len(set(status.progress())) > 1:
            if time.monotonic() > deadline:
                self.close_after_timeout(self.timeout_s)
                return
            time.sleep(_POLL_S)

    def is_capturing(self) -> bool:
        """Return whether the current CUDA stream is captured in a graph."""
        return self.device == "cuda" and torch.cuda.is_current_stream_capturing()

    def check_failure(self) -> None:
        """Raise CommunicationError if an exchange has failed."""
        if self.failed:
            self._check_open()

    @property
    def failed(self) -> bool:
        """Whether an exchange has failed. The manager is closed then."""
        return self._failure is not None

    def fail(self, error: CommunicationError) -> None:
        """Close the manager. Its later use raises an error with `error` as the cause."""
        self._failure = error
        self._close_connections()

    def make_metadata_error(
        self, got: str, need: str, *, step: int, peers: Sequence[int]
    ) -> CommunicationError:
        """Return the error for a call whose metadata, exchanged on the host, is contradictory.

        Every rank has the same metadata and raises the same error. No rank waits for the others, so
        the manager remains usable.
        """
        return self._make_error("ranks of one call", got, need, "counts", step, peers)

    def make_header_error(
        self, got: str, need: str, *, layer: int, call: int, peers: Sequence[int]
    ) -> CommunicationError:
        """Return the error for a call whose headers, compared on the device, are contradictory.

        Every rank compares the same headers and raises the same error.
        """
        # A call replayed from a CUDA graph has no step.
        layer_and_call = layer, call
        steps = (step for step, value in self._calls_by_step.items() if value == layer_and_call)
        subject, step = "ranks of one call", next(steps, 0)
        return self._make_error(
            subject, got, need, "dispatch", step, peers, layer_and_call=layer_and_call
        )

    def _make_error(
        self,
        subject: str,
        got: str,
        need: str,
        phase: str,
        step: int,
        peers: Sequence[int],
        *,
        layer_and_call: tuple[int, int] | None = None,
    ) -> CommunicationError:
        layer, call = layer_and_call or self._calls_by_step.get(step, (0, 0))
        if layer:
            subject = f"{subject}, call {call} of layer {layer}"
        if peers and len(self.hosts) > 1:
            got = f"{got}; {_describe_hosts(self.hosts, peers)}"
        error = CommunicationError(
            subject, got=got, need=need, rank=self.rank, phase=phase, step=step, peers=peers
        )
        error.layer, error.call = layer, call
        return error

    def write_last_calls(self, path: str | Path) -> None:
        """Write this rank's last exchanges as JSON lines."""
        self.last_calls.write(path)

    def destroy(self) -> None:
        """Close the communicator. Later exchanges raise UnsupportedError.

        Raise StateError if the communicator cannot be closed within the deadline, because a CUDA
        graph still contains exchanges of this manager. It is then closed once the graph is reset.
        """
        check_process(self._generation)
        if self._watchdog is not None:
            self._wait_for_calls()
            self._watchdog.stop()
        group = self._communicator.close()
        was_destroyed, self._destroyed = self._destroyed, True
        if self.device == "cuda" and group is not None and not was_destroyed:
            try:
                run_with_timeout(group.shutdown, max(self.timeout_s, _ABORT_TIMEOUT_S))
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
            raise self._make_error(subject, got, "a new one", *position, failure.peers)
        if self._destroyed:
            raise UnsupportedError("exchange", got="a destroyed manager", need="a new one")

    def _wait_for_culprits(self, failure: CommunicationError) -> CommunicationError:
        """Wait until the failed ranks are known, and return the failure with them.

        Returns `failure` immediately in the thread that determines the failed ranks, or after a
        timeout.
        """
        if self._failure_thread not in (None, threading.get_ident()):
            self._culprits_known.wait(self.timeout_s + _GRACE_S + _ABORT_TIMEOUT_S)
            assert self._failure is not None  # set together with _failure_thread
            return self._failure
        return failure

    def _start(
        self,
        launch: Callable[[], Any],
        tensors: tuple[torch.Tensor, ...],
        step: int,
        phase: str,
    ) -> "Exchange":
        """Start an exchange.

        launch: function that calls the backend and returns its handle.
        tensors: tensors that must not be freed before the end of the exchange, the sent tensor
            last.
        """
        self._check_open()
        self.order = zlib.crc32(f"{step} {phase}".encode(), self.order)
        record = self.last_calls.begin(step, phase, tensors[-1].nbytes)
        started = time.monotonic()
        try:
            work = launch()
        except RuntimeError as error:
            raise self._handle_failure(record, started, error) from error
        exchange = Exchange(self, work, tensors, record, started)
        with self._lock:
            self._in_flight.add(exchange)
        return exchange

    def _wait(self, exchange: "Exchange", wait: Callable[[Any, float], None]) -> None:
        """Wait for an exchange with `_wait_for` or `_wait_on_stream`."""
        work = exchange.work
        self._check_open()  # the watchdog may have closed the manager and cleared exchange.work
        try:
            wait(work, exchange.started_s + self.timeout_s)
        except RuntimeError as error:
            del work  # a reference to the work would keep connections open
            raise self._handle_failure(exchange.record, exchange.started_s, error) from error
        self._finish(exchange)

    def _finish(self, exchange: "Exchange") -> None:
        with self._lock:
            self._in_flight.discard(exchange)
        exchange.work = None  # a reference to the work would keep connections open
        self.last_calls.end(exchange.record)

    def _wait_for(self, work: Any, deadline_s: float) -> None:
        """Wait for a collective. Raise RuntimeError if it failed or did not end in time.

        deadline_s: time at which the wait ends (time.monotonic).
        """
        if self.device == "cpu":
            # Wait slightly longer than gloo's timeout, after which gloo has released its threads.
            remaining_s = max(0.0, deadline_s - time.monotonic()) + 0.25
            work.wait(timedelta(seconds=remaining_s))
            return
        while not work.is_completed():
            if time.monotonic() > deadline_s:
                raise RuntimeError("the exchange did not end in time")
            time.sleep(_POLL_S)
        work.wait()

    def _wait_on_stream(self, work: Any, deadline_s: float) -> None:
        """Make the current CUDA stream wait for a collective. On a CPU, the same as `_wait_for`."""
        if self.device == "cuda":
            work.wait()
        else:
            self._wait_for(work, deadline_s)

    def _close_connections(self) -> None:
        """Close every connection, so that ranks that wait for this one fail immediately."""
        if self.device_status is not None and self.device == "cuda":
            # Calls on the device stop waiting for the data of their peers.
            with suppress(RuntimeError):
                self.device_status.mark_failed()
        with self._lock:
            in_flight = list(self._in_flight)
        for exchange in in_flight:
            exchange.work = None  # gloo closes its connections once nothing refers to them
            if exchange.record["ended_s"] is None:
                self.last_calls.end(exchange.record, "failed: given up")
        group = self._communicator.close()
        if self.device == "cuda" and group is not None:
            # abort() does not return while a CUDA graph contains exchanges of the communicator.
            with suppress(RuntimeError):
                run_with_timeout(group.abort, _ABORT_TIMEOUT_S)

    def _find_unreachable_ranks(self, store_rank: int) -> tuple[int, ...]:
        """Return the ranks that are unreachable if the rank that serves the store does not answer.

        These are all ranks of its host. If the host is also this rank's host, or hosts are not
        known yet, it is the store's rank alone.
        """
        index_W = self.hosts.index_W
        is_known = len(index_W) == self.world_size
        if not is_known or index_W[store_rank] == index_W[self.rank]:
            return (store_rank,)
        return self.hosts.ranks_on(index_W[store_rank])

    def _handle_failure(
        self, record: dict[str, Any], started_s: float, error: RuntimeError
    ) -> CommunicationError:
        """Close the manager after a failed exchange, and return an error with the failed ranks.

        If several threads fail at the same time, the first one handles the failure, and the others
        wait for its result.

        record: record of the exchange in `last_calls`.
        started_s: start of the exchange (time.monotonic).
        error: error of the backend.
        """
        reason, position = first_sentence(error), (record["phase"], record["step"])
        need = f"every rank within {self.timeout_s:g} s"
        preliminary = self._make_error("exchange between ranks", reason, need, *position, ())
        with self._lock:
            is_first = self._failure_thread is None
            if is_first:
                self._failure_thread, self._failure = threading.get_ident(), preliminary
        if not is_first:
            assert self._failure is not None  # set together with _failure_thread
            return self._wait_for_culprits(self._failure)
        try:
            return self._close_and_find_culprits(record, started_s, error)
        finally:
            self._culprits_known.set()

    def _close_and_find_culprits(
        self, record: dict[str, Any], started_s: float, error: RuntimeError
    ) -> CommunicationError:
        """Close connections, exchange failure records, and return an error with failed ranks."""
        elapsed_s = record["waited_s"] = time.monotonic() - started_s
        reason = first_sentence(error)
        self.last_calls.end(record, f"failed: {reason}")
        need = f"every rank within {self.timeout_s:g} s"
        position = record["phase"], record["step"]
        clear_frames(error.__traceback__)  # frames may refer to the communicator
        self._close_connections()
        end_time = max(time.monotonic() + _MIN_GRACE_S, started_s + self.timeout_s + _GRACE_S)
        records = self._failure_records.publish_and_collect(record, end_time)
        peers = self._store_rank
        cause = "the group's store, which may run on that rank, does not answer"
        if records is None and peers and not self._failure_records.is_closed:
            peers = self._find_unreachable_ranks(peers[0])
        if records is not None:
            records.setdefault(self.rank, record)
            peers, cause = find_culprits(self.rank, self.world_size, records, self.timeout_s)
        got = f"{cause}; after {elapsed_s:.2f} s: {reason}"
        self._failure = self._make_error("exchange between ranks", got, need, *position, peers)
        return self._failure


@dataclass(eq=False)
class Exchange:
    """A collective in flight, with references to its tensors, so that they are not freed early.

    - work: the backend's handle of the collective; None once it has been waited for.
    - record: record of the exchange in `TorchGroup.last_calls`.
    - started_s: start of the exchange (time.monotonic).
    """

    manager: TorchGroup
    work: Any
    tensors: tuple[torch.Tensor, ...]
    record: dict[str, Any]
    started_s: float

    def wait(self) -> None:
        """Wait for the end of the exchange. Raise CommunicationError if it failed."""
        self.manager._wait(self, self.manager._wait_for)

    def wait_on_stream(self) -> None:
        """Make later work on the current CUDA stream wait for the end of the exchange.

        The host does not wait. On a CPU, this is the same as `wait`.
        """
        self.manager._wait(self, self.manager._wait_on_stream)


def _describe_hosts(hosts: Hosts, peers: Sequence[int]) -> str:
    """Describe the hosts of ranks, as in "ranks 2, 3: all of host b"."""
    host_indices = sorted({hosts.index_W[peer] for peer in peers})
    descriptions = []
    for host in host_indices:
        host_ranks = [peer for peer in peers if hosts.index_W[peer] == host]
        prefix = "all of" if len(host_ranks) == len(hosts.ranks_on(host)) else "on"
        ranks = ", ".join(map(str, host_ranks))
        descriptions.append(
            f"rank{'s' if len(host_ranks) > 1 else ''} {ranks}: {prefix} host {hosts.names[host]}"
        )
    return "; ".join(descriptions)


def first_sentence(error: RuntimeError) -> str:
    """Return the first sentence of an error message, without the source location of torch."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r"^\[\S+\] ", "", lines[0]).split(". ")[0][:200]
