"""Row counts of a two-level exchange, and the all-to-all splits that each rank derives from them.

In a two-level exchange (`host_then_rank.part`), a rank sends a row to its counterpart on another
host: the rank there with the same local rank (the index of a rank on its host). The counterpart
forwards the row to ranks of its host. Tokens are divided into chunks by their index, so that one
chunk can be forwarded within hosts while the next chunk is sent between hosts.

In shapes, W is the number of ranks, L the number of ranks per host, H the number of hosts, and C
the number of chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import pad

from prepare_finalize.common.handshake import CallMetadata
from prepare_finalize.common.torch_group import TorchGroup


@dataclass(frozen=True)
class Geometry:
    """Numbers of ranks, hosts and chunks of an exchange.

    rank, world_size: this rank, and the number of ranks, W.
    ranks_per_host: number of ranks per host, L.
    chunks: number of chunks, C.
    tokens: tokens per chunk, the same on every rank.
    """

    rank: int
    world_size: int
    ranks_per_host: int
    chunks: int
    tokens: int

    @property
    def hosts(self) -> int:
        """Number of hosts, H."""
        return self.world_size // self.ranks_per_host

    @property
    def host(self) -> int:
        """Index of this rank's host."""
        return self.rank // self.ranks_per_host

    @property
    def local_rank(self) -> int:
        """Index of this rank on its host."""
        return self.rank % self.ranks_per_host

    @property
    def counts(self) -> int:
        """Number of row counts that each rank sends in the handshake of a call."""
        return self.chunks * (self.hosts + self.world_size)

    def split_chunks(self, mask_PT: torch.Tensor) -> torch.Tensor:
        """Split a mask of the tokens for P destinations, (P, T), into (C, P, tokens per chunk)."""
        destinations, tokens = mask_PT.shape
        padded = pad(mask_PT, (0, self.chunks * self.tokens - tokens))
        return padded.view(destinations, self.chunks, self.tokens).transpose(0, 1)


