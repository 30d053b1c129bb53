"""`mk` commands that a launcher such as torchrun starts on every rank, and the variables that the
launcher sets.
"""

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
ONE_CASE = ("--one", "--tokens", "3", "--dtype", "float32")


def launch(
    *arguments: str, ranks: int = 2, ranks_per_host: int = 1, rank_1_arguments: str = ""
) -> list[tuple[int, str, str]]:
    """Run `mk` on every rank as a launcher does. Return exit code, stdout and stderr by rank.

    Rank 1 gets `rank_1_arguments` in addition.
    """
    port = str(free_port())
    processes = []
    for rank in range(ranks):
        environment = dict(
            os.environ,  # noqa: TID251  a launcher passes its environment on
            RANK=str(rank),
            WORLD_SIZE=str(ranks),
            LOCAL_RANK=str(rank % ranks_per_host),
            LOCAL_WORLD_SIZE=str(ranks_per_host),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            MK_HOST_ID=f"host{rank // ranks_per_host}",
            CUDA_VISIBLE_DEVICES="",
        )
        command = [sys.executable, "-m", "modular_kernel", *arguments]
        if rank == 1:
            command += rank_1_arguments.split()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, env=environment, **pipes))
    results = []
    for process in processes:
        out, error = process.communicate(timeout=200)
        results.append((process.returncode, out, error))
    return results


def test_only_rank_0_reports_a_case_over_two_hosts() -> None:
    first, second = launch("test", *PAIR, *ONE_CASE, "--json", "-")
    assert (first[0], second[0]) == (0, 0), (first, second)
    record = json.loads(first[1])
    assert (record["world_size"], record["hosts"], record["backend"]) == (2, 2, "gloo")
    (pair,) = record["pairs"]
    assert (pair["cases"], pair["failed"]) == (1, 0)
    assert second[1] == ""
    assert "on 2 hosts, over gloo" in first[2]


def test_a_shared_memory_part_is_refused_over_two_hosts() -> None:
    pair = ("--pf-type", "SymmMemPrepareAndFinalize", "--experts-type", "TorchExperts")
    results = launch("test", *pair)
    assert [status for status, _, _ in results] == [1, 1]
    assert "hosts" in results[0][1]
    assert "at most 1" in results[0][1]
    assert results[1][1] == ""


def test_a_wrong_world_size_is_a_usage_error_on_every_rank() -> None:
    results = launch("check", *PAIR, "--world-size", "4")
    assert [status for status, _, _ in results] == [2, 2]
    message = "need 2, the WORLD_SIZE of the launcher"
    assert message in results[0][2]
    assert results[1][2].startswith("rank 1: error: --world-size: got 4")


def test_different_commands_on_ranks_are_a_usage_error() -> None:
    results = launch("test", *PAIR, *ONE_CASE, rank_1_arguments="--seed 7")
    assert [status for status, _, _ in results] == [2, 2]
    for _, _, error in results:
        assert "commands of ranks: got rank 0: " in error
        assert "--seed 7, need the same command on all ranks" in " ".join(error.split())
        assert "Traceback" not in error


def test_a_missing_rank_0_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 hosts the store, so the connection of rank 1 times out without it."""
    port = str(free_port())
    set_launcher_variables(monkeypatch, VARIABLES | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"})
    monkeypatch.setenv("MASTER_PORT", port)
    launcher = read_launcher()
    assert launcher is not None
    with pytest.raises(RankError, match=f"cannot connect to the store at 127.0.0.1:{port}"):
        LaunchedRanks(launcher, group_timeout=2)


def test_bench_refuses_several_ranks() -> None:
    status, _, error = launch("bench", ranks=2)[0]
    assert status == 2
    assert "got a launcher with 2 ranks, need one process" in error


VARIABLES = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}


def set_launcher_variables(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *VARIABLES):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_launcher_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    set_launcher_variables(monkeypatch, {})
    assert read_launcher() is None
    set_launcher_variables(monkeypatch, VARIABLES | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})
    launcher = read_launcher()
    assert launcher is not None
    ranks = launcher.rank, launcher.world_size, launcher.local_rank, launcher.local_world_size
    assert (*ranks, launcher.address) == (1, 4, 0, 2, "here:29500")
    set_launcher_variables(monkeypatch, VARIABLES)
    launcher = read_launcher()
    assert launcher is not None
    assert (launcher.local_rank, launcher.local_world_size) == (1, None)


@pytest.mark.parametrize(
    ("name", "value"),
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
def test_invalid_launcher_variables_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    set_launcher_variables(monkeypatch, VARIABLES | {name: value})
    with pytest.raises(ConfigurationError, match=name if value else "variables of the launcher"):
        read_launcher()


def test_local_rank_must_be_below_local_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    set_launcher_variables(monkeypatch, VARIABLES | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"})
    with pytest.raises(ConfigurationError, match=r"LOCAL_RANK: got 3, need in \[0, 2\)"):
        read_launcher()
