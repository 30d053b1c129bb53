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
    """(R, H) -> (R, H) through local expert `expert`, products in the problem's dtype.

    Bias and activation are computed in float32 and rounded to the dtype. row_weights_R: (R,)
    float32, multiplies GEMM 1 before its bias (the router weight on the input).
    """
    dtype = problem.dtype
    h_RN = (x_RH @ weights.w1[expert].T).float()
    if row_weights_R is not None:
        h_RN = h_RN * row_weights_R[:, None]
    if weights.b1 is not None:
        h_RN = h_RN + weights.b1[expert].float()
    h_RI = gated_activation_ref(h_RN, problem.act).to(dtype)
    y_RH = h_RI @ weights.w2[expert].T
    if weights.b2 is not None:
        y_RH = (y_RH.float() + weights.b2[expert].float()).to(dtype)
    return y_RH
