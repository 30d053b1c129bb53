"""What ranks tell each other of rows that go by hosts, and what a rank finds in it.

A token's row goes from its rank to the rank of the same local number on each host that needs it,
which passes it on to the ranks of that host. Tokens are cut into chunks, by their numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import pad

from prepare_finalize.common.agreement import Agreement
from prepare_finalize.common.torch_group import TorchGroup


@dataclass(frozen=True)
class Geometry:
    """Ranks by hosts, and chunks of a call. L, H, C: ranks per host, hosts, chunks.

    tokens: of a chunk, the same on every rank.
    """

    rank: int
    world_size: int
    ranks_per_host: int
    chunks: int
    tokens: int

    @property
    def hosts(self) -> int:
        return self.world_size // self.ranks_per_host

    @property
    def host(self) -> int:
        return self.rank // self.ranks_per_host

    @property
    def local_rank(self) -> int:
        return self.rank % self.ranks_per_host

    @property
    def counts(self) -> int:
        """Numbers of rows that each rank tells."""
        return self.chunks * (self.hosts + self.world_size)

    def by_chunk(self, wanted_PT: torch.Tensor) -> torch.Tensor:
        """(P, T) of places that want a token -> (C, P, tokens of a chunk)."""
        places, tokens = wanted_PT.shape
        whole = pad(wanted_PT, (0, self.chunks * self.tokens - tokens))
        return whole.view(places, self.chunks, self.tokens).transpose(0, 1)


@dataclass(frozen=True)
class Passage:
    """How many rows of one call go where, by chunk, as every rank finds it from the same numbers.

    table: (W, C * (H + W)) int64, of each rank the rows to each host, then to each rank.
    """

    at: Geometry
    table: torch.Tensor

    @cached_property
    def _to_hosts(self) -> torch.Tensor:
        """(W, C, H): rows that each rank sends to its like on each host."""
        at = self.at
        return self.table[:, : at.chunks * at.hosts].view(-1, at.chunks, at.hosts)

    @cached_property
    def _to_ranks(self) -> torch.Tensor:
        """(W, C, W): of tokens of the first rank, rows that the last is passed in the end."""
        at = self.at
        return self.table[:, at.chunks * at.hosts :].view(-1, at.chunks, at.world_size)

    @cached_property
    def sent(self) -> list[int]:
        """Rows that this rank sends, its own host's included, by chunk."""
        sent: list[int] = self._to_hosts[self.at.rank].sum(1).tolist()
        return sent

    @cached_property
    def came(self) -> list[int]:
        """Rows that come to this rank to be passed on, by chunk."""
        came: list[int] = self._from_hosts.sum(1).tolist()
        return came

    @property
    def _from_hosts(self) -> torch.Tensor:
        """(C, H): rows that come to this rank from its like on each host."""
        at = self.at
        return self._to_hosts[at.local_rank :: at.ranks_per_host, :, at.host].T

    def splits(self, chunk: int) -> tuple[list[int], list[int]]:
        """Rows to and from each rank in a chunk."""
        at = self.at
        to_W, from_W = [0] * at.world_size, [0] * at.world_size
        to_W[at.local_rank :: at.ranks_per_host] = self._to_hosts[at.rank, chunk].tolist()
        from_W[at.local_rank :: at.ranks_per_host] = self._from_hosts[chunk].tolist()
        return to_W, from_W

    @cached_property
    def crosses(self) -> list[bool]:
        """Whether any row of a chunk leaves its host; every rank finds the same."""
        at = self.at
        own = torch.arange(at.hosts).repeat_interleave(at.ranks_per_host)
        away = torch.arange(at.hosts)[None, :] != own[:, None]
        crosses: list[bool] = (self._to_hosts * away[:, None]).sum((0, 2)).gt(0).tolist()
        return crosses

    @property
    def any_rows(self) -> bool:
        """Whether any rank sends any row; every rank finds the same."""
        return bool(self.table.any())

    @cached_property
    def _inside(self) -> torch.Tensor:
        """(C, L, L): rows that each rank of this host passes to each of it."""
        at, per_host = self.at, self.at.ranks_per_host
        here = self._to_ranks[:, :, at.host * per_host : (at.host + 1) * per_host]
        return here.view(at.hosts, per_host, at.chunks, per_host).sum(0).transpose(0, 1)

    @cached_property
    def busy(self) -> list[bool]:
        """Whether the ranks of this host pass any row of a chunk; each of them finds the same."""
        busy: list[bool] = self._inside.sum((1, 2)).gt(0).tolist()
        return busy

    @cached_property
    def room(self) -> torch.Tensor:
        """(2, C, L): first row, and the one behind the last, that this rank writes at each rank of
        its host: rows there lie by chunk, then by who passed them."""
        at = self.at
        flat = self._inside.reshape(-1, at.ranks_per_host)
        stop = flat.cumsum(0)
        both = torch.stack((stop - flat, stop))
        return both.view(2, at.chunks, at.ranks_per_host, -1)[:, :, at.local_rank]

    @cached_property
    def received(self) -> int:
        """Rows that are passed to this rank."""
        return int(self._inside[:, :, self.at.local_rank].sum())

    @cached_property
    def most_W(self) -> list[int]:
        """The rows that each rank receives: those passed to it, or those it passes on, whichever
        are more."""
        at = self.at
        in_the_end = self._to_ranks.sum((0, 1))
        by_like = self._to_hosts.sum(1).view(at.hosts, at.ranks_per_host, at.hosts).sum(0)
        most: list[int] = torch.maximum(in_the_end, by_like.T.reshape(-1)).tolist()
        return most


def passage(manager: TorchGroup, agreed: Agreement, at: Geometry) -> Passage:
    """Return what the counts say; CommunicationError on every rank where they contradict T."""
    found = Passage(at, torch.tensor(agreed.rows_WW, dtype=torch.int64))
    tokens_W = torch.tensor(agreed.tokens_W)
    first = at.tokens * torch.arange(at.chunks)
    most_WC1 = (tokens_W[:, None] - first).clamp(0, at.tokens)[..., None]
    wrong = ((found._to_hosts > most_WC1).flatten(1).any(1)) | (
        (found._to_ranks > most_WC1).flatten(1).any(1)
    )
    if bool(wrong.any()):
        peers: Sequence[int] = wrong.nonzero()[:, 0].tolist()
        got = f"rows by chunk {[agreed.rows_WW[rank] for rank in peers]}"
        need = "no more than a chunk has tokens"
        raise manager.disagreement(got, need, step=agreed.step, peers=peers)
    return found
