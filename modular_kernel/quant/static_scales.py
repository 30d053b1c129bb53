"""Scales of activations that are given, for values that reach to a known magnitude."""

import torch

from modular_kernel.quant import nvfp4
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme


def largest_value(scheme: QuantScheme) -> float:
    """Return the largest magnitude that a scale of 1 lets activations have."""
    return nvfp4.LARGEST * nvfp4.LARGEST_SCALE if scheme.scales_by_expert else 448.0


def static_scale(
    problem: Problem, most: float, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return an a1_scale or a2_scale, float32: (1,), or (e,) where each expert has its own.

    With it every magnitude up to `most` is held. Experts' scales are unlike: between that and its
    double, so that another one's shows.
    """
    one = most / largest_value(problem.scheme)
    if not problem.scheme.scales_by_expert:
        return torch.full((1,), one, device=device)
    return torch.linspace(one, 2 * one, problem.e, device=device)
