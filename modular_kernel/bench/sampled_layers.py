"""Layers of random sizes for `make bench`. No library has tuned configurations for these sizes."""

import random
from dataclasses import dataclass

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Problem

SEED = 20261201
COUNT = 4

_EXPERTS = (8, 16, 32, 48, 64, 96, 128, 160, 192, 256)
_TOP_K = (2, 4, 6, 8)
_SIZE_STEP = 256  # H and I are multiples of 256, which all block and group sizes divide
_HIDDEN = (1024, 8192)
_INTERMEDIATE = (512, 4096)
# Ranges of E * H * I. One layer is large, one is small, and all others are sampled from _ANY_SIZE.
_LARGE_SIZE = (1.0e9, 1.5e9)
_SMALL_SIZE = (1.0e8, 3.0e8)
_ANY_SIZE = (_SMALL_SIZE[0], _LARGE_SIZE[1])


@dataclass(frozen=True)
class SampledLayer:
    """Sizes of one layer."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def name(self) -> str:
        return f"E{self.experts}-K{self.top_k}-H{self.hidden}-I{self.intermediate}"

    @property
    def size(self) -> int:
        """E * H * I, a third of the layer's number of weights."""
        return self.experts * self.hidden * self.intermediate

    def problem(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Problem:
        """Return the problem of an unquantized SwiGLU layer with these sizes."""
        return Problem(
            tokens=tokens,
            hidden=self.hidden,
            intermediate=self.intermediate,
            experts=self.experts,
            top_k=self.top_k,
            dtype=dtype,
        )


def sample_layers(seed: int = SEED, count: int = COUNT) -> tuple[SampledLayer, ...]:
    """Draw `count` layers. The first has E * H * I above 1e9, and the second below 3e8.

    The same arguments give the same layers on every machine. Raises ConfigurationError if `count`
    is less than two.
    """
    if count < 2:
        raise ConfigurationError("number of sampled layers", got=count, need=">= 2")
    generator = random.Random(seed)
    layers: list[SampledLayer] = []
    for low, high in (_LARGE_SIZE, _SMALL_SIZE, *[_ANY_SIZE] * (count - 2)):
        while True:
            layer = SampledLayer(
                generator.choice(_EXPERTS),
                generator.choice(_TOP_K),
                generator.randrange(_HIDDEN[0], _HIDDEN[1] + 1, _SIZE_STEP),
                generator.randrange(_INTERMEDIATE[0], _INTERMEDIATE[1] + 1, _SIZE_STEP),
            )
            if low < layer.size < high and layer not in layers:
                break
        layers.append(layer)
    return tuple(layers)
