"""Detection of the ranks of a group that share a host, by shared memory instead of host names."""

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
    """The hosts of a group's ranks.

    index_W: host index of each rank; hosts are numbered in the order of their first rank.
    names: name of each host.

    Two containers on one machine that do not share /dev/shm are two hosts.
    """

    index_W: tuple[int, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        """Return a description such as "4 ranks on 2 hosts: 0, 1 on a; 2, 3 on b"."""
        ranks = f"{len(self.index_W)} ranks"
        if len(self) == 1:
            return f"{ranks} on one host, {self.names[0]}"
        parts = (f"{_join(self.ranks_on(host))} on {name}" for host, name in enumerate(self.names))
        return f"{ranks} on {len(self)} hosts: {'; '.join(parts)}"

    def ranks_on(self, host: int) -> tuple[int, ...]:
        """Return the ranks of a host, given its index."""
        return tuple(rank for rank, index in enumerate(self.index_W) if index == host)

    def name_of(self, rank: int) -> str:
        return self.names[self.index_W[rank]]

    def has_consecutive_ranks(self, ranks_per_host: int) -> bool:
        """Return whether each host has `ranks_per_host` consecutive ranks."""
        blocks = [rank // ranks_per_host for rank in range(len(self.index_W))]
        return list(self.index_W) == blocks and len(self.index_W) % ranks_per_host == 0


ONE_PROCESS = Hosts((0,), ("this host",))


def find_hosts(meeting: Meeting, rank: int) -> Hosts:
    """Determine which ranks share a host. Collective, with the same result on every rank.

    Each rank creates a file in shared memory and tries to read those of its peers. Ranks that can
    read each other's files share a host. Ranks with different MK_HOST_ID are treated as ranks of
    different hosts, to simulate several hosts on one machine. Raise CommunicationError if a rank
    does not respond.
    """
    token = secrets.token_hex(16)
    with memory_file("host") as host_file:
        host_file.write(token.encode())
        host_file.flush()
        identity = read_settings().host_id
        name = identity or socket.gethostname()
        gathered = meeting.exchange(
            {"name": name, "id": identity, "file": host_file.name, "word": token}
        )
        readable = [
            peer
            for peer, properties in enumerate(gathered)
            if properties["id"] == identity and _content(properties["file"]) == properties["word"]
        ]
        readable_by_rank = [set(map(int, properties["met"].split())) for properties in
                 meeting.exchange({"met": " ".join(map(str, readable))})]  # fmt: skip
    first_ranks = [_lowest_peer(rank, readable_by_rank) for rank in range(len(readable_by_rank))]
    order = list(dict.fromkeys(first_ranks))
    return Hosts(
        tuple(map(order.index, first_ranks)),
        _number_duplicates([gathered[rank]["name"] for rank in order]),
    )


def check_one_host(hosts: Hosts, part: str) -> None:
    """Raise ConfigurationError on every rank if the ranks of `part` are on several hosts."""
    if len(hosts) > 1:
        need = f"one host, whose memory {part} shares"
        raise ConfigurationError("hosts of the ranks", got=str(hosts), need=need)


def check_hosts(
    hosts: Hosts, *, part: str, requires: PrepareFinalizeRequirements, ranks_per_host: int | None
) -> None:
    """Raise ConfigurationError on every rank unless hosts are as the part and the problem require.

    part: the name of the part, for messages.
    requires: the requirements of the part.
    ranks_per_host: that of the problem; None if it has none.
    """
    if requires.one_host:
        check_one_host(hosts, part)
    if ranks_per_host is not None and not hosts.has_consecutive_ranks(ranks_per_host):
        need = f"{ranks_per_host} consecutive ranks on each (Parallel.ranks_per_host)"
        raise ConfigurationError("hosts of the ranks", got=str(hosts), need=need)
    max_ranks = requires.ranks_per_host
    if max_ranks is None:
        return
    ranks_per_each_host, must_fill_hosts = (
        len(hosts.index_W) // len(hosts),
        requires.full_hosts and len(hosts) > 1,
    )
    if (
        not hosts.has_consecutive_ranks(ranks_per_each_host)
        or ranks_per_each_host > max_ranks
        or (must_fill_hosts and ranks_per_each_host != max_ranks)
    ):
        limit = f"{'' if must_fill_hosts else 'at most '}{max_ranks}"
        need = f"{limit} on each, in blocks of one size, for {part}"
        raise ConfigurationError("hosts of the ranks", got=str(hosts), need=need)


def _content(path: str) -> str:
    """Read a short file; return "" if it is not a memory file, or not on this host."""
    if Path(path).parent not in (IN_MEMORY, Path(tempfile.gettempdir())):
        return ""
    try:
        with Path(path).open(encoding="ascii", errors="replace") as file:
            return file.read(64)
    except OSError:
        return ""


def _lowest_peer(rank: int, readable_by_rank: Sequence[set[int]]) -> int:
    """Return the lowest rank on the host of `rank`: both can read each other's files."""
    return min(
        peer
        for peer in {rank, *readable_by_rank[rank]}
        if peer == rank or rank in readable_by_rank[peer]
    )


def _number_duplicates(names: Sequence[str]) -> tuple[str, ...]:
    """Make equal host names distinct: from the second on, add a number."""
    counts: dict[str, int] = {}
    result = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        result.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return tuple(result)


def _join(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
