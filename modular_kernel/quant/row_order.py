"""Puts the up rows of w1 before its gate rows, where a library wants them so.

    weights, problem = up_rows_first(weights, problem)     # once, when weights are loaded
    kernel = make_kernel("MoEPrepareAndFinalizeNoEP", "FlashInferExperts", problem)

The two go together: the problem's activation says in which order the rows lie.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.quant.quantized_weights import check_weights_quantized
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights

_GRANULARITIES = ("none", "tensor", "channel", "block")
_Rows = Callable[[torch.Tensor], torch.Tensor]


def up_rows_first(weights: ExpertWeights, problem: Problem) -> tuple[ExpertWeights, Problem]:
    """Return the layer with up rows first: w1, b1 and scales copied, other tensors as they are.

    weights: as `problem` has them, gate rows first or alternating; if up rows come first already,
    both are returned as they are. ConfigurationError for an ungated activation, and where a scale
    covers rows of both, or a group of columns; WeightsError and others for weights that are not
    the problem's.
    """
    act, scheme = problem.act, problem.scheme
    if act.up_first:
        return weights, problem
    if not act.gated:
        raise ConfigurationError("activation", got=act.kind, need="a gated one")
    if scheme.granularity not in _GRANULARITIES:
        need = "unquantized weights, or scales of a tensor, of channels or of blocks"
        raise ConfigurationError("quant", got=problem.quant, need=need)
    check_weights_quantized(weights, problem, weights.w1.device)
    block = scheme.group[0] if scheme.granularity == "block" else 1
    if problem.intermediate % block or (act.interleaved and block > 1):
        got = "alternating rows" if act.interleaved else f"I={problem.intermediate}"
        need = f"gate and up rows in blocks of {block} of their own"
        raise ConfigurationError(f"quant {problem.quant}", got=got, need=need)
    rows = _from_alternating if act.interleaved else _from_halves
    fields: dict[str, torch.Tensor] = {"w1": rows(weights.w1)}
    if weights.b1 is not None:
        fields["b1"] = rows(weights.b1)
    if weights.w1_scale is not None and weights.w1_scale.dim() > 1:
        fields["w1_scale"] = rows(weights.w1_scale)
    ordered = replace(act, interleaved=False, up_first=True)
    return replace(weights, **fields), replace(problem, activation=ordered)


def _from_halves(of_rows: torch.Tensor) -> torch.Tensor:
    gate, up = _as_bytes(of_rows).chunk(2, dim=1)
    return torch.cat((up, gate), dim=1).view(of_rows.dtype)


def _from_alternating(of_rows: torch.Tensor) -> torch.Tensor:
    whole = _as_bytes(of_rows)
    return torch.cat((whole[:, 1::2], whole[:, ::2]), dim=1).view(of_rows.dtype)


def _as_bytes(of_rows: torch.Tensor) -> torch.Tensor:
    """Return float8 as uint8, of which any device can make copies."""
    return of_rows.view(torch.uint8) if of_rows.element_size() == 1 else of_rows