@dataclass(frozen=True)
class RowCounts:
    """Numbers of rows of one call, by source, destination and chunk; the same table on every rank.

    table: (W, C * (H + W)) int64. Row r has the numbers of rows from rank r to each host, (C, H),
        then the numbers of rows from rank r to each rank, (C, W).
    """

    geometry: Geometry
    table: torch.Tensor

    @cached_property
    def _to_hosts(self) -> torch.Tensor:
        """(W, C, H): rows that each rank sends to its counterpart on each host."""
        geometry = self.geometry
        return self.table[:, : geometry.chunks * geometry.hosts].view(
            -1, geometry.chunks, geometry.hosts
        )

    @cached_property
    def _to_ranks(self) -> torch.Tensor:
        """(W, C, W): rows from each rank, by the rank whose experts need them."""
        geometry = self.geometry
        return self.table[:, geometry.chunks * geometry.hosts :].view(
            -1, geometry.chunks, geometry.world_size
        )

    @cached_property
    def sent(self) -> list[int]:
        """Number of rows that this rank sends to all hosts, including its own, by chunk."""
        sent: list[int] = self._to_hosts[self.geometry.rank].sum(1).tolist()
        return sent

    @cached_property
    def forwarded(self) -> list[int]:
        """Number of rows from all hosts that this rank forwards within its host, by chunk."""
        forwarded: list[int] = self._from_hosts.sum(1).tolist()
        return forwarded

    @property
    def _from_hosts(self) -> torch.Tensor:
        """(C, H): rows that this rank receives from its counterpart on each host."""
        geometry = self.geometry
        return self._to_hosts[geometry.local_rank :: geometry.ranks_per_host, :, geometry.host].T

    def splits(self, chunk: int) -> tuple[list[int], list[int]]:
        """Return the numbers of rows to and from each rank in a chunk, for the all-to-all."""
        geometry = self.geometry
        to_W, from_W = [0] * geometry.world_size, [0] * geometry.world_size
        to_W[geometry.local_rank :: geometry.ranks_per_host] = self._to_hosts[
            geometry.rank, chunk
        ].tolist()
        from_W[geometry.local_rank :: geometry.ranks_per_host] = self._from_hosts[chunk].tolist()
        return to_W, from_W

    @cached_property
    def crosses_hosts(self) -> list[bool]:
        """Whether any row of a chunk leaves its host; the same on every rank."""
        geometry = self.geometry
        hosts = torch.arange(geometry.hosts, device="cpu")
        host_of_rank = hosts.repeat_interleave(geometry.ranks_per_host)
        is_remote = hosts[None, :] != host_of_rank[:, None]
        crosses: list[bool] = (self._to_hosts * is_remote[:, None]).sum((0, 2)).gt(0).tolist()
        return crosses

    @property
    def any_rows(self) -> bool:
        """Whether any rank sends any row; the same on every rank."""
        return bool(self.table.any())

    @cached_property
    def _rows_within_host(self) -> torch.Tensor:
        """(C, L, L): rows that each rank of this host forwards to each rank of the host."""
        geometry, per_host = self.geometry, self.geometry.ranks_per_host
        to_this_host = self._to_ranks[
            :, :, geometry.host * per_host : (geometry.host + 1) * per_host
        ]
        return (
            to_this_host.view(geometry.hosts, per_host, geometry.chunks, per_host)
            .sum(0)
            .transpose(0, 1)
        )

    @cached_property
    def has_rows(self) -> list[bool]:
        """Whether ranks of this host forward any row of a chunk; the same on all of them."""
        has_rows: list[bool] = self._rows_within_host.sum((1, 2)).gt(0).tolist()
        return has_rows

    @cached_property
    def write_bounds(self) -> torch.Tensor:
        """(2, C, L): range of rows that this rank writes in the buffers of each rank of its host.

        Index 0 is the first row, index 1 the end. The rows in a buffer are ordered by chunk, then
        by forwarding rank.
        """
        geometry = self.geometry
        flat_rows = self._rows_within_host.reshape(-1, geometry.ranks_per_host)
        stop = flat_rows.cumsum(0)
        bounds = torch.stack((stop - flat_rows, stop))
        return bounds.view(2, geometry.chunks, geometry.ranks_per_host, -1)[
            :, :, geometry.local_rank
        ]

    @cached_property
    def received(self) -> int:
        """Number of rows that are forwarded to this rank."""
        return int(self._rows_within_host[:, :, self.geometry.local_rank].sum())

    @cached_property
    def max_rows_W(self) -> list[int]:
        """Number of rows that each rank must have room for.

        This is the larger of the number of rows that the rank forwards and the number of rows for
        its own experts.
        """
        geometry = self.geometry
        expert_rows = self._to_ranks.sum((0, 1))
        forwarded_rows = (
            self._to_hosts.sum(1)
            .view(geometry.hosts, geometry.ranks_per_host, geometry.hosts)
            .sum(0)
        )
        rows_W: list[int] = torch.maximum(expert_rows, forwarded_rows.T.reshape(-1)).tolist()
        return rows_W


def check_counts(manager: TorchGroup, metadata: CallMetadata, geometry: Geometry) -> RowCounts:
    """Return the row counts in the metadata of a call.

    Raise CommunicationError on every rank if a rank announced more rows than it has tokens.
    """
    rows_WW = torch.tensor(metadata.rows_WW, dtype=torch.int64, device="cpu")
    row_counts = RowCounts(geometry, rows_WW)
    tokens_W = torch.tensor(metadata.tokens_W, dtype=torch.int64, device="cpu")
    first_token_C = geometry.tokens * torch.arange(geometry.chunks, device="cpu")
    limit_WC1 = (tokens_W[:, None] - first_token_C).clamp(0, geometry.tokens)[..., None]
    is_wrong = ((row_counts._to_hosts > limit_WC1).flatten(1).any(1)) | (
        (row_counts._to_ranks > limit_WC1).flatten(1).any(1)
    )
    if bool(is_wrong.any()):
        peers: Sequence[int] = is_wrong.nonzero()[:, 0].tolist()
        got = f"rows by chunk {[metadata.rows_WW[rank] for rank in peers]}"
        need = "no more than a chunk has tokens"
        raise manager.make_metadata_error(got, need, step=metadata.step, peers=peers)
    return row_counts
