"""The authority: the layer in plain torch, a loop over experts, sharing no code with any part.

`oracle` computes in float64. `recipe` is the same loop with the roundings that plain torch in the
problem's dtype makes; its distance from the oracle is the error a correct part may have.
"""

from collections.abc import Callable

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.types import ActivationSpec, Combine, Problem

Rounding = Callable[[torch.Tensor], torch.Tensor]


def oracle(
    x_TH: torch.Tensor, weights: ExpertWeights, routing: Routing, problem: Problem
) -> torch.Tensor:
    """The exact output, (T, H) or (T, K, H), float64. Ids outside [0, E) are skipped."""
    return _moe(x_TH, weights, routing, problem, torch.float64, _exact, _exact)


def recipe(
    x_TH: torch.Tensor, weights: ExpertWeights, routing: Routing, problem: Problem
) -> torch.Tensor:
    """The output of plain torch in the problem's dtype, as float64.

    Products accumulate in float32; x times the router weight (where it goes on the input), GEMM 1
    with its bias, the activation, GEMM 2 with its bias and the result are each rounded to the
    problem's dtype. With tf32, operands of both products lose
    their last 13 mantissa bits, as Hopper's tensor cores drop them.
    """

    def rounded(value: torch.Tensor) -> torch.Tensor:
        return value.to(problem.dtype).to(torch.float32)

    tf32 = problem.fp32_precision == "tf32" and problem.dtype is torch.float32
    operand = _drop_13_bits if tf32 else _exact
    return _moe(x_TH, weights, routing, problem, torch.float32, rounded, operand).double()


def _exact(value: torch.Tensor) -> torch.Tensor:
    return value


def _drop_13_bits(value: torch.Tensor) -> torch.Tensor:
    return (value.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def _moe(
    x_TH: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    problem: Problem,
    dtype: torch.dtype,
    rounded: Rounding,
    operand: Rounding,
) -> torch.Tensor:
    if problem.scheme.quantised:
        raise ConfigurationError("reference", got=problem.quant, need="quant=none")
    x, ids = x_TH.to(dtype), _local_ids(routing, weights, problem)
    router = routing.topk_weights_TK.to(dtype)
    on_input = problem.apply_router_weight_on_input
    rows_TKH = torch.zeros(*ids.shape, problem.hidden, dtype=dtype, device=x.device)
    for expert in range(weights.w1.shape[0]):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        h = rounded(x[token] * router[token, slot, None]) if on_input else x[token]
        h = operand(h) @ operand(weights.w1[expert].to(dtype)).T
        if weights.b1 is not None:
            h = h + weights.b1[expert].to(dtype)
        h = rounded(activation(rounded(h), problem.act))
        y = operand(h) @ operand(weights.w2[expert].to(dtype)).T
        if weights.b2 is not None:
            y = y + weights.b2[expert].to(dtype)
        rows_TKH[token, slot] = rounded(y)
    return rounded(_combine(rows_TKH, router, problem))


def _combine(rows_TKH: torch.Tensor, router: torch.Tensor, problem: Problem) -> torch.Tensor:
    if problem.combine is Combine.TOPK_UNWEIGHTED:
        return rows_TKH
    if not problem.apply_router_weight_on_input:
        rows_TKH = rows_TKH * router[..., None]
    rows_TKH = rows_TKH * problem.routed_scaling_factor
    return rows_TKH if problem.combine is Combine.TOPK_WEIGHTED else rows_TKH.sum(1)


def _local_ids(routing: Routing, weights: ExpertWeights, problem: Problem) -> torch.Tensor:
    """Row of w1 for each pair, -1 where it is skipped: (T, K) int64."""
    ids = routing.topk_ids_TK.long()
    valid = (ids >= 0) & (ids < problem.experts)
    if weights.expert_map is not None:
        local = weights.expert_map.long()[ids.clamp(0, problem.experts - 1)]
        return torch.where(valid, local, -1)
    return torch.where(valid, ids, -1)


def activation(value: torch.Tensor, spec: ActivationSpec) -> torch.Tensor:
    """(R, N) -> (R, I): the rules of ActivationSpec, written out once more."""
    if spec.kind == "relu2":
        return value.clamp(min=0).square()
    if spec.interleaved:
        gate, up = value[:, 0::2], value[:, 1::2]
    else:
        gate, up = value.chunk(2, dim=1)
    if spec.kind == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if spec.kind == "gelu":
        return gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up
    if spec.kind == "gelu_tanh":
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return gate * 0.5 * (1 + torch.tanh(inner)) * up
    assert spec.limit is not None
    up = up.clamp(-spec.limit, spec.limit)
    if spec.kind == "swiglu_clamp_after":
        return (gate / (1 + torch.exp(-gate))).clamp(max=spec.limit) * up
    gate = gate.clamp(max=spec.limit)
    if spec.kind == "swiglu_clamp_before":
        return gate / (1 + torch.exp(-gate)) * up
    assert spec.kind == "swiglu_oai"
    assert spec.alpha is not None
    return gate / (1 + torch.exp(-spec.alpha * gate)) * (up + 1)
