"""Random inputs for a problem (the shapes, dtypes and options of a layer).

Used for timing and in examples. Tests use `cases.inputs`, which has more kinds of inputs.
"""

from dataclasses import replace

import torch

from modular_kernel.quant.quantized_weights import quantize_weights, static_scale
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing

Inputs = tuple[torch.Tensor, ExpertWeights, Routing]


def random_inputs(problem: Problem, device: torch.device) -> Inputs:
    """Draw inputs for timing: normal values, weights scaled by 1/sqrt(fan-in), uniform routing.

    All adapters have the maximum rank. Tokens use the adapter slots -1 (no adapter), 0, 1, ...
    cyclically.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, device=device, generator=generator)
        return (values * std).to(problem.dtype)

    e, h, i, k = problem.e, problem.hidden, problem.intermediate, problem.top_k
    weights = ExpertWeights(
        w1=normal(e, problem.w1_rows, h, std=h**-0.5),
        w2=normal(e, h, i, std=i**-0.5),
        b1=normal(e, problem.w1_rows) if problem.bias else None,
        b2=normal(e, h) if problem.bias else None,
        expert_map=_make_expert_map(problem, device) if problem.expert_map else None,
    )
    if problem.scheme.static:
        # The scale covers values up to 28, which x and h do not exceed with these weights.
        scale = static_scale(problem, 28.0, device)
        weights = replace(weights, a1_scale=scale, a2_scale=scale.clone())
    if problem.scheme.quantized:
        weights = quantize_weights(weights, problem)
    num_choices = max(problem.experts, k)
    logits = torch.randn(problem.tokens, num_choices, device=device, generator=generator)
    values, ids = logits.topk(k, dim=-1)
    ids = (ids % problem.experts).to(problem.ids_dtype or torch.int32)
    routing = Routing(values.softmax(-1).float().contiguous(), ids.contiguous())
    if (spec := problem.adapters) is not None:
        shapes = spec.shapes(e, problem.w1_rows, h, i)
        matrices = {name: normal(*s, std=s[-1] ** -0.5) for name, s in shapes.items()}
        slots_T = torch.arange(problem.tokens, device=device) % (spec.adapters + 1) - 1
        weights = replace(weights, **matrices)
        routing = replace(routing, adapters_T=slots_T.to(torch.int32))
    return normal(problem.tokens, h), weights, routing


def _make_expert_map(problem: Problem, device: torch.device) -> torch.Tensor:
    ids = torch.arange(problem.experts, device=device, dtype=torch.int32)
    return torch.where(ids < problem.e, ids, -1).to(torch.int32)
