"""Which ranks of a group share a host's memory, found by trying it and not by names."""

import secrets
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modular_kernel.compatibility.support import PrepareFinalizeRequirements
from modular_kernel.errors import ConfigurationError
from modular_kernel.settings import read_settings
from prepare_finalize.rendezvous.memory_files import IN_MEMORY, memory_file
from prepare_finalize.rendezvous.store_rounds import Meeting


@dataclass(frozen=True)
class Hosts:
    """The hosts of a group. index_W: by rank, counted from 0 in the order of ranks. names: by host.

    Two containers of one machine that do not share /dev/shm are two hosts here.
    """

    index_W: tuple[int, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        """Say who is where: "4 ranks on 2 hosts: 0, 1 on a; 2, 3 on b"."""
        ranks = f"{len(self.index_W)} ranks"
        if len(self) == 1:
            return f"{ranks} on one host, {self.names[0]}"
        where = (f"{_listed(self.ranks_on(at))} on {name}" for at, name in enumerate(self.names))
        return f"{ranks} on {len(self)} hosts: {'; '.join(where)}"

    def ranks_on(self, host: int) -> tuple[int, ...]:
        """Return the ranks of a host, by its index."""
        return tuple(rank for rank, at in enumerate(self.index_W) if at == host)

    def name_of(self, rank: int) -> str:
        return self.names[self.index_W[rank]]

    def in_blocks_of(self, ranks_per_host: int) -> bool:
        """Tell whether each host has so many ranks, numbered one behind another."""
        blocks = [rank // ranks_per_host for rank in range(len(self.index_W))]
        return list(self.index_W) == blocks and len(self.index_W) % ranks_per_host == 0


ONE_PROCESS = Hosts((0,), ("this host",))


def find_hosts(meeting: Meeting, rank: int) -> Hosts:
    """Find who shares a host with whom; collective, and equal on every rank.

    Every rank leaves a file in memory, and opens those of the others: who reads what a peer wrote
    is on its host. MK_HOST_ID keeps ranks apart that name different ones, to try several hosts on
    one machine. CommunicationError where a rank stays away.
    """
    word = secrets.token_hex(16)
    with memory_file("host") as left:
        left.write(word.encode())
        left.flush()
        identity = read_settings().host_id
        name = identity or socket.gethostname()
        told = meeting.tell({"name": name, "id": identity, "file": left.name, "word": word})
        met = [
            peer
            for peer, facts in enumerate(told)
            if facts["id"] == identity and _content(facts["file"]) == facts["word"]
        ]
        reach = [set(map(int, facts["met"].split())) for facts in
                 meeting.tell({"met": " ".join(map(str, met))})]  # fmt: skip
    first = [_first(rank, reach) for rank in range(len(reach))]
    order = list(dict.fromkeys(first))
    return Hosts(tuple(map(order.index, first)), _distinct([told[rank]["name"] for rank in order]))


def check_one_host(hosts: Hosts, part: str) -> None:
    """ConfigurationError on every rank alike where `part`'s ranks share no memory."""
    if len(hosts) > 1:
        need = f"one host, whose memory {part} shares"
        raise ConfigurationError("hosts of the ranks", got=str(hosts), need=need)


def check_hosts(
    hosts: Hosts, *, part: str, requires: PrepareFinalizeRequirements, ranks_per_host: int | None
) -> None:
    """ConfigurationError where ranks are not as a part or a problem needs; on every rank alike.

    requires: what the part declares. ranks_per_host: what the problem says of the cluster; None if
    it says nothing.
    """
    if requires.one_host:
        check_one_host(hosts, part)
    if ranks_per_host is not None and not hosts.in_blocks_of(ranks_per_host):
        need = f"{ranks_per_host} on each, in blocks, as Parallel.ranks_per_host says"
        raise ConfigurationError("hosts of the ranks", got=str(hosts), need=need)
    most = requires.ranks_per_host
    if most is None:
        return
    each, exact = len(hosts.index_W) // len(hosts), requires.full_hosts and len(hosts) > 1
    if not hosts.in_blocks_of(each) or each > most or (exact and each != most):
        need = f"{'' if exact else 'at most '}{most} on each, in blocks of one size, for {part}"
        raise ConfigurationError("hosts of the ranks", got=str(hosts), need=need)


def _content(path: str) -> str:
    """Read a short file; "" where it is none of ours, or not on this host."""
    if Path(path).parent not in (IN_MEMORY, Path(tempfile.gettempdir())):
        return ""
    try:
        with Path(path).open(encoding="ascii", errors="replace") as file:
            return file.read(64)
    except OSError:
        return ""


def _first(rank: int, reach: Sequence[set[int]]) -> int:
    """Return the first rank that this one and it, both ways, reach each other."""
    return min(peer for peer in {rank, *reach[rank]} if peer == rank or rank in reach[peer])


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Tell hosts of one name apart by a number, from the second on."""
    seen: dict[str, int] = {}
    made = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        made.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return tuple(made)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
