"""A small random layer, calls of `fused_experts` on it, and a comparison of outputs."""

from dataclasses import fields, replace
from typing import Any

import torch

from modular_kernel.integrations.fused_moe import MoeRunnerConfig, fused_experts
from modular_kernel.quant.quantized_weights import quantize_weights
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing

T, H, I, E, K = 5, 64, 32, 4, 2  # noqa: E741 (intermediate)
BASE = Problem(T, H, I, E, K, dtype=torch.float32)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def move_tensors(tensors: Any, device: str | torch.device) -> Any:
    """Return a copy of a dataclass with all its tensors on `device`."""
    values = {f.name: getattr(tensors, f.name) for f in fields(tensors)}
    return replace(
        tensors,
        **{k: v.to(device) for k, v in values.items() if isinstance(v, torch.Tensor)},
    )


def make_layer(
    problem: Problem, device: str | torch.device = "cpu"
) -> tuple[torch.Tensor, ExpertWeights, Routing]:
    """Return x, weights and routing of a small layer."""
    g, experts = torch.Generator().manual_seed(3), problem.experts
    x_TH = torch.randn(problem.tokens, H, generator=g, dtype=problem.dtype)
    unquantized = ExpertWeights(
        torch.randn(experts, problem.w1_rows, H, generator=g, dtype=problem.dtype) / 8,
        torch.randn(experts, H, I, generator=g, dtype=problem.dtype) / 5,
    )
    if problem.bias:
        biases = (torch.randn(experts, n, generator=g) for n in (problem.w1_rows, H))
        unquantized = replace(unquantized, b1=next(biases), b2=next(biases))
    if problem.scheme.static:
        unquantized = replace(
            unquantized, a1_scale=torch.tensor([0.01]), a2_scale=torch.tensor([0.02])
        )
    weights = quantize_weights(unquantized, problem) if problem.scheme.quantized else unquantized
    values, ids = torch.randn(problem.tokens, experts, generator=g).topk(problem.top_k)
    routing = Routing(values.softmax(-1), ids)
    return x_TH.to(device), move_tensors(weights, device), move_tensors(routing, device)


def call_fused_experts(
    x_TH: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    config: MoeRunnerConfig | None = None,
    **options: Any,
) -> torch.Tensor:
    """Call `fused_experts` with a layer's tensors as its keyword arguments."""
    topk = (routing.topk_weights_TK, routing.topk_ids_TK, None)
    tensors = {"b1": weights.b1, "b2": weights.b2, "expert_map": weights.expert_map,
             "w1_scale": weights.w1_scale, "w2_scale": weights.w2_scale,
             "w1_zp": weights.w1_zero_point, "w2_zp": weights.w2_zero_point,
             "a1_scale": weights.a1_scale, "a2_scale": weights.a2_scale}  # fmt: skip
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return fused_experts(x_TH, weights.w1, weights.w2, topk, config, **tensors | options)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, rms: float) -> None:
    """Assert that the relative RMS error is below `rms`."""
    assert actual.shape == expected.shape
    assert float((actual.double() - expected).norm() / expected.norm()) < rms
