"""One expert's two products in plain torch, for the parts that loop over experts."""

import torch

from modular_kernel.ops.activation import gated_activation_ref
from modular_kernel.tensors import ExpertWeights
from modular_kernel.types import Problem


def expert_mlp(
    x_RH: torch.Tensor,
    weights: ExpertWeights,
    expert: int,
    problem: Problem,
    row_weights_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """(R, H) -> (R, H) through local expert `expert`.

    Each product, with the router weight and the bias behind it, is rounded once to the problem's
    dtype or not at all before the activation, which is computed in float32. row_weights_R: (R,)
    float32, multiplies GEMM 1 before its bias (the router weight on the input).
    """
    dtype = problem.dtype
    alone = weights.b1 is None and row_weights_R is None
    h_RN = _product(x_RH, weights.w1[expert], alone=alone).float()
    if row_weights_R is not None:
        h_RN = h_RN * row_weights_R[:, None]
    if weights.b1 is not None:
        h_RN = h_RN + weights.b1[expert].float()
    h_RI = gated_activation_ref(h_RN, problem.act).to(dtype)
    y_RH = _product(h_RI, weights.w2[expert], alone=weights.b2 is None)
    if weights.b2 is not None:
        y_RH = y_RH + weights.b2[expert].float()
    return y_RH.to(dtype)


def _product(a: torch.Tensor, matrix: torch.Tensor, *, alone: bool) -> torch.Tensor:
    """a @ matrix.T: in their dtype if nothing is added to it, else in float32, not yet rounded."""
    return a @ matrix.T if alone else a.float() @ matrix.float().T
