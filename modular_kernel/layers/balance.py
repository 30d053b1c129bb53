"""Load balancing of experts across ranks.

    load = count(topk_ids, 256)                          # to be summed over calls and ranks
    new = rebalance(load.tolist(), [36] * 8, old)        # 288 slots for 256 experts and 32 copies
    for move in moves(old, new): ...                     # the weights to transfer

The functions of this module only compute placements. They do not move weights or communicate.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from modular_kernel.errors import ConfigurationError, DtypeError
from modular_kernel.spec.placement import Experts, Placement
from modular_kernel.spec.problem import dtype_name
from modular_kernel.utils.argument_checks import Count, expect, expect_each
from modular_kernel.utils.tensor_checks import check_tensor


def count(topk_ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Return the number of (token, expert) pairs per expert, (experts,) int64, on the ids' device.

    This does not synchronize with the device.

    topk_ids: (T, K) int32 or int64. Ids outside [0, experts) are not counted.
    experts: E, the number of experts.
    """
    expect("experts", experts, Experts)
    check_tensor("topk_ids", topk_ids)
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise DtypeError("topk_ids", got=dtype_name(topk_ids.dtype), need="int32 or int64")
    ids = topk_ids.flatten().long()
    ids = torch.where((ids < 0) | (ids >= experts), experts, ids)
    counts = ids.new_zeros(experts + 1)
    return counts.scatter_add_(0, ids, torch.ones_like(ids))[:experts]


