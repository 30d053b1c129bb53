"""Gradients of a layer call, in torch operations.

The backward pass computes the forward pass again in float32, one expert at a time. It returns the
gradients of x, router weights, biases and unquantized weights. Quantized weights are dequantized
and have no gradient. The quantization of activations is ignored (straight-through estimator).
"""

from collections.abc import Callable
from math import pi, sqrt
from typing import NamedTuple

import torch

from modular_kernel.errors import UnsupportedError
from modular_kernel.quant.quantized_weights import dequantize_weights
from modular_kernel.spec.problem import ActivationSpec, Combine, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.utils.matmul import matmul


class CallGradients(NamedTuple):
    """Gradients of a call, each with the shape and dtype of its tensor; None if not computed."""

    x_TH: torch.Tensor
    topk_weights_TK: torch.Tensor
    w1: torch.Tensor | None
    w2: torch.Tensor | None
    b1: torch.Tensor | None
    b2: torch.Tensor | None


def compute_gradients(
    grad_TH: torch.Tensor,
    x_TH: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    problem: Problem,
    *,
    needs_weights: bool = False,
) -> CallGradients:
    """Return the gradients of x (T, H), router weights (T, K), b1 (e, N), b2 (e, H), w1 and w2.

    grad_TH: gradient of the output.
    needs_weights: whether to compute the gradients of w1 (e, N, H) and w2 (e, H, I). If False, they
        are None.

    Raises UnsupportedError for gradients of quantized weights, and for a layer that applies router
    weights to its input, does not sum over top-k, or has an expert map.
    """
    _check_differentiable(problem, needs_weights=needs_weights)
    ids_TK = routing.topk_ids_TK
    dx = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    dweights = torch.zeros_like(routing.topk_weights_TK)
    dw1, dw2 = (_make_zeros(w if needs_weights else None) for w in (weights.w1, weights.w2))
    db1, db2 = _make_zeros(weights.b1), _make_zeros(weights.b2)
    used_experts = torch.unique(ids_TK[(ids_TK >= 0) & (ids_TK < problem.experts)])
    for expert in used_experts.tolist():
        token, slot = (ids_TK == expert).nonzero(as_tuple=True)
        w1, w2 = (_get_matrix(weights, name, expert, problem) for name in ("w1", "w2"))
        rows_RH, grad_RH = x_TH[token].float(), grad_TH[token].float()
        gate_up_RN = matmul(rows_RH, w1.T)
        if weights.b1 is not None:
            gate_up_RN = gate_up_RN + weights.b1[expert].float()
        h_RI, activation_backward = _activate(gate_up_RN, problem.act)
        y_RH = matmul(h_RI, w2.T)
        if weights.b2 is not None:
            y_RH = y_RH + weights.b2[expert].float()
        dweights[token, slot] = (y_RH * grad_RH).sum(1) * problem.routed_scaling_factor
        scale_R1 = routing.topk_weights_TK[token, slot, None] * problem.routed_scaling_factor
        dy_RH = grad_RH * scale_R1
        dgate_up_RN = activation_backward(matmul(dy_RH, w2))
        dx.index_add_(0, token, matmul(dgate_up_RN, w1))
        if dw1 is not None and dw2 is not None:
            dw1[expert] = matmul(dgate_up_RN.T, rows_RH)
            dw2[expert] = matmul(dy_RH.T, h_RI)
        if db1 is not None:
            db1[expert] = dgate_up_RN.sum(0)
        if db2 is not None:
            db2[expert] = dy_RH.sum(0)
    return CallGradients(dx.to(x_TH.dtype), dweights, dw1, dw2, db1, db2)


def _check_differentiable(problem: Problem, *, needs_weights: bool) -> None:
    if problem.apply_router_weight_on_input:
        got = "router weights on the input"
        raise UnsupportedError("gradients", got=got, need="router weights on the output")
    if problem.combine is not Combine.SUM:
        raise UnsupportedError("gradients", got="(T, K, H)", need="the sum over K, (T, H)")
    if problem.expert_map:
        got = "experts of this rank alone"
        raise UnsupportedError("gradients", got=got, need="a layer that holds all experts")
    if needs_weights and problem.scheme.quantized:
        need = "weights that are not quantized"
        raise UnsupportedError("gradients of weights", got=str(problem.scheme), need=need)


