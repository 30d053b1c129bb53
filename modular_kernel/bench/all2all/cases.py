"""Cases, transports and the roofline of the dispatch and combine benchmark.

A Transport dispatches and combines tokens on one rank: one of our PrepareAndFinalize parts, or a
bare library. Between dispatch and combine the experts are the identity and router weights sum to 1,
so the result must equal x. Inputs are drawn on every rank from the same seeds, so no rank has to
send its inputs to the others.
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

BF16_BOUND = 2.0**-7  # relative error of a row: one rounding of each rank's sum, one of the total
FP8_BOUND = 2.0**-4 + BF16_BOUND  # plus half an ulp of float8_e4m3fn in every value
_INTERMEDIATE = 256  # arbitrary: the experts are not computed


@dataclass(frozen=True)
class ExchangeCase:
    """A case of the exchange benchmark.

    tokens: T of each rank. capacity: maximum tokens per call, for which buffers are allocated.
    quant: format of dispatched rows, "none" (bfloat16) or a scheme such as fp8_w8a8_block; combined
    rows are always bfloat16.
    """

    world_size: int
    tokens: int
    capacity: int
    hidden: int = 7168
    experts: int = 256
    top_k: int = 8
    quant: str = "none"

    def problem(self, rank: int, *, graph: bool = False) -> Problem:
        """Return the problem of one rank, with `capacity` tokens."""
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
        """Maximum relative error of a row against x."""
        return FP8_BOUND if self.scheme.quantizes_activations else BF16_BOUND

    @property
    def row_bytes(self) -> int:
        """Bytes of a dispatched row, including its scales."""
        scheme = self.scheme
        if not scheme.quantizes_activations:
            return 2 * self.hidden
        group = scheme.group[-1] if scheme.activation_granularity == "group" else self.hidden
        return self.hidden + 4 * -(-self.hidden // group)

    def routing(self, rank: int) -> Routing:
        """Draw a rank's routing on the CPU; the weights of a token sum to 1.

        The result is bitwise identical on every machine.
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
        """rows_WW[s][d]: number of tokens of rank s with at least one expert on rank d."""
        tables = self.problem(0).placement.tables()
        rows = []
        for rank in range(self.world_size):
            home_TK, _, _ = pairs_to_slots(self.routing(rank).topk_ids_TK, tables, together=True)
            counts = [(home_TK == d).any(1).sum() for d in range(self.world_size)]
            rows.append(tuple(map(int, counts)))
        return tuple(rows)

    @property
    def remote_rows(self) -> tuple[int, int]:
        """Rows from other ranks that the busiest rank receives, in dispatch and in combine."""
        ranks = range(self.world_size)
        sent = [sum(self.rows_WW[r]) - self.rows_WW[r][r] for r in ranks]
        received = [sum(rows[r] for rows in self.rows_WW) - self.rows_WW[r][r] for r in ranks]
        return max(received), max(sent)


@dataclass(frozen=True)
class TransportLink:
    """The link model of the roofline: bytes per second into one GPU, and latency in seconds."""

    bytes_per_s: float = 393e9
    latency_s: float = 6e-6

    def floor_us(self, nbytes: int) -> float:
        return (nbytes / self.bytes_per_s + self.latency_s) * 1e6


@dataclass(frozen=True)
class RankContext:
    """Rank, process group and device of a transport."""

    rank: int
    world_size: int
    group: Any
    device: torch.device


@dataclass(frozen=True)
class ExchangeInputs:
    """Inputs of a call: x_TH (T, H) bfloat16; contiguous (T, K) ids int32 and weights float32."""

    cell: ExchangeCase
    x_TH: torch.Tensor
    routing: Routing

    @classmethod
    def of(cls, cell: ExchangeCase, rank: int, device: torch.device) -> "ExchangeInputs":
        drawn = cell.routing(rank)
        routing = Routing(drawn.topk_weights_TK.to(device), drawn.topk_ids_TK.to(device))
        return cls(cell, cell.x_TH(rank, device), routing)


class Transport(ABC):
    """Base class of implementations of dispatch and combine on one rank.

    capturable: dispatch and combine can be captured in CUDA graphs. alone: the processes must not
    run another transport afterwards, for example because it uses the same library. replicated:
    every rank passes the tokens of rank 0. interpreted: it runs in Triton's interpreter, so its
    time is meaningless. note: text for the table. arrived: result of the last dispatch, read by
    `identity` and `combine`.
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
        """Return the reason why this case cannot run, else "". Called on a rank before `open`."""
        return ""

    @abstractmethod
    def open(self, cell: ExchangeCase, context: RankContext) -> None:
        """Allocate everything for calls of up to cell.capacity tokens. Collective."""

    @abstractmethod
    def load(self, inputs: ExchangeInputs) -> None:
        """Set the inputs of the following calls and do all work that is not timed."""

    @abstractmethod
    def dispatch(self) -> None:
        """Send this rank's rows and receive those of others, in stream order."""

    @abstractmethod
    def identity(self) -> None:
        """Write the output of identity experts, as the input of `combine`."""

    @abstractmethod
    def combine(self) -> torch.Tensor:
        """Return the weighted sums of this rank's tokens: (T, H) bfloat16, see `expected`."""

    def expected(self, inputs: ExchangeInputs) -> torch.Tensor:
        """Return the correct result of `combine`.

        This is x, unless the transport leaves the summation to its caller.
        """
        return inputs.x_TH

    def settle(self) -> None:  # noqa: B027  most transports raise errors immediately
        """Raise asynchronous errors of earlier calls."""

    def close(self) -> None:  # noqa: B027  most transports hold no resources
        """Release all resources. May be called after a failure, and before `open`."""


def distance(out: torch.Tensor, x_TH: torch.Tensor) -> float:
    """Return the maximum relative error of a row of `out` against the row of x.

    It is infinite if a value is not finite or the shapes differ.
    """
    if out.shape != x_TH.shape or not bool(out.isfinite().all()):
        return float("inf")
    if not x_TH.numel():
        return 0.0
    error_T = (out.float() - x_TH.float()).norm(dim=1) / x_TH.float().norm(dim=1)
    return float(error_T.max())


def dequantize(rows: torch.Tensor, scale: torch.Tensor | None, group: int) -> torch.Tensor:
    """Multiply rows (..., H) by their scales; returns bfloat16.

    scale: None, float32 (1,), or (..., G) with one scale per `group` values of a row; G = 1 means
    one scale per row.
    """
    if scale is None:
        return rows.bfloat16()
    if scale.dim() == rows.dim() and scale.shape[-1] > 1:
        scale = scale.repeat_interleave(group, -1)[..., : rows.shape[-1]]
    return (rows.float() * scale).bfloat16()
