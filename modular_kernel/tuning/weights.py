"""Weights to tune with, made quickly: a few experts are drawn, the others are scaled copies.

A copy's scale is its own, so that an expert taken for another one is seen.
"""

from dataclasses import replace

import torch

from modular_kernel.measure.cases import first_here, make_weights, quantized
from modular_kernel.quant.quantized_weights import SCALE_FIELDS
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights

_DRAWN = 4
_SEED = 11


def tuning_weights(problem: Problem, device: torch.device) -> ExpertWeights:
    """Draw weights of `problem` in its own scheme."""
    drawn = min(_DRAWN, problem.e)
    few = replace(problem, local_experts=drawn, expert_map=True)
    made = quantized(make_weights(replace(few, quant="none"), device), few)
    copies = torch.arange(problem.e, device=device) % drawn
    tensors = {}
    for name in ("w1", "w2", "b1", "b2", *SCALE_FIELDS):
        drawn_tensor = getattr(made, name)
        if drawn_tensor is not None:
            tensors[name] = _copied(drawn_tensor, copies)
    generator = torch.Generator(device).manual_seed(_SEED)
    for name in ("w1", "w2"):
        scaled = f"{name}_scale" if problem.scheme.quantized else name
        if problem.scheme.matrix_scales:
            scaled = f"{name}_global_scale"
        _rescale(tensors[scaled], generator)
    return replace(made, **tensors, expert_map=first_here(problem, device))


def _copied(drawn: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
    """drawn[copies], whatever its dtype."""
    raw = drawn.view(torch.uint8) if drawn.dtype.itemsize == 1 else drawn
    return raw.index_select(0, copies).view(drawn.dtype)


def _rescale(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Scale every expert by a number of its own.

    It is from 1/2 to 1, or a power of two where it is stored as an exponent.
    """
    shape = (tensor.shape[0], *[1] * (tensor.dim() - 1))
    draw = torch.rand(shape, device=tensor.device, generator=generator)
    if tensor.dtype is torch.uint8:
        tensor -= (draw * 4).to(torch.uint8)
    else:
        tensor *= (0.5 + 0.5 * draw).to(tensor.dtype)
