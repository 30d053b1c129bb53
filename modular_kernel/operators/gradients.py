"""Gradients of a call with frozen quantized weights: of x, router weights and biases.

Weights are dequantized to float32, one expert at a time. Gradients pass unchanged through the
quantization of activations (straight-through).
"""

from collections.abc import Callable
from math import pi, sqrt

import torch

from modular_kernel.errors import UnsupportedError
from modular_kernel.quant.quantized_weights import dequantized_weights
from modular_kernel.spec.problem import ActivationSpec, Combine, Problem
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.utils.matmul import matmul


def call_gradients(
    grad_TH: torch.Tensor,
    x_TH: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    problem: Problem,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of x (T, H), router weights (T, K), b1 (e, N) and b2 (e, H).

    grad_TH: gradient of the output. Each gradient has the shape and dtype of its input; bias
    gradients are empty without biases. Raises UnsupportedError for a layer that weights its input,
    keeps top-k, or has an expert map.
    """
    if problem.apply_router_weight_on_input:
        got = "router weights on the input"
        raise UnsupportedError("gradients", got=got, need="router weights on the output")
    if problem.combine is not Combine.SUM:
        raise UnsupportedError("gradients", got="(T, K, H)", need="the sum over K, (T, H)")
    if problem.expert_map:
        got = "experts of this rank alone"
        raise UnsupportedError("gradients", got=got, need="a layer that holds all experts")
    spec, ids_TK = problem.act, routing.topk_ids_TK
    dx = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    dweights = torch.zeros_like(routing.topk_weights_TK)
    biases = [torch.zeros_like(x_TH[:0]) if b is None else torch.zeros(b.shape, device=b.device)
              for b in (weights.b1, weights.b2)]  # fmt: skip
    used_experts = torch.unique(ids_TK[(ids_TK >= 0) & (ids_TK < problem.experts)])
    for expert in used_experts.tolist():
        token, slot = (ids_TK == expert).nonzero(as_tuple=True)
        w1, w2 = (_matrix(weights, name, expert, problem) for name in ("w1", "w2"))
        rows_RH, grad_RH = x_TH[token].float(), grad_TH[token].float()
        gate_up_RN = matmul(rows_RH, w1.T)
        if weights.b1 is not None:
            gate_up_RN = gate_up_RN + weights.b1[expert].float()
        h_RI, backward = _activation(gate_up_RN, spec)
        y_RH = matmul(h_RI, w2.T)
        if weights.b2 is not None:
            y_RH = y_RH + weights.b2[expert].float()
        dweights[token, slot] = (y_RH * grad_RH).sum(1) * problem.routed_scaling_factor
        scaled = routing.topk_weights_TK[token, slot, None] * problem.routed_scaling_factor
        dy_RH = grad_RH * scaled
        dgate_up_RN = backward(matmul(dy_RH, w2))
        dx.index_add_(0, token, matmul(dgate_up_RN, w1))
        if weights.b1 is not None:
            biases[0][expert] = dgate_up_RN.sum(0)
        if weights.b2 is not None:
            biases[1][expert] = dy_RH.sum(0)
    bias_params = (weights.b1, weights.b2)
    db1, db2 = (d if b is None else d.to(b.dtype) for d, b in zip(biases, bias_params, strict=True))
    return dx.to(x_TH.dtype), dweights, db1, db2


def _matrix(weights: ExpertWeights, name: str, expert: int, problem: Problem) -> torch.Tensor:
    """Return one expert's weights in float32, (N, K)."""
    if not problem.scheme.quantized:
        weight: torch.Tensor = getattr(weights, name)[expert]
        return weight.float()
    return dequantized_weights(weights, name, problem, slice(expert, expert + 1))[0]


def _activation(
    rows_RN: torch.Tensor, spec: ActivationSpec
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the activation of float32 rows, (R, I), and its backward function."""
    if not spec.gated:
        value, derivative = _curve(rows_RN, spec)
        return value, lambda grad: grad * derivative
    gate, up = (rows_RN[:, ::2], rows_RN[:, 1::2]) if spec.interleaved else rows_RN.chunk(2, 1)
    value, derivative = _gate(gate, spec)
    factor, up_derivative = _up(up, spec)

    def backward(grad_RI: torch.Tensor) -> torch.Tensor:
        gradients = (grad_RI * factor * derivative, grad_RI * value * up_derivative)
        return torch.stack(gradients, 2).flatten(1) if spec.interleaved else torch.cat(gradients, 1)

    return value * factor, backward


def _gate(gate: torch.Tensor, spec: ActivationSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gate's factor of the activation, and its derivative."""
    if spec.limit is None or spec.kind == "situ":
        return _curve(gate, spec)
    if spec.kind == "swiglu_clamp_after":
        value, derivative = _curve(gate, spec)
        return value.clamp(max=spec.limit), derivative * (value <= spec.limit)
    value, derivative = _curve(gate.clamp(max=spec.limit), spec)
    return value, derivative * (gate <= spec.limit)


def _up(up: torch.Tensor, spec: ActivationSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the up value's factor of the activation, and its derivative."""
    if spec.limit is None:
        return up, torch.ones_like(up)
    if spec.kind == "situ":
        tanh = torch.tanh(up / spec.limit)
        return spec.limit * tanh, 1 - tanh.square()
    clamped = up.clamp(-spec.limit, spec.limit)
    return clamped + 1 if spec.kind == "swiglu_oai" else clamped, (up.abs() <= spec.limit).to(
        up.dtype
    )


def _curve(v: torch.Tensor, spec: ActivationSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the activation's scalar function of v, and its derivative."""
    kind = spec.kind.removesuffix("_no_mul")
    if kind == "relu2":
        return v.relu().square(), 2 * v.relu()
    if kind == "gelu":
        cdf = 0.5 * (1 + torch.erf(v / sqrt(2)))
        return v * cdf, cdf + v * torch.exp(-v.square() / 2) / sqrt(2 * pi)
    if kind == "gelu_tanh":
        tanh = torch.tanh(sqrt(2 / pi) * (v + 0.044715 * v**3))
        inner_derivative = sqrt(2 / pi) * (1 + 3 * 0.044715 * v.square())
        return 0.5 * v * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * v * (
            1 - tanh.square()
        ) * inner_derivative
    alpha = 1.0 if spec.alpha is None else spec.alpha
    if kind == "situ":
        tanh, sigmoid = torch.tanh(v / alpha), torch.sigmoid(v)
        return alpha * tanh * sigmoid, sigmoid * (1 - tanh.square() + alpha * tanh * (1 - sigmoid))
    sigmoid = torch.sigmoid(alpha * v)
    return v * sigmoid, sigmoid * (1 + alpha * v * (1 - sigmoid))
