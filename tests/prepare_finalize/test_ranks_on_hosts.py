"""Ranks on several hosts: detected by what they share, refused if one host is required, named in
errors.

MK_HOST_ID makes the ranks of one machine act as ranks of several hosts.
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
FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


four = make_ranks_fixture(4)


def simulated(rank: int, ids: str) -> None:
    os.environ["MK_HOST_ID"] = ids[rank]  # noqa: TID251  the rank's own, as a launcher sets it


def found(rank: int, world: int, group: object, ids: str) -> tuple[str, tuple[int, ...]]:
    simulated(rank, ids)
    store = new_prefix_store(dist.group.WORLD, 10.0)
    hosts = find_hosts(StoreCollectives(store, rank, world, 10.0), rank)
    return str(hosts), hosts.index_W


@pytest.mark.parametrize(
    ("ids", "index_W", "told"),
    [
        ("aabb", (0, 0, 1, 1), "4 ranks on 2 hosts: 0, 1 on a; 2, 3 on b"),
        ("abab", (0, 1, 0, 1), "4 ranks on 2 hosts: 0, 2 on a; 1, 3 on b"),
        ("aaaa", (0, 0, 0, 0), "4 ranks on one host, a"),
        ("abcd", (0, 1, 2, 3), "4 ranks on 4 hosts: 0 on a; 1 on b; 2 on c; 3 on d"),
    ],
)
def test_every_rank_finds_the_same_hosts(
    four: RankPool, ids: str, index_W: tuple[int, ...], told: str
) -> None:
    assert four.run(found, ids) == [(told, index_W)] * 4


def blind(rank: int, world: int, group: object) -> tuple[str, tuple[int, ...]]:
    """Ranks 2 and 3 cannot open files of others, as in a separate container."""
    os.environ["MK_HOST_ID"] = ""  # noqa: TID251
    content = hosts_module._read_token
    if rank >= 2:
        hosts_module._read_token = lambda path: ""
    try:
        return found(rank, world, group, [""] * 4)
    finally:
        hosts_module._read_token = content


def test_ranks_without_shared_memory_are_on_different_hosts(
    four: RankPool,
) -> None:
    told = four.run(blind)
    assert {index_W for _, index_W in told} == {(0, 0, 1, 2)}
    assert " (2); " in told[0][0]


def in_memory() -> set[Path]:
    """Return the files of ranks in shared memory, including those of other processes."""
    return set() if FOLDER is None else set(FOLDER.glob("modular_kernel-*"))


def left_in_memory(before: set[Path]) -> set[Path]:
    """Return new files that remain; those of other processes' ranks disappear within moments."""
    left, until = in_memory() - before, time.monotonic() + 10
    while left and time.monotonic() < until:
        time.sleep(0.1)
        left &= in_memory()
    return left


@pytest.mark.skipif(FOLDER is None, reason="no /dev/shm here")
def test_shared_memory_files_are_removed(four: RankPool) -> None:
    before = in_memory()
    four.run(found, "aabb")
    assert left_in_memory(before) == set()


def made(rank: int, world: int, group: object, ids: str, part: str, per_host: int | None) -> str:
    simulated(rank, ids)
    parallel = Parallel(world, "linear", rank, per_host)
    problem = Problem(
        tokens=8, hidden=64, intermediate=64, experts=8, top_k=2, dtype=torch.float32,
        parallel=parallel,
    )  # fmt: skip
    started = time.monotonic()
    try:
        make_kernel(part, "TorchExperts", problem, group=group).prepare_finalize.destroy()
    except ModularKernelError as error:
        assert time.monotonic() - started < 5
        return f"{type(error).__name__} {error}"
    return "made"


@pytest.mark.parametrize(
    ("ids", "part", "per_host", "told"),
    [
        ("aabb", ALL2ALL, 2, "made"),
        ("aabb", ALL2ALL, None, "made"),
        ("aabb", ALL2ALL, 4, "need 4 consecutive ranks on each"),
        ("aaaa", ALL2ALL, 2, "need 2 consecutive ranks on each"),
        ("abab", ALL2ALL, 2, "got 4 ranks on 2 hosts: 0, 2 on a; 1, 3 on b"),
    ],
)
def test_a_part_requires_the_hosts_of_its_problem(
    four: RankPool, ids: str, part: str, per_host: int | None, told: str
) -> None:
    answers = four.run(made, ids, part, per_host)
    assert all(told in answer for answer in answers), answers
    assert told == "made" or all(answer.startswith("ConfigurationError") for answer in answers)


@pytest.mark.cpu  # kernels of the exchange are interpreted
def test_shared_memory_over_two_hosts_is_refused_by_every_rank(
    four: RankPool,
) -> None:
    before = in_memory()
    answers = four.run(made, "aabb", SYMM_MEM, None)
    need = f"need one host, whose memory {SYMM_MEM} shares"
    assert all(need in answer for answer in answers), answers
    assert left_in_memory(before) == set()
    assert four.run(made, "aaaa", SYMM_MEM, None) == ["made"] * 4


