"""Checks for the "misunderstood" fault scenario: the hosts of a simulated group of six ranks.

Each check runs on a copy of a manager or part. A store in this process holds the answers of the
other ranks, so two real ranks can check any distribution of ranks over hosts.
"""

import copy
import fcntl
import json
import os
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore

from modular_kernel.catalog import check
from modular_kernel.errors import CommunicationError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.settings import use_host_id
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import Parallel
from modular_kernel.testing.cases.scenario_names import find_manager_class
from modular_kernel.testing.verify.manager_scenarios import has_builtin_classes
from modular_kernel.testing.verify.problem_scenarios import Outcomes
from modular_kernel.testing.verify.scenario_context import ScenarioContext

_RANK, _WORLD_SIZE = 2, 6  # of the simulated manager
_SHARED_MEMORY = Path("/dev/shm")
# Rank -> its answer: the name of the host, MK_HOST_ID, whether the file that it shares can be read,
# whether the token in the file is right, and the ranks whose files it has read.
_ANSWERS: dict[int, tuple[str, str, bool, bool, str]] = {
    0: ("one", "one", True, True, "0 2"),
    1: ("two", "two", True, True, "1"),
    3: ("one", "one", True, False, "2 3"),
    4: ("one", "one", False, True, "2 4"),
    5: ("one", "one", True, True, "5"),
}
_HOSTS = "6 ranks on 5 hosts: 0, 2 on one; 1 on two; 3 on one (2); 4 on one (3); 5 on one (4)"
_READABLE = "0 2 5"  # ranks whose files rank 2 can read
_RANKS_PER_NODE = 8  # maximum number of ranks per host that parts with shared memory support
_STALE_AGE_S, _YOUNG_AGE_S = 75.0, 45.0  # files of ended processes are removed after a minute

# Each row has the host of each rank, the requirements of the part, the problem's ranks per host,
# and the end of the error, or "" if the part supports these hosts.
_ANY_HOSTS = {"one_host": False, "ranks_per_host": None, "full_hosts": False}
_SUPPORT: tuple[tuple[tuple[int, ...], dict[str, Any], int | None, str], ...] = (
    ((0, 0, 0, 1), _ANY_HOSTS, None, ""),
    ((0, 0, 1, 1), _ANY_HOSTS, 2, ""),
    ((0, 0, 0, 1), _ANY_HOSTS, 2, "2 consecutive ranks on each (Parallel.ranks_per_host)"),
    ((0, 1, 0, 1), _ANY_HOSTS, 2, "2 consecutive ranks on each (Parallel.ranks_per_host)"),
    ((0, 0, 1, 1, 2), _ANY_HOSTS, 2, "2 consecutive ranks on each (Parallel.ranks_per_host)"),
    ((0, 0, 1, 1), {**_ANY_HOSTS, "ranks_per_host": 2}, None, ""),
    (
        (0, 0, 1, 1),
        {**_ANY_HOSTS, "ranks_per_host": 1},
        None,
        "at most 1 consecutive ranks on each host",
    ),
    (
        (0, 0, 0, 1),
        {**_ANY_HOSTS, "ranks_per_host": 4},
        None,
        "at most 4 consecutive ranks on each host",
    ),
    ((0, 0, 1, 1), {**_ANY_HOSTS, "ranks_per_host": 3}, None, ""),
    ((0, 0, 1, 1), {**_ANY_HOSTS, "ranks_per_host": 2, "full_hosts": True}, None, ""),
    (
        (0, 0, 1, 1),
        {**_ANY_HOSTS, "ranks_per_host": 3, "full_hosts": True},
        None,
        "got hosts, need 3 consecutive ranks on",
    ),
    ((0, 0, 0, 0), {**_ANY_HOSTS, "ranks_per_host": 8, "full_hosts": True}, None, ""),
    ((0, 0, 1, 1), {**_ANY_HOSTS, "one_host": True}, None, "one host, whose memory"),
    ((0, 0, 0, 0), {**_ANY_HOSTS, "one_host": True}, None, ""),
)


# Each row has the number of attempts to create a manager that each rank has counted, the failed
# (attempt, rank) pairs, and the number of the attempt that rank 2 must join or begin.
_ATTEMPTS: tuple[tuple[Mapping[int, str], tuple[tuple[int, int], ...], str], ...] = (
    ({}, (), "1"),
    ({0: "3", 1: "2", _RANK: "1"}, ((2, 0), (4, 0)), "3"),
    ({0: "3", _RANK: "1"}, ((3, 0),), "4"),
    ({5: "3"}, ((3, 5),), "4"),
    ({0: "3", _RANK: "3"}, (), "4"),
    ({0: "3", _RANK: "5"}, (), "6"),
    ({0: "three"}, (), "the store holds b'three' as modular_kernel/attempts/0, not a number"),
)


