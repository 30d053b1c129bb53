"""Detection of the ranks of a group that share a host.

Two ranks share a host if each can read the file of the other in shared memory. Host names are not
compared, because two containers on one machine can have different names, and two machines can have
the same name.
"""

import secrets
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modular_kernel.compatibility.support import PrepareFinalizeRequirements
from modular_kernel.errors import ConfigurationError
from modular_kernel.settings import read_settings
from prepare_finalize.rendezvous.memory_files import SHARED_MEMORY_DIR, memory_file
from prepare_finalize.rendezvous.store_collectives import StoreCollectives


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
        descriptions = (
            f"{_format_ranks(self.ranks_on(host))} on {name}"
            for host, name in enumerate(self.names)
        )
        return f"{ranks} on {len(self)} hosts: {'; '.join(descriptions)}"

    def ranks_on(self, host: int) -> tuple[int, ...]:
        """Return the ranks of a host, given its index."""
        return tuple(rank for rank, index in enumerate(self.index_W) if index == host)

    def get_host_name(self, rank: int) -> str:
        """Return the name of the host of a rank."""
        return self.names[self.index_W[rank]]

    def has_consecutive_ranks(self, ranks_per_host: int) -> bool:
        """Return whether each host has `ranks_per_host` consecutive ranks."""
        expected_index_W = [rank // ranks_per_host for rank in range(len(self.index_W))]
        return list(self.index_W) == expected_index_W and len(self.index_W) % ranks_per_host == 0


def find_hosts(collectives: StoreCollectives, rank: int) -> Hosts:
    """Determine which ranks share a host. Collective, with the same result on every rank.

    Each rank writes a random token to a file in shared memory and tries to read the tokens of its
    peers. The environment variable MK_HOST_ID simulates several hosts on one machine: ranks with
    different values are treated as ranks of different hosts. Raise CommunicationError if a rank
    does not respond.
    """
    token = secrets.token_hex(16)
    with memory_file("host") as host_file:
        host_file.write(token.encode())
        host_file.flush()
        host_id = read_settings().host_id
        name = host_id or socket.gethostname()
        gathered = collectives.all_gather(
            {"name": name, "id": host_id, "file": host_file.name, "token": token}
        )
        readable_peers = [
            peer
            for peer, properties in enumerate(gathered)
            if properties["id"] == host_id
            and _read_token(properties["file"]) == properties["token"]
        ]
        # This all-gather also keeps the file until all ranks have tried to read it.
        gathered_readable = collectives.all_gather({"readable": " ".join(map(str, readable_peers))})
        readable_by_rank = [
            set(map(int, properties["readable"].split())) for properties in gathered_readable
        ]
    first_ranks = [
        _find_lowest_peer(rank, readable_by_rank) for rank in range(len(readable_by_rank))
    ]
    host_ranks = list(dict.fromkeys(first_ranks))  # the first rank of each host
    return Hosts(
        tuple(map(host_ranks.index, first_ranks)),
        _number_duplicates([gathered[rank]["name"] for rank in host_ranks]),
    )


def check_one_host(hosts: Hosts, part: str) -> None:
    """Raise ConfigurationError if the ranks of `part` are on several hosts.

    All ranks raise, because `hosts` is the same on every rank.
    """
    if len(hosts) > 1:
        need = f"one host, whose memory {part} shares"
        raise ConfigurationError("hosts of the ranks", got=str(hosts), need=need)


def check_hosts(
    hosts: Hosts, *, part: str, requires: PrepareFinalizeRequirements, ranks_per_host: int | None
) -> None:
    """Raise ConfigurationError if the part or the problem does not support the hosts of the ranks.

    All ranks raise, because `hosts` is the same on every rank.

    part: name of the part, for messages.
    requires: requirements of the part.
    ranks_per_host: number of ranks per host that the problem requires; None for any.
    """
    if requires.one_host:
        check_one_host(hosts, part)
    if ranks_per_host is not None and not hosts.has_consecutive_ranks(ranks_per_host):
        need = f"{ranks_per_host} consecutive ranks on each (Parallel.ranks_per_host)"
        raise ConfigurationError("hosts of the ranks", got=str(hosts), need=need)
    max_ranks = requires.ranks_per_host
    if max_ranks is None:
        return
    mean_ranks = len(hosts.index_W) // len(hosts)
    must_fill_hosts = requires.full_hosts and len(hosts) > 1
    if (
        not hosts.has_consecutive_ranks(mean_ranks)
        or mean_ranks > max_ranks
        or (must_fill_hosts and mean_ranks != max_ranks)
    ):
        limit = f"{'' if must_fill_hosts else 'at most '}{max_ranks}"
        need = f"{limit} consecutive ranks on each host, equally many on all, for {part}"
        raise ConfigurationError("hosts of the ranks", got=str(hosts), need=need)


def _read_token(path: str) -> str:
    """Return the token in a peer's file, or "" if the file is not a memory file of this host."""
    if Path(path).parent not in (SHARED_MEMORY_DIR, Path(tempfile.gettempdir())):
        return ""
    try:
        with Path(path).open(encoding="ascii", errors="replace") as file:
            return file.read(64)
    except OSError:
        return ""


def _find_lowest_peer(rank: int, readable_by_rank: Sequence[set[int]]) -> int:
    """Return the lowest rank that shares a host with `rank`."""
    return min(
        peer
        for peer in {rank, *readable_by_rank[rank]}
        if peer == rank or rank in readable_by_rank[peer]
    )


def _number_duplicates(names: Sequence[str]) -> tuple[str, ...]:
    """Make equal host names distinct, as in "node", "node (2)"."""
    counts: dict[str, int] = {}
    distinct_names = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        distinct_names.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return tuple(distinct_names)


def _format_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
