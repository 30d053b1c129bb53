"""DeepEPPart: what the three parts over DeepEP have in common.

The library wants as many experts on each rank, in blocks. Any placement is brought into that form:
each rank has as many numbers as the fullest rank has slots, and a pair is sent to number
rank * slots + slot. Numbers that no expert has are never sent to.
"""

from dataclasses import dataclass
from typing import Any

import torch

from modular_kernel.contracts import Call, PrepareAndFinalize
from modular_kernel.errors import UnsupportedError
from modular_kernel.ops.quantise import quantise_rejections
from modular_kernel.placement import Placement, PlacementTables, pairs_to_slots
from modular_kernel.support import Rejection
from modular_kernel.tensors import Handle, Routing
from modular_kernel.types import Machine, Problem
from prepare_finalize.all2all.deepep import DeepEPGroup, load_deepep
from prepare_finalize.all2all.part import check_place, placement_rejections
from prepare_finalize.all2all.torch_group import place_in
from prepare_finalize.tokens import one_scale_for_all

BF16 = frozenset({torch.bfloat16})
HOPPER = (9, 0)  # the library's kernels use the bulk copy engine


@dataclass(frozen=True)
class DeepEPHandle(Handle):
    """What finalize needs: the part it is of, the call, what the library gave to be given back,
    and the weights still to be applied: of the rows that came, or of this rank's tokens."""

    part: "DeepEPPart"
    call: Call
    given: Any
    weights: torch.Tensor


class DeepEPPart(PrepareAndFinalize):
    """A part over buffers of a DeepEPGroup.

    group: a DeepEPGroup of the caller's, or a ProcessGroup (None: the default one) to make one of.
    The part owns the manager that it makes, and `destroy` closes that; it is collective, and so is
    making a part. ConfigurationError where library or group cannot serve; CommunicationError
    unless every rank makes the same part of the same layer.
    """

    generation = 1  # of the library
    most_slots: int | None = None  # experts of a rank

    def __init__(self, problem: Problem, group: object | None = None) -> None:
        super().__init__(problem, group)
        load_deepep(self.generation)
        owned = not isinstance(group, DeepEPGroup)
        if isinstance(group, DeepEPGroup):
            check_place(problem, group.rank, group.world_size)
        else:
            check_place(problem, *place_in(group))
        self.manager = group if isinstance(group, DeepEPGroup) else DeepEPGroup(group)
        self._owns_manager = owned
        self.slots = slots_of(problem.placement)
        self._tables: dict[torch.device, PlacementTables] = {}
        self.manager.agree(_shared(type(self).__name__, problem))
        self.make_buffer()

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        name = cls.__name__
        found = list(quantise_rejections(name, problem, machine))
        found += placement_rejections(name, problem)
        parties = (name, "problem")
        if one_scale_for_all(problem):
            got = f"{problem.quant}: one computed scale for all ranks' tokens"
            need = "a scale of each token or group, or a static one"
            hint = "a dispatch by this library exchanges no maxima"
            found.append(Rejection("dispatch_quant", parties, got, need, hint))
        slots = slots_of(problem.placement)
        if cls.most_slots is not None and slots > cls.most_slots:
            need = f"<= {cls.most_slots} experts on a rank"
            found.append(Rejection("max_experts", parties, f"{slots} on one", need))
        if cls.generation != 1 and "deep_ep_cpp" in machine.packages:
            hint = "both generations are one package by name: give each an environment"
            parties = (name, "machine")
            found.append(Rejection("package", parties, "deep_ep 1", "deep_ep 2", hint))
        return tuple(found)

    def make_buffer(self) -> None:
        """Make the manager's buffer of this part's sizes, unless it is there."""
        raise NotImplementedError

    def check_machine(self, machine: Machine) -> None:
        self.manager.check_device(machine.device)

    def destroy(self) -> None:
        """Close the manager if this part made it, on every rank; the part serves no more then."""
        if self._owns_manager:
            self.manager.destroy()

    @property
    def world_size(self) -> int:
        return self.problem.parallel.world_size

    @property
    def numbers(self) -> int:
        """How many experts the library is told of."""
        return self.world_size * self.slots

    def numbered(self, routing: Routing, call: Call) -> torch.Tensor:
        """(T, K) int64, contiguous: where each pair goes; -1 where skipped or invalid. Counts
        what is invalid."""
        device = routing.topk_ids_TK.device
        if device not in self._tables:
            self._tables[device] = self.problem.placement.tables(device)
        # Ranks take turns with the copies of an expert.
        numbers_TK, invalid = pair_numbers(
            routing.topk_ids_TK, self.problem.placement, self._tables[device], self.manager.rank
        )
        call.invalid_ids.add_(invalid)
        return numbers_TK

    def own_handle(self, handle: Handle) -> DeepEPHandle:
        """UnsupportedError unless `handle` is of this very part."""
        if not isinstance(handle, DeepEPHandle) or handle.part is not self:
            got, need = type(handle).__name__, f"one of this {type(self).__name__}"
            raise UnsupportedError("handle", got=got, need=need)
        return handle


def slots_of(placement: Placement) -> int:
    """The numbers a rank has: as many as the fullest has experts."""
    return max(map(len, placement.slots))


def pair_numbers(
    ids_TK: torch.Tensor, placement: Placement, tables: PlacementTables, first_token: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, K) int64, rank * slots + slot of each pair's expert, -1 where skipped or invalid; and
    how many are invalid, (1,). first_token: as in `pairs_to_slots`."""
    slots, experts = slots_of(placement), placement.experts
    if placement.is_linear and slots * placement.world_size == experts:
        # Blocks of equal size: an expert's number is its id.
        invalid = ((ids_TK < -1) | (ids_TK >= experts)).sum().reshape(1)
        return torch.where((ids_TK >= 0) & (ids_TK < experts), ids_TK, -1).long(), invalid
    rank_TK, slot_TK, invalid = pairs_to_slots(ids_TK, tables, first_token=first_token)
    return torch.where(rank_TK >= 0, rank_TK * slots + slot_TK, -1), invalid


def joined_pairs(
    ids_TK: torch.Tensor, weights_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same sums with no expert twice in a row: its first pair has all of its weight, float32.

    The others become -1 with weight 0, and so do skipped pairs, whose weight may be anything.
    """
    skipped_TK = ids_TK < 0
    same_TKK = ids_TK[:, :, None] == ids_TK[:, None, :]
    joined = torch.where(same_TKK, weights_TK[:, None, :], 0).sum(2)
    drop = skipped_TK | same_TKK.tril(-1).any(2)
    return ids_TK.masked_fill(drop, -1), joined.masked_fill_(drop, 0)


def _shared(part: str, problem: Problem) -> dict[str, object]:
    """What ranks must have in common, by name."""
    names = (
        "tokens",
        "hidden",
        "intermediate",
        "experts",
        "top_k",
        "dtype",
        "quant",
        "act",
        "bias",
        "apply_router_weight_on_input",
        "routed_scaling_factor",
        "combine",
    )
    slots = problem.placement.slots
    return {"part": part, **{n: getattr(problem, n) for n in names}, "placement": slots}
