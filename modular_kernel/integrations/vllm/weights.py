"""Converts a layer's tensors to ExpertWeights, after vLLM has processed them.

The tensors belong to vLLM's plain backend, which keeps the layout of the checkpoint: w13 is
(e, N, H) with gate rows first, w2 is (e, H, I), and both are packed along rows. Tensors whose
layout already matches are not copied.
"""

import torch

from modular_kernel.errors import ShapeError
from modular_kernel.quant.quantized_weights import weight_specs
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights


def convert_weights(
    problem: Problem,
    w1: torch.Tensor,
    w2: torch.Tensor,
    *,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    **extras: torch.Tensor | None,
) -> ExpertWeights:
    """Return the weights in the layout that the scheme of `problem` requires.

    extras: w1_scale, w2_scale, w1_zero_point, w2_zero_point, a1_scale, a2_scale, w1_global_scale
        and w2_global_scale as vLLM stores them. Tensors that the scheme does not use are ignored,
        because vLLM computes some of these tensors for every scheme.

    Raises ShapeError for a tensor that cannot be reshaped or repeated to the required shape.
    """
    fields: dict[str, torch.Tensor] = {}
    for name, spec in weight_specs(problem).items():
        tensor = extras.get(name)
        if tensor is not None:
            fields[name] = _reshape_or_repeat(name, tensor.detach(), spec.shape)
    return ExpertWeights(
        w1.detach(),
        w2.detach(),
        b1=None if b1 is None else b1.detach(),
        b2=None if b2 is None else b2.detach(),
        expert_map=expert_map,
        **fields,
    )


def _reshape_or_repeat(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Reshape a scale or zero point to this shape, or repeat one value per expert."""
    if tensor.numel() == _numel(shape):
        return tensor.reshape(shape).contiguous()
    if tensor.numel() == shape[0]:  # one value per expert
        ones = (1,) * (len(shape) - 1)
        return tensor.reshape(shape[0], *ones).expand(shape).contiguous()
    raise ShapeError(name, got=tuple(tensor.shape), need=shape)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