def test_verdicts_on_described_clusters() -> None:
    sizes = {"tokens": 8, "hidden": 512, "intermediate": 512, "experts": 8, "top_k": 2}
    machine = Machine("cuda", (9, 0), frozenset({"triton", "deep_ep", "pplx_kernels"}))
    names = ("DeepEPHT", "DeepEPLL", "Pplx", "SymmMem", "TorchAll2All", "AllGatherReduceScatter")
    refused = set()
    for name in names:
        for per_host in (None, 2):
            problem = Problem(**sizes, parallel=Parallel(4, ranks_per_host=per_host))
            experts = "BatchedTritonExperts" if name in ("DeepEPLL", "Pplx") else "TritonExperts"
            verdict = check(f"{name}PrepareAndFinalize", experts, problem, machine)
            rules = {rejection.rule for rejection in verdict.rejections}
            assert ("hosts" in rules) <= (per_host == 2)
            refused |= {name} if "hosts" in rules else set()
    assert refused == {"DeepEPHT", "DeepEPLL", "Pplx", "SymmMem"}


@pytest.mark.parametrize("per_host", [0, 3, 5, 8, True, "2"])
def test_impossible_ranks_per_host_are_refused(per_host: object) -> None:
    with pytest.raises(ConfigurationError, match="ranks_per_host"):
        Parallel(4, ranks_per_host=per_host)


def late(rank: int, world: int, group: object, skew_s: float) -> str:
    """Rank 2 is late; the clocks of host b, ranks 2 and 3, are `skew_s` ahead."""
    simulated(rank, "aabb")
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
    return "whole"


@pytest.mark.parametrize("skew_s", [0.0, 60.0, -60.0])
def test_a_skewed_clock_causes_no_wrong_accusation(four: RankPool, skew_s: float) -> None:
    told = four.run(late, skew_s)
    for rank in (0, 1, 3):
        assert told[rank].startswith("(2,)"), told
        assert "s late" in told[rank]
        assert "rank 2: on host b" in told[rank]
    assert "gave up on this rank, which was at least" in told[2]


def gone(rank: int, world: int, group: object) -> str:
    """Host b misses an exchange."""
    simulated(rank, "aabb")
    manager = TorchGroup(group, timeout_s=1.0)
    if rank >= 2:
        time.sleep(2.5)
        return ""
    try:
        manager.all_reduce(torch.ones(1), step=1, phase="counts").wait()
    except CommunicationError as error:
        return str(error)
    return "whole"


def test_a_missing_host_is_named(four: RankPool) -> None:
    told = four.run(gone)
    assert all("ranks 2, 3: all of host b" in text for text in told[:2]), told


def without_store(rank: int, world: int, group: object, ended: bool) -> tuple[int, ...]:
    """An exchange fails, with a store that does not answer or whose process has exited."""
    simulated(rank, "aabb")
    manager = TorchGroup(group, timeout_s=1.0)
    manager._failure_records.is_closed = ended
    manager._failure_records.publish_and_collect = lambda record, until_s: None
    if rank == 3:
        time.sleep(2.5)
        return ()
    try:
        manager.all_reduce(torch.ones(1), step=1, phase="counts").wait()
    except CommunicationError as error:
        return error.peers
    return ()


def test_a_store_that_does_not_answer_is_attributed_to_its_host(four: RankPool) -> None:
    assert four.run(without_store, False)[:3] == [(), (0,), (0, 1)]
    assert four.run(without_store, True)[:3] == [(), (0,), (0,)]


def test_hosts_in_words() -> None:
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
def test_hosts_of_a_part_that_knows_eight_gpus_of_each(
    index_W: tuple[int, ...], full: bool, need: str
) -> None:
    names = tuple("abc"[: max(index_W) + 1])
    requires = PrepareFinalizeRequirements(
        activation_format=ActivationFormat.STANDARD,
        reduces=frozenset(),
        ranks_per_host=8,
        full_hosts=full,
    )
    told = ""
    try:
        check_hosts(Hosts(index_W, names), part="X", requires=requires, ranks_per_host=None)
    except ConfigurationError as error:
        told = str(error)
    assert need in told
    assert bool(told) is bool(need)


def nearest(rank: int, world: int, group: object, part: str) -> list[list[int]]:
    """Return the ranks to which this rank's pairs of each expert may go."""
    simulated(rank, "aabb")
    placement = Placement.linear(4, 4).with_copies({0: (1, 2), 2: (3,)})
    problem = Problem(
        tokens=8, hidden=64, intermediate=64, experts=4, top_k=2, dtype=torch.float32,
        parallel=Parallel(world, placement, rank),
    )  # fmt: skip
    kernel = make_kernel(part, "TorchExperts", problem, group=group)
    tables = kernel.prepare_finalize.tables(torch.device("cpu"))
    found = [
        sorted({int(home[0]) for home in homes[:copies]})
        for homes, copies in zip(tables.homes_ER2, tables.copies_E.tolist(), strict=True)
    ]
    kernel.prepare_finalize.destroy()
    return found


def test_pairs_go_to_the_nearest_copies_on_actual_hosts(four: RankPool) -> None:
    told = four.run(nearest, ALL2ALL)
    assert told == [
        [[0], [1], [2, 3], [3]],
        [[1], [1], [2, 3], [3]],
        [[2], [1], [2], [3]],
        [[2], [1], [3], [3]],
    ]
    for part in ("AllGatherReduceScatterPrepareAndFinalize", "ReplicatedEPPrepareAndFinalize"):
        told = four.run(nearest, part)
        assert told == [[[0, 1, 2], [1], [2, 3], [3]]] * 4
