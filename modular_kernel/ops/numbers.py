"""number_pairs: routing in the form of libraries that know experts by number, in equal blocks.

Such a library wants as many experts on each rank, in the order of ranks. Any placement is brought
into that form: each rank has as many numbers as the fullest has slots, and an expert's number is
rank * slots + slot. Numbers that no expert has are never sent to.
"""

from dataclasses import dataclass

import torch

from modular_kernel.errors import ShapeError
from modular_kernel.ops.count import next_power_of_2
from modular_kernel.ops.launch import launch
from modular_kernel.ops.runtime import HAS_TRITON, use_triton
from modular_kernel.placement import Placement, PlacementTables, pairs_to_slots
from modular_kernel.tensors import Routing

if HAS_TRITON:
    from modular_kernel.ops.kernels.numbers import number_pairs_kernel

_COMPARED = 1024  # pairs of lanes that a program compares


def slots_of(placement: Placement) -> int:
    """The numbers a rank has: as many as the fullest has experts."""
    return max(map(len, placement.slots))


@dataclass(frozen=True)
class Numbering:
    """How experts are numbered. tables: the placement's. first_token: copy (t + first_token) % R
    of an expert takes token t's pair."""

    placement: Placement
    tables: PlacementTables
    first_token: int = 0

    @classmethod
    def of(
        cls, placement: Placement, device: torch.device | str, first_token: int = 0
    ) -> "Numbering":
        """Of a placement, for ids on `device`."""
        return cls(placement, placement.tables(device), first_token)

    @property
    def slots(self) -> int:
        return slots_of(self.placement)

    @property
    def is_plain(self) -> bool:
        """Blocks of equal size: an expert's number is its id."""
        whole = self.slots * self.placement.world_size == self.placement.experts
        return whole and self.placement.is_linear


@dataclass(frozen=True)
class NumberedPairs:
    """numbers_TK: (T, K) int64, -1 where skipped; weights_TK: (T, K) float32. Contiguous."""

    numbers_TK: torch.Tensor
    weights_TK: torch.Tensor


def number_pairs(
    routing: Routing,
    numbering: Numbering,
    *,
    join: bool,
    factor: float,
    out: NumberedPairs,
    invalid_ids: torch.Tensor,
) -> None:
    """Write `out`: the number of each pair's expert, -1 where skipped or invalid, and its router
    weight times `factor`, 0 there.

    join: no number twice in a row; the first pair has the weights of all, the others become -1.
    invalid_ids: int32 (1,), to which the number of ids outside [-1, E) is added. One launch on a
    GPU; none for T = 0.
    """
    shape = tuple(routing.topk_ids_TK.shape)
    for name, written in (("numbers", out.numbers_TK), ("weights", out.weights_TK)):
        if tuple(written.shape) != shape:
            raise ShapeError(f"{name} of pairs", got=tuple(written.shape), need=shape)
    if out.numbers_TK.numel() == 0:
        return
    if not use_triton(out.numbers_TK):
        invalid_ids.add_(number_pairs_ref(routing, numbering, join=join, factor=factor, out=out))
        return
    homes_ER2 = numbering.tables.homes_ER2
    tokens, top_k = shape
    lanes = next_power_of_2(top_k)
    block_t = max(1, _COMPARED // lanes**2)
    launch(
        number_pairs_kernel,
        (-(-tokens // block_t),),
        ids_ptr=routing.topk_ids_TK,
        weights_ptr=routing.topk_weights_TK,
        homes_ptr=homes_ER2,
        copies_ptr=numbering.tables.copies_E,
        numbers_ptr=out.numbers_TK,
        out_weights_ptr=out.weights_TK,
        invalid_ptr=invalid_ids,
        num_tokens=tokens,
        num_experts=numbering.placement.experts,
        first_token=numbering.first_token,
        slots=numbering.slots,
        most_copies=homes_ER2.shape[1],
        factor=float(factor),
        stride_ids=routing.topk_ids_TK.stride(0),
        stride_weights=routing.topk_weights_TK.stride(0),
        TOP_K=top_k,
        JOIN=join,
        PLAIN=numbering.is_plain,
        BLOCK_T=block_t,
        BLOCK_K=lanes,
    )


def number_pairs_ref(
    routing: Routing, numbering: Numbering, *, join: bool, factor: float, out: NumberedPairs
) -> torch.Tensor:
    """Torch twin of `number_pairs`; returns how many ids are invalid, (1,)."""
    rank_TK, slot_TK, invalid = pairs_to_slots(
        routing.topk_ids_TK, numbering.tables, first_token=numbering.first_token
    )
    numbers_TK = torch.where(rank_TK >= 0, rank_TK * numbering.slots + slot_TK, -1)
    drop_TK, weights_TK = numbers_TK < 0, routing.topk_weights_TK
    if join:
        same_TKK = numbers_TK[:, :, None] == numbers_TK[:, None, :]
        # A skipped pair's weight may be anything; it is in no other pair's sum.
        weights_TK = torch.where(same_TKK, weights_TK[:, None, :], 0).sum(2)
        drop_TK = drop_TK | same_TKK.tril(-1).any(2)
    out.numbers_TK.copy_(numbers_TK.masked_fill(drop_TK, -1))
    out.weights_TK.copy_((weights_TK * factor).masked_fill(drop_TK, 0))
    return invalid
