"""The share of a layer's experts that one rank holds, and its position in the parameters."""

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

# Shard ids, as checkpoint loaders of engines name them.
SHARDS = ("w1", "w2", "w3")  # gate, down, up
FUSED = "w13"  # gate and up in one tensor


@dataclass(frozen=True)
class Share:
    """The experts and the columns of I that one rank holds.

    experts: E of the whole layer.
    hidden: H.
    intermediate: I of the whole layer.
    ep: (rank, number of ranks) in expert parallelism.
    tp: (rank, number of ranks) in tensor parallelism.
    placement: the experts of each EP rank.
    gated: whether w1 has gate and up rows.
    interleaved: whether gate and up rows alternate.
    quant: quantization scheme of the rank's weights. Its groups and packed words are not split.
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
        """The global ids of this rank's experts, in the order of their local slots."""
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
        """The number of columns of I in this rank's weights, including padding."""
        return self.split.width

    @property
    def columns(self) -> Range:
        """(first, last): this rank holds the columns [first, last) of I."""
        return self.split.columns(self.tp[0])

    @property
    def padding(self) -> int:
        """The number of padding columns after the columns that this rank holds."""
        first, last = self.columns
        return self.width - (last - first)

    def local_expert(self, expert: int) -> int:
        """Return the local slot of a global expert id, or -1 if the expert is on another rank."""
        if type(expert) is not int or not 0 <= expert < self.experts:
            raise ConfigurationError("expert_id", got=expert, need=f"in [0, {self.experts})")
        return self.slots.index(expert) if expert in self.slots else -1


@dataclass(frozen=True)
class Move:
    """A copy of part of one projection into a parameter.

    Ranges are (first, last), where last is exclusive.

    slot: index of the expert in the parameter.
    rows: rows of the destination in the expert's matrix.
    columns: columns of the destination in the expert's matrix.
    source_rows: rows of the loaded matrix.
    source_columns: columns of the loaded matrix.
    """

    slot: int
    rows: Range
    columns: Range
    source_rows: Range
    source_columns: Range


def destination(expert: int, shard: str, share: Share) -> Move | None:
    """Return where a projection of an expert is copied to, or None for an expert on another rank.

    Let c be the number of columns of I that this rank holds, and w the number including padding.
    Gate goes to rows [0, c) of w13 and up to rows [w, w + c). Down goes to columns [0, c) of w2.

    expert: global id of the expert.
    shard: "w1" (gate), "w2" (down) or "w3" (up); or "w13" (gate and up in one matrix) if gate and
        up rows are interleaved.

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
    hidden, source_columns = (0, share.hidden), share.columns
    num_columns = source_columns[1] - source_columns[0]
    if shard == FUSED:
        return Move(
            slot,
            (0, 2 * num_columns),
            hidden,
            (2 * source_columns[0], 2 * source_columns[1]),
            hidden,
        )
    if shard == "w2":
        return Move(slot, hidden, (0, num_columns), hidden, source_columns)
    start = share.width if shard == "w3" and share.gated else 0
    return Move(slot, (start, start + num_columns), hidden, source_columns, hidden)


def find_padding(shard: str, share: Share) -> tuple[Range, Range]:
    """Return (rows, columns), the ranges of the padding in one projection's matrix.

    Only one dimension is padded; the range of the other dimension covers the whole matrix.
    """
    num_columns, width, hidden = share.width - share.padding, share.width, (0, share.hidden)
    if shard == FUSED:
        return (2 * num_columns, 2 * width), hidden
    if shard == "w2":
        return hidden, (num_columns, width)
    start = width if shard == "w3" and share.gated else 0
    return (start + num_columns, start + width), hidden
