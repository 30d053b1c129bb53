"""Simulates two hosts with two ranks each on one machine.

Each host is a network namespace with its own host name, address and /dev/shm. A `Cable` with
adjustable delay and packet loss connects them. Ranks run `host_rank_program.py`. If namespaces are
not permitted, all ranks use one network, and MK_HOST_ID simulates different hosts.
"""

import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("host_rank_program.py")
_TAP, _NO_HEADER, _TUNSETIFF, _NEW_NETWORK = 0x0002, 0x1000, 0x400454CA, 0x40000000
# Sets the host name and mounts a folder of the host as /dev/shm before a rank starts.
_ENTER_HOST = 'hostname "$0" && mount --bind "$1" /dev/shm && shift && exec "$@"'
Answer = dict[str, Any]


def _run_command(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


@cache
def namespaces_are_permitted() -> bool:
    """Return whether this process may create network namespaces."""
    script = "ip tuntap add t0 mode tap && mount --bind /tmp /dev/shm && hostname x"
    try:
        _run_command("unshare", "-n", "-u", "-m", "sh", "-c", script)
        _run_command("ip", "netns", "list")
    except (OSError, subprocess.SubprocessError):
        return False
    return os.access("/dev/net/tun", os.R_OK | os.W_OK)


class Cable(threading.Thread):
    """Forwards frames between eth0 of two namespaces.

    delay_s: delay of each frame. loss: fraction of frames that are dropped. cut: whether all frames
    are dropped. names: names of the two namespaces.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(daemon=True)
        self.delay_s, self.loss, self.cut, self._names = 0.0, 0.0, False, names
        self._taps, self._done, self._ready = list[int](), threading.Event(), threading.Event()

    def plug_in(self) -> None:
        self.start()
        assert self._ready.wait(10), "no TAP devices"

    def unplug(self) -> None:
        self._done.set()
        self.join(5)

    def run(self) -> None:
        # setns changes the namespace of this thread only, and TAP devices are created in it.
        libc = ctypes.CDLL(None, use_errno=True)
        for name in self._names:
            namespace = os.open(f"/run/netns/{name}", os.O_RDONLY)
            assert libc.setns(namespace, _NEW_NETWORK) == 0
            os.close(namespace)
            tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _TAP | _NO_HEADER))
            self._taps.append(tap)
        self._ready.set()
        self._forward_frames()
        for tap in self._taps:
            os.close(tap)

    def _forward_frames(self) -> None:
        generator, num_frames = random.Random(0), 0
        delayed_frames: list[tuple[float, int, int, bytes]] = []
        selector = selectors.DefaultSelector()
        for index, tap in enumerate(self._taps):
            selector.register(tap, selectors.EVENT_READ, index)
        while not self._done.is_set():
            wait_s = delayed_frames[0][0] - time.monotonic() if delayed_frames else 0.1
            for key, _ in selector.select(max(0.0, min(wait_s, 0.1))):
                with suppress(OSError):
                    frame = os.read(key.fd, 65536)
                    num_frames += 1
                    if not (self.cut or generator.random() < self.loss):
                        due_time = time.monotonic() + self.delay_s
                        heapq.heappush(delayed_frames, (due_time, num_frames, 1 - key.data, frame))
            while delayed_frames and delayed_frames[0][0] <= time.monotonic():
                _, _, receiver, frame = heapq.heappop(delayed_frames)
                with suppress(OSError):
                    os.write(self._taps[receiver], frame)


class Rank:
    """The process of one rank, which receives commands on stdin and prints answers."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def send(self, *command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, command)) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Answer:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"a rank ended with {self.process.wait(10)}"
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


class World:
    """Two ranks on each of two hosts, a and b."""

    def __init__(self, ranks: list[Rank], cable: Cable | None, names: Sequence[str]) -> None:
        self.ranks, self.cable, self.names = ranks, cable, names

    def run_on_ranks(self, *command: object, ranks: Sequence[int] = (0, 1, 2, 3)) -> list[Answer]:
        """Send a command to several ranks and return their answers."""
        for rank in ranks:
            self.ranks[rank].send(*command)
        return [self.ranks[rank].answer() for rank in ranks]


@contextmanager
def world_of_hosts(
    *, separate_networks: bool, join_s: float = 60, **variables: str
) -> Iterator[World]:
    """Yield four ranks of a gloo group on two hosts. The first answer of each is {"joined": rank}.

    separate_networks: whether each host has its own network. join_s: timeout for joining the group,
    in seconds. variables: environment variables of the ranks.
    """
    names = [f"mk{os.getpid()}{host}" for host in "ab"]
    cable, ranks = None, list[Rank]()
    address = "10.77.0.1" if separate_networks else "127.0.0.1"
    folders = [tempfile.mkdtemp(prefix=name) for name in names]
    try:
        if separate_networks:
            _create_namespaces(names)
            cable = Cable(names)
            cable.plug_in()
        port = 29500 if separate_networks else free_port()
        for rank in range(4):
            name = names[rank // 2]
            host_variables = (
                {"GLOO_SOCKET_IFNAME": "eth0"} if separate_networks else {"MK_HOST_ID": name}
            )
            inherited = dict(os.environ)  # noqa: TID251  a launcher passes its environment on
            command = [
                sys.executable,
                str(PROGRAM),
                str(rank),
                f"tcp://{address}:{port}",
                f"{join_s}",
            ]
            if separate_networks:
                enter_host = ["ip", "netns", "exec", name]
                enter_host += ["unshare", "-u", "-m", "sh", "-c", _ENTER_HOST]
                command = [*enter_host, name, folders[rank // 2], *command]
            ranks.append(Rank(command, inherited | host_variables | variables))
        yield World(ranks, cable, names)
    finally:
        for started_rank in ranks:
            started_rank.kill()
        if cable is not None:
            cable.unplug()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        for name in names if separate_networks else ():
            with suppress(subprocess.SubprocessError):
                _run_command("ip", "netns", "del", name)


def _create_namespaces(names: Sequence[str]) -> None:
    for number, name in enumerate(names, 1):
        _run_command("ip", "netns", "add", name)
        ip_command = "ip", "-n", name
        _run_command("ip", "netns", "exec", name, "ip", "tuntap", "add", "eth0", "mode", "tap")
        _run_command(*ip_command, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _run_command(*ip_command, "link", "set", link, "up")


def free_port() -> int:
    """Return a port of this host that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
