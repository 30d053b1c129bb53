"""Dispatch and combine alone: a size, a way to move tokens, and what must cross links at least.

A Transport stands for one way on one rank: a PrepareAndFinalize of ours, or a bare library call.
Experts are the identity between its two halves, so what comes back must be x: router weights sum
to 1. Everything is drawn on every rank from the same seeds, so nothing is sent beside the rows.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from modular_kernel.measure.records import PEER
from modular_kernel.measure.routing_patterns import RoutingKind, draw
from modular_kernel.spec.placement import pairs_to_slots
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import Routing

BF16_BOUND = 2.0**-7  # a row's distance from x: every rank's sum rounded once, then the total
FP8_BOUND = 2.0**-4 + BF16_BOUND  # half of float8_e4m3fn's last place, in every value
_INTERMEDIATE = 256  # of experts that nobody computes


@dataclass(frozen=True)
class ExchangeCase:
    """One size. tokens: T of each rank. capacity: the most a call may pass; buffers are for it.

    quant: how rows travel to the experts, "none" (bfloat16) or a scheme such as fp8_w8a8_block;
    they always come back in bfloat16.
    """

    world_size: int
    tokens: int
    capacity: int
    hidden: int = 7168
    experts: int = 256
    top_k: int = 8
    quant: str = "none"

    def problem(self, rank: int, *, graph: bool = False) -> Problem:
        """Return the layer of one rank, of `capacity` tokens."""
        return Problem(
            tokens=self.capacity,
            hidden=self.hidden,
            intermediate=_INTERMEDIATE,
            experts=self.experts,
            top_k=self.top_k,
            quant=self.quant,
            graph=graph,
            parallel=Parallel(self.world_size, rank=rank),
        )

    @cached_property
    def scheme(self) -> QuantScheme:
        return QuantScheme.parse(self.quant)

    @property
    def bound(self) -> float:
        """What a row may be away from x, relative to x."""
        return FP8_BOUND if self.scheme.quantizes_activations else BF16_BOUND

    @property
    def row_bytes(self) -> int:
        """Of a row on its way to the experts, scales included."""
        scheme = self.scheme
        if not scheme.quantizes_activations:
            return 2 * self.hidden
        group = scheme.group[-1] if scheme.activation_granularity == "group" else self.hidden
        return self.hidden + 4 * -(-self.hidden // group)

    def routing(self, rank: int) -> Routing:
        """Draw a rank's routing on the CPU.

        The bits are the same on every machine; weights of a token sum to 1.
        """
        generator = torch.Generator().manual_seed(1_000 * self.tokens + rank)
        return draw(self.problem(rank).with_tokens(self.tokens), RoutingKind("uniform"), generator)

    def x_TH(self, rank: int, device: torch.device) -> torch.Tensor:
        """Draw a rank's tokens, (T, H) bfloat16."""
        generator = torch.Generator(device).manual_seed(1_000 * self.tokens + rank)
        values = torch.randn(self.tokens, self.hidden, device=device, generator=generator)
        return values.bfloat16()

    @cached_property
    def rows_WW(self) -> tuple[tuple[int, ...], ...]:
        """[s][d]: tokens of rank s with an expert on rank d, each counted once."""
        tables = self.problem(0).placement.tables()
        found = []
        for rank in range(self.world_size):
            home_TK, _, _ = pairs_to_slots(self.routing(rank).topk_ids_TK, tables, together=True)
            wanted = [(home_TK == d).any(1).sum() for d in range(self.world_size)]
            found.append(tuple(map(int, wanted)))
        return tuple(found)

    @property
    def remote_rows(self) -> tuple[int, int]:
        """Rows that must come into the busiest rank: to dispatch, and to combine."""
        ranks = range(self.world_size)
        sent = [sum(self.rows_WW[r]) - self.rows_WW[r][r] for r in ranks]
        came = [sum(rows[r] for rows in self.rows_WW) - self.rows_WW[r][r] for r in ranks]
        return max(came), max(sent)


