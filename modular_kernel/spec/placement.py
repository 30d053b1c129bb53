"""Placement of experts on ranks, and the assignment of (token, expert) pairs to copies of experts.

    Placement.linear(10, 4).slots          ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))
    Placement.round_robin(6, 2).slots      ((0, 2, 4), (1, 3, 5))
    Placement.from_eplb(phy2log, ranks=8)  from the map of EPLB, DeepSeek's load balancer

An expert may have copies on several ranks. Each (token, expert) pair goes to one of the copies.

    Placement.linear(4, 2).with_copies({3: (0,)})                         rank 0 also holds expert 3
    Placement.linear(4, 2).with_copies({0: (1,), 1: (1,)}).without([0])   rank 1 holds all experts
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Annotated

import torch

from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError
from modular_kernel.text import format_count
from modular_kernel.utils.argument_checks import (
    MAX_INT32,
    Between,
    Count,
    check_fields,
    expect,
    expect_each,
    resolve_device,
)

# The number of experts is limited because host tables have an entry for each expert.
Experts = Annotated[int, Between(1, 2**20 - 1)]


@dataclass(frozen=True)
class Placement:
    """The experts of each rank.

    slots: slots[r][s] is the expert in slot s of rank r. On that rank, its weights are w1[s] and
        w2[s].

    Raises ConfigurationError unless every expert in [0, experts) is on at least one rank, every
    rank holds at least one expert, and no rank holds an expert twice.
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
        all_experts = {expert for slots in self.slots for expert in slots}
        if all_experts != set(range(len(all_experts))):
            need = "every expert from 0 on, each on at least one rank"
            raise ConfigurationError("placement: experts", got=sorted(all_experts), need=need)

    @classmethod
    def linear(cls, experts: int, world_size: int) -> "Placement":
        """Place contiguous blocks in rank order.

        The first experts % world_size ranks have one expert more than the others.

        >>> Placement.linear(6, 4).slots
        ((0, 1), (2, 3), (4,), (5,))
        """
        _check_sizes(experts, world_size)
        per_rank, remainder = divmod(experts, world_size)
        starts = [rank * per_rank + min(rank, remainder) for rank in range(world_size + 1)]
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
        """Make a placement from the (rank, slot) of each expert.

        The slots of a rank must be 0, 1, ... without gaps.
        """
        expect("placement: ranks", world_size, Experts)
        what = "placement: rank and slot of each expert"
        slots: list[dict[int, int]] = [{} for _ in range(world_size)]
        for expert, rank_and_slot in enumerate(expect_each(what, table, Sequence)):
            expect(what, tuple(rank_and_slot), tuple[int, int])
            rank, slot = rank_and_slot
            if not 0 <= rank < world_size or slot in slots[rank]:
                need = f"a rank in [0, {world_size}) and a free slot"
                raise ConfigurationError(f"placement: expert {expert}", got=(rank, slot), need=need)
            slots[rank][slot] = expert
        for rank, expert_of_slot in enumerate(slots):
            if sorted(expert_of_slot) != list(range(len(expert_of_slot))):
                need = "slots from 0 on without gaps"
                raise ConfigurationError(
                    f"placement: rank {rank}", got=sorted(expert_of_slot), need=need
                )
        return cls(
            tuple(
                tuple(expert_of_slot[s] for s in range(len(expert_of_slot)))
                for expert_of_slot in slots
            )
        )

    def with_copies(self, copies: Mapping[int, Sequence[int]]) -> "Placement":
        """Return a placement that also has expert i on each rank of copies[i].

        The copies are in slots after the existing slots.

        >>> Placement.linear(4, 2).with_copies({0: [1]}).slots
        ((0, 1), (2, 3, 0))
        """
        expect("copies", copies, Mapping)
        expect_each("copies: experts", [*copies], Annotated[int, Between(0, self.experts - 1)])
        slots = [list(row) for row in self.slots]
        for expert, ranks in copies.items():
            rank_type = Annotated[int, Between(0, self.world_size - 1)]
            for rank in expect_each(f"copies of expert {expert}: ranks", ranks, rank_type):
                slots[rank].append(expert)
        return Placement(tuple(map(tuple, slots)))

    def without(self, ranks: Sequence[int]) -> "Placement":
        """Return the placement without the given ranks. The other ranks are renumbered in order.

        Raises ConfigurationError if no rank remains, or if an expert has no copy on the remaining
        ranks. The message names these experts.

        >>> Placement.linear(4, 3).with_copies({0: [2], 1: [1]}).without([0]).slots
        ((2, 1), (3, 0))
        """
        lost_ranks = expect_each(
            "lost ranks", ranks, Annotated[int, Between(0, self.world_size - 1)]
        )
        remaining = tuple(row for rank, row in enumerate(self.slots) if rank not in lost_ranks)
        missing = sorted(set(range(self.experts)).difference(*remaining))
        if missing or not remaining:
            what = f"placement without ranks {', '.join(map(str, lost_ranks))}"
            got = f"no copy of experts {', '.join(map(str, missing))}"
            raise ConfigurationError(what, got=got, need="a copy of each on a remaining rank")
        return Placement(remaining)

    @classmethod
    def from_eplb(
        cls, physical_to_logical: Sequence[int], ranks: int, *, join: bool = False
    ) -> "Placement":
        """Make a placement from one layer's row of EPLB's physical-to-logical map.

        physical_to_logical: the logical expert of each physical expert, in rank order, with equally
            many physical experts per rank. Pass `.tolist()` of a tensor.
        ranks: number of ranks.
        join: if EPLB placed an expert twice on a rank, keep one copy. If False, such an expert
            raises ConfigurationError.

        >>> Placement.from_eplb([0, 1, 2, 0], 2).slots
        ((0, 1), (2, 0))
        """
        expect("placement: ranks", ranks, Experts)
        expect("join", join, bool)
        physical = expect_each(
            "physical_to_logical", physical_to_logical, Annotated[int, Between(0, MAX_INT32)]
        )
        per_rank, remainder = divmod(len(physical), ranks)
        if remainder or not per_rank:
            need = f"the same number for each of {format_count(ranks, 'rank')}"
            raise ConfigurationError("physical experts", got=len(physical), need=need)
        rows = [physical[rank * per_rank : (rank + 1) * per_rank] for rank in range(ranks)]
        return cls(tuple(tuple(dict.fromkeys(row)) if join else row for row in rows))

    def to_eplb(self) -> "EplbMaps":
        """Return the placement as EPLB's three maps of one layer.

        Raises ConfigurationError if the ranks hold different numbers of experts.
        """
        sizes = sorted({len(slots) for slots in self.slots})
        if len(sizes) > 1:
            got, need = f"{sizes[0]} to {sizes[-1]} experts on a rank", "the same number on each"
            raise ConfigurationError("placement for EPLB", got=got, need=need)
        copies = [
            [rank * sizes[0] + slot for rank, slot in locations] for locations in self.locations
        ]
        max_copies = max(map(len, copies))
        padded = [[*numbers, *[-1] * (max_copies - len(numbers))] for numbers in copies]
        physical = [expert for slots in self.slots for expert in slots]
        return EplbMaps(*map(torch.tensor, (physical, padded, [*map(len, copies)])))

    @property
    def world_size(self) -> int:
        return len(self.slots)

    @cached_property
    def experts(self) -> int:
        """Number of logical experts, without copies."""
        return len({expert for slots in self.slots for expert in slots})

    @cached_property
    def has_copies(self) -> bool:
        """Whether some expert has several copies."""
        return sum(map(len, self.slots)) > self.experts

    @cached_property
    def is_linear(self) -> bool:
        """Whether this placement equals `Placement.linear` of the same sizes."""
        # With copies, there may be more ranks than experts, unlike in a linear placement.
        if self.world_size > self.experts:
            return False
        return self == Placement.linear(self.experts, self.world_size)

    @cached_property
    def locations(self) -> "tuple[Locations, ...]":
        """The (rank, slot) of every copy of each expert, in rank order."""
        locations: list[list[tuple[int, int]]] = [[] for _ in range(self.experts)]
        for rank, slots in enumerate(self.slots):
            for slot, expert in enumerate(slots):
                locations[expert].append((rank, slot))
        return tuple(map(tuple, locations))

    def expert_map(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return (experts,) int32: the slot of each expert on `rank`, -1 if it is on another rank.

        If experts have copies, use `pairs_to_slots` instead: with expert maps, every rank that
        holds a copy of an expert would compute all of its pairs.
        """
        expect("rank", rank, Annotated[int, Between(0, self.world_size - 1)])
        target = resolve_device(device, meta=True)
        slots = dict.fromkeys(range(self.experts), -1)
        slots |= {expert: slot for slot, expert in enumerate(self.slots[rank])}
        slot_of_expert = [slots[i] for i in range(self.experts)]
        return torch.tensor(slot_of_expert, dtype=torch.int32, device="cpu").to(target)

    def tables(
        self, device: torch.device | str = "cpu", tiers: Sequence[Sequence[int]] = ()
    ) -> "PlacementTables":
        """Return the placement as tensors for `pairs_to_slots`.

        tiers: sets of ranks, nearest first (`rank_tiers`). A pair goes to a copy of its expert in
            the first set that has a copy. If empty, pairs are spread over all copies.
        """
        target = resolve_device(device, meta=True)
        for ranks in expect_each("tiers", tiers, Sequence):
            expect_each("tiers: ranks", ranks, int)
        max_copies = max(map(len, self.locations))
        usable = [_select_nearest(locations, tiers) for locations in self.locations]
        padded = [
            (*locations, *[locations[0]] * (max_copies - len(locations))) for locations in usable
        ]
        homes_ER2 = torch.tensor(padded, dtype=torch.int32, device="cpu")
        copies = [len(locations) for locations in usable]
        copies_E = torch.tensor(copies, dtype=torch.int32, device="cpu")
        return PlacementTables(homes_ER2.to(target), copies_E.to(target))


Locations = tuple[tuple[int, int], ...]


def rank_tiers(rank: int, ranks_per_host: int | None = None) -> tuple[Sequence[int], ...]:
    """Return sets of ranks, nearest first: `rank` alone, then all ranks of its host.

    ranks_per_host: number of ranks on each host. If None, only the first set is returned.
    """
    expect("rank", rank, Annotated[int, Between(0, MAX_INT32)])
    expect("ranks of a host", ranks_per_host, Count | None)
    if ranks_per_host is None:
        return ((rank,),)
    first = rank // ranks_per_host * ranks_per_host
    return (rank,), range(first, first + ranks_per_host)


def _select_nearest(locations: Locations, tiers: Sequence[Sequence[int]]) -> Locations:
    for ranks in tiers:
        matches = tuple(location for location in locations if location[0] in ranks)
        if matches:
            return matches
    return locations


@dataclass(frozen=True)
class EplbMaps:
    """EPLB's maps of one layer, as int64 tensors. P is the number of physical experts.

    physical_to_logical: (P,), the logical expert of each physical expert.
    logical_to_physical: (E, R), the physical experts of each logical expert. Rows of experts with
        fewer than R copies end with -1.
    logical_count: (E,), the number of copies of each logical expert.
    """

    physical_to_logical: torch.Tensor
    logical_to_physical: torch.Tensor
    logical_count: torch.Tensor


@dataclass(frozen=True)
class PlacementTables:
    """A placement as tensors.

    homes_ER2: (E, R, 2) int32, the (rank, slot) of up to R copies of each expert.
    copies_E: (E,) int32, the number of copies of each expert.
    """

    homes_ER2: torch.Tensor
    copies_E: torch.Tensor


def pairs_to_slots(
    topk_ids_TK: torch.Tensor,
    tables: PlacementTables,
    *,
    first_token: int = 0,
    together: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Assign each pair to a copy of its expert. Returns (rank_TK, slot_TK, num_invalid).

    Pair k of token t goes to copy (t + k + first_token) % R of the R copies of its expert in
    `tables`. This spreads the pairs of a token. Ranks with the same tokens make the same
    assignment. rank_TK and slot_TK are (T, K) int64, with -1 for skipped pairs. num_invalid is
    (1,) int32, the number of invalid ids.

    topk_ids_TK: (T, K) int32 or int64, ids of logical experts. -1 skips the pair. Any other id
        outside [0, E) is invalid and also skips the pair.
    first_token: offset that is added to the index of each token.
    together: use copy (t + first_token) % R instead, so that fewer ranks need the row of a token.
    """
    expect("topk_ids", topk_ids_TK, torch.Tensor)
    expect("placement tables", tables, PlacementTables)
    expect("first token", first_token, Annotated[int, Between(0, 2**62)])  # may be a step counter
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
    copy_index = torch.arange(first_token, first_token + ids.shape[0], device=ids.device)[:, None]
    if not together:
        copy_index = copy_index + torch.arange(ids.shape[1], device=ids.device)
    locations = tables.homes_ER2[ids, copy_index % tables.copies_E[ids]].long()
    destination = torch.where(valid[..., None], locations, -1)
    return destination[..., 0], destination[..., 1], invalid


def _check_sizes(experts: int, world_size: int) -> None:
    expect("placement: experts", experts, Experts)
    expect("placement: ranks", world_size, Count)
    if world_size < 1 or experts < world_size:
        need = f"an expert for each of {format_count(world_size, 'rank')}"
        raise ConfigurationError("placement: experts", got=experts, need=need)
