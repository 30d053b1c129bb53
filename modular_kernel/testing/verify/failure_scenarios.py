"""Checks for the "broken-off" fault scenario: failed exchanges of a simulated group of six ranks.

Each check copies a manager (which owns the communication of one rank) and replaces its backend by
one whose exchanges fail. A simulated store holds the failure records of the other ranks. No real
rank is involved, so the expected ranks and reasons in each error are known exactly.
"""

import copy
import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from modular_kernel.errors import CommunicationError, UnsupportedError
from modular_kernel.testing.verify.manager_scenarios import has_builtin_classes
from modular_kernel.testing.verify.problem_scenarios import Outcomes
from modular_kernel.testing.verify.scenario_context import ScenarioContext

_RANK, _WORLD_SIZE = 2, 6  # of the simulated manager
_HOST_INDICES, _HOST_NAMES = (0, 0, 1, 1, 1, 1), ("a", "b")
_STORE_RANK = 0  # the rank whose process serves the store
_TIMEOUT_S = 10.0
_STEP, _PHASE = 7, "dispatch"  # of the failing exchange
_ERROR = "the backend failed"
_RELEASE_S = 5.0  # a simulated store that does not answer is released after this time
_MAX_REPORT_S = 3.0  # maximum time until the error of an overdue exchange is raised
_MAX_OVERDUE_WAIT_S = 0.5  # maximum timeout that is passed to `wait` of an overdue exchange
# Other ranks may publish records until a second after the timeout. A rank must wait this long.
_MIN_GRACE_S = 0.7

_ALL_OTHERS = (0, 1, 3, 4, 5)
_ON_HOSTS = "; ranks 0, 1: all of host a; ranks 3, 4, 5: on host b"


def _make_record(
    step: int | None = _STEP,
    phase: str = _PHASE,
    waited_s: float | None = 12.5,
    **other_fields: object,
) -> dict[str, Any]:
    return {"step": step, "phase": phase, "waited_s": waited_s, **other_fields}


_SAME_RECORDS = dict.fromkeys(_ALL_OTHERS, _make_record())

# Each row has the records of the other ranks, the seconds that this rank has waited, the ranks that
# its error must name, and the expected reason. Another thread of this rank published the record of
# rank 2.
_FAILURES: tuple[tuple[Mapping[int, Any], float, tuple[int, ...], str], ...] = (
    (
        {
            0: _make_record(broke_off="aborted its call: A"),
            4: _make_record(broke_off="aborted its call: B"),
            _RANK: _make_record(broke_off="aborted its call: C"),
        },
        12.0,
        (0, 4),
        "aborted its call: A; rank 0: on host a; rank 4: on host b",
    ),
    (
        {**_SAME_RECORDS, _RANK: _make_record(broke_off="aborted its call: C")},
        12.0,
        _ALL_OTHERS,
        f"failed too{_ON_HOSTS}",
    ),
    (
        {
            0: "{",
            1: [],
            3: _make_record(phase="send"),
            4: _make_record(step=None),
            5: _make_record(waited_s=None),
        },
        12.0,
        _ALL_OTHERS,
        f"no sign of life{_ON_HOSTS}",
    ),
    (
        {rank: record for rank, record in _SAME_RECORDS.items() if rank not in (0, 1)},
        12.0,
        (0, 1),
        "no sign of life; ranks 0, 1: all of host a",
    ),
    (
        {
            **_SAME_RECORDS,
            0: _make_record(step=6, phase="combine"),
            1: _make_record(phase="counts"),
            4: _make_record(step=6, awaited=[3]),
        },
        12.0,
        (0, 1),
        "still in an earlier exchange; ranks 0, 1: all of host a",
    ),
    (
        {
            **_SAME_RECORDS,
            4: _make_record(step=8, phase="counts"),
            5: _make_record(step=6, awaited=[3]),
        },
        12.0,
        (0, 1, 3),
        "still in an earlier exchange; ranks 0, 1: all of host a; rank 3: on host b",
    ),
    (
        {**_SAME_RECORDS, 1: _make_record(waited_s=7.3), 3: _make_record(waited_s=7.7)},
        12.0,
        (1,),
        "at least 5 s late; rank 1: on host a",
    ),
    (
        {**_SAME_RECORDS, 1: _make_record(waited_s=6.4), 3: _make_record(waited_s=3.3)},
        12.0,
        (1, 3),
        "at least 9 s late; rank 1: on host a; rank 3: on host b",
    ),
    (
        _SAME_RECORDS,
        4.6,
        _ALL_OTHERS,
        f"gave up on this rank, which was at least 8 s late{_ON_HOSTS}",
    ),
    (_SAME_RECORDS, 8.2, _ALL_OTHERS, f"failed too{_ON_HOSTS}"),
    ({**_SAME_RECORDS, _RANK: "{"}, 12.0, _ALL_OTHERS, f"failed too{_ON_HOSTS}"),
)


