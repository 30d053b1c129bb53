"""A path of TritonExperts: one way from arrived tokens to the layer's output."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Protocol

import torch

from experts.triton.launch_config import TilePair
from modular_kernel.roundings import Roundings
from modular_kernel.tensors import ContiguousShape, ContiguousTokens, ExpertWeights
from modular_kernel.types import Combine, Problem
from modular_kernel.workspace import BufferSpec, Workspace, WorkspaceShapes


@dataclass(frozen=True)
class PathCall:
    """One call of the experts: what `PermuteExpertsUnpermute.apply` received, and its tiles."""

    tokens: ContiguousTokens
    weights: ExpertWeights
    workspace: Workspace
    output: torch.Tensor
    tiles: TilePair


class Path(Protocol):
    """Declares the buffers of a call and runs it. name: one of launch_config.PATHS.

    roundings: where it rounds; None where that is not declared.
    """

    name: str

    @property
    def roundings(self) -> Roundings | None: ...

    def specs(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        """Every buffer of a call of `tokens` tokens in blocks of block_m rows, by name."""

    def takes(self, weights: ExpertWeights, x_TH: torch.Tensor) -> bool:
        """Whether it can work with weights and tokens that lie in memory as these do."""

    def run(self, call: PathCall) -> None:
        """Write every element of call.output."""


def room_for(
    problem: Problem, shape: ContiguousShape, kinds: Iterable[Mapping[str, BufferSpec]]
) -> WorkspaceShapes:
    """Room for any of the kinds of call whose buffers are given: of each name the largest.

    A buffer lies over what it lies over in any of them, so it must be the last in all.
    """
    largest: dict[str, BufferSpec] = {}
    for specs in kinds:
        for name, spec in specs.items():
            known = largest.get(name, spec)
            over = tuple(dict.fromkeys((*known.over, *spec.over)))
            largest[name] = replace(max(known, spec, key=attrgetter("nbytes")), over=over)
    nothing = BufferSpec((0,), problem.dtype)
    top_k = () if problem.combine is Combine.SUM else (shape.top_k,)
    return WorkspaceShapes(
        workspace13=largest.pop("workspace13", nothing),
        workspace2=largest.pop("workspace2", nothing),
        output=BufferSpec((shape.tokens, *top_k, problem.hidden), problem.dtype),
        extra=largest,
    )
