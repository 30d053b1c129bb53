"""A small layer for tests of FusedMoE and EPMoE, its weights on each rank, and its exact output."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.parallel import LayerParallel
from modular_kernel.ops.route import RouterTensors, route
from modular_kernel.quant.quantized_weights import quantize_weights
from modular_kernel.reference import float64_reference
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.router import RouterSpec
from modular_kernel.tensors import ExpertWeights

H, I, E, K, T = 32, 48, 8, 3, 7  # noqa: E741 (intermediate)
SPLITS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))
FAMILIES = {
    "plain": RouterSpec(K, renormalize=True),
    "zero experts": RouterSpec(K, renormalize=True, zero_experts=4),
    "biased": RouterSpec(K, "sigmoid", groups=4, topk_groups=2, selection_bias=True),
}


@dataclass(frozen=True)
class Sample:
    """A layer and its inputs. fields: fields of the Problem that differ from those in `problem`."""

    router: RouterSpec = FAMILIES["plain"]
    tokens: int = T
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        sizes = {"hidden": H, "intermediate": I, "experts": E, "top_k": K}
        return Problem(self.tokens, **sizes | {"dtype": torch.float32} | self.fields)

    def draw(self, *shape: int, seed: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return values.to(self.problem.dtype)

    @property
    def x_TH(self) -> torch.Tensor:
        return self.draw(self.tokens, H, seed=1)

    @property
    def logits(self) -> torch.Tensor:
        return self.draw(self.tokens, self.router.columns(E), seed=2).float()

    @property
    def selection_bias(self) -> torch.Tensor | None:
        columns = self.router.columns(E)
        return self.draw(columns, seed=3).float() / 4 if self.router.selection_bias else None

    @property
    def plain(self) -> ExpertWeights:
        """The unquantized weights of all experts."""
        problem = self.problem
        rows = problem.w1_rows
        weights = ExpertWeights(self.draw(E, rows, H, seed=4) / 6, self.draw(E, H, I, seed=5) / 7)
        if problem.bias:
            weights = replace(weights, b1=self.draw(E, rows, seed=6), b2=self.draw(E, H, seed=7))
        return weights

    def shared(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return the output of a shared expert."""
        return torch.tanh(x_TH) * 0.5

    def expected_output(self, *, shared: bool = False) -> torch.Tensor:
        """Return the exact output on one rank, (T, H) float64."""
        problem, x_TH = self.problem, self.x_TH
        routed = route(self.logits, self.router, RouterTensors(self.selection_bias))
        weights = self.plain
        if problem.scheme.quantized:
            weights = quantize_weights(weights, problem)
        total = float64_reference(x_TH, weights, routed.routing, problem)
        if routed.identity_T is not None:
            total = total + (
                routed.identity_T[:, None].double() * x_TH.double() * problem.routed_scaling_factor
            )
        return total + self.shared(x_TH).double() if shared else total


def rank_weights(sample: Sample, ep: tuple[int, int], tp: tuple[int, int]) -> ExpertWeights:
    """Return a rank's weights: its experts, its rows of gate and up, and its columns of down."""
    weights, gated = sample.plain, sample.problem.act.gated
    experts = list(Placement.linear(E, ep[1]).slots[ep[0]])
    local_intermediate = I // tp[1]
    columns = torch.arange(tp[0] * local_intermediate, (tp[0] + 1) * local_intermediate)
    rows = torch.cat([columns, columns + I]) if gated else columns
    local_weights = ExpertWeights(
        weights.w1[experts][:, rows], weights.w2[experts][:, :, columns].contiguous()
    )
    if weights.b1 is not None and weights.b2 is not None:
        local_weights = replace(
            local_weights, b1=weights.b1[experts][:, rows], b2=weights.b2[experts]
        )
    if sample.problem.scheme.quantized:
        problem = replace(sample.problem, intermediate=local_intermediate, experts=len(experts))
        local_weights = quantize_weights(local_weights, problem)
    return local_weights


def make_layer(
    sample: Sample,
    ep: tuple[int, int] = (0, 1),
    tp: tuple[int, int] = (0, 1),
    **options: Any,
) -> FusedMoE:
    """Return the layer on one rank."""
    problem = sample.problem
    arguments = {
        "params_dtype": problem.dtype,
        "quant_config": None if problem.quant == "none" else problem.quant,
        "activation": problem.activation,
        "bias": problem.bias,
        "apply_router_weight_on_input": problem.apply_router_weight_on_input,
        "routed_scaling_factor": problem.routed_scaling_factor,
        "router": sample.router,
        "selection_bias": sample.selection_bias,
        "parallel": LayerParallel(ep=ep, tp=tp),
    }
    layer = FusedMoE(E, H, I, **arguments | options)
    layer.set_weights(rank_weights(sample, layer.parallel.ep, layer.parallel.tp))
    return layer


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in norm."""
    assert actual.shape == expected.shape
    return float((actual.double() - expected).norm() / expected.norm())


def field_names(weights: ExpertWeights) -> set[str]:
    return {field_.name for field_ in fields(weights) if getattr(weights, field_.name) is not None}