class _Work:
    """The handle of an exchange, whose `wait` raises an error.

    waits_s: list to which `wait` appends its timeout in seconds.
    on_wait: called by `wait` before the error is raised.
    """

    def __init__(self, waits_s: list[float], on_wait: Callable[[], object]) -> None:
        self._waits_s, self._on_wait = waits_s, on_wait

    def wait(self, timeout: timedelta) -> None:
        self._waits_s.append(timeout.total_seconds())
        self._on_wait()
        raise RuntimeError(_ERROR)


class _Backend:
    """A backend whose exchanges fail.

    waits_s: the timeouts that were passed to `wait`.
    works: weak references to the handles of the exchanges.
    """

    def __init__(self, on_wait: Callable[[], object]) -> None:
        self.waits_s: list[float] = []
        self.works: list[weakref.ref[_Work]] = []
        self._on_wait = on_wait

    def allreduce(self, _tensors: list[torch.Tensor]) -> _Work:
        work = _Work(self.waits_s, self._on_wait)
        self.works.append(weakref.ref(work))
        return work


class _Store:
    """A store with failure records.

    records: the record of each rank, or text that is not JSON. A record that this rank publishes is
        added unless `records` has one.
    on_set: called when this rank publishes its record.
    published: the records that this rank has published.
    read: the ranks whose records this rank has read, in order.
    """

    def __init__(self, records: Mapping[int, Any], on_set: Callable[[], object]) -> None:
        self._records = {
            rank: record if isinstance(record, str) else json.dumps(record)
            for rank, record in records.items()
        }
        self._on_set = on_set
        self.published: list[dict[str, Any]] = []
        self.read: list[int] = []

    def set(self, _key: str, record: str) -> None:
        self.published.append(json.loads(record))
        self._on_set()
        self._records.setdefault(_RANK, record)

    def check(self, keys: list[str]) -> bool:
        return all(_parse_rank(key) in self._records for key in keys)

    def get(self, key: str) -> bytes:
        self.read.append(_parse_rank(key))
        return self._records[self.read[-1]].encode()


def _parse_rank(key: str) -> int:
    return int(key.rpartition("/")[2])


class SimulatedManager:
    """A copy, `manager`, of a real manager, with a simulated backend and store."""

    def __init__(
        self,
        manager: Any,
        records: Mapping[int, Any],
        *,
        on_set: Callable[[], object] = lambda: None,
        on_wait: Callable[[], object] = lambda: None,
        host_indices: tuple[int, ...] = _HOST_INDICES,
    ) -> None:
        self.backend, self.store = _Backend(on_wait), _Store(records, on_set)
        self.manager = simulated = copy.copy(manager)
        simulated.rank, simulated.world_size = _RANK, _WORLD_SIZE
        simulated.timeout_s, simulated._store_rank = _TIMEOUT_S, (_STORE_RANK,)
        simulated.hosts = type(manager.hosts)(host_indices, _HOST_NAMES[: max(host_indices) + 1])
        simulated.last_calls = type(manager.last_calls)(_RANK, 8)
        simulated._calls_by_step, simulated._in_flight = {}, weakref.WeakSet()
        simulated._lock, simulated._culprits_known = threading.Lock(), threading.Event()
        simulated._failure_records = type(manager._failure_records)(self.store, _RANK, _WORLD_SIZE)
        simulated._communicator = type(manager._communicator)(simulated, device=manager.device)
        simulated._communicator.group = self.backend
        if hasattr(manager, "host_memory"):  # otherwise, a failure would set flags of real ranks
            simulated.host_memory = None

    def start(self, waited_s: float) -> Any:
        """Start an exchange, and backdate its start by `waited_s` seconds."""
        exchange = self.manager.all_reduce(torch.ones(1), step=_STEP, phase=_PHASE)
        exchange.started_s -= waited_s
        return exchange

    def fail(self, waited_s: float) -> str:
        """Return the error of an exchange that started `waited_s` seconds ago."""
        return _describe_failure(self.start(waited_s).wait)


