"""Placement: which experts live on which rank, as data.

    Placement.linear(10, 4).slots   ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))
    Placement.round_robin(6, 2)     (0, 2, 4), (1, 3, 5)
    Placement.linear(4, 2).with_copies({3: (0,)})   rank 0 holds expert 3 too

A (logical) expert may have copies on several ranks; each pair goes to one of them.

    Placement.linear(4, 2).with_copies({0: (1,), 1: (1,)}).without([0])   what rank 1 has, if all
    Placement.from_eplb(phy2log, ranks=8)                                 and to_eplb back
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Annotated

import torch

from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError
from modular_kernel.text import counted
from modular_kernel.utils.argument_checks import (
    MOST,
    Between,
    Count,
    available_device,
    check_fields,
    expect,
    expect_each,
)

# Tables on the host have a place for each.
Experts = Annotated[int, Between(1, 2**20 - 1)]


@dataclass(frozen=True)
class Placement:
    """slots[r][s]: the expert that slot s of rank r holds; w1[s] on rank r is its weight.

    Every expert in [0, experts) is somewhere, every rank has one at least, and no rank holds an
    expert twice. ConfigurationError otherwise.
    """

    slots: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        check_fields(self, "placement ")
        if not self.slots or not all(self.slots):
            got = [len(slots) for slots in self.slots]
            raise ConfigurationError("placement: experts of a rank", got=got, need=">= 1 each")
        for rank, slots in enumerate(self.slots):
            if len(set(slots)) != len(slots):
                need = "each expert at most once"
                raise ConfigurationError(f"placement: rank {rank}", got=slots, need=need)
        held = {expert for slots in self.slots for expert in slots}
        if held != set(range(len(held))):
            need = "every expert from 0 on, on one rank at least"
            raise ConfigurationError("placement: experts", got=sorted(held), need=need)

    @classmethod
    def linear(cls, experts: int, world_size: int) -> "Placement":
        """Place blocks in the order of ranks; the first experts % world_size hold one more.

        >>> Placement.linear(6, 4).slots
        ((0, 1), (2, 3), (4,), (5,))
        """
        _check_sizes(experts, world_size)
        each, more = divmod(experts, world_size)
        starts = [rank * each + min(rank, more) for rank in range(world_size + 1)]
        return cls(tuple(tuple(range(start, stop)) for start, stop in pairwise(starts)))

    @classmethod
    def round_robin(cls, experts: int, world_size: int) -> "Placement":
        """Place expert i on rank i % world_size.

        >>> Placement.round_robin(6, 4).slots
        ((0, 4), (1, 5), (2,), (3,))
        """
        _check_sizes(experts, world_size)
        ranks = range(world_size)
        return cls(tuple(tuple(range(rank, experts, world_size)) for rank in ranks))

    @classmethod
    def of_table(cls, table: Sequence[tuple[int, int]], world_size: int) -> "Placement":
        """Make a placement from (rank, slot) of each expert.

        Slots of a rank are 0, 1, ... without gaps.
        """
        expect("placement: ranks", world_size, Experts)
        what = "placement: rank and slot of each expert"
        slots: list[dict[int, int]] = [{} for _ in range(world_size)]
        for expert, place in enumerate(expect_each(what, table, Sequence)):
            expect(what, tuple(place), tuple[int, int])
            rank, slot = place
            if not 0 <= rank < world_size or slot in slots[rank]:
                need = f"a rank in [0, {world_size}) and a slot of its own"
                raise ConfigurationError(f"placement: expert {expert}", got=(rank, slot), need=need)
            slots[rank][slot] = expert
        for rank, taken in enumerate(slots):
            if sorted(taken) != list(range(len(taken))):
                need = "slots from 0 on without gaps"
                raise ConfigurationError(f"placement: rank {rank}", got=sorted(taken), need=need)
        return cls(tuple(tuple(taken[s] for s in range(len(taken))) for taken in slots))

    def with_copies(self, copies: Mapping[int, Sequence[int]]) -> "Placement":
        """Also hold expert i on each rank of copies[i], behind what is there.

        >>> Placement.linear(4, 2).with_copies({0: [1]}).slots
        ((0, 1), (2, 3, 0))
        """
        expect("copies", copies, Mapping)
        expect_each("copies: experts", [*copies], Annotated[int, Between(0, self.experts - 1)])
        slots = [list(held) for held in self.slots]
        for expert, ranks in copies.items():
            a_rank = Annotated[int, Between(0, self.world_size - 1)]
            for rank in expect_each(f"copies of expert {expert}: ranks", ranks, a_rank):
                slots[rank].append(expert)
        return Placement(tuple(map(tuple, slots)))

    def without(self, ranks: Sequence[int]) -> "Placement":
        """Return what the other ranks hold, numbered anew in their order: no weight moves.

        ConfigurationError where an expert has no copy on them, with the experts' names, or where
        no rank is left.

        >>> Placement.linear(4, 3).with_copies({0: [2], 1: [1]}).without([0]).slots
        ((2, 1), (3, 0))
        """
        lost = expect_each("lost ranks", ranks, Annotated[int, Between(0, self.world_size - 1)])
        kept = tuple(held for rank, held in enumerate(self.slots) if rank not in lost)
        gone = sorted(set(range(self.experts)).difference(*kept))
        if gone or not kept:
            what = f"placement without ranks {', '.join(map(str, lost))}"
            got = f"no copy of experts {', '.join(map(str, gone))}"
            raise ConfigurationError(what, got=got, need="a copy of each on a rank that is left")
        return Placement(kept)

    @classmethod
    def from_eplb(
        cls, physical_to_logical: Sequence[int], ranks: int, *, join: bool = False
    ) -> "Placement":
        """Make a placement from one layer's row of EPLB's first map.

        physical_to_logical: the expert of each physical one, as many for each rank, in the order
        of ranks; `.tolist()` of a tensor. join: a rank that has an expert twice, as EPLB may have
        it, holds it once; else ConfigurationError.

        >>> Placement.from_eplb([0, 1, 2, 0], 2).slots
        ((0, 1), (2, 0))
        """
        expect("placement: ranks", ranks, Experts)
        expect("join", join, bool)
        physical = expect_each(
            "physical_to_logical", physical_to_logical, Annotated[int, Between(0, MOST)]
        )
        each, rest = divmod(len(physical), ranks)
        if rest or not each:
            need = f"as many for each of {counted(ranks, 'rank')}"
            raise ConfigurationError("physical experts", got=len(physical), need=need)
        rows = [physical[rank * each : (rank + 1) * each] for rank in range(ranks)]
        return cls(tuple(tuple(dict.fromkeys(row)) if join else row for row in rows))

    def to_eplb(self) -> "EplbMaps":
        """Return EPLB's three maps of one layer; ConfigurationError unless ranks hold as many."""
        held = sorted({len(slots) for slots in self.slots})
        if len(held) > 1:
            got, need = f"{held[0]} to {held[-1]} experts on a rank", "as many on each"
            raise ConfigurationError("placement for EPLB", got=got, need=need)
        copies = [[rank * held[0] + slot for rank, slot in homes] for homes in self.homes]
        most = max(map(len, copies))
        padded = [[*numbers, *[-1] * (most - len(numbers))] for numbers in copies]
        physical = [expert for slots in self.slots for expert in slots]
        return EplbMaps(*map(torch.tensor, (physical, padded, [*map(len, copies)])))

    @property
    def world_size(self) -> int:
        return len(self.slots)

    @cached_property
    def experts(self) -> int:
        """Logical experts, each counted once."""
        return len({expert for slots in self.slots for expert in slots})

    @cached_property
    def has_copies(self) -> bool:
        """Whether some expert is in several places, which take turns."""
        return sum(map(len, self.slots)) > self.experts

    @cached_property
    def is_linear(self) -> bool:
        """Whether ranks hold blocks in their order, as `linear` gives them."""
        return self == Placement.linear(self.experts, self.world_size)

    @cached_property
    def homes(self) -> "tuple[Homes, ...]":
        """(rank, slot) of each copy of each expert, by rank."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.experts)]
        for rank, slots in enumerate(self.slots):
            for slot, expert in enumerate(slots):
                found[expert].append((rank, slot))
        return tuple(map(tuple, found))

    def expert_map(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return (experts,) int32: the slot of each expert on `rank`, -1 where it is not there.

        With copies several ranks name an expert, and each would compute it: see `pairs_to_slots`.
        """
        expect("rank", rank, Annotated[int, Between(0, self.world_size - 1)])
        place = available_device(device, meta=True)
        slots = dict.fromkeys(range(self.experts), -1)
        slots |= {expert: slot for slot, expert in enumerate(self.slots[rank])}
        return torch.tensor([slots[i] for i in range(self.experts)], dtype=torch.int32).to(place)

    def tables(
        self, device: torch.device | str = "cpu", near: Sequence[Sequence[int]] = ()
    ) -> "PlacementTables":
        """Return the placement as tensors for `pairs_to_slots`.

        near: ranks by their distance, the nearest first (`near_ranks`). Pairs of an expert go to
        its copies on the first of these that have one; () is all copies alike.
        """
        place = available_device(device, meta=True)
        for ranks in expect_each("near", near, Sequence):
            expect_each("near: ranks", ranks, int)
        most = max(map(len, self.homes))
        found = [_nearest(homes, near) for homes in self.homes]
        padded = [(*homes, *[homes[0]] * (most - len(homes))) for homes in found]
        homes_ER2 = torch.tensor(padded, dtype=torch.int32)
        copies_E = torch.tensor([len(homes) for homes in found], dtype=torch.int32)
        return PlacementTables(homes_ER2.to(place), copies_E.to(place))


