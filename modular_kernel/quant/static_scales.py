"""Static activation scales for values of a known maximum magnitude."""

import torch

from modular_kernel.quant import nvfp4
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme


def largest_value(scheme: QuantScheme) -> float:
    """Return the largest activation magnitude that a static scale of 1 can represent."""
    return nvfp4.LARGEST * nvfp4.LARGEST_SCALE if scheme.scales_by_expert else 448.0


def static_scale(
    problem: Problem, most: float, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return an a1_scale or a2_scale, float32: (1,), or (e,) if scales are per expert.

    It represents every magnitude up to `most`. Per-expert scales differ, ranging from that scale to
    twice it, so that tests detect the use of another expert's scale.
    """
    unit = most / largest_value(problem.scheme)
    if not problem.scheme.scales_by_expert:
        return torch.full((1,), unit, device=device)
    return torch.linspace(unit, 2 * unit, problem.e, device=device)