def _describe_failure(function: Callable[[], object]) -> str:
    """Return the peers and the reason of the CommunicationError that `function` raises.

    Durations are rounded to seconds or removed.
    """
    try:
        function()
    except CommunicationError as error:
        if (error.rank, error.phase, error.step) != (_RANK, _PHASE, _STEP):
            return f"{error.rank}, {error.phase}, {error.step}: {error}"
        reason = re.sub(rf"; after \d+\.\d+ s: {_ERROR}", "", str(error.got))
        return f"{error.peers} " + re.sub(
            r"\d+\.\d+ s late", lambda match: f"{float(match[0].split()[0]):.0f} s late", reason
        )
    except UnsupportedError as error:
        return str(error)
    return "no error"


def check_simulated_failures(context: ScenarioContext, manager: Any) -> Outcomes:
    """Check the errors of exchanges that fail on a copy of `manager`."""
    if not has_builtin_classes(context) or not hasattr(manager, "all_reduce"):
        return
    checks = [
        *(partial(_check_reported_ranks, manager, *failure) for failure in _FAILURES),
        *(partial(_check_dead_store, manager, *store) for store in _DEAD_STORES),
        partial(_check_grace, manager),
        partial(_check_release, manager),
        partial(_check_two_threads, manager),
        partial(_check_abort, manager),
    ]
    with ThreadPoolExecutor(len(checks)) as pool:  # some checks sleep
        yield from pool.map(lambda check: check(), checks)


def _check_reported_ranks(
    manager: Any,
    records: Mapping[int, Any],
    waited_s: float,
    peers: tuple[int, ...],
    reason: str,
) -> tuple[str, str]:
    simulated = SimulatedManager(manager, records)
    start = time.monotonic()
    outcome = simulated.fail(waited_s)
    if time.monotonic() - start > _MAX_REPORT_S:
        return "the error came late", "the error came at once"
    (wait_s,) = simulated.backend.waits_s
    if waited_s > _TIMEOUT_S and wait_s > _MAX_OVERDUE_WAIT_S:
        return f"waited {wait_s} s for an exchange that was overdue", "at most half a second"
    return outcome, f"{peers} {reason}"


def _check_grace(manager: Any) -> tuple[str, str]:
    """Check that a rank waits for the records of ranks that time out a little later."""
    simulated = SimulatedManager(manager, {0: _make_record(), 1: _make_record()})
    start = time.monotonic()
    outcome = simulated.fail(_TIMEOUT_S + 0.2)
    if time.monotonic() - start < _MIN_GRACE_S:
        return "no time for the records of other ranks", "a second after the timeout"
    expected = "(3, 4, 5) no sign of life; ranks 3, 4, 5: on host b; read 0, 1, 2"
    return f"{outcome}; read {', '.join(map(str, simulated.store.read))}", expected


# Each row of _DEAD_STORES has the behavior of the store when this rank publishes its record, the
# host of each rank, the ranks that the error must name, and the hosts in the error.
_SILENT, _CLOSED = "silent", "closed"
_DEAD_STORES = (
    (_CLOSED, _HOST_INDICES, (0,), "rank 0: on host a"),
    (_SILENT, _HOST_INDICES, (0, 1), "ranks 0, 1: all of host a"),
    (_SILENT, (0, 1, 0, 1, 1, 1), (0,), "rank 0: on host a"),
    (_SILENT, (0,), (0,), ""),  # the hosts are not known yet
)


def _check_dead_store(
    manager: Any, kind: str, host_indices: tuple[int, ...], peers: tuple[int, ...], hosts: str
) -> tuple[str, str]:
    """Make a call on a manager whose store is silent, or has closed its connections."""
    released = threading.Event()

    def on_set() -> None:
        if kind == _CLOSED:
            raise RuntimeError("connection closed")
        released.wait(_RELEASE_S)

    simulated = SimulatedManager(manager, _SAME_RECORDS, on_set=on_set, host_indices=host_indices)
    start = time.monotonic()
    outcome = simulated.fail(12.0)
    released.set()
    if time.monotonic() - start > _MAX_REPORT_S:
        return "the error came late", "the error came at once"
    reason = "the group's store, which may run on that rank, does not answer"
    return outcome, f"{peers} {reason}{'; ' if hosts else ''}{hosts}"