Homes = tuple[tuple[int, int], ...]


def near_ranks(rank: int, ranks_per_host: int | None = None) -> tuple[Sequence[int], ...]:
    """Return `rank`, then the ranks of its host where there are several, in blocks of so many."""
    expect("rank", rank, Annotated[int, Between(0, MOST)])
    expect("ranks of a host", ranks_per_host, Count | None)
    if ranks_per_host is None:
        return ((rank,),)
    first = rank // ranks_per_host * ranks_per_host
    return (rank,), range(first, first + ranks_per_host)


def _nearest(homes: Homes, near: Sequence[Sequence[int]]) -> Homes:
    for ranks in near:
        found = tuple(home for home in homes if home[0] in ranks)
        if found:
            return found
    return homes


@dataclass(frozen=True)
class EplbMaps:
    """EPLB's maps of one layer, int64: physical_to_logical (P,); logical_to_physical (E, R), -1
    where an expert has fewer than R copies; logical_count (E,), its copies."""

    physical_to_logical: torch.Tensor
    logical_to_physical: torch.Tensor
    logical_count: torch.Tensor


@dataclass(frozen=True)
class PlacementTables:
    """homes_ER2: (E, R, 2) int32, rank and slot of each of at most R copies; copies_E: how many."""

    homes_ER2: torch.Tensor
    copies_E: torch.Tensor


