"""Verbs in a world that a launcher made: each case once over all ranks, one report, one status."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest
from simulated_hosts import free_port

from modular_kernel.errors import ConfigurationError
from modular_kernel.settings import read_launcher
from modular_kernel.testing.ranks.external_launcher import LaunchedRanks
from modular_kernel.testing.ranks.pool import RankError

PAIR = ("--pf-type", "ReplicatedEPPrepareAndFinalize", "--experts-type", "TorchExperts")
ONE = ("--one", "--tokens", "3", "--dtype", "float32")


def world(
    *words: str, ranks: int = 2, local: int = 1, **changes: str
) -> list[tuple[int, str, str]]:
    """Status, stdout and stderr of `mk` on each rank of a world, as a launcher starts it."""
    port = str(free_port())
    started = []
    for rank in range(ranks):
        environment = dict(
            os.environ,  # noqa: TID251  a launcher's processes inherit it
            RANK=str(rank),
            WORLD_SIZE=str(ranks),
            LOCAL_RANK=str(rank % local),
            LOCAL_WORLD_SIZE=str(local),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            MK_HOST_ID=f"host{rank // local}",
            CUDA_VISIBLE_DEVICES="",
        )
        command = [sys.executable, "-m", "modular_kernel", *words]
        if rank in (1,) and "other" in changes:
            command += changes["other"].split()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment, **pipes))
    told = []
    for process in started:
        out, error = process.communicate(timeout=200)
        told.append((process.returncode, out, error))
    return told


def test_a_case_runs_once_over_both_hosts_and_rank_0_reports() -> None:
    first, second = world("test", *PAIR, *ONE, "--json", "-")
    assert (first[0], second[0]) == (0, 0), (first, second)
    record = json.loads(first[1])
    assert (record["world_size"], record["hosts"], record["backend"]) == (2, 2, "gloo")
    (pair,) = record["pairs"]
    assert (pair["cases"], pair["failed"]) == (1, 0)
    assert second[1] == ""
    assert "on 2 hosts, over gloo" in first[2]


def test_what_shares_memory_is_refused_over_two_hosts_by_every_rank() -> None:
    pair = ("--pf-type", "SymmMemPrepareAndFinalize", "--experts-type", "TorchExperts")
    told = world("test", *pair)
    assert [status for status, _, _ in told] == [1, 1]
    assert "hosts" in told[0][1]
    assert "at most 1" in told[0][1]
    assert told[1][1] == ""


def test_another_world_size_is_bad_usage_on_every_rank() -> None:
    told = world("check", *PAIR, "--world-size", "4")
    assert [status for status, _, _ in told] == [2, 2]
    need = "need 2, the WORLD_SIZE of the launcher"
    assert need in told[0][2]
    assert told[1][2].startswith("rank 1: error: --world-size: got 4")


def test_ranks_that_run_other_commands_are_told() -> None:
    told = world("test", *PAIR, *ONE, other="--seed 7")
    assert [status for status, _, _ in told] == [2, 2]
    for _, _, error in told:
        assert "commands of ranks: got rank 0: " in error
        assert "--seed 7, need one on all ranks" in " ".join(error.split())
        assert "Traceback" not in error


def test_a_world_whose_other_rank_never_comes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is rank 0's, which is not there: within its timeout, and not by a traceback."""
    port = str(free_port())
    placed(monkeypatch, VARIABLES | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"})
    monkeypatch.setenv("MASTER_PORT", port)
    launcher = read_launcher()
    assert launcher is not None
    with pytest.raises(RankError, match=f"cannot connect to the store at 127.0.0.1:{port}"):
        LaunchedRanks(launcher, group_timeout=2)


def test_bench_is_of_one_process() -> None:
    status, _, error = world("bench", ranks=2)[0]
    assert status == 2
    assert "got a launcher with 2 ranks, need one process" in error


VARIABLES = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}


def placed(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *VARIABLES):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_what_a_launcher_left(monkeypatch: pytest.MonkeyPatch) -> None:
    placed(monkeypatch, {})
    assert read_launcher() is None
    placed(monkeypatch, VARIABLES | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})
    launcher = read_launcher()
    assert launcher is not None
    place = launcher.rank, launcher.world_size, launcher.local_rank, launcher.local_world_size
    assert (*place, launcher.address) == (1, 4, 0, 2, "here:29500")
    placed(monkeypatch, VARIABLES)
    launcher = read_launcher()
    assert launcher is not None
    assert (launcher.local_rank, launcher.local_world_size) == (1, None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RANK", "4"),
        ("RANK", "-1"),
        ("RANK", "one"),
        ("RANK", ""),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", ""),
        ("MASTER_ADDR", ""),
        ("MASTER_PORT", "http"),
        ("MASTER_PORT", "0"),
        ("RANK", "9" * 5000),
        ("LOCAL_RANK", "4"),
        ("LOCAL_WORLD_SIZE", "5"),
    ],
)
def test_variables_that_no_launcher_leaves(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    placed(monkeypatch, VARIABLES | {name: text})
    with pytest.raises(ConfigurationError, match=name if text else "launcher's variables"):
        read_launcher()


def test_a_local_rank_is_below_the_ranks_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    placed(monkeypatch, VARIABLES | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"})
    with pytest.raises(ConfigurationError, match=r"LOCAL_RANK: got 3, need in \[0, 2\)"):
        read_launcher()
