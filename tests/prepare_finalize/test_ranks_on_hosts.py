"""Ranks on several hosts are detected, refused if a part requires one host, and named in errors.
MK_HOST_ID simulates several hosts on one machine.
"""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_fixtures import make_ranks_fixture

from modular_kernel.catalog import check, make_kernel
from modular_kernel.compatibility.support import PrepareFinalizeRequirements
from modular_kernel.errors import CommunicationError, ConfigurationError, ModularKernelError
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import ActivationFormat, Machine, Parallel, Problem
from modular_kernel.testing.ranks.pool import RankPool
from prepare_finalize import TorchGroup
from prepare_finalize.rendezvous import hosts as hosts_module
from prepare_finalize.rendezvous.connect import new_prefix_store
from prepare_finalize.rendezvous.hosts import Hosts, check_hosts, check_one_host, find_hosts
from prepare_finalize.rendezvous.store_collectives import StoreCollectives

SYMM_MEM, ALL2ALL = "SymmMemPrepareAndFinalize", "TorchAll2AllPrepareAndFinalize"
SHARED_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


four = make_ranks_fixture(4)


def set_host_id(rank: int, ids: str) -> None:
    os.environ["MK_HOST_ID"] = ids[rank]  # noqa: TID251


def find_hosts_of_rank(
    rank: int, world: int, group: object, ids: str
) -> tuple[str, tuple[int, ...]]:
    set_host_id(rank, ids)
    store = new_prefix_store(dist.group.WORLD, 10.0)
    hosts = find_hosts(StoreCollectives(store, rank, world, 10.0), rank)
    return str(hosts), hosts.index_W


@pytest.mark.parametrize(
    ("ids", "index_W", "message"),
    [
        ("aabb", (0, 0, 1, 1), "4 ranks on 2 hosts: 0, 1 on a; 2, 3 on b"),
        ("abab", (0, 1, 0, 1), "4 ranks on 2 hosts: 0, 2 on a; 1, 3 on b"),
        ("aaaa", (0, 0, 0, 0), "4 ranks on one host, a"),
        ("abcd", (0, 1, 2, 3), "4 ranks on 4 hosts: 0 on a; 1 on b; 2 on c; 3 on d"),
    ],
)
def test_every_rank_finds_the_same_hosts(
    four: RankPool, ids: str, index_W: tuple[int, ...], message: str
) -> None:
    assert four.run(find_hosts_of_rank, ids) == [(message, index_W)] * 4


def find_hosts_without_shared_memory(
    rank: int, world: int, group: object
) -> tuple[str, tuple[int, ...]]:
    """Find hosts while ranks 2 and 3 cannot read files of other ranks, as in another container."""
    os.environ["MK_HOST_ID"] = ""  # noqa: TID251
    read_token = hosts_module._read_token
    if rank >= 2:
        hosts_module._read_token = lambda path: ""
    try:
        return find_hosts_of_rank(rank, world, group, [""] * 4)
    finally:
        hosts_module._read_token = read_token


def test_ranks_without_shared_memory_are_on_different_hosts(
    four: RankPool,
) -> None:
    reports = four.run(find_hosts_without_shared_memory)
    assert {index_W for _, index_W in reports} == {(0, 0, 1, 2)}
    assert " (2); " in reports[0][0]


def list_shared_memory_files() -> set[Path]:
    """Return the files of ranks in shared memory, including those of other processes."""
    return set() if SHARED_MEMORY is None else set(SHARED_MEMORY.glob("modular_kernel-*"))


def wait_for_removal(files_before: set[Path]) -> set[Path]:
    """Wait up to 10 s until new files are removed, and return those that remain."""
    remaining, deadline = list_shared_memory_files() - files_before, time.monotonic() + 10
    while remaining and time.monotonic() < deadline:
        time.sleep(0.1)
        remaining &= list_shared_memory_files()
    return remaining


@pytest.mark.skipif(SHARED_MEMORY is None, reason="no /dev/shm here")
def test_shared_memory_files_are_removed(four: RankPool) -> None:
    files_before = list_shared_memory_files()
    four.run(find_hosts_of_rank, "aabb")
    assert wait_for_removal(files_before) == set()


def make_part(
    rank: int, world: int, group: object, ids: str, part: str, per_host: int | None
) -> str:
    set_host_id(rank, ids)
    parallel = Parallel(world, "linear", rank, per_host)
    problem = Problem(
        tokens=8, hidden=64, intermediate=64, experts=8, top_k=2, dtype=torch.float32,
        parallel=parallel,
    )  # fmt: skip
    start_time = time.monotonic()
    try:
        make_kernel(part, "TorchExperts", problem, group=group).prepare_finalize.destroy()
    except ModularKernelError as error:
        assert time.monotonic() - start_time < 5
        return f"{type(error).__name__} {error}"
    return "made"