def _make_zeros(like: torch.Tensor | None) -> torch.Tensor | None:
    return None if like is None else torch.zeros_like(like)


def _get_matrix(weights: ExpertWeights, name: str, expert: int, problem: Problem) -> torch.Tensor:
    """Return w1 or w2 of one expert in float32, (N, K)."""
    if not problem.scheme.quantized:
        weight: torch.Tensor = getattr(weights, name)[expert]
        return weight.float()
    return dequantize_weights(weights, name, problem, slice(expert, expert + 1))[0]


def _activate(
    rows_RN: torch.Tensor, spec: ActivationSpec
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the activation of float32 rows, (R, N) -> (R, I), and its backward function.

    A gated activation is a function of the gate values times a function of the up values.
    """
    if not spec.gated:
        value, derivative = _activate_elementwise(rows_RN, spec)
        return value, lambda grad: grad * derivative
    gate, up = (rows_RN[:, ::2], rows_RN[:, 1::2]) if spec.interleaved else rows_RN.chunk(2, 1)
    gate_factor, gate_derivative = _activate_gate(gate, spec)
    up_factor, up_derivative = _activate_up(up, spec)

    def backward(grad_RI: torch.Tensor) -> torch.Tensor:
        dgate = grad_RI * up_factor * gate_derivative
        dup = grad_RI * gate_factor * up_derivative
        if spec.interleaved:
            return torch.stack((dgate, dup), 2).flatten(1)
        return torch.cat((dgate, dup), 1)

    return gate_factor * up_factor, backward


def _activate_gate(gate: torch.Tensor, spec: ActivationSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the function of the gate values, and its derivative."""
    if spec.limit is None or spec.kind == "situ":
        return _activate_elementwise(gate, spec)
    if spec.kind == "swiglu_clamp_after":
        value, derivative = _activate_elementwise(gate, spec)
        return value.clamp(max=spec.limit), derivative * (value <= spec.limit)
    value, derivative = _activate_elementwise(gate.clamp(max=spec.limit), spec)
    return value, derivative * (gate <= spec.limit)


def _activate_up(up: torch.Tensor, spec: ActivationSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the function of the up values, and its derivative."""
    if spec.limit is None:
        return up, torch.ones_like(up)
    if spec.kind == "situ":
        tanh = torch.tanh(up / spec.limit)
        return spec.limit * tanh, 1 - tanh.square()
    clamped = up.clamp(-spec.limit, spec.limit)
    derivative = (up.abs() <= spec.limit).to(up.dtype)
    return clamped + 1 if spec.kind == "swiglu_oai" else clamped, derivative


def _activate_elementwise(
    v: torch.Tensor, spec: ActivationSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an ungated activation of v, such as v sigmoid(v), and its derivative."""
    kind = spec.kind.removesuffix("_no_mul")
    if kind == "relu2":
        return v.relu().square(), 2 * v.relu()
    if kind == "gelu":
        cdf = 0.5 * (1 + torch.erf(v / sqrt(2)))
        return v * cdf, cdf + v * torch.exp(-v.square() / 2) / sqrt(2 * pi)
    if kind == "gelu_tanh":
        tanh = torch.tanh(sqrt(2 / pi) * (v + 0.044715 * v**3))
        inner_derivative = sqrt(2 / pi) * (1 + 3 * 0.044715 * v.square())
        derivative = 0.5 * (1 + tanh) + 0.5 * v * (1 - tanh.square()) * inner_derivative
        return 0.5 * v * (1 + tanh), derivative
    alpha = 1.0 if spec.alpha is None else spec.alpha
    if kind == "situ":
        tanh, sigmoid = torch.tanh(v / alpha), torch.sigmoid(v)
        return alpha * tanh * sigmoid, sigmoid * (1 - tanh.square() + alpha * tanh * (1 - sigmoid))
    sigmoid = torch.sigmoid(alpha * v)
    return v * sigmoid, sigmoid * (1 + alpha * v * (1 - sigmoid))