def rank_loads(
    load: Sequence[float], placement: Placement, *, ranks_per_host: int | None = None
) -> tuple[float, ...]:
    """Return the load of each rank, if all ranks send equally many pairs.

    The pairs that a host sends to an expert are divided equally among the copies of the expert on
    this host, or among all copies if the host has no copy.

    load: load of each expert, in any unit.
    ranks_per_host: number of ranks on each host; None if all ranks are on one host.

    >>> placement = Placement(((0, 1), (0, 2), (0, 3), (4, 5)))
    >>> rank_loads([12, 0, 0, 0, 0, 0], placement)
    (4.0, 4.0, 4.0, 0.0)
    >>> rank_loads([12, 0, 0, 0, 0, 0], placement, ranks_per_host=2)
    (3.0, 3.0, 6.0, 0.0)
    """
    _check_load(load)
    expect("placement", placement, Placement)
    if len(load) != placement.experts:
        raise ConfigurationError("load", got=len(load), need=f"{placement.experts} experts")
    expect("ranks_per_host", ranks_per_host, Count | None)
    host_size = placement.world_size if ranks_per_host is None else ranks_per_host
    if placement.world_size % host_size:
        need = f"a divisor of {placement.world_size} ranks"
        raise ConfigurationError("ranks_per_host", got=host_size, need=need)
    hosts, loads = placement.world_size // host_size, [0.0] * placement.world_size
    for amount, locations in zip(load, placement.locations, strict=True):
        for host in range(hosts):
            on_host = [rank for rank, _ in locations if rank // host_size == host]
            targets = on_host or [rank for rank, _ in locations]
            for rank in targets:
                loads[rank] += amount / hosts / len(targets)
    return tuple(loads)


def rebalance(
    load: Sequence[float],
    slots: Sequence[int],
    old: Placement | None = None,
    *,
    hosts: int = 1,
    groups: int = 1,
) -> Placement:
    """Return a placement of len(load) experts that balances the load of the ranks.

    If there are more slots than experts, each extra slot gets a copy of the expert with the highest
    load per copy. The copies are then assigned in order of decreasing load, each to the rank with
    the lowest load so far.

    load: load of each expert, in any unit, for example the number of pairs from `count`.
    slots: the maximum number of experts of each rank.
    old: the current placement. An expert that stays on its rank keeps its slot, if the rank still
        has that slot.
    hosts: number of hosts. With several hosts, each host gets the same number of whole groups, and
        the copies of an expert stay on one host. A router that selects few groups for a token then
        sends the token to few hosts.
    groups: number of expert groups of the router.

    Raises ConfigurationError if there are fewer slots than experts, overall or on a host, or if
    ranks, groups or experts do not divide evenly.

    >>> placement = rebalance([90, 10, 20, 40], slots=[3, 3])
    >>> placement.slots
    ((0, 2, 3), (0, 3, 1))
    >>> rank_loads([90, 10, 20, 40], placement)
    (85.0, 75.0)
    >>> rebalance([9, 1, 4, 5], slots=[2, 2], hosts=2, groups=2).slots
    ((0, 1), (3, 2))
    """
    _check_load(load)
    sizes = expect_each("slots", slots, Count)
    expect("old placement", old, Placement | None)
    experts_by_host = _assign_to_hosts(load, len(sizes), hosts, groups)
    rank_experts: list[list[int]] = []
    for host, experts in enumerate(experts_by_host):
        ranks = len(sizes) // hosts
        host_slots = sizes[host * ranks : (host + 1) * ranks]
        if not experts or not len(experts) <= sum(host_slots):
            need = f">= {max(len(experts), 1)}, the number of experts"
            name = "slots of all ranks" if hosts == 1 else f"slots of host {host}"
            raise ConfigurationError(name, got=sum(host_slots), need=need)
        host_load = [load[expert] for expert in experts]
        host_assignment = _assign_copies(
            host_load, _count_copies(host_load, host_slots), host_slots
        )
        rank_experts += [[experts[index] for index in rank] for rank in host_assignment]
    if old is not None and old.world_size == len(sizes):
        rank_experts = [
            _keep_slots(experts, slots)
            for experts, slots in zip(rank_experts, old.slots, strict=True)
        ]
    return Placement(tuple(map(tuple, rank_experts)))


def _assign_to_hosts(load: Sequence[float], ranks: int, hosts: int, groups: int) -> list[list[int]]:
    """Return the experts of each host.

    Whole groups are assigned in order of decreasing load, to the host with the lowest load so far.
    """
    expect("hosts", hosts, Count)
    expect("groups", groups, Count)
    if hosts == 1:
        return [list(range(len(load)))]
    for name, number, divisor in (
        ("ranks", ranks, hosts), ("groups", groups, hosts), ("experts", len(load), groups)
    ):  # fmt: skip
        if number % divisor:
            raise ConfigurationError(name, got=number, need=f"a multiple of {divisor}")
    group_size = len(load) // groups
    experts_by_host: list[list[int]] = [[] for _ in range(hosts)]
    loads = [0.0] * hosts
    expert_groups = [range(group * group_size, (group + 1) * group_size) for group in range(groups)]
    group_loads = {group: sum(load[expert] for expert in group) for group in expert_groups}
    for group in sorted(expert_groups, key=lambda group: (-group_loads[group], group.start)):
        free_hosts = [
            host
            for host in range(hosts)
            if len(experts_by_host[host]) < groups // hosts * group_size
        ]
        host = min(free_hosts, key=lambda host: (loads[host], host))
        experts_by_host[host] += group
        loads[host] += group_loads[group]
    return experts_by_host


@dataclass(frozen=True)
class Move:
    """A transfer of one expert's weights from an old to a new (rank, slot)."""

    expert: int
    source: tuple[int, int]
    target: tuple[int, int]


def moves(old: Placement, new: Placement) -> tuple[Move, ...]:
    """Return the transfers that turn `old` into `new`, ordered by target.

    The source of a transfer is on the target's own rank if possible, and otherwise on the rank that
    has sent the fewest experts so far. Sources are slots of `old`, so read all of them before you
    write to a slot.

    Raises ConfigurationError if the placements differ in their numbers of experts or ranks.

    >>> moves(Placement.linear(4, 2), Placement.round_robin(4, 2))
    (Move(expert=2, source=(1, 0), target=(0, 1)), Move(expert=1, source=(0, 1), target=(1, 0)))
    """
    expect("old placement", old, Placement)
    expect("new placement", new, Placement)
    if (old.experts, old.world_size) != (new.experts, new.world_size):
        got = f"{new.experts} experts on {new.world_size} ranks"
        need = f"{old.experts} experts on {old.world_size} ranks, as before"
        raise ConfigurationError("placement", got=got, need=need)
    transfers, sent = list[Move](), [0] * old.world_size
    for rank, slots in enumerate(new.slots):
        for slot, expert in enumerate(slots):
            old_slots = old.slots[rank]
            if slot < len(old_slots) and old_slots[slot] == expert:
                continue
            locations = old.locations[expert]
            source = min(
                locations, key=lambda location: (location[0] != rank, sent[location[0]], location)
            )
            sent[source[0]] += source[0] != rank
            transfers.append(Move(expert, source, (rank, slot)))
    return tuple(transfers)


def _check_load(load: object) -> None:
    if not isinstance(load, Sequence) or isinstance(load, str | bytes):
        need = "a list; pass `.tolist()` of a tensor"
        raise ConfigurationError("load", got=type(load).__name__, need=need)
    for expert, amount in enumerate(load):
        expect(f"load of expert {expert}", amount, float)
        if not 0 <= amount < math.inf:
            raise ConfigurationError(f"load of expert {expert}", got=amount, need=">= 0")


def _count_copies(load: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Return the number of copies of each expert, at most one per rank."""
    copies = [1] * len(load)
    queue = [(-amount, expert) for expert, amount in enumerate(load)]
    heapq.heapify(queue)
    extra_slots = sum(sizes) - len(load) if len(sizes) > 1 else 0
    while extra_slots and queue:
        _, expert = heapq.heappop(queue)
        copies[expert] += 1
        extra_slots -= 1
        if copies[expert] < len(sizes):
            heapq.heappush(queue, (-load[expert] / copies[expert], expert))
    return copies


def _assign_copies(
    load: Sequence[float], copies: Sequence[int], sizes: Sequence[int]
) -> list[list[int]]:
    """Return the experts of each rank.

    Copies are assigned in order of decreasing load, to the rank with the lowest load so far.
    """
    rank_experts: list[list[int]] = [[] for _ in sizes]
    loads = [0.0] * len(sizes)
    copy_loads = [amount / num_copies for amount, num_copies in zip(load, copies, strict=True)]
    copies_to_assign = [
        expert for expert, num_copies in enumerate(copies) for _ in range(num_copies)
    ]
    for expert in sorted(copies_to_assign, key=lambda expert: (-copy_loads[expert], expert)):
        free_ranks = [rank for rank, size in enumerate(sizes) if len(rank_experts[rank]) < size]
        rank = min(
            (rank for rank in free_ranks if expert not in rank_experts[rank]),
            key=lambda rank: (loads[rank], len(rank_experts[rank]), rank),
            default=None,
        )
        if rank is None:
            rank = _free_a_slot(expert, rank_experts, loads, copy_loads, free_ranks)
        if rank is not None:  # otherwise no rank can take the copy, and a slot stays free
            rank_experts[rank].append(expert)
            loads[rank] += copy_loads[expert]
    return rank_experts


def _free_a_slot(
    expert: int,
    rank_experts: list[list[int]],
    loads: list[float],
    copy_loads: Sequence[float],
    free_ranks: Sequence[int],
) -> int | None:
    """Free a slot on a rank that does not hold `expert`, and return the rank; None if impossible.

    Another expert of this rank is moved to a rank in `free_ranks`. These ranks have free slots, but
    already hold `expert`.
    """
    for rank in range(len(rank_experts)):
        if expert in rank_experts[rank]:
            continue
        for moved_expert in reversed(rank_experts[rank]):
            target = next(
                (target for target in free_ranks if moved_expert not in rank_experts[target]), None
            )
            if target is not None:
                rank_experts[rank].remove(moved_expert)
                rank_experts[target].append(moved_expert)
                loads[rank] -= copy_loads[moved_expert]
                loads[target] += copy_loads[moved_expert]
                return rank
    return None


def _keep_slots(new: Sequence[int], old: Sequence[int]) -> list[int]:
    """Reorder the new experts of a rank so that experts that it already held keep their slots."""
    slots: list[int | None] = [expert if expert in new else None for expert in old[: len(new)]] + [
        None
    ] * (len(new) - len(old))
    new_experts = (expert for expert in new if expert not in slots)
    return [next(new_experts) if expert is None else expert for expert in slots]
