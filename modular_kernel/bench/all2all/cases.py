"""The cases of `mk exchange`, and `Transport`, the interface of an exchange to measure.

`mk exchange` measures dispatch, which sends each token to the ranks of its experts, and combine,
which returns the experts' outputs and sums them. A Transport runs both on one rank, with one of our
PrepareAndFinalize parts or with a library. The experts between them are the identity, and the
router weights of a token sum to 1, so the result must equal x. Inputs are drawn from seeds, so
every rank can reproduce the inputs of all ranks.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from modular_kernel.bench.peer_files import load_peer_file
from modular_kernel.measure.records import PEER
from modular_kernel.measure.routing_patterns import RoutingKind, draw_routing
from modular_kernel.spec.placement import pairs_to_slots
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import Routing

# Bounds on the relative error of a row. The sum of each rank and the total are rounded to bfloat16.
BF16_BOUND = 2.0**-7
FP8_BOUND = 2.0**-4 + BF16_BOUND  # each value is also rounded to float8_e4m3fn
_INTERMEDIATE = 256  # any valid size, because the experts are not computed


@dataclass(frozen=True)
class ExchangeCase:
    """Sizes and formats of one dispatch and combine.

    tokens: number of tokens of each rank.
    capacity: maximum number of tokens per call, for which buffers are allocated.
    quant: format of dispatched rows, "none" (bfloat16) or a scheme such as fp8_w8a8_block. Combined
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
        """Maximum relative error that is allowed for a row of the result."""
        return FP8_BOUND if self.scheme.quantizes_activations else BF16_BOUND

    @property
    def row_bytes(self) -> int:
        """Bytes of a dispatched row: H bfloat16 values, or H bytes and float32 scales."""
        scheme = self.scheme
        if not scheme.quantizes_activations:
            return 2 * self.hidden
        group = scheme.group[-1] if scheme.activation_granularity == "group" else self.hidden
        return self.hidden + 4 * -(-self.hidden // group)

    def routing(self, rank: int) -> Routing:
        """Draw a rank's routing, in which the weights of a token sum to 1.

        The routing is drawn on the CPU, so that it is bitwise identical on every machine.
        """
        generator = torch.Generator().manual_seed(1_000 * self.tokens + rank)
        return draw_routing(
            self.problem(rank).with_tokens(self.tokens), RoutingKind("uniform"), generator
        )

    def x_TH(self, rank: int, device: torch.device) -> torch.Tensor:
        """Draw a rank's tokens, (T, H) bfloat16."""
        generator = torch.Generator(device).manual_seed(1_000 * self.tokens + rank)
        values = torch.randn(self.tokens, self.hidden, device=device, generator=generator)
        return values.bfloat16()

    @cached_property
    def rows_WW(self) -> tuple[tuple[int, ...], ...]:
        """Matrix whose element [s][d] is the number of rank s's tokens with an expert on rank d."""
        tables = self.problem(0).placement.tables()
        rows = []
        for rank in range(self.world_size):
            home_TK, _, _ = pairs_to_slots(self.routing(rank).topk_ids_TK, tables, together=True)
            counts = [(home_TK == d).any(1).sum() for d in range(self.world_size)]
            rows.append(tuple(map(int, counts)))
        return tuple(rows)

    @property
    def remote_rows(self) -> tuple[int, int]:
        """Number of rows that the busiest rank receives from others, in dispatch and in combine.

        In combine, a rank returns the rows that it received in dispatch, so the counts are
        transposed.
        """
        ranks = range(self.world_size)
        sent = [sum(self.rows_WW[r]) - self.rows_WW[r][r] for r in ranks]
        received = [sum(rows[r] for rows in self.rows_WW) - self.rows_WW[r][r] for r in ranks]
        return max(received), max(sent)


@dataclass(frozen=True)
class TransportLink:
    """Model of the link into one GPU, for rooflines.

    bytes_per_s: bandwidth.
    latency_s: latency in seconds.
    """

    bytes_per_s: float = 393e9
    latency_s: float = 6e-6

    def floor_us(self, nbytes: int) -> float:
        return (nbytes / self.bytes_per_s + self.latency_s) * 1e6


@dataclass(frozen=True)
class RankContext:
    """The rank that a transport runs on.

    group: process group of all ranks.
    """

    rank: int
    world_size: int
    group: Any
    device: torch.device


@dataclass(frozen=True)
class ExchangeInputs:
    """Inputs of a call on one rank.

    x_TH: (T, H) bfloat16.
    routing: contiguous ids (T, K) int32 and weights (T, K) float32.
    """

    case: ExchangeCase
    x_TH: torch.Tensor
    routing: Routing

    @classmethod
    def from_case(cls, case: ExchangeCase, rank: int, device: torch.device) -> "ExchangeInputs":
        cpu_routing = case.routing(rank)
        routing = Routing(
            cpu_routing.topk_weights_TK.to(device), cpu_routing.topk_ids_TK.to(device)
        )
        return cls(case, case.x_TH(rank, device), routing)


class Transport(ABC):
    """Base class of implementations of dispatch and combine on one rank.

    name: name in the tables.
    origin: see measure.records.Row.
    capturable: whether dispatch and combine can be captured in CUDA graphs.
    needs_fresh_ranks: whether the processes of the ranks must be replaced after this transport, for
        example because another transport uses the same library.
    replicated: whether every rank passes the tokens of rank 0.
    interpreted: whether the transport runs in Triton's interpreter, so that its time is
        meaningless.
    note: text for the table.
    dispatched: result of the last dispatch, which `identity` and `combine` read.
    """

    name: ClassVar[str]
    origin: ClassVar[str] = PEER
    capturable: bool = False
    needs_fresh_ranks: bool = False
    replicated: bool = False
    interpreted: bool = False
    note: str = ""
    dispatched: Any = None

    def refusal(self, case: ExchangeCase) -> str:
        """Return the reason why the transport cannot run this case, or "". Called before `open`."""
        return ""

    @abstractmethod
    def open(self, case: ExchangeCase, context: RankContext) -> None:
        """Allocate all buffers for calls of up to case.capacity tokens. All ranks call this."""

    @abstractmethod
    def load(self, inputs: ExchangeInputs) -> None:
        """Set the inputs of the following calls, and do all work that is not timed."""

    @abstractmethod
    def dispatch(self) -> None:
        """Send rows to other ranks and receive rows from them, in stream order."""

    @abstractmethod
    def identity(self) -> None:
        """Copy the dispatched rows to the input of `combine`, like experts that return x."""

    @abstractmethod
    def combine(self) -> torch.Tensor:
        """Return the weighted sums of this rank's tokens, (T, H) bfloat16.

        See `compute_expected`.
        """

    def compute_expected(self, inputs: ExchangeInputs) -> torch.Tensor:
        """Return the correct result of `combine`.

        The result is x, except for a transport that leaves the weighted sum to its caller.
        """
        return inputs.x_TH

    def raise_async_errors(self) -> None:  # noqa: B027  most transports raise errors immediately
        """Raise the asynchronous errors of earlier calls."""

    def close(self) -> None:  # noqa: B027  most transports hold no resources
        """Release all resources. May be called after a failure, and without `open`."""


def load_transports(path: Path) -> list[Transport]:
    """Import a --peer file and return the result of its function `transports()`.

    The file is imported in the main process and on every rank, so it should import libraries only
    in `Transport.open`.

    Raises BrokenPartError or ConfigurationError, with the name of the file, if that fails.
    """
    transports: list[Transport]
    _, transports = load_peer_file(path, "transports", Transport)
    return transports


def max_row_error(out: torch.Tensor, x_TH: torch.Tensor) -> float:
    """Return the maximum relative error of a row of `out`, compared with x.

    The error is infinite if the shapes differ or a value is not finite.
    """
    if out.shape != x_TH.shape or not bool(out.isfinite().all()):
        return float("inf")
    if not x_TH.numel():
        return 0.0
    error_T = (out.float() - x_TH.float()).norm(dim=1) / x_TH.float().norm(dim=1)
    return float(error_T.max())


def dequantize(rows: torch.Tensor, scale: torch.Tensor | None, group: int) -> torch.Tensor:
    """Multiply rows (..., H) by their scales. Returns bfloat16.

    scale: None for unquantized rows. Else float32, with shape (1,) for one scale for all rows,
        (..., 1) for one scale per row, or (..., ceil(H / group)) for one scale per `group` values
        of a row.
    """
    if scale is None:
        return rows.bfloat16()
    if scale.dim() == rows.dim() and scale.shape[-1] > 1:
        scale = scale.repeat_interleave(group, -1)[..., : rows.shape[-1]]
    return (rows.float() * scale).bfloat16()
