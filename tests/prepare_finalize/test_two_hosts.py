"""Faults between hosts: what each side reports, how soon, and how ranks continue.

Each host has its own network namespace if this process can create one (usually as root); otherwise
all share one network, and tests that need a cable between hosts are skipped.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from simulated_hosts import World, namespaces_are_permitted, world_of_hosts

BOTH = [False, True]  # apart: a network for each host
cabled = pytest.mark.skipif(not namespaces_are_permitted(), reason="no network namespaces here")
TIMEOUT_S = 5  # with busy processors the store itself answers late
PROGRAM = Path(__file__).parents[1] / "helpers" / "restarted_rank_program.py"


def worlds(apart: bool) -> bool:
    return not apart or namespaces_are_permitted()


@pytest.fixture(params=[apart for apart in BOTH if worlds(apart)], ids=lambda apart: f"{apart=}")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with world_of_hosts(apart=request.param) as made:
        assert [rank.answer() for rank in made.ranks] == [{"joined": rank} for rank in range(4)]
        yield made


@pytest.fixture
def cable() -> Iterator[World]:
    with world_of_hosts(apart=True) as made:
        assert [rank.answer() for rank in made.ranks] == [{"joined": rank} for rank in range(4)]
        yield made


@pytest.mark.share(2)
def test_a_killed_host_is_named_and_the_other_continues_with_copies(world: World) -> None:
    a, b = world.names
    for made in world.all("make", TIMEOUT_S, "copies"):
        assert made["hosts"] == f"4 ranks on 2 hosts: 0, 1 on {a}; 2, 3 on {b}"
    assert [told["right"] for told in world.all("call")] == [True] * 4
    for rank in (2, 3):
        world.ranks[rank].kill()
    for told in world.all("until", ranks=(0, 1)):
        assert told["error"] == "CommunicationError", told
        assert told["peers"] == [2, 3], told
        assert f"ranks 2, 3: all of host {b}" in told["text"]
        assert told["seconds"] < TIMEOUT_S + 2
    for made in world.all("without", 2, 3, ranks=(0, 1)):
        assert made.get("hosts") == f"2 ranks on one host, {a}", made
    assert [told.get("right") for told in world.all("call", ranks=(0, 1))] == [True] * 2


@pytest.mark.share(2)
def test_without_copies_the_lost_experts_are_named(world: World) -> None:
    world.all("make", TIMEOUT_S)
    for rank in (2, 3):
        world.ranks[rank].kill()
    world.all("until", ranks=(0, 1))
    for told in world.all("without", 2, 3, ranks=(0, 1)):
        assert told["error"] == "ConfigurationError", told
        assert "placement without ranks 2, 3: got no copy of experts 4, 5, 6, 7" in told["text"]


@cabled
def test_a_cut_cable_is_attributed_to_the_other_host_and_recovers(cable: World) -> None:
    a, b = cable.names
    cable.all("make", TIMEOUT_S)
    assert [told["right"] for told in cable.all("call")] == [True] * 4
    assert cable.cable is not None
    cable.cable.cut = True
    told = cable.all("until")
    for rank, said in enumerate(told):
        others, host = ([2, 3], b) if rank < 2 else ([0, 1], a)
        assert said["error"] == "CommunicationError", said
        assert said["peers"] == others, (rank, said)
        assert f"ranks {others[0]}, {others[1]}: all of host {host}" in said["text"], said
        assert said["seconds"] < TIMEOUT_S + 4
    cable.cable.cut = False
    cable.all("drop")
    for made in cable.all("make", 20):
        assert "error" not in made, made
    assert [said["right"] for said in cable.all("call")] == [True] * 4


@pytest.mark.share(2)
@cabled
@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_a_slow_and_lossy_cable_causes_no_error(cable: World, loss: float) -> None:
    assert cable.cable is not None
    cable.cable.delay_s, cable.cable.loss = 0.2, loss
    for made in cable.all("make", 30):
        assert "error" not in made, made
    for _ in range(3):
        told = cable.all("call")
        assert [said.get("right") for said in told] == [True] * 4, told
        assert max(said["seconds"] for said in told) > 0.4  # a round trip at least


@cabled
def test_a_host_name_on_loopback_requires_a_named_interface() -> None:
    """gloo uses the interface of the host's name; if that is the loopback interface, ranks cannot
    connect.
    """
    with world_of_hosts(apart=True, join_s=8, GLOO_SOCKET_IFNAME="lo") as made:
        answers = [rank.answer() for rank in made.ranks]
    assert all("error" in told for told in answers), answers


def test_torchrun_restarts_a_lost_rank(tmp_path: Path) -> None:
    """The agents' store is separate from the ranks' store; otherwise the second attempt reads the
    keys of the first.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # noqa: TID251
    started = [
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
        told = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], told
    assert sorted(line for text in told for line in text.splitlines() if "is right" in line) == [
        "rank 0 is right",
        "rank 1 is right",
    ]
