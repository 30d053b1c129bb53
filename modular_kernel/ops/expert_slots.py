"""number_pairs: routing in the form of libraries that know experts by number, in equal blocks.

Such a library wants as many experts on each rank, in the order of ranks. Any placement is brought
into that form: each rank has as many numbers as the fullest has slots, and an expert's number is
rank * numbers + slot. Numbers that no expert has are never sent to.

A library that sends exactly K rows for a token has no room for a pair that is dropped. For it each
rank has more numbers behind its slots, its sinks: what comes back from them has to be zero.
"""

from dataclasses import dataclass

import torch

from modular_kernel.errors import ConfigurationError, ShapeError
from modular_kernel.ops.count import next_power_of_2
from modular_kernel.replay.launch.launch import launch
from modular_kernel.replay.launch.pdl import overlap
from modular_kernel.replay.launch.runtime import use_triton
from modular_kernel.spec.placement import Placement, PlacementTables, pairs_to_slots
from modular_kernel.tensors import Routing

_WARP_PAIRS = 32  # a lane has one


def slots_of(placement: Placement) -> int:
    """Return the slots a rank has numbers for: as many as the fullest has experts."""
    return max(map(len, placement.slots))


@dataclass(frozen=True)
class Numbering:
    """How experts are numbered. tables: the placement's. first_token: copy (t + first_token) % R
    of an expert takes token t's pair, and the first sink is that rank's. sinks: of each rank."""

    placement: Placement
    tables: PlacementTables
    first_token: int = 0
    sinks: int = 0

    @classmethod
    def of(
        cls,
        placement: Placement,
        device: torch.device | str,
        first_token: int = 0,
        *,
        sinks: int = 0,
    ) -> "Numbering":
        """Of a placement, for ids on `device`."""
        return cls(placement, placement.tables(device), first_token, sinks)

    @property
    def slots(self) -> int:
        return slots_of(self.placement)

    @property
    def each(self) -> int:
        """The numbers of one rank."""
        return self.slots + self.sinks

    @property
    def is_plain(self) -> bool:
        """Blocks of equal size: an expert's number follows from its id."""
        whole = self.slots * self.placement.world_size == self.placement.experts
        return whole and self.placement.is_linear


@dataclass(frozen=True)
class Pairs:
    """Pairs to be numbered, and where to.

    Written: numbers_TK (T, K) int64 or int32, the number of each pair's expert, and weights_TK
    (T, K) float32, its router weight times `factor`, both contiguous; -1 and 0 where a pair is
    dropped, because it is skipped or invalid. join: no number twice in a row; the first pair has
    the weights of all, the others are dropped. With sinks, which need `join`, a dropped pair's
    number is a sink's, of a rank in turn: K different ones in every row. invalid_ids: int32 (1,),
    to which the number of ids outside [-1, E) is added.
    """

    routing: Routing
    numbering: Numbering
    numbers_TK: torch.Tensor
    weights_TK: torch.Tensor
    invalid_ids: torch.Tensor
    join: bool
    factor: float


def number_pairs(pairs: Pairs) -> None:
    """Write the numbers that `pairs` asks for. One launch on a GPU; none for T = 0."""
    check_pairs(pairs)
    if pairs.numbers_TK.numel() == 0:
        return
    if not use_triton(pairs.numbers_TK):
        number_pairs_ref(pairs)
        return
    from modular_kernel.ops.kernels.expert_slots import number_pairs_kernel

    arguments, programs = pair_arguments(pairs, 1)
    launch(number_pairs_kernel, (programs,), num_warps=1, **arguments, **overlap())


def check_pairs(pairs: Pairs) -> None:
    """Raise the InputError of what cannot be numbered so."""
    shape = tuple(pairs.routing.topk_ids_TK.shape)
    for name, written in (("numbers", pairs.numbers_TK), ("weights", pairs.weights_TK)):
        if tuple(written.shape) != shape:
            raise ShapeError(f"{name} of pairs", got=tuple(written.shape), need=shape)
    if pairs.numbering.sinks and not pairs.join:
        raise ConfigurationError("sinks", got="pairs of one expert apart", need="join")


def pair_arguments(pairs: Pairs, warps: int) -> tuple[dict[str, object], int]:
    """Kernel arguments for programs of `warps` warps, and how many programs."""
    routing, numbering = pairs.routing, pairs.numbering
    tokens, top_k = routing.topk_ids_TK.shape
    homes_ER2, lanes = numbering.tables.homes_ER2, next_power_of_2(top_k)
    block_t = max(1, _WARP_PAIRS * warps // lanes)
    arguments: dict[str, object] = {
        "ids_ptr": routing.topk_ids_TK,
        "weights_ptr": routing.topk_weights_TK,
        "homes_ptr": homes_ER2,
        "copies_ptr": numbering.tables.copies_E,
        "numbers_ptr": pairs.numbers_TK,
        "out_weights_ptr": pairs.weights_TK,
        "invalid_ptr": pairs.invalid_ids,
        "num_tokens": tokens,
        "num_experts": numbering.placement.experts,
        "first_token": numbering.first_token,
        "world_size": numbering.placement.world_size,
        "slots": numbering.slots,
        "each": numbering.each,
        "most_copies": homes_ER2.shape[1],
        "factor": float(pairs.factor),
        "stride_ids": routing.topk_ids_TK.stride(0),
        "stride_weights": routing.topk_weights_TK.stride(0),
        "TOP_K": top_k,
        "JOIN": pairs.join,
        "SINKS": numbering.sinks > 0,
        "PLAIN": numbering.is_plain,
        "BLOCK_T": block_t,
        "BLOCK_K": lanes,
    }
    return arguments, -(-tokens // block_t)


def number_pairs_ref(pairs: Pairs) -> None:
    """Torch twin of `number_pairs`."""
    routing, numbering = pairs.routing, pairs.numbering
    rank_TK, slot_TK, invalid = pairs_to_slots(
        routing.topk_ids_TK, numbering.tables, first_token=numbering.first_token, together=True
    )
    numbers_TK = torch.where(rank_TK >= 0, rank_TK * numbering.each + slot_TK, -1)
    drop_TK, weights_TK = numbers_TK < 0, routing.topk_weights_TK
    if pairs.join:
        same_TKK = numbers_TK[:, :, None] == numbers_TK[:, None, :]
        # A skipped pair's weight may be anything; it is in no other pair's sum.
        weights_TK = torch.where(same_TKK, weights_TK[:, None, :], 0).sum(2)
        drop_TK = drop_TK | same_TKK.tril(-1).any(2)
    dropped = _sinks(drop_TK, numbering) if numbering.sinks else -1
    pairs.numbers_TK.copy_(torch.where(drop_TK, dropped, numbers_TK))
    pairs.weights_TK.copy_((weights_TK * pairs.factor).masked_fill(drop_TK, 0))
    pairs.invalid_ids.add_(invalid)


def _sinks(drop_TK: torch.Tensor, numbering: Numbering) -> torch.Tensor:
    """Numbers of sinks for the dropped pairs of each token, (T, K)."""
    world_size, index_TK = numbering.placement.world_size, drop_TK.cumsum(1) - 1
    rank_TK = (index_TK + numbering.first_token) % world_size
    return rank_TK * numbering.each + numbering.slots + index_TK // world_size
