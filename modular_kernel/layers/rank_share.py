"""One rank's share of a layer's experts, and where each projection goes in its parameters."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from modular_kernel.checkpoints.matrix_layout import Range
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.intermediate_split import IntermediateSplit, split_intermediate
from modular_kernel.spec.placement import Experts, Placement
from modular_kernel.spec.problem import Parallel
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.utils.argument_checks import Count, check_fields, expect

SHARDS = ("w1", "w2", "w3")  # gate, down, up
FUSED = "w13"  # gate and up


@dataclass(frozen=True)
class Share:
    """The experts that one rank holds, and the columns of I that it holds of each.

    experts, hidden, intermediate: sizes of the whole layer. ep, tp: (rank, number of ranks).
    placement: the experts of each EP rank. gated: w1 has gate and up rows. interleaved: these rows
    alternate. quant: the scheme of a rank's weights, whose groups and packed words are not split.
    """

    experts: Experts
    hidden: Count
    intermediate: Count
    ep: tuple[int, int] = (0, 1)
    tp: tuple[int, int] = (0, 1)
    placement: Literal["linear"] | Placement = "linear"
    gated: bool = True
    interleaved: bool = False
    quant: str = "none"

    def __post_init__(self) -> None:
        check_fields(self, "share ")
        rank, world = self.tp
        if not 0 <= rank < world:
            raise ConfigurationError("tp: rank", got=rank, need=f"in [0, {world})")
        # These raise ConfigurationError for too many TP ranks and for an invalid placement.
        _ = self.split, self.slots

    @cached_property
    def split(self) -> IntermediateSplit:
        """The division of I over the TP ranks."""
        return split_intermediate(self.intermediate, self.tp[1], QuantScheme.parse(self.quant))

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """The global ids of this rank's experts, in the order of the parameters' rows."""
        parallel = Parallel(self.ep[1], self.placement, self.ep[0])
        return parallel.place(self.experts).slots[self.ep[0]]

    @property
    def shards(self) -> tuple[str, ...]:
        """The shard ids of one expert's projections."""
        if self.interleaved:
            return (FUSED, "w2")
        return SHARDS if self.gated else SHARDS[1:]

    @property
    def width(self) -> int:
        """I of this rank's weights, including padding."""
        return self.split.width

    @property
    def columns(self) -> Range:
        """The columns [first, last) of I that this rank holds."""
        return self.split.columns(self.tp[0])

    @property
    def padding(self) -> int:
        """The number of padding columns after the columns that this rank holds."""
        first, last = self.columns
        return self.width - (last - first)

    def local_expert(self, expert: int) -> int:
        """Return the row of a global expert id, or -1 if another rank holds it."""
        if type(expert) is not int or not 0 <= expert < self.experts:
            raise ConfigurationError("expert_id", got=expert, need=f"in [0, {self.experts})")
        return self.slots.index(expert) if expert in self.slots else -1


@dataclass(frozen=True)
class Move:
    """A copy of part of one projection into a parameter.

    slot: index of the expert in the parameter. rows, columns: destination within that expert's
    matrix. source_rows, source_columns: source within the loaded matrix.
    """

    slot: int
    rows: Range
    columns: Range
    source_rows: Range
    source_columns: Range


def destination(expert: int, shard: str, share: Share) -> Move | None:
    """Return the destination of one projection of an expert, or None if another rank holds it.

    shard: "w1" (gate) goes to rows [0, c) of w13 and "w3" (up) to rows [w, w + c), where c is the
        number of this rank's columns of I, and w is c plus the padding. "w2" (down) is split along
        its columns. With interleaved rows, gate and up are loaded as one matrix, "w13".

    Raises ConfigurationError for any other shard.
    """
    expect("share", share, Share)
    expect("shard_id", shard, str)
    if shard not in share.shards:
        need = f"one of {', '.join(share.shards)}"
        raise ConfigurationError("shard_id", got=repr(shard)[:80], need=need)
    slot = share.local_expert(expert)
    if slot < 0:
        return None
    hidden, source = (0, share.hidden), share.columns
    count = source[1] - source[0]
    if shard == FUSED:
        return Move(slot, (0, 2 * count), hidden, (2 * source[0], 2 * source[1]), hidden)
    if shard == "w2":
        return Move(slot, hidden, (0, count), hidden, source)
    start = share.width if shard == "w3" and share.gated else 0
    return Move(slot, (start, start + count), hidden, source, hidden)


def padded_parts(shard: str, share: Share) -> tuple[Range, Range]:
    """Return the row range and the column range of the padding in one projection's matrix.

    Padding is along one dimension; the range of the other dimension is the whole matrix.
    """
    count, width, hidden = share.width - share.padding, share.width, (0, share.hidden)
    if shard == FUSED:
        return (2 * count, 2 * width), hidden
    if shard == "w2":
        return hidden, (count, width)
    start = width if shard == "w3" and share.gated else 0
    return (start + count, start + width), hidden
