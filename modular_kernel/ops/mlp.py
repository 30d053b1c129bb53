"""The two products of each expert in plain torch, for the parts that loop over experts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from modular_kernel import stages
from modular_kernel.ops.activation import gated_activation_ref
from modular_kernel.ops.quantise import dequantise_rows, quantised
from modular_kernel.quant import values_of
from modular_kernel.roundings import Roundings
from modular_kernel.tensors import ExpertWeights
from modular_kernel.types import Problem


@dataclass(frozen=True)
class ExpertTokens:
    """The rows of one local expert.

    x_RH: (R, H) in the problem's dtype, or quantised with scale (R, 1), (R, G) or (1,).
    row_weights_R: (R,) float32, multiplies GEMM 1 before its bias (the router weight on the
    input).
    """

    expert: int
    x_RH: torch.Tensor
    scale: torch.Tensor | None = None
    row_weights_R: torch.Tensor | None = None


def expert_mlps(
    tokens: Sequence[ExpertTokens], weights: ExpertWeights, problem: Problem
) -> list[torch.Tensor]:
    """(R, H) rows of each entry of `tokens` through its expert, in the problem's dtype.

    Each product, with the router weight and the bias behind it, is rounded once to the problem's
    dtype or not at all before the activation, which is computed in float32. Schemes that quantise
    activations quantise h by its rows, or by all rows of `tokens` together.
    """
    with stages.stage(stages.GEMM1):
        hidden = [_hidden(rows, weights, problem) for rows in tokens]
    if hidden and problem.scheme.quantises_activations:
        with stages.stage(stages.QUANTISE):
            hidden = _as_quantised(hidden, weights, problem)
    with stages.stage(stages.GEMM2):
        return [
            _output(rows.expert, h_RI, weights, problem)
            for rows, h_RI in zip(tokens, hidden, strict=True)
        ]


def mlp_roundings(weights: ExpertWeights, problem: Problem, *, row_weights: bool) -> Roundings:
    """Where `expert_mlps` rounds. row_weights: whether rows come with router weights."""
    scheme = problem.scheme
    halves = not scheme.quantises_activations
    alone = weights.b1 is None and not row_weights
    return Roundings(weights=scheme.quantised and halves, gate_up=halves and alone)


def _hidden(rows: ExpertTokens, weights: ExpertWeights, problem: Problem) -> torch.Tensor:
    """(R, H) -> (R, I): GEMM 1 and the activation, rounded to the problem's dtype."""
    x_RH = rows.x_RH
    if rows.scale is not None:
        x_RH = dequantise_rows(x_RH, rows.scale, problem.scheme)
    alone = weights.b1 is None and rows.row_weights_R is None
    h_RN = _product(x_RH, _matrix(weights, "w1", rows.expert, problem), alone=alone)
    if rows.row_weights_R is not None:
        h_RN = h_RN * rows.row_weights_R[:, None]
    if weights.b1 is not None:
        h_RN = h_RN + weights.b1[rows.expert].float()
    return gated_activation_ref(h_RN, problem.act).to(problem.dtype)


def _output(
    expert: int, h_RI: torch.Tensor, weights: ExpertWeights, problem: Problem
) -> torch.Tensor:
    """(R, I) -> (R, H): GEMM 2."""
    y_RH = _product(h_RI, _matrix(weights, "w2", expert, problem), alone=weights.b2 is None)
    if weights.b2 is not None:
        y_RH = y_RH + weights.b2[expert].float()
    return y_RH.to(problem.dtype)


def _as_quantised(
    hidden: list[torch.Tensor], weights: ExpertWeights, problem: Problem
) -> list[torch.Tensor]:
    """Return the values that h has once it is quantised, float32."""
    all_rows = torch.cat(hidden).float()
    static = weights.a2_scale if problem.scheme.static else None
    q, scale = quantised(all_rows, problem.scheme, static)
    values = dequantise_rows(q, scale, problem.scheme)
    return list(torch.split(values, [len(h_RI) for h_RI in hidden]))


def _matrix(weights: ExpertWeights, name: str, expert: int, problem: Problem) -> torch.Tensor:
    """One expert's w1 or w2: as it is, or the values it stands for.

    Those are float32 beside quantised activations, and rounded to the problem's dtype otherwise.
    """
    stored: torch.Tensor = getattr(weights, name)
    scheme = problem.scheme
    if not scheme.quantised:
        return stored[expert]
    values = values_of(weights, name, problem, slice(expert, expert + 1))[0]
    return values if scheme.quantises_activations else values.to(problem.dtype)


def _product(a: torch.Tensor, matrix: torch.Tensor, *, alone: bool) -> torch.Tensor:
    """Return a @ matrix.T.

    It is in their dtype if nothing is added to it, else in float32, not yet rounded.
    """
    return a @ matrix.T if alone else a.float() @ matrix.float().T
