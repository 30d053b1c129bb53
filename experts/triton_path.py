"""A path of TritonExperts: one way from arrived tokens to the layer's output."""

from dataclasses import dataclass
from typing import Protocol

import torch

from experts.tile_shapes import TilePair
from modular_kernel.tensors import ContiguousTokens, ExpertWeights
from modular_kernel.workspace import BufferSpec, Workspace


@dataclass(frozen=True)
class PathCall:
    """One call of the experts: what `PermuteExpertsUnpermute.apply` received, and its tiles."""

    tokens: ContiguousTokens
    weights: ExpertWeights
    workspace: Workspace
    output: torch.Tensor
    tiles: TilePair


class Path(Protocol):
    """Declares the buffers of a call and runs it. name: one of tile_shapes.PATHS."""

    name: str

    def specs(self, tokens: int, block_m: int) -> dict[str, BufferSpec]:
        """Every buffer of a call of `tokens` tokens in blocks of block_m rows, by name."""

    def takes(self, weights: ExpertWeights) -> bool:
        """Whether it can work with weights that lie in memory as these do."""

    def run(self, call: PathCall) -> None:
        """Write every element of call.output."""