@pytest.mark.parametrize(
    ("ids", "part", "per_host", "message"),
    [
        ("aabb", ALL2ALL, 2, "made"),
        ("aabb", ALL2ALL, None, "made"),
        ("aabb", ALL2ALL, 4, "need 4 consecutive ranks on each"),
        ("aaaa", ALL2ALL, 2, "need 2 consecutive ranks on each"),
        ("abab", ALL2ALL, 2, "got 4 ranks on 2 hosts: 0, 2 on a; 1, 3 on b"),
    ],
)
def test_a_part_requires_the_hosts_of_its_problem(
    four: RankPool, ids: str, part: str, per_host: int | None, message: str
) -> None:
    messages = four.run(make_part, ids, part, per_host)
    assert all(message in answer for answer in messages), messages
    assert message == "made" or all(answer.startswith("ConfigurationError") for answer in messages)


@pytest.mark.cpu  # The kernels of the exchange are interpreted.
def test_shared_memory_over_two_hosts_is_refused_by_every_rank(
    four: RankPool,
) -> None:
    files_before = list_shared_memory_files()
    messages = four.run(make_part, "aabb", SYMM_MEM, None)
    need = f"need one host, whose memory {SYMM_MEM} shares"
    assert all(need in answer for answer in messages), messages
    assert wait_for_removal(files_before) == set()
    assert four.run(make_part, "aaaa", SYMM_MEM, None) == ["made"] * 4


def test_verdicts_on_described_clusters() -> None:
    sizes = {"tokens": 8, "hidden": 512, "intermediate": 512, "experts": 8, "top_k": 2}
    machine = Machine("cuda", (9, 0), frozenset({"triton", "deep_ep", "pplx_kernels"}))
    names = ("DeepEPHT", "DeepEPLL", "Pplx", "SymmMem", "TorchAll2All", "AllGatherReduceScatter")
    parts_on_one_host = set()
    for name in names:
        for per_host in (None, 2):
            problem = Problem(**sizes, parallel=Parallel(4, ranks_per_host=per_host))
            experts = "BatchedTritonExperts" if name in ("DeepEPLL", "Pplx") else "TritonExperts"
            verdict = check(f"{name}PrepareAndFinalize", experts, problem, machine)
            rules = {rejection.rule for rejection in verdict.rejections}
            assert ("hosts" in rules) <= (per_host == 2)
            parts_on_one_host |= {name} if "hosts" in rules else set()
    assert parts_on_one_host == {"DeepEPHT", "DeepEPLL", "Pplx", "SymmMem"}


@pytest.mark.parametrize("per_host", [0, 3, 5, 8, True, "2"])
def test_impossible_ranks_per_host_are_refused(per_host: object) -> None:
    with pytest.raises(ConfigurationError, match="ranks_per_host"):
        Parallel(4, ranks_per_host=per_host)


def call_with_late_rank(rank: int, world: int, group: object, skew_s: float) -> str:
    """Return the error if rank 2 is late. The clocks of host b are `skew_s` ahead."""
    set_host_id(rank, "aabb")
    clock = time.time
    if rank >= 2:
        time.time = lambda: clock() + skew_s
    try:
        manager = TorchGroup(group, timeout_s=3.0)
        if rank == 2:
            time.sleep(3.3)
        manager.all_reduce(torch.ones(1), step=1, phase="counts").wait()
    except CommunicationError as error:
        return f"{error.peers} {error}"
    finally:
        time.time = clock
    return "no error"


@pytest.mark.parametrize("skew_s", [0.0, 60.0, -60.0])
def test_a_skewed_clock_causes_no_wrong_accusation(four: RankPool, skew_s: float) -> None:
    messages = four.run(call_with_late_rank, skew_s)
    for rank in (0, 1, 3):
        assert messages[rank].startswith("(2,)"), messages
        assert "s late" in messages[rank]
        assert "rank 2: on host b" in messages[rank]
    assert "gave up on this rank, which was at least" in messages[2]


def call_with_missing_host(rank: int, world: int, group: object) -> str:
    """Return the error if host b misses an exchange."""
    set_host_id(rank, "aabb")
    manager = TorchGroup(group, timeout_s=1.0)
    if rank >= 2:
        time.sleep(2.5)
        return ""
    try:
        manager.all_reduce(torch.ones(1), step=1, phase="counts").wait()
    except CommunicationError as error:
        return str(error)
    return "no error"


