"""Communication between the ranks that measure together: a single process, or a process group.

All ranks must time the same layers in the same order, because a call of a layer communicates. Every
decision (which layer is next, whether time is left, which layer is too slow) is therefore based on
data that the ranks have exchanged.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Problem

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks that measure together.

    rank: rank of this process.
    size: number of ranks.
    group: the process group for parts that exchange tokens; None for a single process.
    """

    rank: int
    size: int
    group: Any

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank. This is also a barrier."""

    def broadcast(self, value: T) -> T:
        """Return rank 0's value."""


class SingleProcess:
    """A single rank, which does not communicate."""

    rank, size, group = 0, 1, None

    def all_gather(self, value: T) -> list[T]:
        return [value]

    def broadcast(self, value: T) -> T:
        return value


class GroupRanks:
    """The ranks of a torch.distributed process group. Every method is collective."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        return self.all_gather(value if self.rank == 0 else None)[0]  # type: ignore[return-value]


def ranks_of(problem: Problem, group: object | None) -> Ranks:
    """Return the object through which the ranks of a problem communicate.

    group: the process group of the problem. None uses the default group if the problem has several
        ranks.

    Raises ConfigurationError if the rank or the size of the group does not match the problem.
    """
    parallel = problem.parallel
    if parallel.world_size == 1:
        if group is not None:
            raise ConfigurationError("group", got="a process group", need="None for one rank")
        return SingleProcess()
    if not dist.is_available() or not dist.is_initialized():
        need = "torch.distributed initialized, for world_size > 1"
        raise ConfigurationError("group", got="none", need=need)
    ranks = GroupRanks(group if group is not None else dist.group.WORLD)
    if (ranks.size, ranks.rank) != (parallel.world_size, parallel.rank):
        got = f"rank {ranks.rank} of {ranks.size}"
        need = f"rank {parallel.rank} of {parallel.world_size}, the problem's"
        raise ConfigurationError("group", got=got, need=need)
    return ranks


def reduce_max_over_ranks(ranks: Ranks, values: Sequence[float]) -> list[float]:
    """Return the maximum over ranks of each value. All ranks must call this function."""
    return [max(column) for column in zip(*ranks.all_gather(list(values)), strict=True)]


def first_failure(ranks: Ranks, message: str) -> str:
    """Return the error message of the lowest rank that failed, or "".

    Over several ranks, the result begins with the rank that failed. All ranks must call this
    function.

    message: the error message of this rank, or "".
    """
    messages = ranks.all_gather(message)
    rank = next((r for r, rank_message in enumerate(messages) if rank_message), None)
    if rank is None:
        return ""
    return messages[rank] if ranks.size == 1 else f"rank {rank}: {messages[rank]}"
