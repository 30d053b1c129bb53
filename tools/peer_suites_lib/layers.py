"""Compares whole layers: our parts that run on a CPU with another project's reference."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from modular_kernel.catalog import make_kernel, this_machine
from modular_kernel.quant.quantized_weights import QMAX, STORAGE, quantize_weights, weight_specs
from modular_kernel.reference import float64_reference, rounded_reference
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ExpertWeights, Routing
from peer_suites_lib.outcomes import (
    REFUSAL_ERRORS,
    CaseOutcome,
    Tolerance,
    call_reference,
    compare_with_exact,
    compute_relative_error,
    find_worst_outcome,
    make_refusal_outcome,
)

_LOCAL = "MoEPrepareAndFinalizeNoEP", "BatchedPrepareAndFinalize"
# Maximum ratio of a part's error to the error of plain torch in the dtypes of the layer.
_MAX_ERROR_RATIO = 2.0
TORCH = (_LOCAL[0], "TorchExperts"), (_LOCAL[1], "NaiveBatchedExperts")
TRITON = (
    (_LOCAL[0], "TritonExperts"),
    (_LOCAL[0], "GroupedGemmExperts"),
    (_LOCAL[1], "BatchedTritonExperts"),
)


@dataclass(frozen=True)
class SizeLimits:
    """Limits for shrinking a layer.

    max_weights: maximum number of weight values.
    max_tokens: maximum number of tokens.
    min_size: minimum of hidden and intermediate size.
    """

    max_weights: int
    max_tokens: int
    min_size: int


TORCH_LIMITS, TRITON_LIMITS = SizeLimits(1 << 22, 32, 128), SizeLimits(1 << 17, 4, 64)


@dataclass(frozen=True)
class Layer:
    """A layer of another project's test.

    ep_size: number of ranks. If it is above 1, this rank has a part of the experts and an
        expert_map.
    on_input: whether router weights are applied to x.
    padded: whether the row stride of weights exceeds the row length.
    stored: "rounded" quantizes random weights, and "codes" draws random codes and scales.
    multiple: hidden and intermediate size remain multiples of this when the layer is shrunk.
    scale: standard deviations of x, w1 and w2.
    representable: whether all values of x are representable in float8 after scaling.
    """

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    dtype: torch.dtype = torch.bfloat16
    quant: str = "none"
    activation: str = "silu"
    bias: bool = False
    ep_size: int = 1
    on_input: bool = False
    renormalize: bool = False
    padded: bool = False
    stored: str = "rounded"
    multiple: int = 1
    scale: tuple[float, float, float] = (0.1, 0.1, 0.1)
    representable: bool = False

    def shrink(self, limits: SizeLimits) -> "Layer":
        """Return the layer with the number of tokens and the sizes reduced to fit `limits`."""
        hidden, intermediate = self.hidden, self.intermediate
        local_experts = max(1, self.experts // self.ep_size)
        while local_experts * 3 * hidden * intermediate > limits.max_weights:
            larger = max(hidden, intermediate)
            half = larger // 2
            if half < limits.min_size or half % self.multiple:
                break
            hidden, intermediate = (half, intermediate) if hidden == larger else (hidden, half)
        tokens = min(self.tokens, limits.max_tokens)
        return replace(self, tokens=tokens, hidden=hidden, intermediate=intermediate)

    @property
    def problem(self) -> Problem:
        local = self.experts // self.ep_size if self.ep_size > 1 else None
        return Problem(
            self.tokens, self.hidden, self.intermediate, self.experts, self.top_k,
            dtype=self.dtype, quant=self.quant, activation=self.activation, bias=self.bias,
            local_experts=local, expert_map=self.ep_size > 1,
            apply_router_weight_on_input=self.on_input,
        )  # fmt: skip


@dataclass(frozen=True)
class LayerInputs:
    """Tensors of a layer.

    score: router logits (T, E), from which the routing is computed.
    """

    problem: Problem
    x: torch.Tensor
    weights: ExpertWeights
    routing: Routing
    score: torch.Tensor


Reference = Callable[[Layer, LayerInputs], torch.Tensor]
Weights = Callable[[Layer, ExpertWeights], ExpertWeights]


def make_layer_inputs(layer: Layer, stored: Weights | None = None) -> LayerInputs:
    """Draw the tensors of a layer. The same layer always gets the same tensors.

    stored: converts the weights to the format that their test stores. None stands for the
        conversion that `layer.stored` names.
    """
    problem = layer.problem
    generator = torch.Generator().manual_seed(zlib.crc32(repr(layer).encode()))
    e = problem.e

    def draw_normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(layer.dtype)

    x = draw_normal(layer.tokens, layer.hidden, scale=layer.scale[0])
    if layer.representable:
        scale = x.abs().max() / 448
        x = (x / scale).to(torch.float8_e4m3fn).to(layer.dtype) * scale
    score = draw_normal(layer.tokens, layer.experts)
    w1 = draw_normal(e, problem.w1_rows, layer.hidden, scale=layer.scale[1])
    w2 = draw_normal(e, layer.hidden, layer.intermediate, scale=layer.scale[2])
    if layer.padded:
        w1, w2 = (torch.nn.functional.pad(w, (0, 128))[..., :-128] for w in (w1, w2))
    biases = {}
    if layer.bias:
        biases = {"b1": draw_normal(e, problem.w1_rows), "b2": draw_normal(e, layer.hidden)}
    expert_map = None
    if layer.ep_size > 1:
        expert_map = torch.full((layer.experts,), -1, dtype=torch.int32)
        local_experts = torch.randperm(layer.experts, generator=generator)[:e]
        expert_map[local_experts] = torch.arange(e, dtype=torch.int32)
    weights = ExpertWeights(w1, w2, expert_map=expert_map, **biases)
    if stored is not None:
        weights = stored(layer, weights)
    elif layer.stored == "codes":
        weights = _draw_codes(problem, weights, generator)
    elif layer.quant != "none":
        weights = quantize_weights(weights, problem)
    weights_TK, ids = score.float().softmax(-1).topk(layer.top_k)
    if layer.renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return LayerInputs(problem, x, weights, Routing(weights_TK, ids.int()), score)


def _draw_codes(
    problem: Problem, weights: ExpertWeights, generator: torch.Generator
) -> ExpertWeights:
    """Return `weights` with random codes over the whole range and random scales."""
    specs, qmax = weight_specs(problem), QMAX[problem.scheme.weight]
    fields = {}
    for name in ("w1", "w2"):
        values = (torch.rand(specs[name].shape, generator=generator) - 0.5) * 2 * qmax
        fields[name] = values.to(STORAGE[problem.scheme.weight])
        fields[f"{name}_scale"] = (
            torch.rand(specs[f"{name}_scale"].shape, generator=generator) * 1e-2
        )
    return replace(weights, **fields)


class LayerCheck:
    """Compares layers with one reference.

    Outcomes are cached by shrunk layer, because interpreted parts are slow.
    """

    def __init__(
        self, reference: Reference, tolerance: Tolerance, stored: Weights | None = None
    ) -> None:
        self._reference, self._tolerance, self._stored = reference, tolerance, stored
        self._outcomes: dict[Layer, dict[str, CaseOutcome]] = {}

    def __call__(self, layer: Layer) -> CaseOutcome:
        """Return the worst outcome of all parts on a layer."""
        torch_layer, triton_layer = layer.shrink(TORCH_LIMITS), layer.shrink(TRITON_LIMITS)
        outcomes = self._check_parts(torch_layer, TORCH) | self._check_parts(triton_layer, TRITON)
        shrunk = ""
        if torch_layer != layer:
            tokens, values = TORCH_LIMITS.max_tokens, TORCH_LIMITS.max_weights
            shrunk = f"tokens to {tokens}, weights to {values} by halving a size"
        return find_worst_outcome(outcomes, shrunk, torch_layer)

    def _check_parts(
        self, layer: Layer, pairs: tuple[tuple[str, str], ...]
    ) -> dict[str, CaseOutcome]:
        outcomes = self._outcomes.setdefault(layer, {})
        pending = [pair for pair in pairs if pair[1] not in outcomes]
        if pending:
            inputs = make_layer_inputs(layer, self._stored)
            their_output = call_reference(self._reference, layer, inputs)
            assert isinstance(their_output, torch.Tensor)
            exact = float64_reference(inputs.x, inputs.weights, inputs.routing, inputs.problem)
            rounded_output = rounded_reference(
                inputs.x, inputs.weights, inputs.routing, inputs.problem
            )
            limit = _MAX_ERROR_RATIO * compute_relative_error(rounded_output, exact) + 1e-6
            for pair in pending:
                outcomes[pair[1]] = self._check_part(pair, inputs, their_output, exact, limit)
        return {name: outcomes[name] for _, name in pairs}

    def _check_part(
        self,
        pair: tuple[str, str],
        inputs: LayerInputs,
        their_output: torch.Tensor,
        exact: torch.Tensor,
        limit: float,
    ) -> CaseOutcome:
        try:
            kernel = make_kernel(*pair, inputs.problem, machine=this_machine(device="cpu"))
            our_output = kernel(inputs.x, inputs.weights, inputs.routing)
        except REFUSAL_ERRORS as error:
            return make_refusal_outcome(error)
        return compare_with_exact(our_output, their_output, exact, self._tolerance, limit)
