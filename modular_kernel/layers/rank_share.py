"""The share of a layer's experts on one rank, and the destination of each projection."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from modular_kernel.checkpoints.matrix_layout import Range
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.placement import Experts, Placement
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.utils.argument_checks import Count, check_fields, expect

SHARDS = ("w1", "w2", "w3")  # gate, down, up
FUSED = "w13"  # gate and up


@dataclass(frozen=True)
class Share:
    """The experts, and the part of each expert, that one rank holds.

    experts, hidden, intermediate: sizes of the whole layer. ep, tp: (rank, ranks). placement: the
    experts of each EP rank. gated: w1 has gate and up rows. interleaved: these rows alternate.
    """

    experts: Experts
    hidden: Count
    intermediate: Count
    ep: tuple[int, int] = (0, 1)
    tp: tuple[int, int] = (0, 1)
    placement: Literal["linear"] | Placement = "linear"
    gated: bool = True
    interleaved: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "share ")
        rank, world = self.tp
        if not 0 <= rank < world:
            raise ConfigurationError("tp: rank", got=rank, need=f"in [0, {world})")
        if self.intermediate % world:
            need = f"a multiple of the {world} tensor-parallel ranks"
            raise ConfigurationError("intermediate", got=self.intermediate, need=need)
        _ = self.slots  # raises ConfigurationError for an invalid placement

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
        """I of this rank."""
        return self.intermediate // self.tp[1]

    def local_expert(self, expert: int) -> int:
        """Return the row of a global expert id, or -1 if another rank holds it."""
        if type(expert) is not int or not 0 <= expert < self.experts:
            raise ConfigurationError("expert_id", got=expert, need=f"in [0, {self.experts})")
        return self.slots.index(expert) if expert in self.slots else -1


@dataclass(frozen=True)
class Move:
    """The destination of one projection, and the part of it that is copied.

    slot: the expert's row of the parameter. rows, columns: destination within that expert's matrix.
    of_rows, of_columns: source within the loaded matrix.
    """

    slot: int
    rows: Range
    columns: Range
    source_rows: Range
    source_columns: Range


def destination(expert: int, shard: str, share: Share) -> Move | None:
    """Return the destination of one projection of an expert, or None if another rank holds it.

    shard: "w1" (gate) goes to rows [0, I) of w13 and "w3" (up) to rows [I, 2I), where I is this
    rank's; "w2" (down) is split along its columns. With interleaved rows, gate and up are loaded as
    one matrix, "w13". Raises ConfigurationError for any other shard.
    """
    expect("share", share, Share)
    expect("shard_id", shard, str)
    if shard not in share.shards:
        need = f"one of {', '.join(share.shards)}"
        raise ConfigurationError("shard_id", got=repr(shard)[:80], need=need)
    slot = share.local_expert(expert)
    if slot < 0:
        return None
    width, hidden = share.width, (0, share.hidden)
    source = (share.tp[0] * width, (share.tp[0] + 1) * width)
    if shard == FUSED:
        return Move(slot, (0, 2 * width), hidden, (2 * source[0], 2 * source[1]), hidden)
    if shard == "w2":
        return Move(slot, hidden, (0, width), hidden, source)
    start = width if shard == "w3" and share.gated else 0
    return Move(slot, (start, start + width), hidden, source, hidden)


def intermediate_per_rank(intermediate: int, ranks: int, quant: str) -> int:
    """Return I of one TP rank; raise ConfigurationError if that splits a quantization group."""
    per_rank, remainder = divmod(intermediate, ranks)
    if remainder:
        need = f"a multiple of {ranks}, the TP ranks"
        raise ConfigurationError("intermediate_size", got=intermediate, need=need)
    scheme = Problem(1, 1, 1, 1, 1, quant=quant).scheme
    one_group = scheme.granularity == "group" and scheme.group[0] >= intermediate
    for size in scheme.group if ranks > 1 and not one_group else ():
        if per_rank % size:
            need = f"{ranks} shares of whole groups of {size}"
            raise ConfigurationError("intermediate_size", got=intermediate, need=need)
    return per_rank
