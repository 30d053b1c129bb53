"""Converts a layer's scales and biases from vLLM to the fields of ExpertWeights.

The tensors belong to the backend of vLLM that keeps the layout of the checkpoint: w13 is (e, N, H)
with gate rows first, w2 is (e, H, I), and both are packed along rows. Tensors whose layout already
matches are not copied, except global scales.
"""

import torch

from modular_kernel.errors import ShapeError
from modular_kernel.quant.quantized_weights import weight_specs
from modular_kernel.spec.problem import Problem


def convert_scales(
    problem: Problem,
    sources: dict[str, torch.Tensor | None],
    copies: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return the scales and zero points in the shapes that the scheme of `problem` requires.

    sources: vLLM's tensors by field of ExpertWeights. Tensors that the scheme does not use are
        ignored, because vLLM computes some of the tensors for every scheme.
    copies: tensors of earlier conversions for the same layer. They are overwritten, because CUDA
        graphs may read them. New copies are added.

    Raises ShapeError for a tensor that cannot be reshaped or repeated to the required shape.
    """
    scales: dict[str, torch.Tensor] = {}
    for name, spec in weight_specs(problem).items():
        source = sources.get(name)
        if source is None:
            continue
        scale = _reshape_or_repeat(name, source.detach(), spec.shape)
        if scale.data_ptr() != source.data_ptr():
            scale = _keep_copy(name, scale, copies)
        elif name.endswith("_global_scale"):
            # vLLM may compute global scales in each load. They are then not parameters of the
            # layer, and a reload does not keep their memory.
            scale = _keep_copy(name, scale.clone(), copies)
        scales[name] = scale
    return scales


def convert_biases(
    problem: Problem,
    b1: torch.Tensor | None,
    b2: torch.Tensor | None,
    copies: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return b1 (e, N) and b2 (e, H), or {} if both are None. A missing bias is zero.

    copies: tensors of earlier conversions, as in `convert_scales`.
    """
    biases = {name: bias.detach() for name, bias in (("b1", b1), ("b2", b2)) if bias is not None}
    if len(biases) == 1:
        (bias,) = biases.values()
        columns_by_name = {"b1": problem.w1_rows, "b2": problem.hidden}
        (missing,) = columns_by_name.keys() - biases.keys()
        zeros = bias.new_zeros(problem.e, columns_by_name[missing])
        biases[missing] = _keep_copy(missing, zeros, copies)
    return biases


def _keep_copy(name: str, scale: torch.Tensor, copies: dict[str, torch.Tensor]) -> torch.Tensor:
    """Write a scale to the copy of an earlier conversion if it fits. Return the copy."""
    copy = copies.get(name)
    properties = scale.shape, scale.dtype, scale.device
    if copy is None or (copy.shape, copy.dtype, copy.device) != properties:
        copies[name] = scale
        return scale
    return copy.copy_(scale)


def _reshape_or_repeat(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Reshape a scale or zero point to `shape`, or repeat one value per expert."""
    if tensor.numel() == _numel(shape):
        return tensor.reshape(shape).contiguous()
    if tensor.numel() == shape[0]:  # one value per expert
        ones = (1,) * (len(shape) - 1)
        return tensor.reshape(shape[0], *ones).expand(shape).contiguous()
    raise ShapeError(name, got=tuple(tensor.shape), need=shape)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
