"""Weights for tuning, created quickly: a few random experts, and scaled copies as the others.

Each copy has its own scale, so that a wrong expert index changes the result.
"""

from dataclasses import replace

import torch

from modular_kernel.measure.cases import first_experts_map, make_weights, quantize
from modular_kernel.quant.quantized_weights import SCALE_FIELDS
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights

_DRAWN = 4
_SEED = 11


def tuning_weights(problem: Problem, device: torch.device) -> ExpertWeights:
    """Create weights of `problem`, quantized by its scheme."""
    drawn = min(_DRAWN, problem.e)
    drawn_problem = replace(problem, local_experts=drawn, expert_map=True)
    weights = quantize(make_weights(replace(drawn_problem, quant="none"), device), drawn_problem)
    copies = torch.arange(problem.e, device=device) % drawn
    tensors = {}
    for name in ("w1", "w2", "b1", "b2", *SCALE_FIELDS):
        drawn_tensor = getattr(weights, name)
        if drawn_tensor is not None:
            tensors[name] = _copied(drawn_tensor, copies)
    generator = torch.Generator(device).manual_seed(_SEED)
    for name in ("w1", "w2"):
        rescaled = f"{name}_scale" if problem.scheme.quantized else name
        if problem.scheme.matrix_scales:
            rescaled = f"{name}_global_scale"
        _rescale(tensors[rescaled], generator)
    return replace(weights, **tensors, expert_map=first_experts_map(problem, device))


def _copied(drawn: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
    """Return drawn[copies] for any dtype."""
    raw = drawn.view(torch.uint8) if drawn.dtype.itemsize == 1 else drawn
    return raw.index_select(0, copies).view(drawn.dtype)


def _rescale(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Multiply each expert by a random factor.

    The factor is from 1/2 to 1, or a power of two if the tensor stores exponents.
    """
    shape = (tensor.shape[0], *[1] * (tensor.dim() - 1))
    draw = torch.rand(shape, device=tensor.device, generator=generator)
    if tensor.dtype is torch.uint8:
        tensor -= (draw * 4).to(torch.uint8)
    else:
        tensor *= (0.5 + 0.5 * draw).to(tensor.dtype)