# Each row has the entries of some ranks in the store, and the ranks and the reason of the error of
# rank 2, which compares its properties with those of the others.
_SAME_ENTRY = '{"bytes": "8", "use": "a"}'
_ENTRIES: tuple[tuple[Mapping[int, str], tuple[int, ...], str], ...] = (
    ({}, (), "no error"),
    ({0: "", 5: ""}, (0, 5), "no sign of life"),
    ({1: "", 3: ""}, (1, 3), "no sign of life"),
    ({3: "text"}, (), "a store that fails: it holds b'text' for rank 3"),
    ({4: "[]"}, (), "a store that fails: it holds b'[]' for rank 4"),
    ({0: '{"bytes": 9, "use": "a"}'}, (0,), "bytes 9, 8, 8, 8, 8, 8 by rank"),
    (
        {1: '{"bytes": 8}', 5: '{"bytes": 16, "use": "a"}'},
        (1, 5),
        "bytes 8, 8, 8, 8, 8, 16 by rank; use a, nothing, a, a, a, a by rank",
    ),
)
_COLLECTIVES_TIMEOUT_S = 0.3
_MAX_CHECKS = 2000  # of entries of a store, in one collective with pauses between the checks


def check_simulated_hosts(context: ScenarioContext, kernel: FusedMoEModularKernel) -> Outcomes:
    """Check which ranks share a host, which hosts a part supports, and the files that hosts share.

    kernel: a kernel whose part was made for the context.
    """
    if not has_builtin_classes(context):
        return
    part: Any = kernel.prepare_finalize
    yield _find_hosts(part.manager), f"{_HOSTS}; readable {_READABLE}"
    for row in _SUPPORT:
        yield _check_support(part, *row), str(row)
    yield from (_agree_on_prefix(part.manager, *row) for row in _ATTEMPTS)
    yield from (_compare_properties(*row) for row in _ENTRIES)
    yield from _check_ranks_per_node(context)
    yield from _check_stale_files(context)


def _find_hosts(manager: Any) -> str:
    store, simulated = HashStore(), copy.copy(manager)
    simulated.rank, simulated.world_size, simulated.timeout_s = _RANK, _WORLD_SIZE, 5.0
    with ExitStack() as stack:
        stack.enter_context(use_host_id("one"))
        for rank, (name, host_id, is_readable, is_right, readable) in _ANSWERS.items():
            token = secrets.token_hex(16)
            file = stack.enter_context(_write_host_file(token if is_right else token[::-1]))
            answer = {"name": name, "id": host_id, "token": token}
            answer["file"] = file if is_readable else f"{file}-of-another-host"
            store.set(f"hosts/gather/1/{rank}", json.dumps(answer))
            store.set(f"hosts/gather/2/{rank}", json.dumps({"readable": readable}))
        if hasattr(manager, "all_reduce"):
            hosts = simulated._find_hosts(store)
        else:  # the ranks communicate only through shared memory
            collectives: Any = copy.copy(manager._open_store_collectives())
            collectives.barrier()  # wait until every rank has opened them
            collectives._store, collectives._rank = PrefixStore("hosts", store), _RANK
            collectives._world_size, collectives._num_gathers = _WORLD_SIZE, 0
            simulated._open_store_collectives = lambda: collectives
            hosts = simulated._find_hosts()
    own_answer = json.loads(store.get(f"hosts/gather/2/{_RANK}"))
    return f"{hosts}; readable {own_answer['readable']}"


def _compare_properties(
    entries: Mapping[int, str], peers: tuple[int, ...], reason: str
) -> tuple[str, str]:
    """Compare the properties of rank 2 with those of other ranks; return (actual, expected) error.

    entries: what ranks have written to the store instead of `_SAME_ENTRY`; "" for nothing.
    """
    store = _CountingStore()
    for rank in range(_WORLD_SIZE):
        entry = entries.get(rank, _SAME_ENTRY)
        if rank != _RANK and entry:
            store.set(f"gather/1/{rank}", entry)
    module: Any = sys.modules["prepare_finalize.rendezvous.store_collectives"]
    collectives = module.StoreCollectives(store, _RANK, _WORLD_SIZE, _COLLECTIVES_TIMEOUT_S)
    start, actual = time.monotonic(), "() no error"
    try:
        collectives.check_equal({"bytes": 8, "use": "a"})
    except CommunicationError as error:
        actual = f"{error.peers} {error.got}"
    has_waited = time.monotonic() - start > _COLLECTIVES_TIMEOUT_S - 0.1
    num_checks, num_reads = store.num_checks, max(store.num_reads.values())
    own_entry, failed = store.get(f"gather/1/{_RANK}").decode(), store.check([f"failed/{_RANK}"])
    is_absent, has_slept = "" in entries.values(), num_checks < _MAX_CHECKS
    actual += f"; waited: {has_waited}, recorded: {failed}, sent {own_entry}"
    expected = f"{peers} {reason}; waited: {is_absent}, recorded: {is_absent}, sent {_SAME_ENTRY}"
    actual += f", slept: {has_slept}, reads of an entry: {num_reads}"
    return actual, f"{expected}, slept: True, reads of an entry: 1"