@dataclass(frozen=True)
class TransportLink:
    """What a floor is made of: bytes a second into one GPU, and seconds before the first."""

    bytes_per_s: float = 393e9
    latency_s: float = 6e-6

    def floor_us(self, nbytes: int) -> float:
        return (nbytes / self.bytes_per_s + self.latency_s) * 1e6


@dataclass(frozen=True)
class Place:
    """Where a transport works: its rank, the process group of all, its device."""

    rank: int
    world_size: int
    group: Any
    device: torch.device


@dataclass(frozen=True)
class ExchangeInputs:
    """A call: x_TH (T, H) bfloat16; topk_ids int32 and weights float32, (T, K), contiguous."""

    cell: ExchangeCase
    x_TH: torch.Tensor
    routing: Routing

    @classmethod
    def of(cls, cell: ExchangeCase, rank: int, device: torch.device) -> "ExchangeInputs":
        drawn = cell.routing(rank)
        routing = Routing(drawn.topk_weights_TK.to(device), drawn.topk_ids_TK.to(device))
        return cls(cell, cell.x_TH(rank, device), routing)


class Transport(ABC):
    """One way to bring tokens to their experts and sums back, on one rank.

    capturable: both halves may be captured in a CUDA graph. alone: nothing else should run in
    these processes after it, such as another user of its library. replicated: every rank passes
    rank 0's tokens. interpreted: it runs in Triton's interpreter, so that its time says nothing
    about a GPU. note: for the table. arrived: what the last dispatch left, which `identity` and
    `combine` read.
    """

    name: ClassVar[str]
    origin: ClassVar[str] = PEER
    capturable: bool = False
    alone: bool = False
    replicated: bool = False
    interpreted: bool = False
    note: str = ""
    arrived: Any = None

    def refusal(self, cell: ExchangeCase) -> str:
        """Why this cell cannot be served; "" if it can. Asked on a rank, before `open`."""
        return ""

    @abstractmethod
    def open(self, cell: ExchangeCase, place: Place) -> None:
        """Make what calls of at most cell.capacity tokens need. Collective; then `load`s follow."""

    @abstractmethod
    def load(self, given: ExchangeInputs) -> None:
        """Take the tensors of the calls to come, and prepare whatever is not to be timed."""

    @abstractmethod
    def dispatch(self) -> None:
        """Bring the rows, and wait for those of others, as far as the stream is concerned."""

    @abstractmethod
    def identity(self) -> None:
        """Write what experts that change nothing would hand to `combine`."""

    @abstractmethod
    def combine(self) -> torch.Tensor:
        """Return the sums of this rank's tokens, (T, H) bfloat16, or what `expected` says."""

    def expected(self, given: ExchangeInputs) -> torch.Tensor:
        """Return what `combine` must return.

        That is x, unless the transport leaves adding up to its caller.
        """
        return given.x_TH

    def settle(self) -> None:  # noqa: B027  most find out at once
        """Raise what went wrong in calls that have returned."""

    def close(self) -> None:  # noqa: B027  most own nothing
        """Give everything back; may be called after a failure, and before `open`."""


def distance(out: torch.Tensor, x_TH: torch.Tensor) -> float:
    """Return the largest relative distance of a row from x's.

    It is infinite if a value is not finite, or the shape is another.
    """
    if out.shape != x_TH.shape or not bool(out.isfinite().all()):
        return float("inf")
    if not x_TH.numel():
        return 0.0
    away_T = (out.float() - x_TH.float()).norm(dim=1) / x_TH.float().norm(dim=1)
    return float(away_T.max())


def dequantized(rows: torch.Tensor, scale: torch.Tensor | None, group: int) -> torch.Tensor:
    """rows (..., H) times its scales, bfloat16.

    scale: None, float32 (1,), or (..., G) for one of each `group` values of a row (G = 1: of all).
    """
    if scale is None:
        return rows.bfloat16()
    if scale.dim() == rows.dim() and scale.shape[-1] > 1:
        scale = scale.repeat_interleave(group, -1)[..., : rows.shape[-1]]
    return (rows.float() * scale).bfloat16()
