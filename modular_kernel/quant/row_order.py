"""Reordering of the rows of w1, for libraries that require the up rows before the gate rows.

    weights, problem = up_rows_first(weights, problem)     # once, when weights are loaded
    kernel = make_kernel("MoEPrepareAndFinalizeNoEP", "FlashInferExperts", problem)

The activation of the returned problem declares the new order, so the weights match this problem
only.
"""

from dataclasses import replace

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.quant.quantized_weights import check_weights_quantized
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights

_SUPPORTED_GRANULARITIES = ("none", "tensor", "channel", "block")


def up_rows_first(weights: ExpertWeights, problem: Problem) -> tuple[ExpertWeights, Problem]:
    """Return weights with up rows first, and a problem that declares this order.

    w1, b1 and w1_scale are copied, and other tensors are shared. If up rows already come first,
    both arguments are returned unchanged.

    weights: weights that match `problem`.

    Raises ConfigurationError for an ungated activation, for scales per group of columns, or if a
    scale covers both gate and up rows. Raises an InputError if a tensor does not match the problem.
    """
    act, scheme = problem.act, problem.scheme
    if act.up_first:
        return weights, problem
    if not act.gated:
        raise ConfigurationError("activation", got=act.kind, need="a gated one")
    if scheme.granularity not in _SUPPORTED_GRANULARITIES:
        need = "unquantized weights, or scales of a tensor, of channels or of blocks"
        raise ConfigurationError("quant", got=problem.quant, need=need)
    check_weights_quantized(weights, problem, weights.w1.device)
    block = scheme.group[0] if scheme.granularity == "block" else 1
    if problem.intermediate % block or (act.interleaved and block > 1):
        got = "interleaved rows" if act.interleaved else f"I={problem.intermediate}"
        need = f"gate and up rows in separate blocks of {block}"
        raise ConfigurationError(f"quant {problem.quant}", got=got, need=need)
    reorder = _deinterleave if act.interleaved else _swap_halves
    reordered: dict[str, torch.Tensor] = {"w1": reorder(weights.w1)}
    if weights.b1 is not None:
        reordered["b1"] = reorder(weights.b1)
    if weights.w1_scale is not None and weights.w1_scale.dim() > 1:
        reordered["w1_scale"] = reorder(weights.w1_scale)
    new_activation = replace(act, interleaved=False, up_first=True)
    return replace(weights, **reordered), replace(problem, activation=new_activation)


def _swap_halves(tensor: torch.Tensor) -> torch.Tensor:
    gate, up = _view_as_bytes(tensor).chunk(2, dim=1)
    return torch.cat((up, gate), dim=1).view(tensor.dtype)


def _deinterleave(tensor: torch.Tensor) -> torch.Tensor:
    rows = _view_as_bytes(tensor)
    return torch.cat((rows[:, 1::2], rows[:, ::2]), dim=1).view(tensor.dtype)


def _view_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View float8 as uint8, because some devices cannot concatenate float8 tensors."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