class _CountingStore:
    """A store that counts the checks and reads of its entries.

    num_checks: number of checks whether an entry exists.
    num_reads: number of reads of each entry.
    """

    def __init__(self) -> None:
        self.num_checks, self.num_reads = 0, Counter[str]()
        self._store = HashStore()

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        self.num_checks += 1
        return self._store.check(keys)

    def get(self, key: str) -> bytes:
        self.num_reads[key] += 1
        return self._store.get(key)


def _agree_on_prefix(
    manager: Any, attempts: Mapping[int, str], failed: Sequence[tuple[int, int]], expected: str
) -> tuple[str, str]:
    """Return the actual and the expected attempt that rank 2 joins."""
    store = HashStore()
    for rank, attempt in attempts.items():
        store.set(f"modular_kernel/attempts/{rank}", attempt)
    for failed_attempt, rank in failed:
        store.set(f"modular_kernel/{failed_attempt}/failed/{rank}", "{}")
    modules = (sys.modules[cls.__module__] for cls in type(manager).__mro__)
    connect = next(vars(m)["new_prefix_store"] for m in modules if "new_prefix_store" in vars(m))
    try:
        prefix = connect.__globals__["agree_on_prefix"](store, _RANK, _WORLD_SIZE)
    except RuntimeError as error:
        return str(error), expected
    counted = store.get(f"modular_kernel/attempts/{_RANK}").decode()
    return f"{prefix}, counted {counted}", f"modular_kernel/{expected}, counted {expected}"


@contextmanager
def _write_host_file(token: str) -> Iterator[str]:
    folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    with tempfile.NamedTemporaryFile("w", dir=folder, encoding="ascii") as file:
        file.write(token)
        file.flush()
        yield file.name


def _check_support(
    part: Any,
    index_W: tuple[int, ...],
    requires: dict[str, Any],
    ranks_per_host: int | None,
    error: str,
) -> str:
    """Check on a copy of `part` whether it supports the hosts; return the row, or what differs."""
    part_copy = object.__new__(type(part))  # parts over ranks cannot be copied
    names = tuple(f"host{index}" for index in range(max(index_W) + 1))
    part_copy.manager = SimpleNamespace(hosts=type(part.manager.hosts)(index_W, names))
    part_copy.requires, part_copy._owns_manager = replace(part.requires, **requires), False
    part_copy.problem = SimpleNamespace(parallel=SimpleNamespace(ranks_per_host=ranks_per_host))
    try:
        part_copy._check_hosts()
        message = ""
    except Exception as raised:  # noqa: BLE001  a wrong part may raise anything
        message = str(raised)
    is_right = error.removeprefix("got hosts, ") in message if error else not message
    return str((index_W, requires, ranks_per_host, error)) if is_right else f"{index_W}: {message}"


def _check_ranks_per_node(context: ScenarioContext) -> Outcomes:
    requires, problem = context.part.requires, context.case.problem
    if requires.ranks_per_host is None and not requires.one_host:
        return
    for ranks, is_supported in ((_RANKS_PER_NODE, True), (_RANKS_PER_NODE + 1, False)):
        hosts = 1 if requires.one_host else 2
        parallel = Parallel(
            hosts * ranks, Placement.linear(2 * hosts * ranks, hosts * ranks), ranks_per_host=ranks
        )
        names = context.case.prepare_finalize, context.case.experts
        larger_problem = replace(
            problem, experts=2 * hosts * ranks, local_experts=None, parallel=parallel
        )
        verdict = check(*names, larger_problem, context.machine)
        yield f"{ranks} ranks per host: {verdict.ok}", f"{ranks} ranks per host: {is_supported}"


def _check_stale_files(context: ScenarioContext) -> Outcomes:
    """Check that a new manager removes the files of ended processes, but no others."""
    folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    with ExitStack() as stack:
        paths = []
        for kind, age_s, is_locked in (
            ("host", _STALE_AGE_S, False),
            ("block", _STALE_AGE_S, False),
            ("host", _YOUNG_AGE_S, False),
            ("block", _STALE_AGE_S, True),
            ("other", _STALE_AGE_S, False),
        ):
            name = f"modular_kernel-{kind}-{secrets.token_hex(8)}"
            file = stack.enter_context((folder / name).open("wb"))
            stack.callback(partial((folder / name).unlink, missing_ok=True))
            os.utime(folder / name, (time.time() - age_s,) * 2)
            if is_locked:
                fcntl.flock(file, fcntl.LOCK_EX)
            paths.append(folder / name)
        find_manager_class(context.part)(None).destroy()
        yield str([path.exists() for path in paths]), str([False, False, True, True, True])
