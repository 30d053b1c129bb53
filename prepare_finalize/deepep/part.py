"""DeepEPPart: what the three parts over DeepEP have in common.

The library is told numbers of experts, as many for each rank (`modular_kernel.ops.expert_slots`),
so that any placement will do.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from modular_kernel.compatibility.support import Rejection
from modular_kernel.contracts import TopKWeightAndReduce
from modular_kernel.ops.expert_slots import slots_of
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.tensors import Handle
from modular_kernel.workspace import BufferSpec
from prepare_finalize.common.group_part import AtOncePart, PartHandle
from prepare_finalize.common.tokens import one_scale_for_all, reduced_rows, token_specs
from prepare_finalize.deepep.group import DeepEPGroup, load_deepep

BF16 = frozenset({torch.bfloat16})
HOPPER = (9, 0)  # the library's kernels use the bulk copy engine


@dataclass(frozen=True)
class DeepEPHandle(PartHandle):
    """What the library gave to be given back, and the weights still to be applied: of the rows
    that came, or of this rank's tokens."""

    given: Any
    weights: torch.Tensor


class DeepEPPart(AtOncePart[DeepEPGroup]):
    """A part over buffers of a DeepEPGroup.

    Making and destroying one is collective. ConfigurationError where library or group cannot
    serve; CommunicationError unless every rank makes the same part of the same layer.
    """

    manager_class = DeepEPGroup
    generation = 1  # of the library
    ids_dtype = torch.int64  # as the library takes them
    most_experts: int | None = None  # of all ranks, as many on each

    def __init__(self, problem: Problem, group: object | None = None) -> None:
        load_deepep(self.generation)
        super().__init__(problem, group)
        self.slots = slots_of(problem.placement)
        self.manager.agree(_shared(type(self).__name__, problem))
        self.make_buffer()

    @classmethod
    def extra_rejections(cls, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        found = list(super().extra_rejections(problem, machine))
        name = cls.__name__
        parties = (name, "problem")
        if one_scale_for_all(problem):
            got = f"{problem.quant}: one computed scale for all ranks' tokens"
            need = "a scale of each token or group, or a static one"
            hint = "a dispatch by this library exchanges no maxima"
            found.append(Rejection("dispatch_quant", parties, got, need, hint))
        slots, most = slots_of(problem.placement), cls.most_slots(problem)
        if most is not None and slots > most:
            need = f"<= {most} experts on a rank"
            found.append(Rejection("max_experts", parties, f"{slots} on one", need))
        numbers = slots * problem.parallel.world_size
        if cls.most_experts is not None and numbers > cls.most_experts:
            need = f"<= {cls.most_experts} in all"
            found.append(Rejection("max_experts", parties, f"{numbers} in all", need))
        if cls.generation != 1 and "deep_ep_cpp" in machine.packages:
            hint = "both generations are one package by name: give each an environment"
            parties = (name, "machine")
            found.append(Rejection("package", parties, "deep_ep 1", "deep_ep 2", hint))
        return tuple(found)

    @classmethod
    def most_slots(cls, problem: Problem) -> int | None:
        """Return how many experts a rank may have; None for any number."""
        return None

    @abstractmethod
    def make_buffer(self) -> None:
        """Make the manager's buffer of this part's sizes, unless it is there."""

    @property
    def world_size(self) -> int:
        return self.problem.parallel.world_size

    @property
    def numbers(self) -> int:
        """How many experts the library is told of."""
        return self.world_size * self.slots


class DeepEPRowsPart(DeepEPPart):
    """A part whose library brings a row to each rank that holds one of its experts, and adds up the
    sums of those ranks in a tensor of its own."""

    makes_output = True

    def row_specs(self, tokens: int, rows: int) -> dict[str, BufferSpec]:
        """Return the buffers of a part that quantizes its tokens, and sums the `rows` that come."""
        problem = self.problem
        return {
            **token_specs(problem, tokens),
            **self.pair_specs(tokens),
            "rows_sum": BufferSpec((rows, problem.hidden), problem.dtype),
        }

    def finalize(
        self,
        expert_output: torch.Tensor,
        *,
        handle: Handle,
        reduce: TopKWeightAndReduce,
        out: torch.Tensor,
    ) -> None:
        out.copy_(self.combined(expert_output, handle=handle, reduce=reduce))

    def combined(
        self, expert_output: torch.Tensor, *, handle: Handle, reduce: TopKWeightAndReduce
    ) -> torch.Tensor:
        own = self.own_handle(handle, DeepEPHandle)
        rows_RH = reduced_rows(expert_output, own.weights, self.problem, own.call, reduce)
        return self.sums_of_ranks(rows_RH, own.given)

    @abstractmethod
    def sums_of_ranks(self, rows_RH: torch.Tensor, given: Any) -> torch.Tensor:
        """(T, H) sums of the ranks' rows for this rank's tokens; given: by the dispatch."""


def _shared(part: str, problem: Problem) -> dict[str, object]:
    """Return what ranks must have in common, by name."""
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