def _check_release(manager: Any) -> tuple[str, str]:
    """Check that a rank releases its exchange and backend before it publishes its record.

    The release closes the connections to the other ranks, so that their exchanges fail as well.
    """
    states = list[str]()

    def on_set() -> None:
        is_freed = [work() is None for work in simulated.backend.works] == [True, True]
        is_closed = simulated.manager._communicator.group is None
        states.append(f"freed: {is_freed}, closed: {is_closed}")

    simulated = SimulatedManager(manager, _SAME_RECORDS, on_set=on_set)
    older_exchange = simulated.start(0.0)
    exchange = simulated.start(4.0)
    outcome = _describe_failure(exchange.wait)
    (wait_s,) = simulated.backend.waits_s
    record = simulated.store.published[0]
    is_complete = (record["rank"], record["step"], record["phase"]) == (_RANK, _STEP, _PHASE)
    is_complete &= record["state"] == f"failed: {_ERROR}" and 4.0 <= record["waited_s"] < 6.0
    is_complete &= older_exchange.record["state"] == "failed: given up"
    states += [
        outcome.partition(";")[0],
        "waited" if 4.0 < wait_s <= _TIMEOUT_S - 4.0 + 0.5 else f"waited {wait_s} s",
        "complete" if is_complete else f"{record} {older_exchange.record}",
    ]
    expected = "freed: True, closed: True"
    expected_error = f"{_ALL_OTHERS} gave up on this rank, which was at least 8 s late"
    return "; ".join(states), "; ".join((expected, expected_error, "waited", "complete"))


def _check_two_threads(manager: Any) -> tuple[str, str]:
    """Make exchanges fail in two threads at the same time while a third thread begins a call.

    Only one thread publishes a record and determines the ranks to report. All threads must raise
    its error.
    """
    both_waiting, publishing = threading.Barrier(2, timeout=_RELEASE_S), threading.Event()

    def on_set() -> None:
        publishing.set()
        time.sleep(0.2)  # give the other threads time to fail

    simulated = SimulatedManager(manager, _SAME_RECORDS, on_set=on_set, on_wait=both_waiting.wait)
    exchanges = [simulated.start(12.0) for _ in range(2)]

    def begin_call() -> str:
        publishing.wait(_RELEASE_S)
        return _describe_failure(simulated.manager.next_step)

    with ThreadPoolExecutor(3) as pool:
        begin_future = pool.submit(begin_call)
        outcomes = [*pool.map(lambda exchange: _describe_failure(exchange.wait), exchanges)]
    failure = f"failed too{_ON_HOSTS}"
    outcomes += [begin_future.result(), f"{len(simulated.store.published)} records"]
    later = f"{_ALL_OTHERS} a manager that failed before: {failure}{_ON_HOSTS}"
    error = f"{_ALL_OTHERS} {failure}"
    return " | ".join(outcomes), " | ".join((error, error, later, "1 records"))


def _check_abort(manager: Any) -> tuple[str, str]:
    """Check that an abort closes the manager once, and that some aborts have no effect.

    An abort has no effect after an error of an exchange, after an earlier abort, and on a destroyed
    manager.
    """
    simulated = SimulatedManager(manager, _SAME_RECORDS)
    aborted_manager = simulated.manager
    aborted_manager.step = _STEP
    aborted_manager.abort(
        CommunicationError("exchange", got="a failure", need="none", rank=_RANK, phase="")
    )
    states = [f"failed: {aborted_manager.failed}"]
    aborted_manager.abort(RuntimeError("broken"))
    aborted_manager.abort(RuntimeError("broken again"))
    states += [
        f"{record['rank']}, {record['step']}, {record['waited_s']}: {record['broke_off']}"
        for record in simulated.store.published
    ]
    states += [
        f"failed: {aborted_manager.failed}, closed: {aborted_manager._communicator.group is None}",
    ]
    destroyed = SimulatedManager(manager, _SAME_RECORDS)
    destroyed.manager.destroy()
    destroyed.manager.abort(RuntimeError("broken"))
    states.append(f"{len(destroyed.store.published)} records")
    return "; ".join(states), "; ".join(
        (
            "failed: False",
            f"{_RANK}, {_STEP}, 0.0: aborted its call: RuntimeError",
            "failed: True, closed: True",
            "0 records",
        )
    )
