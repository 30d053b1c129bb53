"""Faults between hosts: which errors are raised, how soon, and how ranks continue.
If this process can create network namespaces (usually as root), each host has its own. Otherwise
all hosts share one network, and tests that need a simulated cable between hosts are skipped.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from simulated_hosts import World, namespaces_are_permitted, world_of_hosts

BOTH = [False, True]  # whether each host has its own network
needs_cable = pytest.mark.skipif(
    not namespaces_are_permitted(), reason="no network namespaces here"
)
TIMEOUT_S = 5  # On a busy machine, even the store answers late.
PROGRAM = Path(__file__).parents[1] / "helpers" / "restarted_rank_program.py"


def is_possible(separate_networks: bool) -> bool:
    return not separate_networks or namespaces_are_permitted()


@pytest.fixture(
    params=[s for s in BOTH if is_possible(s)],
    ids=lambda separate_networks: f"{separate_networks=}",
)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with world_of_hosts(separate_networks=request.param) as hosts:
        assert [rank.answer() for rank in hosts.ranks] == [{"joined": rank} for rank in range(4)]
        yield hosts


@pytest.fixture
def cable() -> Iterator[World]:
    with world_of_hosts(separate_networks=True) as hosts:
        assert [rank.answer() for rank in hosts.ranks] == [{"joined": rank} for rank in range(4)]
        yield hosts


@pytest.mark.share(2)
def test_a_killed_host_is_named_and_the_other_continues_with_copies(world: World) -> None:
    a, b = world.names
    for answer in world.run_on_ranks("make", TIMEOUT_S, "copies"):
        assert answer["hosts"] == f"4 ranks on 2 hosts: 0, 1 on {a}; 2, 3 on {b}"
    assert [answer["right"] for answer in world.run_on_ranks("call")] == [True] * 4
    for rank in (2, 3):
        world.ranks[rank].kill()
    for answer in world.run_on_ranks("until", ranks=(0, 1)):
        assert answer["error"] == "CommunicationError", answer
        assert answer["peers"] == [2, 3], answer
        assert f"ranks 2, 3: all of host {b}" in answer["text"]
        assert answer["seconds"] < TIMEOUT_S + 2
    for answer in world.run_on_ranks("without", 2, 3, ranks=(0, 1)):
        assert answer.get("hosts") == f"2 ranks on one host, {a}", answer
    assert [answer.get("right") for answer in world.run_on_ranks("call", ranks=(0, 1))] == [
        True
    ] * 2


@pytest.mark.share(2)
def test_without_copies_the_lost_experts_are_named(world: World) -> None:
    world.run_on_ranks("make", TIMEOUT_S)
    for rank in (2, 3):
        world.ranks[rank].kill()
    world.run_on_ranks("until", ranks=(0, 1))
    for answer in world.run_on_ranks("without", 2, 3, ranks=(0, 1)):
        assert answer["error"] == "ConfigurationError", answer
        assert "placement without ranks 2, 3: got no copy of experts 4, 5, 6, 7" in answer["text"]


@needs_cable
def test_a_cut_cable_is_attributed_to_the_other_host_and_recovers(cable: World) -> None:
    a, b = cable.names
    cable.run_on_ranks("make", TIMEOUT_S)
    assert [answer["right"] for answer in cable.run_on_ranks("call")] == [True] * 4
    assert cable.cable is not None
    cable.cable.cut = True
    answers = cable.run_on_ranks("until")
    for rank, answer in enumerate(answers):
        other_ranks, host = ([2, 3], b) if rank < 2 else ([0, 1], a)
        assert answer["error"] == "CommunicationError", answer
        assert answer["peers"] == other_ranks, (rank, answer)
        assert f"ranks {other_ranks[0]}, {other_ranks[1]}: all of host {host}" in answer["text"], (
            answer
        )
        assert answer["seconds"] < TIMEOUT_S + 4
    cable.cable.cut = False
    cable.run_on_ranks("drop")
    for answer in cable.run_on_ranks("make", 20):
        assert "error" not in answer, answer
    assert [answer["right"] for answer in cable.run_on_ranks("call")] == [True] * 4


@pytest.mark.share(2)
@needs_cable
@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_a_slow_and_lossy_cable_causes_no_error(cable: World, loss: float) -> None:
    assert cable.cable is not None
    cable.cable.delay_s, cable.cable.loss = 0.2, loss
    for answer in cable.run_on_ranks("make", 30):
        assert "error" not in answer, answer
    for _ in range(3):
        answers = cable.run_on_ranks("call")
        assert [answer.get("right") for answer in answers] == [True] * 4, answers
        assert max(answer["seconds"] for answer in answers) > 0.4  # at least one round trip


@needs_cable
def test_a_host_name_on_loopback_requires_a_named_interface() -> None:
    """gloo uses the interface of the host name. Ranks cannot connect by the loopback interface."""
    with world_of_hosts(separate_networks=True, join_s=8, GLOO_SOCKET_IFNAME="lo") as hosts:
        answers = [rank.answer() for rank in hosts.ranks]
    assert all("error" in answer for answer in answers), answers


def test_torchrun_restarts_a_lost_rank(tmp_path: Path) -> None:
    """The stores of agents and of ranks are separate. Otherwise the second attempt would read keys
    of the first.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # noqa: TID251
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--max-restarts=2"),
                *("--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
                *("--rdzv-id=mk", f"--node-rank={host}", str(PROGRAM), str(tmp_path / "died")),
            ],
            env=environment | {"MK_HOST_ID": f"host{host}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sorted(
        line for output in outputs for line in output.splitlines() if "is right" in line
    ) == [
        "rank 0 is right",
        "rank 1 is right",
    ]
