"""A third-party runner backend made of stages, and a fused operation that replaces the stages."""

from dataclasses import dataclass, field

import torch

from experts.staged import make_experts, make_fused_experts
from modular_kernel.ops.activation import gated_activation_ref
from modular_kernel.ops.count import local_ids
from modular_kernel.runner import (
    MoeRunnerCore,
    RunnerCall,
    RunnerInput,
    RunnerOutput,
    register_core,
    register_fused_func,
    register_post_permute,
    register_pre_permute,
)


@dataclass
class ToyState:
    """The pair of each row in one call."""

    pair_of_row: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True)
class ToyInput(RunnerInput):
    """Rows (R, H) float32 sorted by expert, and the expert of each row."""

    rows: torch.Tensor
    experts: torch.Tensor

    @property
    def runner_backend(self) -> str:
        return "toy"


@dataclass(frozen=True)
class ToyOutput(RunnerOutput):
    """Rows (R, H) float32 in the order of the input."""

    rows: torch.Tensor

    @property
    def runner_backend(self) -> str:
        return "toy"


@register_core("toy")
class ToyCore(MoeRunnerCore[ToyState]):
    state = ToyState

    def run(self, runner_input: ToyInput, call: RunnerCall[ToyState]) -> ToyOutput:
        out = torch.empty_like(runner_input.rows)
        for expert in range(call.weights.w1.shape[0]):
            selected = runner_input.experts == expert
            out[selected] = run_expert(runner_input.rows[selected], expert, call)
        return ToyOutput(out)


@register_pre_permute("standard", "toy")
def standard_to_toy(call: RunnerCall[ToyState]) -> ToyInput:
    ids = local_ids(call.tokens.routing, call.weights.w1.shape[0]).flatten()
    pairs = ids.argsort(stable=True)
    pairs = pairs[ids[pairs] >= 0]
    call.state.pair_of_row = pairs
    top_k = call.tokens.routing.topk_ids_TK.shape[1]
    return ToyInput(call.tokens.x_TH[pairs // top_k].float(), ids[pairs])


@register_post_permute("toy", "standard")
def toy_to_standard(result: ToyOutput, call: RunnerCall[ToyState]) -> None:
    weights = call.tokens.routing.topk_weights_TK.flatten()
    pairs, top_k = call.state.pair_of_row, call.tokens.routing.topk_ids_TK.shape[1]
    total = torch.zeros(call.output.shape, dtype=torch.float32, device=call.output.device)
    total.index_add_(0, pairs // top_k, result.rows * weights[pairs, None])
    call.output.copy_(total * call.problem.routed_scaling_factor)


def run_expert(rows: torch.Tensor, expert: int, call: RunnerCall[ToyState]) -> torch.Tensor:
    """Return the output of an expert for rows (R, H) float32."""
    weights, problem = call.weights, call.problem
    h = rows @ weights.w1[expert].float().T
    return gated_activation_ref(h, problem.act) @ weights.w2[expert].float().T


ToyExperts = make_experts(
    "ToyExperts",
    "toy",
    "standard",
    bias=False,
    weight_on_input=False,
    expert_map=True,
    chunking=True,
)


@register_fused_func("none", "toy", unfused=ToyExperts)
def fused_toy(call: RunnerCall[ToyState]) -> None:
    routing, x = call.tokens.routing, call.tokens.x_TH.float()
    ids = local_ids(routing, call.weights.w1.shape[0])
    total = torch.zeros(call.output.shape, dtype=torch.float32, device=call.output.device)
    for k in range(ids.shape[1]):
        for expert in range(call.weights.w1.shape[0]):
            selected = ids[:, k] == expert
            weight = routing.topk_weights_TK[selected, k, None]
            total[selected] += run_expert(x[selected], expert, call) * weight
    call.output.copy_(total * call.problem.routed_scaling_factor)


FusedToyExperts = make_fused_experts("FusedToyExperts", "none", "toy")

PARTS = (ToyExperts, FusedToyExperts)