def test_a_missing_host_is_named(four: RankPool) -> None:
    messages = four.run(call_with_missing_host)
    assert all("ranks 2, 3: all of host b" in message for message in messages[:2]), messages


def call_without_store(rank: int, world: int, group: object, is_closed: bool) -> tuple[int, ...]:
    """Return the named peers if an exchange fails, and the store does not answer.
    is_closed: whether the connection to the store is closed.
    """
    set_host_id(rank, "aabb")
    manager = TorchGroup(group, timeout_s=1.0)
    manager._failure_records.is_closed = is_closed
    manager._failure_records.publish_and_collect = lambda record, until_s: None
    if rank == 3:
        time.sleep(2.5)
        return ()
    try:
        manager.all_reduce(torch.ones(1), step=1, phase="counts").wait()
    except CommunicationError as error:
        return error.peers
    return ()


def test_ranks_name_the_rank_of_a_store_that_does_not_answer(four: RankPool) -> None:
    assert four.run(call_without_store, False)[:3] == [(), (0,), (0, 1)]
    assert four.run(call_without_store, True)[:3] == [(), (0,), (0,)]


def test_hosts_have_ranks_and_names() -> None:
    hosts = Hosts((0, 0, 1, 1), ("a", "b"))
    assert hosts.has_consecutive_ranks(2)
    assert not hosts.has_consecutive_ranks(4)
    assert not hosts.has_consecutive_ranks(3)
    assert hosts.ranks_on(1) == (2, 3)
    assert hosts.get_host_name(2) == "b"
    with pytest.raises(ConfigurationError, match="need one host, whose memory X shares"):
        check_one_host(hosts, "X")


@pytest.mark.parametrize(
    ("index_W", "full", "need"),
    [
        ((0,) * 8 + (1,) * 8, True, ""),
        ((0,) * 8, True, ""),
        ((0,) * 3, True, ""),
        ((0,) * 4 + (1,) * 4, False, ""),
        (
            (0,) * 4 + (1,) * 4,
            True,
            "need 8 consecutive ranks on each host, equally many on all, for X",
        ),
        ((0,) * 16, True, "need at most 8 consecutive ranks on each host"),
        ((0, 1) * 8, True, "need 8 consecutive ranks on each host"),
        ((0,) * 12 + (1,) * 12, False, "need at most 8 consecutive ranks on each host"),
        ((0,) * 8 + (1,) * 4, False, "need at most 8 consecutive ranks on each host"),
    ],
)
def test_parts_with_eight_ranks_per_host_refuse_other_hosts(
    index_W: tuple[int, ...], full: bool, need: str
) -> None:
    names = tuple("abc"[: max(index_W) + 1])
    requires = PrepareFinalizeRequirements(
        activation_format=ActivationFormat.STANDARD,
        reduces=frozenset(),
        ranks_per_host=8,
        full_hosts=full,
    )
    message = ""
    try:
        check_hosts(Hosts(index_W, names), part="X", requires=requires, ranks_per_host=None)
    except ConfigurationError as error:
        message = str(error)
    assert need in message
    assert bool(message) is bool(need)


def find_ranks_by_expert(rank: int, world: int, group: object, part: str) -> list[list[int]]:
    """Return the ranks to which this rank's pairs of each expert may go."""
    set_host_id(rank, "aabb")
    placement = Placement.linear(4, 4).with_copies({0: (1, 2), 2: (3,)})
    problem = Problem(
        tokens=8, hidden=64, intermediate=64, experts=4, top_k=2, dtype=torch.float32,
        parallel=Parallel(world, placement, rank),
    )  # fmt: skip
    kernel = make_kernel(part, "TorchExperts", problem, group=group)
    tables = kernel.prepare_finalize.tables(torch.device("cpu"))
    ranks_by_expert = [
        sorted({int(location[0]) for location in locations[:copies]})
        for locations, copies in zip(tables.homes_ER2, tables.copies_E.tolist(), strict=True)
    ]
    kernel.prepare_finalize.destroy()
    return ranks_by_expert


def test_pairs_go_to_the_nearest_copies_on_actual_hosts(four: RankPool) -> None:
    ranks_by_expert = four.run(find_ranks_by_expert, ALL2ALL)
    assert ranks_by_expert == [
        [[0], [1], [2, 3], [3]],
        [[1], [1], [2, 3], [3]],
        [[2], [1], [2], [3]],
        [[2], [1], [3], [3]],
    ]
    for part in ("AllGatherReduceScatterPrepareAndFinalize", "ReplicatedEPPrepareAndFinalize"):
        ranks_by_expert = four.run(find_ranks_by_expert, part)
        assert ranks_by_expert == [[[0, 1, 2], [1], [2, 3], [3]]] * 4
