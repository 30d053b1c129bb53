"""Converts vLLM's tensors of a layer to ExpertWeights, after vLLM has processed them.

They are those of a plain backend, which keeps the layout of the checkpoint: w13 (e, N, H), gate
rows first, and w2 (e, H, I), packed along rows. Tensors whose layout already matches are not
copied.
"""

import torch

from modular_kernel.errors import ShapeError
from modular_kernel.quant.quantized_weights import weight_specs
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights


def expert_weights(
    problem: Problem,
    w1: torch.Tensor,
    w2: torch.Tensor,
    *,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    **extras: torch.Tensor | None,
) -> ExpertWeights:
    """Return the weights of `problem`'s scheme.

    extras: w1_scale, w2_scale, w1_zero_point, w2_zero_point, a1_scale, a2_scale, w1_global_scale
    and w2_global_scale as vLLM stores them. Those that the scheme does not use are ignored, because
    vLLM computes some of them for every scheme. Raises ShapeError for a tensor that cannot be
    reshaped or repeated to the shape that the scheme requires.
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
    """Return a scale or zero point in this shape: reshaped, or one value per expert repeated."""
    if tensor.numel() == _numel(shape):
        return tensor.reshape(shape).contiguous()
    if tensor.numel() == shape[0]:  # one value for each expert
        ones = (1,) * (len(shape) - 1)
        return tensor.reshape(shape[0], *ones).expand(shape).contiguous()
    raise ShapeError(name, got=tuple(tensor.shape), need=shape)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