def pairs_to_slots(
    topk_ids_TK: torch.Tensor,
    tables: PlacementTables,
    *,
    first_token: int = 0,
    together: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each pair goes: rank_TK and slot_TK, int64, -1 where skipped; and how many are invalid.

    topk_ids_TK: (T, K) int32 or int64 logical experts; -1 skips, anything else outside [0, E) is
    invalid and skipped too: the third result, int32 (1,), counts those. Copy (t + k + first_token)
    % R of the R in `tables` takes pair k of token t, so pairs of one token are spread, too, and
    ranks that see the same tokens agree. together: copy (t + first_token) % R, for rows that
    travel: fewer ranks need a token's row.
    """
    expect("topk_ids", topk_ids_TK, torch.Tensor)
    expect("placement tables", tables, PlacementTables)
    expect("first token", first_token, Annotated[int, Between(0, 2**62)])  # a step, maybe
    expect("together", together, bool)
    if topk_ids_TK.dtype not in (torch.int32, torch.int64):
        raise DtypeError("topk_ids", got=topk_ids_TK.dtype, need="torch.int32 or torch.int64")
    if topk_ids_TK.dim() != 2:
        raise ShapeError("topk_ids", got=tuple(topk_ids_TK.shape), need="(T, K)")
    experts = tables.copies_E.numel()
    ids = topk_ids_TK.long()
    valid = (ids >= 0) & (ids < experts)
    invalid = ((ids < -1) | (ids >= experts)).sum().to(torch.int32).reshape(1)
    ids = torch.where(valid, ids, 0)
    turn = torch.arange(first_token, first_token + ids.shape[0], device=ids.device)[:, None]
    if not together:
        turn = turn + torch.arange(ids.shape[1], device=ids.device)
    homes = tables.homes_ER2[ids, turn % tables.copies_E[ids]].long()
    place = torch.where(valid[..., None], homes, -1)
    return place[..., 0], place[..., 1], invalid


def _check_sizes(experts: int, world_size: int) -> None:
    expect("placement: experts", experts, Experts)
    expect("placement: ranks", world_size, Count)
    if world_size < 1 or experts < world_size:
        need = f"an expert for each of {counted(world_size, 'rank')}"
        raise ConfigurationError("placement: experts", got=experts, need=need)
