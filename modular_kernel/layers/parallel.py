"""LayerParallel: a rank's position in expert and tensor parallelism, with its process groups."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from modular_kernel.errors import CommunicationError, ConfigurationError, UnsupportedError
from modular_kernel.spec.placement import Placement
from modular_kernel.utils import forks
from modular_kernel.utils.argument_checks import Count, expect, format_value

RankPosition = tuple[int, int]  # (rank, number of ranks)
GROUP_FIELDS = ("ep_group", "tp_group", "group")  # fields of LayerParallel with process groups


@dataclass(frozen=True)
class LayerParallel:
    """A rank's position in expert parallelism (EP) and tensor parallelism (TP).

    EP ranks hold different experts. TP ranks hold slices of experts along I.

    ep: (rank, number of ranks) in expert parallelism. Defaults to the position in ep_group, or to
        (0, 1) without a group.
    tp: (rank, number of ranks) in tensor parallelism. Defaults to the position in tp_group, or to
        (0, 1) without a group.
    ep_group: process group of the EP ranks; None if the caller sums the outputs of the ranks.
    tp_group: process group of the TP ranks; None if the caller sums the outputs of the ranks.
    group: process group of all EP x TP ranks. With it, a sum over EP and TP ranks takes a single
        all-reduce instead of two.
    """

    ep: RankPosition = (0, 1)
    tp: RankPosition = (0, 1)
    ep_group: object | None = None
    tp_group: object | None = None
    group: object | None = None
    _fork_generation: int = field(
        default_factory=forks.generation, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name in ("ep", "tp"):
            position = _check_position(name, getattr(self, name), getattr(self, f"{name}_group"))
            object.__setattr__(self, name, position)
        ranks = self.ep[1] * self.tp[1]
        if self.group is not None:
            _, size = _find_position_in_group("", self.group)
            if size != ranks:
                need = f"{ranks}, the number of EP ranks times the number of TP ranks"
                raise ConfigurationError("size of group", got=size, need=need)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle or copy. Raises UnsupportedError if there are groups."""
        groups = [name for name in GROUP_FIELDS if getattr(self, name) is not None]
        if groups:
            need = (
                "no process groups; create the layer in each process with its own groups, and load "
                "this layer's state_dict"
            )
            raise UnsupportedError("pickle or copy of a layer", got=", ".join(groups), need=need)
        return self.__dict__

    def check_process(self) -> None:
        """Raise StateError in a process that was forked after the groups were created."""
        need = "a spawned process that creates its own groups"
        forks.check_process(self._fork_generation, "process groups of a layer", need)

    @property
    def first(self) -> bool:
        """Whether this is rank 0 of both EP and TP."""
        return self.ep[0] == self.tp[0] == 0

    def groups(self, *, ep: bool) -> tuple[object, ...]:
        """Return the process groups to all-reduce over. Groups of one rank are omitted.

        ep: whether to reduce over EP ranks in addition to TP ranks.

        Raises ConfigurationError if there are several ranks but no group.
        """
        positions = [("tp", self.tp, self.tp_group)]
        if ep:
            positions.append(("ep", self.ep, self.ep_group))
        required = [(name, size, group) for name, (_, size), group in positions if size > 1]
        if self.group is not None and len(required) == 2:
            return (self.group,)
        for name, size, group in required:
            if group is None:
                need = f"{name}_group, or reduce_results=False"
                raise ConfigurationError("reduce_results", got=f"{name} of {size} ranks", need=need)
        return tuple(group for _, _, group in required)


def all_reduce(tensor: torch.Tensor, groups: tuple[object, ...]) -> None:
    """Sum over the ranks of each group, in place. Raises CommunicationError if a sum fails."""
    for group in groups:
        try:
            dist.all_reduce(tensor, group=_unwrap_process_group(group))
        except RuntimeError as error:
            got, need = str(error).splitlines()[0][:200], "a call on every rank of the group"
            raise CommunicationError(
                "all-reduce of a layer", got=got, need=need, rank=dist.get_rank(), phase="combine"
            ) from error


def _check_position(name: str, position: RankPosition, group: object | None) -> RankPosition:
    expect(name, position, tuple[int, int])
    rank, size = position
    expect(f"{name} ranks", size, Count)
    if not 0 <= rank < size:
        raise ConfigurationError(f"{name} rank", got=rank, need=f"in [0, {size})")
    if group is None:
        return position
    position_in_group = _find_position_in_group(name, group)
    if position_in_group[0] < 0:
        raise ConfigurationError(
            f"{name}_group", got="a group without this rank", need="a group with this rank"
        )
    if position not in ((0, 1), position_in_group):
        raise ConfigurationError(
            name, got=position, need=f"{position_in_group}, this rank's position in {name}_group"
        )
    return position_in_group


def _unwrap_process_group(group: object) -> Any:
    """Return the ProcessGroup of a group, or of an object that wraps one."""
    return getattr(group, "group", group) if not isinstance(group, dist.ProcessGroup) else group


def _find_position_in_group(name: str, group: object) -> RankPosition:
    """Return this rank's position in a process group.

    Raises ConfigurationError for an object that is not a process group.
    """
    try:
        return _get_rank(group), _get_size(group)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        got = f"{format_value(group)} ({str(error).splitlines()[0][:120]})"
        what = f"{name}_group" if name else "group"
        raise ConfigurationError(what, got=got, need="a torch process group") from None


def _get_rank(group: object) -> int:
    return int(dist.get_rank(_unwrap_process_group(group)))


def _get_size(group: object) -> int:
    return int(dist.get_world_size(_unwrap_process_group(group)))


def resolve_placement(
    placement: Placement | None, experts: int, ranks: int, *, over_ranks: bool
) -> Placement:
    """Return a layer's placement of experts on EP ranks.

    placement: the given placement; None places contiguous blocks in rank order.
    experts: E of the layer.
    ranks: number of EP ranks.
    over_ranks: whether the prepare/finalize part spans ranks.

    Raises ConfigurationError if the placement has another number of experts or ranks than the
    layer, or if it has copies of experts and `over_ranks` is False.
    """
    if placement is None:
        return Placement.linear(experts, ranks)
    if (placement.experts, placement.world_size) != (experts, ranks):
        got = f"{placement.experts} experts on {placement.world_size} ranks"
        raise ConfigurationError("placement", got=got, need=f"{experts} experts on {ranks} ranks")
    if placement.has_copies and not over_ranks:
        need = "no copies, or a prepare/finalize part that exchanges tokens between ranks"
        raise ConfigurationError("placement", got="copies of experts", need=need)
    return placement
