"""The cases of a benchmark, and the weights and inputs with which they are measured.

A case is a layer together with a number of tokens and a routing pattern (`routing_patterns`). `mk
bench` measures every implementation that it compares in each case.
"""

from dataclasses import dataclass, replace

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.measure.routing_patterns import RoutingKind, draw_routing
from modular_kernel.quant.quantized_weights import quantize_weights, static_scale
from modular_kernel.spec.problem import Problem, dtype_name
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights, Routing

_SEED = 7
_SHORT_NAMES = {
    "float8_e4m3fn": "fp8",
    "int8": "int8",
    "uint8": "int8",
    "uint4": "int4",
    "float4_e2m1": "fp4",
    # Codes of 4 and 8 bits that index a table of values (`spec.external_schemes.TableScheme`).
    "table4": "table4",
    "table8": "table8",
}
# Maxima of the inputs of GEMM 1 and GEMM 2, for normal x and the weights of `make_weights`.
_INPUT_MAXIMA = (6.5, 24.0)


@dataclass(frozen=True)
class LayerCase:
    """One case of a benchmark.

    shape: name of the layer, such as "mixtral".
    problem: the layer and the number of tokens, without quantization, because the implementations
        that are compared may use different schemes.
    routing: distribution of tokens over experts.
    """

    shape: str
    problem: Problem
    routing: RoutingKind

    def __post_init__(self) -> None:
        problem = self.problem
        if problem.tokens < 1:
            raise ConfigurationError("tokens of a benchmark", got=problem.tokens, need=">= 1")
        if problem.inplace:  # each replay would overwrite x
            raise ConfigurationError("inplace of a benchmark", got=True, need="False")
        if problem.parallel.world_size > 1:
            got = problem.parallel.world_size
            raise ConfigurationError("world_size of a benchmark", got=got, need="1: one GPU")
        if problem.quant != "none":
            raise ConfigurationError("quant of a benchmark case", got=problem.quant, need="none")


def operand_types(problem: Problem, scheme: QuantScheme) -> str:
    """Return the types of weights and activations: "bfloat16", "fp8/fp8", "int4/bfloat16".

    Layers with equal types are compared with each other. The granularity of scales may differ.
    """
    unquantized = dtype_name(problem.dtype)
    if not scheme.quantized:
        return unquantized
    return f"{_SHORT_NAMES[scheme.weight]}/{_SHORT_NAMES.get(scheme.activation, unquantized)}"


@dataclass(frozen=True)
class Input:
    """The arguments of one call, except the weights."""

    x_TH: torch.Tensor
    routing: Routing


def make_weights(problem: Problem, device: torch.device, index: int = 0) -> ExpertWeights:
    """Draw normal weights with standard deviation fan_in ** -0.5, unquantized.

    Experts are drawn one by one, because a float32 copy of all of them may not fit into memory.

    index: index of the set of weights. Sets have different values.
    """
    generator = torch.Generator(device).manual_seed(_SEED + index)
    e, n, h, i = problem.e, problem.w1_rows, problem.hidden, problem.intermediate
    dtype = problem.dtype
    w1 = torch.empty(e, n, h, dtype=dtype, device=device)
    w2 = torch.empty(e, h, i, dtype=dtype, device=device)
    for expert in range(e):
        w1[expert] = torch.randn(n, h, device=device, generator=generator) * h**-0.5
        w2[expert] = torch.randn(h, i, device=device, generator=generator) * i**-0.5

    def draw_bias(rows: int) -> torch.Tensor | None:
        if not problem.bias:
            return None
        return (torch.randn(e, rows, device=device, generator=generator) / 2).to(dtype)

    b1, b2 = draw_bias(n), draw_bias(h)
    matrices = _draw_adapters(problem, generator)
    return ExpertWeights(w1, w2, b1, b2, make_expert_map(problem, device), **matrices)


def _draw_adapters(problem: Problem, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Draw the LoRA matrices of all adapter slots, by field of ExpertWeights."""
    spec = problem.adapters
    if spec is None:
        return {}
    sizes = problem.e, problem.w1_rows, problem.hidden, problem.intermediate
    matrices = {}
    for name, shape in spec.shapes(*sizes).items():
        matrices[name] = torch.empty(shape, dtype=problem.dtype, device=generator.device)
        for slot in range(spec.adapters):
            values = torch.randn(shape[1:], device=generator.device, generator=generator)
            matrices[name][slot] = values * (shape[-1] ** -0.5 / 2)
    return matrices


def assign_adapter_slots(problem: Problem, device: torch.device) -> torch.Tensor | None:
    """Assign tokens to adapter slots in rotation, (T,) int32; None without adapters."""
    if problem.adapters is None:
        return None
    slots_T = torch.arange(problem.tokens, device=device) % problem.adapters.adapters
    return slots_T.to(torch.int32)


def make_expert_map(problem: Problem, device: torch.device) -> torch.Tensor | None:
    """Return an expert_map with experts [0, e) on this rank; None if the problem has none.

    The result is (E,) int32: the local index of each expert, or -1 if it is on another rank.
    """
    if not problem.expert_map:
        return None
    ids = torch.arange(problem.experts, device=device, dtype=torch.int32)
    return torch.where(ids < problem.e, ids, -1).to(torch.int32)


def make_input(case: LayerCase, device: torch.device, index: int) -> Input:
    """Draw normal x_TH and the routing of a case.

    index: index of the input. Inputs have different values.
    """
    problem = case.problem
    generator = torch.Generator(device).manual_seed(1000 * problem.tokens + index)
    x_TH = torch.randn(problem.tokens, problem.hidden, device=device, generator=generator)
    routing = draw_routing(problem, case.routing, generator)
    routing = replace(routing, adapters_T=assign_adapter_slots(problem, device))
    return Input(x_TH.to(problem.dtype), routing)


def quantize(weights: ExpertWeights, problem: Problem) -> ExpertWeights:
    """Return the weights quantized by the problem's scheme."""
    if not problem.scheme.quantized:
        return weights
    return quantize_weights(_add_static_scales(weights, problem), problem)


def _add_static_scales(weights: ExpertWeights, problem: Problem) -> ExpertWeights:
    """Add activation scales for _INPUT_MAXIMA, if the scheme has static activation scales."""
    if not problem.scheme.static:
        return weights
    a1, a2 = (static_scale(problem, maximum, weights.w1.device) for maximum in _INPUT_MAXIMA)
    return replace(weights, a1_scale=a1, a2_scale=a2)
